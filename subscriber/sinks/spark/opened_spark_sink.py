"""An opened lake: the stream, the state store, and the synchronization of tables."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from subscriber.errors import MissingColumns, RelationError, TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    ExportSnapshot,
    Position,
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
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.sinks.request_files import RequestFiles
from subscriber.sinks.spark.catalog.definition import read_definition, write_definition
from subscriber.sinks.spark.catalog.history import write_histories
from subscriber.sinks.spark.catalog.lake import WRITER_LOCK, Lake, LakeState, with_table, with_tables, without_table
from subscriber.sinks.spark.catalog.requests import lake_requests, write_boundary
from subscriber.sinks.spark.catalog.status_files import StatusFile
from subscriber.sinks.spark.copy.spark_table_sink import SparkTableSink
from subscriber.sinks.spark.copy.table_group import SparkTableGroup
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing_stream import LandingStream
from subscriber.sinks.spark.pipeline.program.applier_thread import ApplierThread
from subscriber.threads import run_in_thread, to_its_end
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["LakeSessions", "OpenedSparkSink"]


class LakeSessions:
    """What a sink and everything that it opens share.

    Attributes:
        lake: the lake as it was opened last. Synchronizations that have begun before continue with it.
        catalog: held while the lake's catalog is changed.
        statistics: counts of what was landed since the sink was made.
        applier: the applier of this process, if the URL asks for one.
    """

    def __init__(self, location: Location) -> None:
        self.location = location
        self.catalog = asyncio.Lock()
        self.statistics = ApplyStatistics()
        self.applier = ApplierThread(location)
        self.lake: Lake

    @cached_property
    def storage(self) -> Storage:
        """The storage, which is reached when it is used first."""
        return Storage.open(self.location)

    @cached_property
    def lock(self) -> FileLock:
        """The writer's lock."""
        refusal = f"the lake in {self.location} is in use by another process"
        return FileLock(self.storage.local(WRITER_LOCK), refusal, "stop that subscriber first")


