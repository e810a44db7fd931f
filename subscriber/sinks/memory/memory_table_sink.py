"""The synchronization of one table into memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from subscriber.errors import RelationError, SubscriptionInUse, TargetError
from subscriber.interfaces import ApplyStatistics, Batch, CopyFormat, Position, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.memory.accepted_changes import Relations
from subscriber.sinks.memory.applier import Applier, read_value
from subscriber.sinks.memory.table import Undo, Values
from subscriber.sinks.memory.target import MemoryTarget, SubscriptionRecord, TableRecord
from subscriber.transaction.model import Transaction
from subscriber.types import codec, copy_decoder

__all__ = ["MemoryTableSink"]


class MemoryTableSink:
    """A :class:`subscriber.interfaces.TableSink`.

    Args:
        target: the target that has the table.
        subscription: the subscription that has the table.
        table: name of the table.
        statistics: counters of the sink.
        published: the publisher's description of the table, if it is known.
    """

    def __init__(
        self,
        target: MemoryTarget,
        subscription: SubscriptionRecord,
        table: TableName,
        statistics: ApplyStatistics,
        published: PublishedTable | None,
    ) -> None:
        self._target = target
        self._subscription = subscription
        self._name = table
        self._statistics = statistics
        self._published = published
        self._relations = Relations()
        self._record: TableRecord | None = None

    @property
    def relation_id(self) -> int:
        return self._target.table(self._name).oid

    @property
    def _state(self) -> TableRecord:
        self._target.require(None if self._record is None else self._record.holder, self, f'the synchronization of table "{self._name}"')
        assert self._record is not None
        return self._record

    async def begin(self) -> TableEntry:
        record = self._subscription.tables.get(self._name)
        table = self._target.table(self._name)
        if record is None:
            raise RelationError(f'table "{self._name}" is not part of the subscription', hint="start the run again")
        if record.holder not in {None, self}:
            raise SubscriptionInUse(f'synchronization of table "{self._name}" is active', hint="one process at a time synchronizes it")
        record.holder = self
        self._record = record
        self._relations = Relations()
        if record.entry.state is TableState.DATASYNC:
            there = set(table.numbers())
            for number in record.copied & there:
                table.delete(number)
            record.copied.clear()
            record.entry = TableEntry(TableState.INIT)
        return record.entry

    async def start_copy(self) -> None:
        if self._state.entry.state not in {TableState.INIT, TableState.DATASYNC}:
            raise TargetError(f'table "{self._name}" is already copied', hint="start the run again")
        self._state.entry = TableEntry(TableState.DATASYNC)

    async def describe(self, table: PublishedTable) -> None:
        self._published = table

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        table = self._target.table(self._name)
        self._target.follow(table, columns)
        published = self._published
        types = {} if published is None else dict(zip(published.columns, published.column_types, strict=True))
        if published is not None:
            self._relations.types.add(published.types)
        codecs = [codec(self._relations.types.resolve(types.get(column, 0))) for column in columns]
        binary = copy_format is CopyFormat.BINARY
        decoder = copy_decoder(len(columns), binary=binary)
        state, copied = self._state, set[int]()
        undone: list[Undo] = []
        done = False
        try:
            async for chunk in data:
                for fields in decoder.feed(chunk):
                    values: Values = {
                        column: None if field is None else read_value(reading, column, field, binary=binary)
                        for column, reading, field in zip(columns, codecs, fields, strict=True)
                        if column in table.columns
                    }
                    number, undo = table.insert(values)
                    copied.add(number)
                    undone.append(undo)
            decoder.finish()
            state.copied |= copied
            done = True
        except TargetError as error:
            error.add_note(f'while copying table "{self._name}"')
            raise
        finally:
            if not done:
                for undo in reversed(undone):
                    undo()

    async def finish_copy(self, position: Position) -> None:
        self._require(TableState.DATASYNC)
        self._state.copied.clear()
        self._state.position = position
        self._state.entry = TableEntry(TableState.FINISHEDCOPY)

    async def position(self) -> Position:
        found = self._state.position
        if found is None:
            raise TargetError(f'table "{self._name}" has no position of its own', hint="start the run again")
        return found

    async def apply(self, batch: Batch) -> None:
        statistics = self._statistics
        for transaction in batch.transactions:
            changes, described = await self._relations.read(transaction, batch.gate, ApplyStatistics())
            position = await self.position()
            if transaction.end_lsn > position.lsn:
                Applier(self._target, self._relations.types, statistics, f"pg_{self._subscription.oid}_{self.relation_id}").apply(
                    transaction, changes
                )
                self._move(position, transaction)
            self._relations.learn(described)
            await transaction.discard()

    def _move(self, position: Position, transaction: Transaction) -> None:
        self._state.position = Position(position.slot_name, position.system_identifier, position.timeline, transaction.end_lsn)

    async def finish_sync(self, lsn: Lsn) -> None:
        self._require(TableState.FINISHEDCOPY)
        self._state.position = None
        self._state.entry = TableEntry(TableState.SYNCDONE, lsn)

    def _require(self, state: TableState) -> None:
        if self._state.entry.state is not state:
            raise TargetError(f'table "{self._name}" is not in state {state.name}', hint="start the run again")

    async def close(self) -> None:
        """Release the table, so that another synchronization can begin. Idempotent."""
        if self._record is not None and self._record.holder is self:
            self._record.holder = None
        self._record = None
