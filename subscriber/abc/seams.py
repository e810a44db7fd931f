"""The interfaces, as small Protocols whose docstrings are the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from subscriber.abc.values import (
    ApplyStatistics,
    Batch,
    Capabilities,
    CopyFormat,
    Finding,
    Position,
    PublishedTable,
    RelationGate,
    SnapshotOrder,
    SubscriptionState,
    TableEntry,
    TableName,
    TargetActivity,
    TwoPhaseState,
    WorkerActivity,
)
from subscriber.errors import RelationError
from subscriber.protocol.lsn import Lsn

if TYPE_CHECKING:
    # `subscriber status` needs none of these
    from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
    from subscriber.transaction.model import PreparedTransaction, SpooledRecords, Transaction

__all__ = [
    "GroupingSink",
    "ManyTablesSink",
    "ParallelTransaction",
    "PostgresDatabase",
    "Query",
    "ReplicationStream",
    "Sink",
    "SnapshotTableSink",
    "Spool",
    "TableGroup",
    "TableSink",
    "WatchedSink",
]


class ReplicationStream(Protocol):
    """COPY BOTH with a walsender."""

    async def receive(self) -> Sequence[bytes]:
        """Wait for CopyData messages and return them raw, header included: at least one, at most about a megabyte of what has arrived.

        Cancelling loses nothing. One caller at a time; ``send`` may run meanwhile.

        Raises:
            PublisherUnavailable: the connection was lost or the server ended the stream.
            PublisherError: the server reported an error.
        """
        ...

    async def send(self, message: bytes) -> None:
        """Send one CopyData message (a standby status update) and flush it."""
        ...

    async def wal_end(self, least: Lsn) -> Lsn:
        """Return the end of the publisher's WAL. Ask the publisher only if the known end is before ``least``.

        Raises:
            PublisherError: or a subclass: the query failed.
        """
        ...

    async def close(self) -> None:
        """End the stream cleanly if the connection works (CopyDone both ways, at most a second), and close the connection."""
        ...


class Spool(Protocol):
    """Stores the changes of large transactions. Private to this process; its content is lost with the process.

    Calls are made one at a time.
    """

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        """Append records to a transaction. The first call creates it.

        Raises:
            SpoolError: disk full, no permission.
        """
        ...

    async def truncate(self, spool_id: int, count: int) -> None:
        """Keep only the first ``count`` records, after a subtransaction was aborted."""
        ...

    async def discard(self, spool_id: int) -> None:
        """Delete the records of a transaction. Unknown ids are allowed."""
        ...

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        """Read some hundred kilobytes of an unfinished transaction from record number ``start``. Empty after the last record."""
        ...

    def reader(self, spool_id: int) -> SpooledRecords:
        """Return the records for reading. ``append`` is not called after this."""
        ...


class TableSink(Protocol):
    """The synchronization of one table, on its own sessions. Only one per table exists at a time, also across processes.

    A crash at any instant leaves the state before a call or the state after it.
    """

    @property
    def relation_id(self) -> int:
        """A number that permanently identifies the table in this target (PostgreSQL: its oid). Known after :meth:`begin`."""
        ...

    async def begin(self) -> TableEntry:
        """Return the stored entry. First undo an unfinished copy (state DATASYNC becomes INIT).

        Call it again after another call failed, to learn whether that call took effect.
        """
        ...

    async def start_copy(self) -> None:
        """Store DATASYNC."""
        ...

    async def describe(self, table: PublishedTable) -> None:
        """Receive the publisher's description of the table.

        It is called before :meth:`start_copy`, so that a table that does not fit is not started. It is called again before the first
        :meth:`copy`, because the publisher's table may have been altered in between.

        Raises:
            RelationError: the target's table does not match.
        """
        ...

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store the rows of one COPY stream. Calls may overlap if ``capabilities.parallel_copy``.

        Raises:
            TargetError: the target rejected the rows.
        """
        ...

    async def finish_copy(self, position: Position) -> None:
        """Store FINISHEDCOPY and the table's own position together with all rows copied since :meth:`start_copy`, atomically."""
        ...

    async def position(self) -> Position:
        """The table's own position: that of the snapshot, or a later one from :meth:`apply`. Only in state FINISHEDCOPY."""
        ...

    async def apply(self, batch: Batch) -> None:
        """Apply the changes of this table in a batch, with the position. Durable on return."""
        ...

    async def finish_sync(self, lsn: Lsn) -> None:
        """Store SYNCDONE at ``lsn`` and delete the table's own position."""
        ...

    async def close(self) -> None:
        """Release the sessions. Uncommitted work is rolled back. Idempotent."""
        ...