class OpenedSparkSink:
    """A :class:`subscriber.interfaces.OpenedSink`, which says what methods without a description do. The lake is locked."""

    prepares_in_target = False

    def __init__(
        self, sessions: LakeSessions, lake: Lake, stream: LandingStream, state: SubscriptionState, counted: dict[str, int]
    ) -> None:
        self.state = state
        self.statistics = sessions.statistics
        self.lake = lake
        self._sessions = sessions
        self._stream = stream
        self._status = StatusFile(lake.storage, counted)
        self._has_histories = False
        self._closed = False
        # an object store has no locks, and so no requests
        self.requests: RequestFiles | None = lake_requests(lake.storage) if lake.storage.root is not None else None

    async def _define(self, **changes: Any) -> None:
        """Change what ``subscriber create`` defined. Does nothing if the command line defines the subscription."""
        storage = self.lake.storage

        def store() -> None:
            definition = read_definition(storage)
            if definition is not None:
                write_definition(storage, replace(definition, **changes))

        async with self._sessions.catalog:
            await run_in_thread(store)

    async def close(self) -> None:
        """Land what was collected, unless the sink has failed. Stop the applier and unlock the lake."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._stream.close()
            with contextlib.suppress(TargetError):  # nothing depends on it
                await run_in_thread(self._status.flush)
        finally:
            try:
                await run_in_thread(self._sessions.applier.stop)
            finally:
                # also if this call is cancelled: nothing lands any more, and the applier has its own lock
                self._sessions.lock.give_back()

    async def finish(self) -> None:
        """See :meth:`subscriber.interfaces.FinishingSink.finish`: this process's applier has applied what was landed, if that is quick."""
        await self._usable.land()
        await run_in_thread(self._sessions.applier.finish)

    @property
    def _usable(self) -> LandingStream:
        if self._stream.failure is not None:
            raise self._stream.failure
        return self._stream

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        await self._change(lambda state: replace(state, slot_name=slot_name, publications=tuple(publications), two_phase=two_phase))

    async def _change(self, change: Callable[[LakeState], LakeState]) -> None:
        async with self._sessions.catalog:
            await run_in_thread(lambda: self.lake.change(change))

    async def slot_names(self) -> frozenset[str]:
        """Slot names of the subscription and of tables that catch up."""
        lake = self.lake
        own = [lake.position.slot_name] if lake.position is not None else []
        return frozenset([*own, *(table.position.slot_name for table in lake.state.tables.values() if table.position is not None)])

    async def set_publications(self, publications: Sequence[str]) -> None:
        await self._change(lambda state: replace(state, publications=tuple(publications)))

    async def refreshed(self) -> None:
        await self._define(pending_refresh=None)

    async def set_position(self, position: Position) -> None:
        await self._usable.set_position(position)

    async def set_two_phase(self, two_phase: TwoPhaseState) -> None:
        await self._change(lambda state: replace(state, two_phase=two_phase))

    async def tables(self) -> Mapping[TableName, TableEntry]:
        return {name: table.entry for name, table in self.lake.state.tables.items()}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables. They begin after what was landed. One that was removed before keeps its number, and its rows until it is copied."""
        position = self._usable.lander.position

        def change(state: LakeState) -> LakeState:
            for table in tables:
                state = with_table(state, table, entry, position)
            return state

        await self._change(change)
        return {}

    async def remove_table(self, table: TableName) -> None:
        """Remove a table. Its Delta tables remain, and still get what was landed for it until now."""
        opened = self._usable
        await opened.land()
        await self._change(lambda state: without_table(state, table, opened.lander.position))

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state from SYNCDONE to READY."""

        def change(state: LakeState) -> LakeState:
            known = {name: state.tables[name] for name in tables if name in state.tables}
            synchronized = {name: table for name, table in known.items() if table.entry.state is TableState.SYNCDONE}
            ready = {name: replace(table, entry=TableEntry(TableState.READY, tables[name])) for name, table in synchronized.items()}
            return with_tables(state, ready)

        await self._change(change)

    async def take_columns(self, missing: MissingColumns, gap: str | None) -> TableEntry | None:
        """See :meth:`subscriber.interfaces.SchemaGapSink.take_columns`."""
        opened = self._stream
        if opened.failure is None:
            await opened.land()
            position = opened.lander.position
        else:
            # a long transaction, of which a part was written. It comes again
            position = await run_in_thread(lambda: self.lake.landed() or INVALID_LSN)
        gap = gap or opened.gaps.gap(missing)
        again = opened.gaps.copies_again(missing, gap)
        await self._change(lambda state: opened.gaps.changed(state, missing, gap, position, again=again))
        return TableEntry(TableState.INIT) if again else None

    async def _streaming(self) -> LandingStream:
        """The open stream. Stores the histories that the URL asks for, and starts the applier of this process if it asks for one."""
        opened = self._usable
        if not self._has_histories:
            # here and not when the sink is opened, because verbs open it too, with another URL
            await run_in_thread(lambda: write_histories(self.lake.storage, self._sessions.location.history))
            self._has_histories = True
        self._sessions.applier.start()
        return opened

    async def apply(self, batch: Batch) -> None:
        opened = await self._streaming()
        if self.lake.position is None:
            raise TargetError(f'subscription "{self.lake.name}" has no position yet', hint="report this")
        await opened.apply(batch)

    async def advance(self, lsn: Lsn) -> None:
        await (await self._streaming()).advance(lsn, self._sessions.applier.start)

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        await (await self._streaming()).prepare(prepared, gate)

    async def commit_prepared(self, message: CommitPrepared, gate: RelationGate = everything_applies) -> None:
        await (await self._streaming()).commit_prepared(message)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        await (await self._streaming()).rollback_prepared(message)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Skip a transaction, and clear the request to skip it. A prepared transaction is prepared without rows."""
        opened = self._usable
        if isinstance(event, CommitPrepared):
            # the order matters: if COMMIT PREPARED of a removed transaction were sent again, it would be an error
            await self.advance(event.end_lsn)
            await self.commit_prepared(event)
            await self.clear_skip()
            return
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        await opened.lander.described.learn(transaction)
        if isinstance(event, PreparedTransaction):
            await self.prepare(PreparedTransaction(transaction.without_records(), event.gid), lambda *_: False)
        else:
            await self.advance(transaction.end_lsn)
        await self.clear_skip()
        await transaction.discard()

    async def clear_skip(self) -> None:
        await self._define(skip_lsn=INVALID_LSN)

    @contextlib.asynccontextmanager
    async def exporting(self) -> AsyncIterator[ExportSnapshot]:
        """See :meth:`subscriber.interfaces.ExportingSink.exporting`. The name is the last batch's end: its snapshot will be published."""

        async def export() -> tuple[str, int]:
            stream = await self._streaming()
            # a batch that is not landed completely would have to be sent again
            await to_its_end(stream.land())
            landed = stream.lander.zone.last
            await run_in_thread(lambda: write_boundary(self.lake.storage, landed))
            return str(landed), 0

        yield export

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write ``status.json``, if it is due."""
        await run_in_thread(lambda: self._status.report(workers, last_error, self.statistics))

    def open_table(self, table: TableName) -> SparkTableSink:
        """The sink for the synchronization of a table."""
        shared = self._sessions
        return SparkTableSink(table, lambda: shared.lake, shared.lock, shared.catalog, self.statistics)

    def open_group(self) -> SparkTableGroup:
        """A group of tables that are synchronized together. See :meth:`subscriber.interfaces.GroupingSink.open_group`."""
        shared = self._sessions
        return SparkTableGroup(self.lake, shared.lock, shared.catalog, lambda: not self._closed)
