"""The interface of a sink, and of what it opens: the stream and the state store of one subscription."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from subscriber.errors import RelationError
from subscriber.interfaces.tables import TableSink
from subscriber.interfaces.values import (
    ApplyStatistics,
    Batch,
    Finding,
    Position,
    PublishedTable,
    SubscriptionState,
    TableEntry,
    TableName,
    TwoPhaseState,
    WorkerActivity,
)
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    # `subscriber status` needs none of these
    from subscriber.protocol.messages import CommitPrepared
    from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["OpenedSink", "Sink", "StateStore", "Stream"]


class Stream(Protocol):
    """Applies transactions, in the order of their commits.

    *Exactly once.* :meth:`apply` stores the position with the data. It skips a transaction whose end LSN is not past the stored position,
    so a batch may come again after a crash.
    *Durable.* The methods may return before their work is durable. ``on_durable`` (given at :meth:`Sink.open`) is called with an end LSN
    once everything up to it is durable. A sink that is durable at once calls it before returning. A sink may report a transaction that an
    earlier run applied before it comes again. It must then report it once more after it has come again.
    *Errors.* After ApplyError and RelationError, the transaction that they name is rolled back. Those before it in the batch may be
    durable: read the position. After TargetUnavailable the call may have taken effect: open again and read the position.
    """

    @property
    def statistics(self) -> ApplyStatistics:
        """The counters of the sink."""
        ...

    async def apply(self, batch: Batch) -> None:
        """Apply a batch together with its end LSN."""
        ...

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data: everything up to ``lsn`` was received and there was nothing to apply."""
        ...

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Skip a transaction and clear ``skip_lsn``. Durable on return. Relation messages of the transaction still apply.

        The other two events come only to a :class:`TwoPhaseSink`. For a prepared transaction, prepare it without changes, because its
        COMMIT PREPARED will come. For a COMMIT PREPARED, delete the stored transaction unapplied, if there is one; this occurs only
        without ``prepares_in_target``.
        """
        ...


class StateStore(Protocol):
    """Stores the subscription: its slot, its position, and the states of its tables. Each call is durable on return.

    :class:`subscriber.catalog.subscription_rows.CatalogStateStore` implements it for targets that store the catalog's rows.
    """

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        """Record that the slot is about to be created, so that a crash in between is detected. None withdraws it."""
        ...

    async def slot_names(self) -> frozenset[str]:
        """The slots to which stored positions belong: the subscription's, and those of tables that catch up."""
        ...

    async def set_publications(self, publications: Sequence[str]) -> None:
        """Store the publications of the subscription."""
        ...

    async def refreshed(self) -> None:
        """Record that the tables match the publications, so that no refresh is pending."""
        ...

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one on another timeline."""
        ...

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        """Store ``subtwophasestate``."""
        ...

    async def clear_skip(self) -> None:
        """Clear ``skip_lsn``."""
        ...

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """Return the subscription's tables. This removes entries whose target table was dropped.

        For the start of a run. It waits until table synchronizations of an earlier, killed or cancelled process can store nothing any
        more. Do not call it while tables of this process are open.
        """
        ...

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables with their first state (INIT, or READY without copy).

        Returns:
            The tables that were not added, because they do not exist in the target, or are not tables. The errors have PostgreSQL's words.
        """
        ...

    async def remove_table(self, table: TableName) -> None:
        """Remove the entry of a table that is no longer published. Its rows stay."""
        ...

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """SYNCDONE to READY, after the apply worker has passed the LSNs of the entries."""
        ...

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Publish in the target what the workers do, and what :attr:`Stream.statistics` counted since the last report.

        May overlap with any other call except :meth:`OpenedSink.close`, and may be cancelled at any moment. Need not be durable.

        Args:
            workers: all workers.
            last_error: the latest error of this run; None keeps the stored one.

        Raises:
            TargetError: the report is lost. If the session is lost, the next other call reports that too.
        """
        ...


class OpenedSink(Stream, StateStore, Protocol):
    """One subscription of a target, opened by :meth:`Sink.open`.

    It has further abilities by implementing them: see :mod:`subscriber.interfaces.abilities`.

    *Order.* One caller. Calls do not overlap, except with the objects that :meth:`open_table` returns.
    *One writer.* Until :meth:`close` no other process can open the same subscription: it gets SubscriptionInUse.
    *Closed.* Afterwards only :meth:`open_table` and ``close`` are called.
    """

    @property
    def state(self) -> SubscriptionState:
        """The subscription as it was stored when it was opened."""
        ...

    def open_table(self, table: TableName) -> TableSink:
        """Return the table's synchronization, which has its own sessions. It continues after :meth:`close`."""
        ...

    async def close(self) -> None:
        """Make everything applied durable, release the lock, disconnect. Idempotent; also after errors.

        Wait at most some seconds for a target that does not answer.
        """
        ...


class Sink(Protocol):
    """A target, for one subscription. It is connected only while it is open."""

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        ...

    @property
    def supports_two_phase(self) -> bool:
        """Whether :meth:`open` returns a :class:`TwoPhaseSink`. Otherwise ``two_phase = true`` is an error."""
        ...

    async def exists(self, name: str) -> bool:
        """Whether the target has the subscription. Changes nothing.

        Raises:
            TargetUnavailable, TargetError: the target cannot be queried.
        """
        ...

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedSink:
        """Connect, create the catalog if there is none, create the subscription's entry if there is none, and take the writer's lock.

        Called again only after the opened sink was closed.

        Args:
            name: name of the subscription.
            on_durable: see :class:`Stream`.

        Raises:
            TargetUnavailable: the target cannot be reached.
            TargetError: the target rejected a statement.
            SubscriptionInUse: another process holds the writer's lock.
        """
        ...

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Return all problems that these tables would meet in the target. Changes nothing.

        Raises:
            TargetUnavailable, TargetError: the target cannot be queried.
        """
        ...
