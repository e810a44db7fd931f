"""An opened sink in memory: the stream, the state store and prepared transactions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    Position,
    PublishedTable,
    RelationGate,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
    TwoPhaseState,
    WorkerActivity,
    everything_applies,
)
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.sinks.memory.accepted_changes import Relations
from subscriber.sinks.memory.applier import Applier
from subscriber.sinks.memory.memory_table_sink import MemoryTableSink
from subscriber.sinks.memory.target import MemoryTarget, SubscriptionRecord, TableRecord, no_table
from subscriber.sinks.prepared_errors import never_prepared
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["OpenedMemorySink"]


class OpenedMemorySink:
    """A :class:`subscriber.interfaces.OpenedSink`.

    Args:
        target: the target.
        name: name of the subscription.
        record: what the target stores about it. This object becomes its writer.
        published: the publisher's descriptions of the tables, shared with the sink.
        statistics: counters of the sink.
        on_durable: is told what is durable.
    """

    def __init__(
        self,
        target: MemoryTarget,
        name: str,
        record: SubscriptionRecord,
        *,
        published: dict[TableName, PublishedTable],
        statistics: ApplyStatistics,
        on_durable: Callable[[Lsn], None],
    ) -> None:
        self._target = target
        self._stored = record
        self._on_durable = on_durable
        self._relations = Relations()
        self._published = published
        for table in published.values():
            self._relations.types.add(table.types)
        self.statistics = statistics
        self.state = SubscriptionState(
            oid=record.oid,
            name=name,
            target_identifier=target.identifier,
            slot_name=record.slot_name,
            publications=record.publications,
            two_phase=record.two_phase,
            position=record.position,
            skip_lsn=record.skip_lsn,
        )

    @property
    def _record(self) -> SubscriptionRecord:
        self._target.require(self._stored.writer, self, "the sink")
        return self._stored

    @property
    def _position(self) -> Position:
        found = self._record.position
        if found is None:
            raise TargetError(
                f'subscription "{self.state.name}" has no position in the target',
                hint="was the subscription dropped? start it with a new name",
            )
        return found

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        """Store the slot's name, publications and two-phase state. None as the name: the slot was not created."""
        record = self._record
        record.slot_name, record.publications, record.two_phase = slot_name, tuple(publications), two_phase

    async def slot_names(self) -> frozenset[str]:
        """The slots to which stored positions belong."""
        positions = [self._record.position, *(record.position for record in self._record.tables.values())]
        return frozenset(position.slot_name for position in positions if position is not None)

    async def set_publications(self, publications: Sequence[str]) -> None:
        """Store the publications of the subscription."""
        self._record.publications = tuple(publications)

    async def refreshed(self) -> None:
        """Nothing to do: no refresh is ever pending."""

    async def set_position(self, position: Position) -> None:
        """Store the first position, or a position on another timeline."""
        self._record.position = position

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data."""
        self._move(lsn)

    def _move(self, lsn: Lsn) -> None:
        """Move the position forward (never back), and report it."""
        old = self._position
        moved = max(old.lsn, lsn)
        self._record.position = Position(old.slot_name, old.system_identifier, old.timeline, moved)
        self._on_durable(moved)

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        """Store ``subtwophasestate``."""
        self._record.two_phase = state

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """Store the descriptions and types of these tables, and create missing tables if the target does that."""
        for published in tables:
            self._published[published.name] = published
            self._relations.types.add(published.types)
            if self._target.create_tables:
                self._target.create_published(published)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables. Tables that were dropped are removed."""
        record = self._record
        record.tables = {table: found for table, found in record.tables.items() if self._target.find(table) is not None}
        return {table: found.entry for table, found in record.tables.items()}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables with their first state. See :meth:`subscriber.interfaces.StateStore.add_tables`."""
        failed = {table: no_table(table) for table in tables if self._target.find(table) is None}
        self._record.tables |= {table: TableRecord(entry) for table in tables if table not in failed}
        return failed

    async def remove_table(self, table: TableName) -> None:
        """Remove a table from the subscription. Its rows stay."""
        self._record.tables.pop(table, None)

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state of tables from SYNCDONE to READY."""
        for table, lsn in tables.items():
            record = self._record.tables.get(table)
            if record is not None and record.entry.state is TableState.SYNCDONE:
                record.entry = TableEntry(TableState.READY, lsn)

    def _applier(self) -> Applier:
        return Applier(self._target, self._relations.types, self.statistics, f"pg_{self._record.oid}")

    async def apply(self, batch: Batch) -> None:
        """Apply the transactions of a batch one by one. See :meth:`subscriber.interfaces.Stream.apply`."""
        for transaction in batch.transactions:
            changes, described = await self._relations.read(transaction, batch.gate, self.statistics)
            if transaction.end_lsn > self._position.lsn:
                self._applier().apply(transaction, changes)
            self._relations.learn(described)
            self._move(transaction.end_lsn)
            await transaction.discard()

    @property
    def prepares_in_target(self) -> bool:
        """Prepared transactions are stored."""
        return False

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Store the changes of a prepared transaction. See :meth:`subscriber.interfaces.TwoPhaseSink.prepare`."""
        transaction = prepared.transaction
        changes, described = await self._relations.read(transaction, gate, self.statistics)
        self._relations.learn(described)
        self._record.prepared.setdefault((transaction.xid, prepared.gid), changes)
        self._move(transaction.end_lsn)
        await transaction.discard()

    async def commit_prepared(self, message: CommitPrepared, gate: RelationGate = everything_applies) -> None:
        """Apply the changes of a prepared transaction. See :meth:`subscriber.interfaces.TwoPhaseSink.commit_prepared`.

        Raises:
            ApplyError, RelationError: the transaction stays prepared.
            NeverPrepared: there is no such prepared transaction.
        """
        prepared = self._record.prepared
        key = message.xid, message.gid
        if message.end_lsn > self._position.lsn:
            if key not in prepared:
                raise never_prepared(message)
            ended = Transaction(
                xid=message.xid,
                final_lsn=message.commit_lsn,
                end_lsn=message.end_lsn,
                commit_time=message.commit_time,
                prefixed=False,
                records=[],
            )
            self._applier().apply(ended, prepared[key])
        prepared.pop(key, None)
        self._move(message.end_lsn)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """Delete a prepared transaction."""
        self._record.prepared.pop((message.xid, message.gid), None)
        self._move(message.rollback_end_lsn)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Skip a transaction. See :meth:`subscriber.interfaces.Stream.skip`."""
        if isinstance(event, CommitPrepared):
            self._record.prepared.pop((event.xid, event.gid), None)
            self._record.skip_lsn = INVALID_LSN
            self._move(event.end_lsn)
            return
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        _, described = await self._relations.read(transaction, _nothing, self.statistics)
        self._relations.learn(described)
        if isinstance(event, PreparedTransaction):
            self._record.prepared.setdefault((transaction.xid, event.gid), [])
        self._record.skip_lsn = INVALID_LSN
        self._move(transaction.end_lsn)
        await transaction.discard()

    async def clear_skip(self) -> None:
        """Clear ``skip_lsn``."""
        self._record.skip_lsn = INVALID_LSN

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Store the report in the target."""
        self._record.activity = tuple(workers)
        self._record.last_error = last_error or self._record.last_error

    def open_table(self, table: TableName) -> MemoryTableSink:
        """The table's synchronization. See :meth:`subscriber.interfaces.OpenedSink.open_table`."""
        return MemoryTableSink(self._target, self._stored, table, self.statistics, self._published.get(table))

    async def close(self) -> None:
        """Release the subscription, so that another sink can open it. Idempotent."""
        if self._stored.writer is self:
            self._stored.writer = None


def _nothing(_relation: Relation, _final_lsn: Lsn) -> bool:
    return False
