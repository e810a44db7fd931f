"""The definition of a subscription, and its conversion to and from a row of ``pg_subscription`` in the target's catalog."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from subscriber.catalog.model import PG_SUBSCRIPTION, known_values
from subscriber.catalog.store import Row
from subscriber.catalog.subscription_rows import pending_refresh_of
from subscriber.config import PARAMETERS, STORED, CopyData, SubscriptionOptions
from subscriber.errors import ConfigurationError, SubscriptionInUse
from subscriber.interfaces import TwoPhaseState
from subscriber.protocol.conninfo import StoredConninfo
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["Definition", "claimed_elsewhere", "columns_of", "definition_of", "require_name"]

_NAME_BYTES: Final = 63

_COLUMNS: Final[Mapping[str, str]] = {
    "name": "subname",
    "enabled": "subenabled",
    "conninfo": "subconninfo",
    "slot_name": "subslotname",
    "publications": "subpublications",
    "two_phase": "subtwophasestate",
    "skip_lsn": "subskiplsn",
    "made": "submade",
    "generation": "subgeneration",
    "pending_refresh": "subrefresh",
    **{name: option.column for name, option in STORED.items()},
}
"""Columns by attributes of :class:`Definition`, or of its options."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A subscription, as its row of ``pg_subscription`` defines it.

    Attributes:
        oid: unique in the target's cluster; 0 before it is stored.
        name: unique in the catalog.
        enabled: whether the launcher runs it.
        conninfo: the connection to the publisher. None: the command line of its run gives it (``subscriber run --connection``), and no
            launcher runs it.
        slot_name: None: it has no slot.
        publications: their names; a subscription of a run that has not begun has none.
        options: its parameters. ``connect``, ``create_slot``, ``copy_data``, ``enabled`` and ``slot_name`` in it have no meaning.
        two_phase: ``subtwophasestate``; ``options.two_phase`` follows from it.
        skip_lsn: the finish LSN of the transaction to skip, or INVALID_LSN.
        position: the target has all changes up to this LSN; None: no position is stored yet.
        made: False while it is being created, and after its creation was interrupted.
        generation: a number that each claim increases.
        pending_refresh: the publications were changed and the tables have to be refreshed, with this ``copy_data``.
        claimed: a verb has claimed it: it must not be run.
    """

    oid: int = 0
    name: str
    enabled: bool
    conninfo: str | None
    slot_name: str | None
    publications: tuple[str, ...]
    options: SubscriptionOptions
    two_phase: TwoPhaseState
    skip_lsn: Lsn = INVALID_LSN
    position: Lsn | None = None
    made: bool = True
    generation: int = 0
    pending_refresh: CopyData | None = None
    claimed: bool = False

    @property
    def columns(self) -> Row:
        """Its row, without the oid."""
        values = {name: getattr(self.options if name in STORED else self, name) for name in _COLUMNS}
        return columns_of(values)


def columns_of(changes: Mapping[str, Any]) -> Row:
    """Convert new values of a definition's attributes, or of its options, to values of columns."""
    return {_COLUMNS[name]: _stored(name, value) for name, value in changes.items()}


def _stored(name: str, value: Any) -> Any:
    if name in STORED:
        return STORED[name].stored(value)
    match name:
        case "two_phase":
            return TwoPhaseState(value).value
        case "publications":
            return tuple(value)
        case "pending_refresh" if value is not None:
            return PARAMETERS["copy_data"].type.show(value)
        case _:
            return value


def definition_of(row: Row, position: Lsn | None, *, claimed: bool = False) -> Definition:
    """Build the definition from a row of ``pg_subscription``.

    Args:
        row: values by column.
        position: the subscription's position, or None.
        claimed: whether a verb has claimed the subscription.

    Raises:
        TargetError: the row has a value that this program does not know.
    """
    with known_values(PG_SUBSCRIPTION):
        two_phase = TwoPhaseState(row["subtwophasestate"])
        options = {name: option.loaded(row[option.column]) for name, option in STORED.items()}
        return Definition(
            oid=row["oid"],
            name=row["subname"],
            enabled=row["subenabled"],
            conninfo=None if row["subconninfo"] is None else StoredConninfo(row["subconninfo"]),
            slot_name=row["subslotname"],
            publications=row["subpublications"],
            options=SubscriptionOptions(two_phase=two_phase is not TwoPhaseState.DISABLED, **options),
            two_phase=two_phase,
            skip_lsn=row["subskiplsn"],
            position=position,
            made=row["submade"],
            generation=row["subgeneration"],
            pending_refresh=pending_refresh_of(row),
            claimed=claimed,
        )


def claimed_elsewhere(name: str) -> SubscriptionInUse:
    """The error of a run with ``--connection`` while a verb has claimed the subscription."""
    return SubscriptionInUse(
        f'subscription "{name}" is being altered or dropped by another process', hint="start it again when that process has ended"
    )


def require_name(name: str) -> None:
    """Reject a subscription name that PostgreSQL's catalog could not hold.

    Raises:
        ConfigurationError: the name is empty, too long, or has a null character.
    """
    if not name or "\0" in name or len(name.encode("utf-8", "replace")) > _NAME_BYTES:
        shown = name.replace("\0", "?")
        raise ConfigurationError(f'subscription name "{shown}" is empty or longer than {_NAME_BYTES} bytes', hint="choose another name")