@runtime_checkable
class SnapshotTableSink(Protocol):
    """A :class:`TableSink` whose target reads the publisher directly has this method too."""

    async def copy_snapshot(self, order: SnapshotOrder, rows: Callable[[int], None]) -> None:
        """Store all rows, instead of calls of :meth:`TableSink.copy`. The snapshot stays open until this returns.

        Args:
            order: where to read the rows.
            rows: called with the number of further rows stored.

        Raises:
            PublisherUnavailable: the snapshot does not exist any more; copy again.
            TargetError: the rows cannot be stored.
        """
        ...


@runtime_checkable
class ManyTablesSink(Protocol):
    """A :class:`Sink` that can change the state of many tables in about the time of one has these methods too."""

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Call :meth:`Sink.add_table` for each table. Return the errors of the tables that were not added."""
        ...

    async def set_all_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Call :meth:`Sink.set_ready` for each table."""
        ...


class TableGroup(Protocol):
    """Tables that are copied one after another through one session. Each takes one transaction, with its rows and its state.

    One call at a time. A crash at any instant leaves each table in INIT, without copied rows, or in SYNCDONE, with all of them.
    """

    @property
    def usable(self) -> bool:
        """False once the session is lost, or its sink was closed. Then only :meth:`close` may be called."""
        ...

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        """Connect. Return the tables that are in INIT, each with its :attr:`TableSink.relation_id`."""
        ...

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store a table's rows. Other sessions see them only after :meth:`finish`. It waits only a moment for locks of other sessions.

        Raises:
            SubscriberError: the table was rolled back. The group can continue with other tables if it is still ``usable``.
        """
        ...

    async def finish(self, lsn: Lsn) -> None:
        """Store SYNCDONE at ``lsn`` for the copied table, and commit. Durable on return.

        Raises:
            TargetError: the table was rolled back. But if the group is not ``usable`` any more, the call may have taken effect:
                :meth:`TableSink.begin` returns the state.
        """
        ...

    async def roll_back(self) -> None:
        """Roll back the table that was copied. Idempotent."""
        ...

    async def close(self) -> None:
        """Release the session. Uncommitted work is rolled back. Idempotent."""
        ...


@runtime_checkable
class GroupingSink(Protocol):
    """A :class:`Sink` that can copy small tables faster in groups has this method too."""

    def open_group(self) -> TableGroup:
        """Create a group. Several groups may work at the same time.

        Raises:
            TargetUnavailable: the sink is not open.
        """
        ...


class ParallelTransaction(Protocol):
    """One streamed transaction that is applied while the publisher still sends it, in an open transaction on its own session.

    *An attempt only.* The caller keeps all records. If the attempt fails, the caller passes the whole transaction to :meth:`Sink.apply`.
    So every error but one rolls the attempt back and ends it, and is no reason to stop. If the cause persists, ``Sink.apply`` reports it.
    *Invisible.* Other sessions see none of its changes before :meth:`commit`. It may hold locks for which others wait, such as
    :meth:`Sink.apply`. Then it must be rolled back (:meth:`Sink.holding_up`).
    *Order.* Records come in the order received, each once. One call at a time. Only :meth:`roll_back` may be called while another,
    cancelled call has not returned yet.
    """

    async def apply(self, records: Sequence[bytes]) -> None:
        """Apply the next records. They are raw, each with an xid after its tag.

        Raises:
            SubscriberError: see above.
        """
        ...

    async def cut(self, count: int) -> None:
        """Undo all but the first ``count`` records: the next one began a subtransaction that was aborted."""
        ...

    async def commit(self, transaction: Transaction) -> bool:
        """Commit the transaction after its last record, with its end LSN as the position, as :meth:`Sink.apply` would.

        Not called while another call of the sink runs. If it returns True, the sink has discarded and counted the transaction.

        Returns:
            False if the transaction was rolled back.

        Raises:
            TargetUnavailable: the commit may have taken effect, as with ``Sink.apply``.
        """
        ...

    async def prepare(self, prepared: PreparedTransaction) -> bool:
        """Prepare the transaction, as :meth:`Sink.prepare` would. Otherwise like :meth:`commit`."""
        ...

    async def roll_back(self) -> None:
        """Roll back and release all locks. Idempotent. Does nothing after :meth:`commit` or :meth:`prepare`."""
        ...


class Sink(Protocol):
    """A target, opened for one subscription.

    *Order.* One caller. Calls do not overlap, except with the objects that :meth:`open_table` returns.
    *Exactly once.* :meth:`apply` stores the position with the data. It skips a transaction whose end LSN is not past the stored position,
    so a batch may come again after a crash.
    *Durable.* ``apply`` and similar methods may return before their work is durable. ``on_durable`` (given at :meth:`open`) is called with
    an end LSN once everything up to it is durable. A sink that is durable at once calls it before returning. A sink may report a
    transaction that an earlier run applied before it comes again. It must then report it once more after it has come again.
    *One writer.* Between ``open`` and ``close`` no other process can open the same subscription: it gets SubscriptionInUse.
    *Errors.* After ApplyError and RelationError, the transaction that they name is rolled back. Those before it in the batch may be
    durable: read the position. After TargetUnavailable the call may have taken effect: open again and read the position.
    """

    @property
    def capabilities(self) -> Capabilities:
        """The abilities of this target."""
        ...

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        ...

    async def exists(self, name: str) -> bool:
        """Whether the target has the subscription. Changes nothing, works without ``open``.

        Raises:
            TargetUnavailable, TargetError: the target cannot be queried.
        """
        ...

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        """Connect, create or migrate the catalog, create the subscription's entry if there is none, and take the writer's lock.

        Raises:
            TargetUnavailable: the target cannot be reached.
            TargetError: the target rejected a statement.
            SubscriptionInUse: another process holds the writer's lock.
        """
        ...

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        """Record durably that the slot is about to be created, so that a crash in between is detected. None withdraws it."""
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
        """Store the first position, or one on another timeline. Durable on return."""
        ...

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data: everything up to ``lsn`` was received and there was nothing to apply."""
        ...

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        """Store ``subtwophasestate``."""
        ...

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """Receive the publisher's description of these tables, including types that Relation messages do not describe.

        It is called in every run after :meth:`open`, before :meth:`add_table` and before the first change, and again when the tables are
        refreshed. If the sink is so configured, it creates missing tables.

        Only called if ``capabilities.described``.

        Raises:
            RelationError: a table cannot be created.
        """
        ...

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """Return the subscription's tables. This removes entries whose target table was dropped.

        For the start of a run. It waits until table synchronizations of an earlier, killed or cancelled process can store nothing any
        more. Do not call it while tables of this process are open.
        """
        ...

    async def add_table(self, table: TableName, entry: TableEntry) -> None:
        """Add a table with its first state (INIT, or READY without copy).

        Raises:
            RelationError: relation does not exist in the target, or is not a table. The message is PostgreSQL's.
        """
        ...

    async def remove_table(self, table: TableName) -> None:
        """Remove the entry of a table that is no longer published. Its rows stay."""
        ...

    async def set_ready(self, table: TableName, lsn: Lsn) -> None:
        """SYNCDONE to READY, after the apply worker has passed the entry's LSN."""
        ...

    async def apply(self, batch: Batch) -> None:
        """Apply a batch together with its end LSN."""
        ...

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Apply a transaction up to PREPARE TRANSACTION. Durable on return, and the position not earlier. Idempotent.

        Without ``capabilities.prepares_in_target``, store the changes durably instead; :meth:`commit_prepared` applies them. The gate is
        asked now, but errors of the target only occur there.

        Do this even if its end LSN is not past the position: a transaction that was prepared before two-phase was enabled for the slot
        comes late, right before its COMMIT PREPARED.

        Only called if ``capabilities.two_phase``.
        """
        ...

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """COMMIT PREPARED, together with the position. Idempotent.

        Raises:
            ApplyError, RelationError: only without ``capabilities.prepares_in_target``. The transaction stays prepared.
            DataLossError: the target has neither the prepared transaction nor a record of its commit. NeverPrepared if it was also never
                prepared there.
        """
        ...

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """ROLLBACK PREPARED if the prepared transaction exists. Otherwise store only the position. Idempotent."""
        ...

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool]) -> ParallelTransaction:
        """Begin to apply the streamed transaction ``xid`` before its end, in parallel to other work.

        Only called if ``capabilities.parallel_apply``, and between ``open`` and ``close``. ``close`` rolls back what is left of it.

        Args:
            xid: its (top) id on the publisher.
            gate: as :data:`RelationGate`, but the final LSN is not known yet. The caller checks whether its answers stay the same.

        Raises:
            TargetUnavailable, TargetError: no session is available; or the transaction is already prepared in the target.
        """
        ...

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        """Return those of ``others`` that must be rolled back, because a running call may wait for them for ever.

        They hold locks that the call waits for, directly or through other sessions; or this cannot be determined. May overlap with
        that call.

        Args:
            waiting: the transaction whose call it is; None: it is a call of the sink.
            others: transactions that may be rolled back.

        Raises:
            TargetUnavailable, TargetError: the locks cannot be queried.
        """
        ...

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Skip a transaction and clear ``skip_lsn``. Durable on return. Relation messages of the transaction still apply.

        For a prepared transaction, prepare it without changes, because its COMMIT PREPARED will come. For a COMMIT PREPARED, delete the
        stored transaction unapplied, if there is one; this occurs only without ``capabilities.prepares_in_target``.
        """
        ...

    async def clear_skip(self) -> None:
        """Clear ``skip_lsn``."""
        ...

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Publish in the target what the workers do, and what :attr:`statistics` counted since the last report.

        May overlap with any other call except :meth:`close`, and may be cancelled at any moment. Does nothing while the sink is not open.
        Need not be durable.

        Args:
            workers: all workers.
            last_error: the latest error of this run; None keeps the stored one.

        Raises:
            TargetError: the report is lost. If the session is lost, the next other call reports that too.
        """
        ...

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Return all problems that these tables would meet in the target. Changes nothing, works without ``open``.

        Raises:
            TargetUnavailable, TargetError: the target cannot be queried.
        """
        ...

    def open_table(self, table: TableName) -> TableSink:
        """Return the table's synchronization, which has its own sessions. Allowed after ``open``, also if an error closed the sink."""
        ...

    async def close(self) -> None:
        """Make everything applied durable, release the lock, disconnect. Idempotent; also after errors.

        Wait at most some seconds for a target that does not answer.
        """
        ...


