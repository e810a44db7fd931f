"""What the user wants of a cutover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from subscriber.errors import ConfigurationError
from subscriber.interfaces.sequences import SequenceChoice
from subscriber.walreceiver.fences.fence_kinds import FenceKind
from subscriber.walreceiver.new_publication import TableChoice

__all__ = ["CutoverOptions"]

_FLAGS: Final = ("unlogged", "large_objects")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutoverOptions:
    """How :func:`subscriber.cutover` and :func:`subscriber.roll_back` work.

    Attributes:
        fence: how writers are kept out of a database: ``read-only`` or ``revoke``.
        verify: which rows are compared while there are no writers: ``full``: all; ``changed``: those that changed since a verification
            found their table equal; ``none``.
        sequences: which sequences are set: ``none``, or as :func:`subscriber.sync_sequences`. Empty: the default.
        unlogged: whether rows of unlogged tables are moved while writers are stopped.
        large_objects: whether large objects are moved while writers are stopped.
        refresh: when materialized views are refreshed that are populated in the other database: ``before`` writers are let in, while they
            are stopped; ``after`` that; ``none``.
        switch: a command that leads the application to the other database. None: nothing. It is not stored: a call that repeats an
            interrupted cutover, or rolls it back, must give it again.
        pool: ``pgbouncer:CONNINFO`` of the admin console of a PgBouncer. Its clients wait instead of failing: PAUSE before the source is
            closed, RELOAD after the switch command, which has written the new address into the configuration file, and RESUME at the end.
            None: there is none. It is not stored, as the command.
        switch_timeout: how many seconds the command may take.
        max_downtime: how many seconds the source may be closed before everything is undone. None: no limit.
        max_lag: how many seconds the target may take to reach the publisher before writers are stopped.
        way_back: whether the subscription of the opposite direction is made.
        exclude_tables: patterns of tables of the new database that a rollback leaves there, because the way back does not have them.
    """

    fence: str = FenceKind.READ_ONLY
    verify: Literal["full", "changed", "none"] = "changed"
    sequences: Sequence[str] = ()
    unlogged: bool = False
    large_objects: bool = False
    refresh: Literal["before", "after", "none"] = "after"
    switch: str | None = None
    pool: str | None = field(default=None, repr=False)
    switch_timeout: float = 60.0
    max_downtime: float | None = 300.0
    max_lag: float = 10.0
    way_back: bool = True
    exclude_tables: Sequence[str] = ()

    def kept(self) -> dict[str, Any]:
        """Those that a rollback has, too, as values of JSON."""
        return {name: getattr(self, name) for name in _FLAGS} | {"refresh": self.refresh, "sequences": list(self.sequences)}

    @staticmethod
    def of_kept(values: Any) -> dict[str, Any]:
        """From :meth:`kept`, in the row of a database. What else another program has written there is ignored: a command, too."""
        known = values if isinstance(values, dict) else {}
        found: dict[str, Any] = {name: known[name] is True for name in _FLAGS if name in known}
        if known.get("refresh") in {"before", "after", "none"}:
            found["refresh"] = known["refresh"]
        if isinstance(known.get("sequences"), list):
            found["sequences"] = [str(each) for each in known["sequences"]]
        return found

    def __post_init__(self) -> None:
        SequenceChoice.parse(self.sequences)
        TableChoice(exclude_tables=self.exclude_tables)
        for name in ("switch_timeout", "max_downtime", "max_lag"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} must be positive", hint="give a number of seconds")
        if self.fence not in {FenceKind.READ_ONLY, FenceKind.REVOKE}:
            raise ConfigurationError(f'unknown fence "{self.fence}"', hint="use read-only or revoke")
