"""The suite fails where a sink is wrong: faults of many kinds, built into the one in memory, and each is found."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from unittest import SkipTest

import pytest

from subscriber.errors import RelationError, SubscriberError, TargetUnavailable
from subscriber.interfaces import (
    Batch,
    ParallelTransaction,
    Position,
    PublishedTable,
    RelationGate,
    Sink,
    TableEntry,
    TableName,
    everything_applies,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation
from subscriber.sinks.memory import MemorySink
from subscriber.sinks.memory.memory_table_sink import MemoryTableSink
from subscriber.sinks.memory.opened_memory_sink import OpenedMemorySink
from subscriber.sinks.memory.target import SubscriptionRecord
from subscriber.testing.compliance import SCENARIOS
from subscriber.transaction.model import PreparedTransaction, Transaction
from tests.sinks.targets import MemoryAdapter


class _ForgetsPosition(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        before = self._position
        await super().apply(batch)
        self._record.position = before


class _AppliesAgain(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        before = self._position
        self._record.position = dataclasses.replace(before, lsn=Lsn(0))
        await super().apply(batch)


class _ReportsTooMuch(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        await super().apply(batch)
        self._on_durable(Lsn(batch.end_lsn + 0x1000))


class _ReportsNothing(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        self._on_durable = lambda _: None
        await super().apply(batch)


class _IgnoresGate(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        await super().apply(Batch(batch.transactions, lambda _relation, _lsn: True))


class _TwoWriters(OpenedMemorySink):
    async def set_position(self, position: Position) -> None:
        await super().set_position(position)
        self._stored.writer = None

    @property
    def _record(self) -> SubscriptionRecord:
        return self._stored


class _PreparesAtOnce(OpenedMemorySink):
    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        await super().apply(Batch((prepared.transaction,), gate))
        self._record.prepared[prepared.transaction.xid, prepared.gid] = []


class _ForgetsPrepared(OpenedMemorySink):
    async def close(self) -> None:
        self._stored.prepared.clear()
        await super().close()


class _CommitsTwice(OpenedMemorySink):
    async def commit_prepared(self, message: CommitPrepared, gate: RelationGate = everything_applies) -> None:
        kept = dict(self._record.prepared)
        await super().commit_prepared(message, gate)
        self._record.prepared.update(kept)
        self._record.position = dataclasses.replace(self._position, lsn=Lsn(message.end_lsn - 1))


class _KeepsUnfinishedCopies(OpenedMemorySink):
    def open_table(self, table: TableName) -> MemoryTableSink:
        found = super().open_table(table)
        self._record.tables[table].copied.clear()
        return found


class _StayingTable(MemoryTableSink):
    def _move(self, position: Position, transaction: Transaction) -> None:
        if transaction.records:
            super()._move(position, transaction)


class _StaysWhereNothingIsTheTables(OpenedMemorySink):
    def open_table(self, table: TableName) -> MemoryTableSink:
        return _StayingTable(self._target, self._record, table, self.statistics, None)


class _AddsAnyTable(OpenedMemorySink):
    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        for table in tables:
            if self._target.find(table) is None:
                self._target.create_table(table, [])
        return await super().add_tables(tables, entry)


class _GoesBack(OpenedMemorySink):
    async def advance(self, lsn: Lsn) -> None:
        self._record.position = dataclasses.replace(self._position, lsn=lsn)


class _OnePosition(OpenedMemorySink):
    async def set_position(self, position: Position) -> None:
        await super().set_position(dataclasses.replace(position, timeline=1))


class _CreatesNothing(OpenedMemorySink):
    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        self._target.create_tables = False
        await super().describe_tables(tables)


class _ForgetsNotNull(OpenedMemorySink):
    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        await super().describe_tables([dataclasses.replace(table, not_null=frozenset()) for table in tables])


class _AddsWhatIsToBeIgnored(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        self._target.schema_change = "add"
        await super().apply(batch)


class _NeverAsks(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        if callable(self._target.schema_change):
            self._target.schema_change = "ignore"
        await super().apply(batch)


class _DoesNothingInParallel(OpenedMemorySink):
    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool | None], *, streamed: bool = True) -> ParallelTransaction:
        raise TargetUnavailable("not implemented")

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        return others


_FAULTY: list[type[OpenedMemorySink]] = [
    _ForgetsPosition,
    _AppliesAgain,
    _ReportsTooMuch,
    _ReportsNothing,
    _IgnoresGate,
    _TwoWriters,
    _PreparesAtOnce,
    _ForgetsPrepared,
    _CommitsTwice,
    _KeepsUnfinishedCopies,
    _StaysWhereNothingIsTheTables,
    _AddsAnyTable,
    _GoesBack,
    _OnePosition,
    _CreatesNothing,
    _ForgetsNotNull,
    _AddsWhatIsToBeIgnored,
    _NeverAsks,
    _DoesNothingInParallel,
]


class _Adapter(MemoryAdapter):
    def __init__(self, kind: type[OpenedMemorySink]) -> None:
        super().__init__()
        self._kind = kind

    def new_sink(self) -> Sink:
        return MemorySink(self._target, self._kind)


async def _failing(kind: type[OpenedMemorySink]) -> str | None:
    """Name of the first scenario that fails."""
    for scenario in SCENARIOS:
        target = _Adapter(kind)
        try:
            await scenario.run(target)
        except SkipTest:
            continue
        except (AssertionError, SubscriberError, KeyError):
            return scenario.name
    return None


@pytest.mark.parametrize("kind", _FAULTY, ids=lambda kind: kind.__name__.strip("_"))
async def test_a_fault_is_found(kind: type[OpenedMemorySink]) -> None:
    assert await _failing(kind) is not None


async def test_nothing_is_found_where_there_is_no_fault() -> None:
    assert await _failing(OpenedMemorySink) is None


class _CommitsOutOfOrder(OpenedMemorySink):
    async def apply(self, batch: Batch) -> None:
        before, half = self._position, len(batch.transactions) // 2
        if half:
            await super().apply(Batch(batch.transactions[half:], batch.gate))
            # a reader may come
            await asyncio.sleep(0)
            self._record.position = before
        await super().apply(Batch(batch.transactions[:half] or batch.transactions, batch.gate))


class _WorkersAdapter(_Adapter):
    def new_sink(self) -> Sink:
        return self.new_sink_with_workers(1)

    def new_sink_with_workers(self, workers: int) -> Sink:
        sink = MemorySink(self._target, self._kind)
        sink.has_apply_workers = True  # type: ignore[attr-defined]
        return sink


async def test_a_commit_out_of_order_is_found() -> None:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == "parallel.workers"]
    await scenario.run(_WorkersAdapter(OpenedMemorySink))
    with pytest.raises(AssertionError, match="rows that were visible"):
        await scenario.run(_WorkersAdapter(_CommitsOutOfOrder))
