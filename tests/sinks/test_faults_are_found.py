"""The suite fails where a sink is wrong: faults of many kinds, built into the one in memory, and each is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from unittest import SkipTest

import pytest

from subscriber.abc import (
    Batch,
    ParallelTransaction,
    Position,
    PublishedTable,
    RelationGate,
    Sink,
    SubscriptionState,
    TableEntry,
    TableName,
)
from subscriber.errors import RelationError, SubscriberError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation
from subscriber.sinks.memory import MemorySink
from subscriber.sinks.memory.table_sync import MemoryTableSink
from subscriber.testing.compliance import SCENARIOS
from subscriber.transaction.model import PreparedTransaction, Transaction
from tests.sinks.targets import MemoryAdapter


class _ForgetsPosition(MemorySink):
    async def apply(self, batch: Batch) -> None:
        before = self._position
        await super().apply(batch)
        self._open.position = before


class _AppliesAgain(MemorySink):
    async def apply(self, batch: Batch) -> None:
        before = self._position
        self._open.position = dataclasses.replace(before, lsn=Lsn(0))
        await super().apply(batch)


class _ReportsTooMuch(MemorySink):
    async def apply(self, batch: Batch) -> None:
        await super().apply(batch)
        assert self._on_durable is not None
        self._on_durable(Lsn(batch.end_lsn + 0x1000))


class _ReportsNothing(MemorySink):
    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        return await super().open(name, lambda _: None)


class _IgnoresGate(MemorySink):
    async def apply(self, batch: Batch) -> None:
        await super().apply(Batch(batch.transactions, lambda _relation, _lsn: True))


class _TwoWriters(MemorySink):
    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        if name in self._target.subscriptions:
            self._target.subscriptions[name].writer = None
        return await super().open(name, on_durable)


class _PreparesAtOnce(MemorySink):
    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        await super().apply(Batch((prepared.transaction,), gate))
        self._open.prepared[prepared.transaction.xid, prepared.gid] = []


class _ForgetsPrepared(MemorySink):
    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        found = await super().open(name, on_durable)
        self._open.prepared.clear()
        return found


class _CommitsTwice(MemorySink):
    async def commit_prepared(self, message: CommitPrepared) -> None:
        kept = dict(self._open.prepared)
        await super().commit_prepared(message)
        self._open.prepared.update(kept)
        self._open.position = dataclasses.replace(self._position, lsn=Lsn(message.end_lsn - 1))


class _KeepsUnfinishedCopies(MemorySink):
    def open_table(self, table: TableName) -> MemoryTableSink:
        found = super().open_table(table)
        assert self._record is not None
        self._record.tables[table].copied.clear()
        return found


class _StayingTable(MemoryTableSink):
    def _move(self, position: Position, transaction: Transaction) -> None:
        if transaction.records:
            super()._move(position, transaction)


class _StaysWhereNothingIsTheTables(MemorySink):
    def open_table(self, table: TableName) -> MemoryTableSink:
        assert self._record is not None
        return _StayingTable(self._target, self._record, table, self._statistics, None)


class _AddsAnyTable(MemorySink):
    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        for table in tables:
            if self._target.find(table) is None:
                self._target.create_table(table, [])
        return await super().add_tables(tables, entry)


class _GoesBack(MemorySink):
    async def advance(self, lsn: Lsn) -> None:
        self._open.position = dataclasses.replace(self._position, lsn=lsn)


class _OnePosition(MemorySink):
    async def set_position(self, position: Position) -> None:
        await super().set_position(dataclasses.replace(position, timeline=1))


class _CreatesNothing(MemorySink):
    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        self._target.create_tables = False
        await super().describe_tables(tables)


class _ForgetsNotNull(MemorySink):
    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        await super().describe_tables([dataclasses.replace(table, not_null=frozenset()) for table in tables])


class _AddsWhatIsToBeIgnored(MemorySink):
    async def apply(self, batch: Batch) -> None:
        self._target.schema_change = "add"
        await super().apply(batch)


class _NeverAsks(MemorySink):
    async def apply(self, batch: Batch) -> None:
        if callable(self._target.schema_change):
            self._target.schema_change = "ignore"
        await super().apply(batch)


class _NeverOverwrites(MemorySink):
    async def apply(self, batch: Batch) -> None:
        self._target.insert_conflict = "error"
        await super().apply(batch)


class _AlwaysOverwrites(MemorySink):
    async def apply(self, batch: Batch) -> None:
        self._target.insert_conflict = "upsert"
        await super().apply(batch)


class _OverwritesForGood(MemorySink):
    def open_table(self, table: TableName) -> MemoryTableSink:
        found = super().open_table(table)
        assert self._record is not None
        self._record.tables[table].overwritten.clear()
        return found


class _DoesNothingInParallel(MemorySink):
    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool]) -> ParallelTransaction:
        raise TargetUnavailable("not implemented")

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        return others


_FAULTY: list[type[MemorySink]] = [
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
    _NeverOverwrites,
    _AlwaysOverwrites,
    _OverwritesForGood,
    _DoesNothingInParallel,
]


class _Adapter(MemoryAdapter):
    def __init__(self, kind: type[MemorySink]) -> None:
        super().__init__()
        self._kind = kind

    def new_sink(self) -> Sink:
        return self._kind(self._target)


async def _failing(kind: type[MemorySink]) -> str | None:
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
async def test_a_fault_is_found(kind: type[MemorySink]) -> None:
    assert await _failing(kind) is not None


async def test_nothing_is_found_where_there_is_no_fault() -> None:
    assert await _failing(MemorySink) is None
