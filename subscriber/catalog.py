"""The seam to a target's catalog of subscriptions: what the verbs, the launcher and ``status`` need of it.

:class:`subscriber.abc.Sink` is the work of one subscription; this is about all of them. A target keeps both in the same place, so that a
subscription's definition, its position and its rows are of one piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, runtime_checkable

from subscriber.abc import Retry, TableEntry, TableName, TwoPhaseState, WorkerActivity, WorkerDetails
from subscriber.config import SubscriptionOptions
from subscriber.errors import SubscriptionInUse, TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn

__all__ = ["ApplierObservation", "Catalog", "Definition", "Observation", "OwnedCatalog", "TableObservation", "claimed_elsewhere"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A subscription, as its row of ``pg_subscription`` defines it.

    Attributes:
        oid: unique in the target's cluster; 0 before it is stored.
        name: unique in the catalog.
        enabled: whether the launcher runs it.
        conninfo: of the publisher. None: whoever runs it gives it (``subscriber run --connection``), and no launcher does.
        slot_name: None: it has none.
        publications: names, at least one.
        options: its parameters. ``connect``, ``create_slot``, ``copy_data``, ``enabled`` and ``slot_name`` in it mean nothing.
        two_phase: ``subtwophasestate``; ``options.two_phase`` follows from it.
        skip_lsn: finish LSN of the transaction to be skipped, or INVALID_LSN.
        position: up to where the target has everything, or None before the first.
        made: False while it is being created, and when that was cut off.
        generation: grows with every claim.
        pending_refresh: the publications were changed, and the tables have to follow: with a copy (True) or without (False).
        claimed: a verb is at work on it just now: it must not be run.
        problem: what of its row cannot be understood, because a hand changed it; then it can be neither run nor altered nor dropped, and
            the attributes in question have their defaults. None: nothing.
        remedy: of the problem.
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
    pending_refresh: bool | None = None
    claimed: bool = False
    problem: str | None = None
    remedy: str | None = None

    def require_understood(self) -> None:
        """See that it has no problem.

        Raises:
            TargetError: it has.
        """
        if self.problem is not None:
            raise TargetError(f'subscription "{self.name}" cannot be used: {self.problem}', hint=self.remedy)


def claimed_elsewhere(name: str) -> SubscriptionInUse:
    """The error of a run that its command line defines, while a verb has claimed it. The launcher looks at the claim."""
    return SubscriptionInUse(
        f'subscription "{name}" is being altered or dropped by another process', hint="start it again when that process has ended"
    )


class Catalog(Protocol):
    """A session with a target's catalog. One call at a time, except for :meth:`wait`'s cancellation."""

    async def subscriptions(self) -> Sequence[Definition]:
        """All of them, by name.

        Raises:
            TargetUnavailable: the connection was lost: open the catalog again.
            TargetError: no privilege, or a catalog that this program does not know.
        """
        ...

    def create(self, definition: Definition) -> AbstractAsyncContextManager[Definition]:
        """Store a new subscription, not enabled and not made, and claim it while the block lasts.

        What an earlier process that was killed left of this name has to be removed before (:meth:`claim`, :meth:`remove`).

        Raises:
            TargetError: native's words: subscription already exists.
        """
        ...

    def claim(self, name: str) -> AbstractAsyncContextManager[Definition]:
        """Keep everybody else from working on a subscription while the block lasts; wait until whoever runs it has stopped.

        Gives the definition as it is then, of a new generation: a worker that is between two connections just now learns by it, when it
        opens the sink again, that it must not go on.

        Raises:
            TargetError: native's words: subscription does not exist. Or it has a :attr:`Definition.problem`.
            SubscriptionInUse: whoever works on it does not stop.
        """
        ...

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns of a subscription, all or none. To be called under a claim.

        Args:
            oid: the subscription's.
            changes: new values of :class:`Definition`'s attributes, or of its options', by their names.

        Raises:
            TargetError: native's words: the new name is taken.
        """
        ...

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove a subscription with its tables, positions and notes. To be called under a claim.

        Returns:
            Names of prepared transactions that it leaves in the target: nobody but the caller's user can decide about them.
        """
        ...

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        """Keep an error of a worker that could not report it itself.

        Args:
            oid: the subscription's.
            text: the error, one line.
            details: the worker's details from now on, until it reports again; None: there is nothing to say.
        """
        ...

    async def reset_statistics(self, name: str) -> None:
        """Set a subscription's counters to zero, and note when; whoever runs it goes on, and counts from there.

        Raises:
            TargetError: native's words: subscription does not exist.
        """
        ...

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Names of the prepared transactions that a subscription holds in the target."""
        ...

    async def become_launcher(self, lost: int | None = None) -> int | None:
        """Be the one launcher of this target, until the session ends.

        Args:
            lost: what this gave when this process was the launcher before, through a session that is closed. The target may still serve
                that session: it is terminated.

        Returns:
            The number of the session that is the launcher, if it has one.

        Raises:
            SubscriptionInUse: there is one.
        """
        ...

    async def wait(self, timeout: float) -> None:
        """Return when a verb changed something, or after ``timeout`` seconds.

        Raises:
            TargetUnavailable: the connection was lost.
        """
        ...

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


