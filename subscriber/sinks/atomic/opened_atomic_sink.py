"""An opened sink: the stream and the state store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    Position,
    PublishedTable,
    Row,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
    TwoPhaseState,
    WorkerActivity,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation
from subscriber.sinks.atomic.atomic_table_sink import AtomicTableSink
from subscriber.sinks.atomic.row_changes import DeleteRow, InsertRow, read_batch
from subscriber.sinks.atomic.stored import Stored, SubscriptionRecord, TableRecord
from subscriber.sinks.request_files import RequestFiles
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["OpenedAtomicSink"]


class OpenedAtomicSink:
    """A :class:`subscriber.interfaces.OpenedSink` and :class:`subscriber.interfaces.RepairingSink`.

    Attributes:
        requests: of other processes; None: there can be none.
    """

    def __init__(
        self, stored: Stored, statistics: ApplyStatistics, on_durable: Callable[[Lsn], None], requests: RequestFiles | None
    ) -> None:
        self.requests = requests
        self._stored = stored
        self._on_durable = on_durable
        self._relations: dict[int, Relation] = {}
        self.statistics = statistics
        self.state: SubscriptionState

    async def open(self, name: str, where: str) -> None:
        """Take the lock, and store the subscription if it is new, with the row filters of this run."""
        await self._stored.acquire(self)
        try:
            if self.requests is not None:
                self.requests.serve()
            async with self._stored.changing(self) as (record, _):
                record.where = where
                self.state = SubscriptionState(
                    oid=record.oid,
                    name=name,
                    target_identifier=record.identifier,
                    slot_name=record.slot_name,
                    publications=record.publications,
                    two_phase=record.two_phase,
                    position=record.position,
                )
        except BaseException:
            await self.close()
            raise

    def open_table(self, table: TableName) -> AtomicTableSink:
        return AtomicTableSink(self._stored, table)

    async def close(self) -> None:
        if self.requests is not None:
            self.requests.end()
        await self._stored.release(self)

    # --- the stream

    async def apply(self, batch: Batch) -> None:
        relations, counted = dict(self._relations), ApplyStatistics()
        async with self._stored.changing(self) as (record, changes):
            changes.extend(await read_batch(batch, relations, self._position(record).lsn, counted))
            position = self._move(record, batch.end_lsn)
        self._relations = relations
        self.statistics.add(counted)
        self._on_durable(position)
        for transaction in batch.transactions:
            await transaction.discard()

    async def advance(self, lsn: Lsn) -> None:
        async with self._stored.changing(self) as (record, _):
            position = self._move(record, lsn)
        self._on_durable(position)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        assert isinstance(event, Transaction), "the others come only to a TwoPhaseSink"
        await read_batch(Batch((event,), lambda *_: False), self._relations, event.end_lsn, ApplyStatistics())
        await self.advance(event.end_lsn)
        await event.discard()

    async def repair(self, table: PublishedTable, key: Sequence[str], keys: Sequence[Row], rows: Sequence[Row]) -> None:
        missing = self.statistics.confl_delete_missing
        async with self._stored.changing(self) as (_, changes):
            changes += [DeleteRow(table.name, dict(zip(key, values, strict=True))) for values in keys]
            changes += [InsertRow(table.name, dict(zip(table.columns, row, strict=True))) for row in rows]
        # a row that the target lacks is no conflict here
        self.statistics.confl_delete_missing = missing

    def _move(self, record: SubscriptionRecord, lsn: Lsn) -> Lsn:
        position = self._position(record)
        record.position = replace(position, lsn=max(position.lsn, lsn))
        return record.position.lsn

    def _position(self, record: SubscriptionRecord) -> Position:
        if record.position is None:
            raise TargetError(
                f'subscription "{self.state.name}" has no position', hint="was the subscription dropped? start it with a new name"
            )
        return record.position

    # --- the state store

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        await self._change(slot_name=slot_name, publications=tuple(publications), two_phase=two_phase)

    async def set_publications(self, publications: Sequence[str]) -> None:
        await self._change(publications=tuple(publications))

    async def set_position(self, position: Position) -> None:
        await self._change(position=position)

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        await self._change(two_phase=state)

    async def _change(self, **values: object) -> None:
        async with self._stored.changing(self) as (record, _):
            for name, value in values.items():
                setattr(record, name, value)

    async def refreshed(self) -> None:
        """Nothing to do: no refresh is ever pending."""

    async def clear_skip(self) -> None:
        """Nothing to do: ``skip_lsn`` is never set."""

    async def slot_names(self) -> frozenset[str]:
        record = await self._stored.record(self)
        positions = [record.position, *(table.position for table in record.tables.values())]
        return frozenset(position.slot_name for position in positions if position is not None)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        return {name: table.entry for name, table in (await self._stored.record(self)).tables.items()}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        async with self._stored.changing(self) as (record, _):
            for name in tables:
                record.last_number += 1
                record.tables[name] = TableRecord(record.last_number, entry)
        return {}

    async def remove_table(self, table: TableName) -> None:
        async with self._stored.changing(self) as (record, _):
            record.tables.pop(table, None)

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        async with self._stored.changing(self) as (record, _):
            for name, lsn in tables.items():
                if name in record.tables and record.tables[name].entry.state is TableState.SYNCDONE:
                    record.tables[name].entry = TableEntry(TableState.READY, lsn)

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Nothing to do: the target shows no activity."""
