"""A target in memory whose server can crash, and whose sink can fail at any step as a real one does. It keeps the sink's contract.

The target's *server* outlives the processes that use it. What was committed is in its ``visible`` state; what is on disk too is in
``flushed``, and a crash of the server goes back to that. A flush also covers everything committed before it, as in
a write-ahead log. A table holds the values of its rows in the order in which they came, so that a row that is missing, there twice or
in a wrong place is seen.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.errors import RelationError, SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    CopyFormat,
    Finding,
    ParallelTransaction,
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
from subscriber.transaction.changes import ChangeReader, InsertChange
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["CrashableParallel", "CrashableSink", "CrashableTableSink", "State", "TargetServer", "never_fails"]

Step = Callable[[str], Awaitable[None]]
"""Awaited with the name of a call before and after it takes effect: lets others go on, or raises what a lost connection would."""

COLUMN: Final = "id"


async def never_fails(_: str) -> None:
    """The step of a target that is always there."""


@dataclass
class State:
    """What the target holds."""

    position: Position | None = None
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED
    entries: dict[TableName, TableEntry] = field(default_factory=dict)
    table_positions: dict[TableName, Position] = field(default_factory=dict)
    rows: dict[TableName, list[str]] = field(default_factory=dict)
    prepared: dict[str, list[tuple[TableName, str]]] = field(default_factory=dict)
    skip_lsn: Lsn = INVALID_LSN


class TargetServer:
    """See the module.

    Attributes:
        visible: committed.
        flushed: on disk.
        writer: the open sink, or None.
    """

    def __init__(self, state: State) -> None:
        self.visible = state
        self.flushed = copy.deepcopy(state)
        self.writer: CrashableSink | None = None

    def flush(self) -> None:
        """Everything committed gets on disk."""
        self.flushed = copy.deepcopy(self.visible)

    def sever(self) -> None:
        """All sessions end, as when their process is killed."""
        self.visible = copy.deepcopy(self.visible)
        self.writer = None

    def crash(self) -> None:
        """The server loses what was not on disk, and all its sessions."""
        self.visible = copy.deepcopy(self.flushed)
        self.writer = None


class CrashableSink:
    """A :class:`subscriber.interfaces.Sink`, and what it opens.

    Args:
        server: the target.
        step: see :data:`Step`.
        lazy: commits of batches are not on disk when they return; :meth:`settle` reports them.
        keeps: what a prepared transaction changes is kept until its COMMIT PREPARED, and may be refused there.

    Attributes:
        parallel: the parallel transactions opened.
        held_up_by: those that hold up the transaction in question; roll_back() of theirs removes them.
    """

    supports_two_phase = True

    def __init__(
        self,
        server: TargetServer,
        *,
        step: Step = never_fails,
        lazy: bool = False,
        keeps: bool = False,
    ) -> None:
        self.server = server
        self.batches: list[Batch] = []
        self.advanced: list[Lsn] = []
        self.reports: list[tuple[list[WorkerActivity], str | None]] = []
        self._step = step
        self._lazy = lazy
        self.parallel: list[CrashableParallel] = []
        self.held_up_by: list[CrashableParallel] = []
        self.prepares_in_target = not keeps
        self._statistics = ApplyStatistics()
        self._relations: dict[int, Relation] = {}
        self._on_durable: Callable[[Lsn], None] | None = None
        self.state: SubscriptionState

    @property
    def statistics(self) -> ApplyStatistics:
        return self._statistics

    @property
    def _state(self) -> State:
        if self.server.writer is not self:
            raise TargetUnavailable("connection to the target was lost")
        return self.server.visible

    @property
    def _position(self) -> Position:
        found = self._state.position
        if found is None:
            raise TargetError("no position")
        return found

    def settle(self) -> None:
        """Everything committed gets on disk, and is reported."""
        position = self._position
        self.server.flush()
        if self._on_durable is not None:
            self._on_durable(position.lsn)

    async def exists(self, name: str) -> bool:
        await self._step("exists")
        return self.server.visible.position is not None

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> CrashableSink:
        await self._step("open")
        if self.server.writer not in {None, self}:
            raise SubscriptionInUse("the subscription is in use")
        self.server.writer = self
        self._on_durable = on_durable
        self._relations.clear()
        self.server.flush()  # what is returned will be acknowledged
        state = self.server.visible
        self.state = SubscriptionState(
            oid=1,
            name=name,
            target_identifier="target",
            slot_name=None if state.position is None else state.position.slot_name,
            publications=("pub",),
            two_phase=state.two_phase,
            position=state.position,
            skip_lsn=state.skip_lsn,
        )
        return self

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        self._state.two_phase = two_phase

    async def slot_names(self) -> frozenset[str]:
        return frozenset(position.slot_name for position in self._state.table_positions.values()) | {self._position.slot_name}

    async def set_publications(self, publications: Sequence[str]) -> None:
        await self._step("set_publications")

    async def refreshed(self) -> None:
        await self._step("refreshed")

    async def set_position(self, position: Position) -> None:
        self._state.position = position
        self.server.flush()

    async def advance(self, lsn: Lsn) -> None:
        await self._step("advance")
        self._move(lsn)
        self.advanced.append(lsn)
        self.settle()
        await self._step("advance")

    def _move(self, lsn: Lsn) -> None:
        old = self._position
        self._state.position = Position(old.slot_name, old.system_identifier, old.timeline, max(old.lsn, lsn))

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        self._state.two_phase = state
        self.server.flush()

    async def tables(self) -> Mapping[TableName, TableEntry]:
        await self._step("tables")
        return dict(self._state.entries)

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        self._state.entries |= dict.fromkeys(tables, entry)
        self.server.flush()
        return {}

    async def remove_table(self, table: TableName) -> None:
        del self._state.entries[table]
        self.server.flush()

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        await self._step("set_ready")
        for table, lsn in tables.items():
            if self._state.entries[table].state is TableState.SYNCDONE:
                self._state.entries[table] = TableEntry(TableState.READY, lsn)
        self.server.flush()
        await self._step("set_ready")

    async def apply(self, batch: Batch) -> None:
        await self._step("apply")
        position = self._position.lsn
        relations = dict(self._relations)
        changed: list[tuple[TableName, str]] = []
        for transaction in batch.transactions:
            if transaction.end_lsn > position:
                # asked step by step: the gate must not change in between
                changed += await _changes(transaction, batch.gate, relations)
                await self._step("apply")
        self._commit(changed)
        self._relations = relations
        self._move(batch.end_lsn)
        self.batches.append(batch)
        if not self._lazy:
            self.settle()
        await self._step("apply")

    def _commit(self, changed: list[tuple[TableName, str]]) -> None:
        for table, value in changed:
            self._state.rows.setdefault(table, []).append(value)

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        await self._step("prepare")
        changed = await _changes(prepared.transaction, gate, self._relations)
        self._state.prepared[prepared.gid] = changed
        self._move(prepared.transaction.end_lsn)
        self.settle()

    async def commit_prepared(self, message: CommitPrepared, gate: RelationGate = everything_applies) -> None:
        await self._step("commit_prepared")
        self._commit(self._state.prepared.pop(message.gid, []))
        self._move(message.end_lsn)
        self.settle()

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        await self._step("rollback_prepared")
        self._state.prepared.pop(message.gid, None)
        self._move(message.rollback_end_lsn)
        self.settle()

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool | None], *, streamed: bool = True) -> CrashableParallel:
        await self._step("open_parallel")
        found = CrashableParallel(self, xid, gate, prefixed=streamed)
        found._relations |= {} if streamed else self._relations
        self.parallel.append(found)
        return found

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        await self._step("holding_up")
        return [other for other in others if other in self.held_up_by]

    async def commit_parallel(self, transaction: Transaction, records: list[bytes]) -> None:
        """What a parallel transaction did becomes visible, with its position."""
        relations = {} if transaction.prefixed else dict(self._relations)
        own = Transaction(
            xid=transaction.xid,
            final_lsn=transaction.final_lsn,
            end_lsn=transaction.end_lsn,
            commit_time=0,
            prefixed=transaction.prefixed,
            records=records,
        )
        self._commit(await _changes(own, lambda relation, lsn: True, relations))
        self._relations |= relations
        self._move(transaction.end_lsn)
        self._statistics.parallel_transactions += 1
        if not self._lazy:
            self.settle()

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        await self._step("skip")
        self._state.skip_lsn = INVALID_LSN
        if isinstance(event, CommitPrepared):
            del self._state.prepared[event.gid]
            self._move(event.end_lsn)
            self.settle()
            return
        if isinstance(event, PreparedTransaction):
            self._state.prepared[event.gid] = []
            event = event.transaction
        self._move(event.end_lsn)
        self.settle()

    async def clear_skip(self) -> None:
        self._state.skip_lsn = INVALID_LSN
        self.server.flush()

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        self.reports.append((list(workers), last_error))

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        return []

    def open_table(self, table: TableName) -> CrashableTableSink:
        return CrashableTableSink(self.server, table, self._step)

    async def close(self) -> None:
        if self.server.writer is self:
            self.settle()
            self.server.writer = None


class CrashableParallel:
    """A :class:`subscriber.interfaces.ParallelTransaction`. Its steps are called "parallel ...".

    Attributes:
        records: what it was given and what was not cut off.
        calls: how many records each call brought, or a cut left (negative).
        ended: ``committed`` or ``rolled back``; None while it is open.
        interrupted: it was rolled back in the middle of its commit.
        cut_off: it was cancelled in the middle of its rollback.
    """

    def __init__(self, sink: CrashableSink, xid: int, gate: Callable[[Relation], bool | None], *, prefixed: bool) -> None:
        self.sink = sink
        self.xid = xid
        self.prefixed = prefixed
        self.records: list[bytes] = []
        self.calls: list[int] = []
        self.ended: str | None = None
        self.interrupted = self.cut_off = False
        self._committing = False
        self._gate = gate
        self._relations: dict[int, Relation] = {}

    async def apply(self, records: Sequence[bytes], *, more: bool = False) -> None:
        assert self.ended is None
        await self.sink._step("parallel apply")
        self.records += records
        self.calls.append(len(records))
        reader = ChangeReader(self._relations, prefixed=self.prefixed)
        for record in records:
            change = reader.read(record)
            if isinstance(change, InsertChange):
                assert self._gate(change.relation)
        self._relations.update(reader.described)

    async def cut(self, count: int) -> None:
        assert self.ended is None
        assert count < len(self.records)
        await self.sink._step("parallel cut")
        del self.records[count:]
        self.calls.append(-count)

    async def commit(self, transaction: Transaction) -> bool:
        self._committing = True
        await self.sink._step("parallel commit")
        assert self.ended is None
        assert len(self.records) == transaction.count
        await self.sink.commit_parallel(transaction, self.records)
        await transaction.discard()
        self.ended = "committed"
        self._committing = False
        return True

    async def prepare(self, prepared: PreparedTransaction) -> bool:
        raise AssertionError("not prepared here")

    async def roll_back(self) -> None:
        self.interrupted |= self._committing
        try:
            await self.sink._step("parallel roll back")
        except asyncio.CancelledError:
            self.cut_off = True
            raise
        if self.ended is None:
            self.ended = "rolled back"
        if self in self.sink.held_up_by:
            self.sink.held_up_by.remove(self)


class CrashableTableSink:
    """A :class:`subscriber.interfaces.TableSink`."""

    def __init__(self, server: TargetServer, table: TableName, step: Step) -> None:
        self._server = server
        self._table = table
        self._step = step
        self._seen = server.visible
        self._copied: list[str] = []
        self._relations: dict[int, Relation] = {}

    @property
    def relation_id(self) -> int:
        return 1000 + int(self._table.name.removeprefix("t"))

    @property
    def _state(self) -> State:
        if self._seen is not self._server.visible:
            raise TargetUnavailable("connection to the target was lost")
        return self._seen

    async def begin(self) -> TableEntry:
        await self._step("begin")
        self._seen = self._server.visible
        self._relations.clear()
        entry = self._state.entries[self._table]
        if entry.state is TableState.DATASYNC:
            entry = self._set(TableEntry(TableState.INIT))
        return entry

    def _set(self, entry: TableEntry) -> TableEntry:
        self._state.entries[self._table] = entry
        self._server.flush()
        return entry

    async def start_copy(self) -> None:
        await self._step("start_copy")
        self._copied = []
        self._set(TableEntry(TableState.DATASYNC))

    async def describe(self, table: PublishedTable) -> None:
        await self._step("describe")

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        async for line in data:
            self._copied.append(line.decode())

    async def finish_copy(self, position: Position) -> None:
        await self._step("finish_copy")
        self._state.rows[self._table] = list(self._copied)
        self._state.table_positions[self._table] = position
        self._set(TableEntry(TableState.FINISHEDCOPY))
        await self._step("finish_copy")

    async def position(self) -> Position:
        await self._step("position")
        return self._state.table_positions[self._table]

    async def apply(self, batch: Batch) -> None:
        await self._step("table apply")
        stored = self._state.table_positions[self._table]
        relations = dict(self._relations)
        changed: list[tuple[TableName, str]] = []
        for transaction in batch.transactions:
            if transaction.end_lsn > stored.lsn:
                changed += await _changes(transaction, batch.gate, relations)
        await self._step("table apply")
        self._state.rows[self._table] += [value for _, value in changed]
        lsn = max(stored.lsn, batch.end_lsn)
        self._state.table_positions[self._table] = Position(stored.slot_name, stored.system_identifier, stored.timeline, lsn)
        self._relations = relations
        self._server.flush()
        await self._step("table apply")

    async def finish_sync(self, lsn: Lsn) -> None:
        await self._step("finish_sync")
        assert self._state.entries[self._table].state is TableState.FINISHEDCOPY
        del self._state.table_positions[self._table]
        self._set(TableEntry(TableState.SYNCDONE, lsn))
        await self._step("finish_sync")

    async def close(self) -> None:
        return


async def _changes(transaction: Transaction, gate: RelationGate, relations: dict[int, Relation]) -> list[tuple[TableName, str]]:
    """The rows that the gate lets through."""
    reader = ChangeReader(relations, prefixed=transaction.prefixed)
    found: list[tuple[TableName, str]] = []
    async for chunk in transaction.chunks():
        for record in chunk:
            change = reader.read(record)
            if isinstance(change, InsertChange) and gate(change.relation, transaction.final_lsn):
                found.append((TableName(change.relation.namespace, change.relation.name), str(change.new[COLUMN])))
    relations.update(reader.described)
    return found