@runtime_checkable
class OwnedCatalog(Protocol):
    """A :class:`Catalog` of a target that has roles: each subscription has an owner, with whose rights it is applied."""

    async def set_owner(self, oid: int, role: str) -> None:
        """Give a subscription to a role. To be called under a claim.

        Raises:
            TargetError: there is no such role, or this one cannot become it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TableObservation:
    """One table of a subscription.

    Attributes:
        table: its name.
        entry: its state, as ``pg_subscription_rel`` has it.
        worker: what its synchronization tells, if one is at work.
        retry: its latest synchronization, if that failed and is made again.
    """

    table: TableName
    entry: TableEntry
    worker: WorkerActivity | None = None
    retry: Retry | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplierObservation:
    """Who applies what a subscription has landed, in a target where these are two programs.

    Attributes:
        pid: of the process; None: nobody applies.
        host: where it runs.
        engine: how.
        lsn: up to where everything is applied, and published; None: nothing is.
        waiting_batches, waiting_bytes: of what was landed and is not applied. Copies of tables are not counted.
        waiting_since: when the first transaction of these was committed, seconds since 1970; None: nothing waits.
        last_error: the latest error, one line.
        last_error_time: when.
    """

    pid: int | None = None
    host: str | None = None
    engine: str | None = None
    lsn: Lsn | None = None
    waiting_batches: int = 0
    waiting_bytes: int = 0
    waiting_since: float | None = None
    last_error: str | None = None
    last_error_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Everything that a target knows of one subscription.

    Attributes:
        definition: its ``conninfo`` is None also where the looking role may not read it.
        pid: of the apply worker's session in the target; None: nobody runs it.
        worker: what the apply worker tells.
        tables: by name.
        counters: those of pg_stat_subscription_stats, by their names.
        stats_reset: when they were reset.
        last_error: the latest error of its workers, one line.
        last_error_time: when.
        applier: where landing and applying are two programs, the other one.
        details: what the apply worker reported last, also if it does not run any more.
        by_command_line: its command line defines it, as far as the looking role can see.
    """

    definition: Definition
    pid: int | None = None
    worker: WorkerActivity | None = None
    tables: tuple[TableObservation, ...] = ()
    counters: Mapping[str, int]
    stats_reset: datetime | None = None
    last_error: str | None = None
    last_error_time: datetime | None = None
    applier: ApplierObservation | None = None
    details: WorkerDetails = field(default_factory=WorkerDetails)
    by_command_line: bool = False

    @property
    def left_out(self) -> Mapping[TableName, str]:
        """Published tables that the latest run did not replicate, each with the reason, without those that were added since."""
        added = {table.table for table in self.tables}
        return {table: reason for table, reason in self.details.left_out.items() if table not in added}