Query = Callable[[str], Awaitable[Sequence[Sequence[str | None]]]]
"""Runs one SELECT without parameters. Its columns are texts."""


@runtime_checkable
class PostgresDatabase(Protocol):
    """A :class:`Sink` whose target may be a PostgreSQL database has this method too."""

    def querying(self) -> AbstractAsyncContextManager[Query | None]:
        """Open a transaction for SELECTs in the target, on its own session. Works without ``open``. It is rolled back at the end.

        Yields None if the target is not a PostgreSQL database.

        Raises:
            TargetUnavailable, TargetError: the target cannot be queried.
        """
        ...


@runtime_checkable
class WatchedSink(Protocol):
    """A :class:`Sink` that has sessions with a server, or a file that other programs may lock, has these methods too."""

    async def ping(self) -> None:
        """Check that the sessions for applying are alive. It is called like the other methods, by the one caller, while the sink is open.

        Raises:
            TargetUnavailable: a session is lost, or does not answer within some seconds.
        """
        ...

    async def activity(self) -> TargetActivity:
        """Observe the sink's sessions, including those of table synchronizations, through another session.

        May overlap with any other call, including :meth:`Sink.open` and :meth:`Sink.close`, and may be cancelled at any moment.

        Raises:
            TargetError: the sessions cannot be observed.
        """
        ...
