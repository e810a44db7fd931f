"""The seams themselves, as small Protocols whose texts are the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

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
        """Wait for and return CopyData messages (raw, header included): at least one, else whatever is there, within about a megabyte.

        Cancelling it loses nothing. One caller at a time; ``send`` may run meanwhile.

        Raises:
            PublisherUnavailable: the connection was lost or the server ended the stream.
            PublisherError: the server reported an error.
        """
        ...

    async def send(self, message: bytes) -> None:
        """Send one CopyData message (a standby status update) and flush it."""
        ...

    async def wal_end(self, least: Lsn) -> Lsn:
        """Where the publisher's WAL ends. What is known is enough if it is not before ``least``; otherwise the publisher is asked.

        Raises:
            PublisherError: or one of its kin: it cannot be asked.
        """
        ...

    async def close(self) -> None:
        """End the stream politely if the connection still lives (CopyDone both ways, a second at most), and close the connection."""
        ...


class Spool(Protocol):
    """Where the changes of large transactions wait. Private to this process; its content never outlives it.

    Calls are made one at a time.
    """

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        """Add records to a transaction's part, creating it with the first.

        Raises:
            SpoolError: disk full, no permission.
        """
        ...

    async def truncate(self, spool_id: int, count: int) -> None:
        """Keep only the first ``count`` records: a subtransaction was aborted."""
        ...

    async def discard(self, spool_id: int) -> None:
        """Forget a transaction's part. Unknown ids are fine."""
        ...

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        """Some hundred kilobytes of a part that still grows, from record number ``start`` on; nothing behind the last one."""
        ...

    def reader(self, spool_id: int) -> SpooledRecords:
        """The part as a transaction reads it. No ``append`` comes after this."""
        ...


class TableSink(Protocol):
    """One table's synchronization, on sessions of its own. One at a time per table, also between processes.

    A crash at any instant leaves either the state from before a call or the one after it.
    """

    @property
    def relation_id(self) -> int:
        """A number that names the table in this target for good (PostgreSQL: the target table's oid). Known after :meth:`begin`."""
        ...

    async def begin(self) -> TableEntry:
        """Return the entry as stored, after undoing what a copy that did not finish left (state DATASYNC becomes INIT).

        Also to be called again after any other call failed: it tells whether that call took effect.
        """
        ...

    async def start_copy(self) -> None:
        """Store DATASYNC."""
        ...

    async def describe(self, table: PublishedTable) -> None:
        """What is to be copied, as the publisher describes it.

        Comes before :meth:`start_copy`, so that nothing is begun for a table that does not fit, and again before the first :meth:`copy`:
        the publisher's table may have been altered in between.

        Raises:
            RelationError: the target's table does not fit.
        """
        ...

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store the rows of one COPY stream. May run concurrently with itself if ``capabilities.parallel_copy``.

        Raises:
            TargetError: the rows were refused.
        """
        ...

    async def finish_copy(self, position: Position) -> None:
        """Store FINISHEDCOPY, and the table's own position, with all rows copied since :meth:`start_copy`; all of it or nothing."""
        ...

    async def position(self) -> Position:
        """The table's own position: of the snapshot, or later by :meth:`apply`. Only in state FINISHEDCOPY."""
        ...

    async def apply(self, batch: Batch) -> None:
        """Apply the table's share of a batch, and the position with it; durable on return."""
        ...

    async def finish_sync(self, lsn: Lsn) -> None:
        """Store SYNCDONE at ``lsn`` and forget the table's own position."""
        ...

    async def close(self) -> None:
        """Give the sessions back. Uncommitted work is rolled back. Idempotent."""
        ...


@runtime_checkable
class SnapshotTableSink(Protocol):
    """A :class:`TableSink` whose target reads the publisher by itself: it has this method too."""

    async def copy_snapshot(self, order: SnapshotOrder, rows: Callable[[int], None]) -> None:
        """Have all rows stored, in place of every :meth:`TableSink.copy`. The snapshot stays open until this returns.

        Args:
            order: where they are.
            rows: is told how many more are stored.

        Raises:
            PublisherUnavailable: the snapshot is gone; copy anew.
            TargetError: the rows cannot be stored.
        """
        ...


@runtime_checkable
class ManyTablesSink(Protocol):
    """A :class:`Sink` that does something for many tables in about the time that one takes: it has these methods too."""

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """:meth:`Sink.add_table` of each; the errors of those that were not added."""
        ...

    async def set_all_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """:meth:`Sink.set_ready` of each."""
        ...


class TableGroup(Protocol):
    """Tables that are copied one after another, each by one transaction with its rows and its state, through one session.

    One call at a time. A crash at any instant leaves each table in INIT, without rows of ours, or in SYNCDONE, with all of them.
    """

    @property
    def usable(self) -> bool:
        """False once the session is lost, or the sink it came of was closed: then nothing more can be done but :meth:`close`."""
        ...

    async def begin(self, tables: Sequence[TableName]) -> Mapping[TableName, int]:
        """Connect; return those of the tables that are in INIT, each with its :attr:`TableSink.relation_id`."""
        ...

    async def copy(self, table: PublishedTable, copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        """Store a table's rows; no other session sees them before :meth:`finish`. A lock of another session is waited for only a moment.

        Raises:
            SubscriberError: nothing of the table stays. The group goes on with others if it is still ``usable``.
        """
        ...

    async def finish(self, lsn: Lsn) -> None:
        """Store SYNCDONE at ``lsn`` for the table that was copied, and commit; durable on return.

        Raises:
            TargetError: nothing of the table stays. But if the group is not ``usable`` any more, it is open whether it took effect:
                :meth:`TableSink.begin` tells.
        """
        ...

    async def roll_back(self) -> None:
        """Nothing of the table that was copied stays. Idempotent."""
        ...

    async def close(self) -> None:
        """Give the session back. Uncommitted work is rolled back. Idempotent."""
        ...


@runtime_checkable
class GroupingSink(Protocol):
    """A :class:`Sink` that copies small tables faster together: it has this method too."""

    def open_group(self) -> TableGroup:
        """A group of tables; several work side by side.

        Raises:
            TargetUnavailable: the sink is not open.
        """
        ...


class ParallelTransaction(Protocol):
    """One streamed transaction, applied while the publisher still sends it, in an open transaction of a session of its own.

    *Only an attempt.* Whoever drives it keeps all records, and gives the whole transaction to :meth:`Sink.apply` if this comes to
    nothing. So every error but one leaves nothing of it, ends it, and is no reason to stop: it comes again there, or does not.
    *Invisible.* Nobody sees anything of it before :meth:`commit`. It may hold locks that others wait for, :meth:`Sink.apply` among
    them: then it has to be rolled back (:meth:`Sink.holding_up`).
    *Order.* Records come in the order in which they were received, each once. One call at a time; only :meth:`roll_back` may come
    while another call was cancelled and has not returned yet.
    """

    async def apply(self, records: Sequence[bytes]) -> None:
        """Apply the next records, raw, each with an xid behind its tag.

        Raises:
            SubscriberError: see above.
        """
        ...

    async def cut(self, count: int) -> None:
        """Only the first ``count`` records count: with the next one a subtransaction began that was aborted."""
        ...

    async def commit(self, transaction: Transaction) -> bool:
        """Its end came and all its records were given. Commit it with its end LSN as the position, as :meth:`Sink.apply` would have.

        Not while the sink is doing anything else. The transaction is discarded, and counted, if this returns True.

        Returns:
            False if nothing of it stays.

        Raises:
            TargetUnavailable: whether it took effect is open, as with ``Sink.apply``.
        """
        ...

    async def prepare(self, prepared: PreparedTransaction) -> bool:
        """As :meth:`commit`, for a transaction that is prepared: as :meth:`Sink.prepare` would have."""
        ...

    async def roll_back(self) -> None:
        """Nothing of it stays, and its locks are free. Idempotent, and nothing after :meth:`commit` or :meth:`prepare`."""
        ...


class Sink(Protocol):
    """A target, opened for one subscription.

    *Order.* One caller; calls do not overlap, except that :meth:`open_table` gives objects that work beside it.
    *Exactly once.* :meth:`apply` stores the position with the data; a transaction whose end LSN is not past the stored position is
    skipped, so that a batch may come again after a crash.
    *Durable.* ``apply`` and its siblings may return before what they did is durable; ``on_durable`` (given at :meth:`open`) is called
    with an end LSN once everything up to it is. A sink that is durable at once calls it before returning. What was taken and made durable
    in a former life may be reported before it comes again; what is reported then has to be reported once more when it has come.
    *One writer.* Between ``open`` and ``close`` no other process can open the same subscription: it gets SubscriptionInUse.
    *Errors.* ApplyError and RelationError leave nothing of the transaction they name; those before it in the batch may have become
    durable, and the position tells. TargetUnavailable leaves it open whether the call took effect: open again and read the position.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this target can do."""
        ...

    @property
    def statistics(self) -> ApplyStatistics:
        """What was done since the sink was made."""
        ...

    async def exists(self, name: str) -> bool:
        """Whether the target knows the subscription. Changes nothing, needs no ``open``.

        Raises:
            TargetUnavailable, TargetError: there is no session with the target to look through.
        """
        ...

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        """Connect, make or migrate the catalog, make the subscription's entry if there is none, take the writer's lock.

        Raises:
            TargetUnavailable: the target cannot be reached.
            TargetError: the target refused something.
            SubscriptionInUse: another process holds the writer's lock.
        """
        ...

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        """Note durably that the slot is about to be created, so that a crash in between is recognised; None takes it back."""
        ...

    async def slot_names(self) -> frozenset[str]:
        """The slots that stored positions are of: the subscription's, and those of tables that catch up."""
        ...

    async def set_publications(self, publications: Sequence[str]) -> None:
        """Store the publications subscribed to."""
        ...

    async def refreshed(self) -> None:
        """Note that the tables follow the publications: nothing is pending."""
        ...

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one that moves to another timeline; durable on return."""
        ...

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data: everything up to ``lsn`` was received and there was nothing to apply."""
        ...

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        """Store ``subtwophasestate``."""
        ...

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """What the publisher's catalog says of these tables, types included that Relation messages do not tell.

        Comes after :meth:`open` in every run, before :meth:`add_table` and before the first change, and again when the tables follow the
        publications. Makes those tables that are missing, if the sink is set so.

        Only called if ``capabilities.described``.

        Raises:
            RelationError: one of them cannot be made.
        """
        ...

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables. Entries whose target table was dropped are removed by this.

        For the start of a run: a table's synchronization of an earlier process, killed or cancelled, is waited for until it can store
        nothing any more. Not to be called while tables of this process are open.
        """
        ...

    async def add_table(self, table: TableName, entry: TableEntry) -> None:
        """Add a table with its first state (INIT, or READY without copy).

        Raises:
            RelationError: native's words: relation does not exist in the target, or is no table.
        """
        ...

    async def remove_table(self, table: TableName) -> None:
        """Forget a table that is no longer published. Its rows stay."""
        ...

    async def set_ready(self, table: TableName, lsn: Lsn) -> None:
        """SYNCDONE to READY: the apply worker passed the entry's LSN."""
        ...

    async def apply(self, batch: Batch) -> None:
        """Apply a batch and its end LSN, together."""
        ...

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Apply a transaction up to PREPARE TRANSACTION; durable on return, the position not before it. Idempotent.

        Without ``capabilities.prepares_in_target`` keep its changes durably instead: :meth:`commit_prepared` applies them. Which relations'
        changes are wanted is then asked now, and what the target has against them is known only there.

        It is done also if its end LSN is not past the position: one that was prepared before the slot's two-phase start comes late,
        right before its COMMIT PREPARED.

        Only called if ``capabilities.two_phase``.
        """
        ...

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """COMMIT PREPARED, and the position with it. Idempotent.

        Raises:
            ApplyError, RelationError: without ``capabilities.prepares_in_target``; the transaction stays prepared.
            DataLossError: the target has neither the prepared transaction nor the proof that it was committed; NeverPrepared if it was
                never prepared there either.
        """
        ...

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """ROLLBACK PREPARED if there is such a prepared transaction; else nothing but the position. Idempotent."""
        ...

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool]) -> ParallelTransaction:
        """Begin to apply the streamed transaction ``xid`` before its end, beside everything else that is done.

        Only called if ``capabilities.parallel_apply``, and between ``open`` and ``close``, which rolls back what is left of it.

        Args:
            xid: its (top) id at the publisher.
            gate: as :data:`RelationGate`; the final LSN is not known yet. Whether it still answers the same is the caller's to see.

        Raises:
            TargetUnavailable, TargetError: there is no session to be had; or the target has it prepared already.
        """
        ...

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        """Which of ``others`` have to be rolled back, because a call under way may wait for them for ever. May be called meanwhile.

        They hold locks that it waits for, directly or through other sessions; or it cannot be seen whether they do.

        Args:
            waiting: whose call; None: the sink's own.
            others: those that may be rolled back.

        Raises:
            TargetUnavailable, TargetError: it cannot be found out.
        """
        ...

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Pass over a transaction, and forget ``skip_lsn``; durable on return. What it says of relations counts.

        A prepared one is prepared without any change: its COMMIT PREPARED will come. With that, what was kept of a prepared one is
        forgotten unapplied, if it is there; only without ``capabilities.prepares_in_target``.
        """
        ...

    async def clear_skip(self) -> None:
        """Forget ``skip_lsn``."""
        ...

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Tell everybody who looks into the target what the workers do, and what :attr:`statistics` counted since the last time.

        May overlap with any other call but :meth:`close`; may be cancelled at any moment. Does nothing while the sink is not open. Need not
        be durable.

        Args:
            workers: all there are.
            last_error: the latest of this run; None leaves what is there.

        Raises:
            TargetError: it is dropped. Of a session that is lost the next other call will say so too.
        """
        ...

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Everything in the target that would go wrong with these tables; empty if nothing. Changes nothing, needs no ``open``.

        Raises:
            TargetUnavailable, TargetError: there is no session with the target to look through.
        """
        ...

    def open_table(self, table: TableName) -> TableSink:
        """The table's synchronization, on connections of its own. Once the sink was opened, also while it is closed after an error."""
        ...

    async def close(self) -> None:
        """Let everything applied become durable, release the lock, disconnect. Idempotent; also after errors.

        A target that does not answer is not waited for longer than some seconds.
        """
        ...


Query = Callable[[str], Awaitable[Sequence[Sequence[str | None]]]]
"""Runs one SELECT without parameters; its columns are texts."""


@runtime_checkable
class PostgresDatabase(Protocol):
    """A :class:`Sink` whose target may be a database of a PostgreSQL server: it has this method too."""

    def querying(self) -> AbstractAsyncContextManager[Query | None]:
        """Open a transaction for SELECTs in the target, in a session of its own; needs no ``open``. It is rolled back at the end.

        Gives None if the target is no database of PostgreSQL.

        Raises:
            TargetUnavailable, TargetError
        """
        ...


@runtime_checkable
class WatchedSink(Protocol):
    """A :class:`Sink` that keeps sessions with a server, or a file that others may lock: it has these methods too."""

    async def ping(self) -> None:
        """See that the sessions which apply are alive. As any call of the one caller; between ``open`` and ``close``.

        Raises:
            TargetUnavailable: one is lost, or does not answer within some seconds.
        """
        ...

    async def activity(self) -> TargetActivity:
        """Look at the sink's sessions, those of table synchronizations included, through another one.

        May overlap with any other call, :meth:`Sink.open` and :meth:`Sink.close` included, and may be cancelled at any moment.

        Raises:
            TargetError: they cannot be looked at.
        """
        ...
