"""The lake as a sink. What is acknowledged is durable in the landing zone, even if the applier is slow or not running.

With ``confirm=applied``, the applier's position is acknowledged, and a restart begins there. Transactions that were landed after it are
then sent again, and skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from subscriber.abc import (
    ApplyStatistics,
    Batch,
    Finding,
    Position,
    PublishedTable,
    RelationGate,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
    TwoPhaseState,
    WorkerActivity,
)
from subscriber.catalog.definition import claimed_elsewhere, require_name
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import (
    ConfigurationError,
    RelationError,
    SubscriptionChanged,
    TargetError,
    TargetUnavailable,
)
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.sinks.spark.catalog.checks import check_place, check_tables
from subscriber.sinks.spark.catalog.definition import DEFINITION, LakeDefinition, read_definition, read_generation, write_definition
from subscriber.sinks.spark.catalog.lake import LANDING, Lake, LakeState, LakeTable
from subscriber.sinks.spark.catalog.status_files import read_landed_counters, write_status
from subscriber.sinks.spark.catalog.subscriptions import OID, locks
from subscriber.sinks.spark.copy.table_sync import ExecutorTableSink, SparkTableSink
from subscriber.sinks.spark.files.file_lock import FileLock, is_held
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.files.threads import run_in_thread
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.landing.writer import LandingWriter
from subscriber.sinks.spark.landing.zone import LandingZone
from subscriber.sinks.spark.landing_stream import LandingStream
from subscriber.sinks.spark.pipeline.applier_thread import ApplierThread
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["SparkSink"]

_UNFINISHED: Final = frozenset({TableState.INIT, TableState.DATASYNC})


class SparkSink:
    """A :class:`subscriber.abc.Sink`.

    Args:
        target: URL of the lake, see :mod:`subscriber.sinks.spark.files.location`.
        options: of the subscription.
        settings: of the process.
        defined: whether ``subscriber create`` made the subscription. Then :meth:`open` does not create it.

    Raises:
        ConfigurationError: a lake does not support the URL or an option.
    """

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        if options.binary:
            raise ConfigurationError("a lake can only receive values in text format", hint="use binary = false")
        self._location = Location.parse(target)
        self._settings = settings
        self._defined = defined
        self._counted: dict[str, int] = {}
        self._storage: Storage | None = None
        self._lake: Lake | None = None
        self._lock: FileLock | None = None
        self._opened: LandingStream | None = None
        self._catalog = asyncio.Lock()
        self._statistics = ApplyStatistics()
        self._applier = ApplierThread(self._location)

    @property
    def statistics(self) -> ApplyStatistics:
        """Counts of what was landed since the sink was made."""
        return self._statistics

    # --- opening and closing

    def _reach(self) -> Storage:
        if self._storage is None:
            self._storage = Storage.open(self._location)
        return self._storage

    async def exists(self, name: str) -> bool:
        """Whether the lake exists and belongs to this subscription.

        Raises:
            TargetError: the lake belongs to another subscription, or the directory contains something else.
        """
        require_name(name)
        lake = await run_in_thread(lambda: Lake.find(self._reach()))
        if self._defined and (lake is None or lake.dropped or lake.name != name):
            return False
        if lake is not None:
            self._require_ours(lake, name)
        return lake is not None

    def _require_ours(self, lake: Lake | None, name: str) -> Lake:
        gone = lake is None or lake.dropped or lake.name != name
        if self._defined and gone:
            raise SubscriptionChanged(
                f'subscription "{name}" was dropped or renamed in the meantime', hint="`subscriber status` lists the existing subscriptions"
            )
        assert lake is not None
        if lake.dropped or lake.name != name:
            whose = (
                f'belonged to subscription "{lake.name}", which was dropped'
                if lake.dropped
                else f'belongs to subscription "{lake.name}", not "{name}"'
            )
            raise TargetError(f"the lake in {self._location} {whose}", hint="use a separate directory for each subscription")
        return lake

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        """Lock the lake, create it if it does not exist, and recover the landing zone.

        Raises:
            TargetUnavailable, TargetError: the lake cannot be reached, or belongs to another subscription.
            SubscriptionInUse: another process uses the lake.
            DataLossError: a landed batch is missing.
        """
        storage = self._reach()
        if self._lock is None:
            path = storage.root / "lock" if storage.root is not None else None
            self._lock = FileLock(path, f"the lake in {self._location} is in use by another process", "stop that subscriber first")
        found = await run_in_thread(lambda: Lake.find(storage))
        if found is not None or self._defined:
            self._require_ours(found, name)
        await run_in_thread(lambda: storage.make_directory(""))
        self._lock.take()
        try:
            # a verb takes the verbs' lock before it asks for the writer's lock
            if not self._defined and is_held(locks(storage)[1]):
                raise claimed_elsewhere(name)
            # what was read before taking the lock may have changed since, and running table copies continue to store their states
            async with self._catalog:
                lake = self._require_ours(await run_in_thread(lambda: self._found_or_made(storage, name)), name)
                self._lake = lake
            self._counted = await run_in_thread(lambda: read_landed_counters(storage))
            position = lake.position
            # the chain begins at INVALID_LSN, so the applier notices if the first batch is missing
            zone = LandingZone(storage, LANDING)
            await run_in_thread(zone.recover)
        except BaseException:
            self._lock.give_back()
            raise
        landed = max(zone.last, position.lsn if position is not None else INVALID_LSN)
        lander = LandingWriter(zone, self._table_id, self._statistics, landed)
        self._opened = LandingStream(
            lake, lander, self._location, table_ids=self._table_id, statistics=self._statistics, on_durable=on_durable
        )
        try:
            opened = await self._state(lake, landed)
            begin = opened.position.lsn if opened.position is not None else INVALID_LSN
            await run_in_thread(lambda: PreparedTransactions(storage).recover(landed, begin))
        except BaseException:
            await self.close()
            raise
        return opened

    def _found_or_made(self, storage: Storage, name: str) -> Lake | None:
        lake = Lake.find(storage)
        if lake is None and not self._defined:
            # left behind by a create that was killed
            storage.delete([DEFINITION])
            return Lake.make(storage, name)
        return lake

    async def _state(self, lake: Lake, landed: Lsn) -> SubscriptionState:
        position = lake.position
        if position is not None:
            known = landed
            if self._location.confirm == "applied":
                known = min(landed, await self._now.applied())
            position = replace(position, lsn=known)
        state = lake.state
        definition, generation = await run_in_thread(lambda: (read_definition(lake.storage), read_generation(lake.storage)))
        definition = definition or LakeDefinition()
        return SubscriptionState(
            oid=OID,
            name=lake.name,
            target_identifier=lake.target_identifier,
            slot_name=state.slot_name,
            publications=state.publications,
            two_phase=state.two_phase,
            position=position,
            managed=definition.conninfo is not None,
            generation=generation,
            pending_refresh=definition.pending_refresh,
            skip_lsn=definition.skip_lsn,
            # with confirm=applied the position is behind what is landed. What is landed is never landed again
            taken=landed,
        )

    async def _define(self, **changes: Any) -> None:
        """Change what ``subscriber create`` defined. Does nothing if the command line defines the subscription."""
        storage = self._known.storage

        def store() -> None:
            definition = read_definition(storage)
            if definition is not None:
                write_definition(storage, replace(definition, **changes))

        async with self._catalog:
            await run_in_thread(store)

    async def close(self) -> None:
        """Land what was collected, unless the sink has failed. Stop the applier and unlock the lake."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        assert self._lock is not None
        try:
            await opened.close()
        finally:
            await run_in_thread(self._applier.stop)
            self._lock.give_back()

    @property
    def _now(self) -> LandingStream:
        if self._opened is None:
            raise TargetUnavailable("the lake is not open")
        if self._opened.failure is not None:
            raise self._opened.failure
        return self._opened

    @property
    def _known(self) -> Lake:
        if self._lake is None:
            raise TargetUnavailable("the lake is not open")
        return self._lake

    def _table_id(self, relation: Relation) -> int | None:
        table = self._known.state.tables.get(TableName(relation.namespace, relation.name))
        return table.id if table is not None else None

    # --- what the subscription stores

    async def begin_slot(self, slot_name: str | None, publications: Sequence[str], two_phase: TwoPhaseState) -> None:
        """Note the slot that is about to be created."""
        await self._change(slot_name=slot_name, publications=tuple(publications), two_phase=two_phase)

    async def _change(self, **changes: object) -> None:
        async with self._catalog:
            await run_in_thread(lambda: self._known.change(**changes))

    async def slot_names(self) -> frozenset[str]:
        """Slot names of the subscription and of tables that catch up."""
        lake = self._known
        own = [lake.position.slot_name] if lake.position is not None else []
        return frozenset([*own, *(table.position.slot_name for table in lake.state.tables.values() if table.position is not None)])

    async def set_publications(self, publications: Sequence[str]) -> None:
        """Store the publications."""
        await self._change(publications=tuple(publications))

    async def refreshed(self) -> None:
        """Clear the pending refresh."""
        await self._define(pending_refresh=None)

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one on another timeline."""
        await self._now.set_position(position)

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        """Store ``subtwophasestate``."""
        await self._change(two_phase=state)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables."""
        return {name: table.entry for name, table in self._known.state.tables.items()}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables. They begin after what was landed. One that was removed before keeps its number, and its rows until it is copied."""
        position = self._now.lander.position
        async with self._catalog:
            state = self._known.state
            for table in tables:
                state = _with_table(state, table, entry, position)
            await run_in_thread(lambda: self._known.change(next_id=state.next_id, tables=state.tables, removed=state.removed))
        return {}

    async def remove_table(self, table: TableName) -> None:
        """Remove a table. Its Delta tables remain, and still get what was landed for it until now."""
        opened = self._now
        await opened.land()
        async with self._catalog:
            state = self._known.state
            known = state.tables.get(table)
            if known is None:
                return
            was = state.removed.get(table)
            if known.entry.state not in _UNFINISHED:
                was = replace(known, position=None, until=max(opened.lander.position, known.entry.lsn or INVALID_LSN))
            elif was is None or was.entry.state in _UNFINISHED:
                was = replace(known, position=None)
            else:
                # the unfinished copy has not replaced anything
                was = replace(was, begun=known.generation)
            removed = {**state.removed, table: was}
            rest = {name: other for name, other in state.tables.items() if name != table}
            await run_in_thread(lambda: self._known.change(tables=rest, removed=removed))

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state from SYNCDONE to READY."""
        async with self._catalog:
            known = self._known.state.tables
            ready = {table: lsn for table, lsn in tables.items() if table in known and known[table].entry.state is TableState.SYNCDONE}
            changed = {table: replace(known[table], entry=TableEntry(TableState.READY, lsn)) for table, lsn in ready.items()}
            if changed:
                await run_in_thread(lambda: self._known.change(tables={**known, **changed}))

    # --- the stream

    def _streaming(self) -> LandingStream:
        """The open stream. Starts the applier of this process if the URL asks for one."""
        opened = self._now
        self._applier.start()
        return opened

    async def apply(self, batch: Batch) -> None:
        """Collect a batch. It is landed now if there is enough data, else soon."""
        opened = self._streaming()
        if self._known.position is None:
            raise TargetError(f'subscription "{self._known.name}" has no position yet', hint="report this")
        await opened.apply(batch)

    async def advance(self, lsn: Lsn) -> None:
        """Land what was collected, and store the position. With ``confirm=applied``, return after it is applied."""
        await self._streaming().advance(lsn, self._applier.start)

    @property
    def prepares_in_target(self) -> bool:
        """Prepared transactions are stored."""
        return False

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Store the transaction's rows apart. On return they are durable, and the position is after the transaction."""
        await self._streaming().prepare(prepared, gate)

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """Land the rows of a prepared transaction, as of its commit.

        Raises:
            DataLossError: it was neither prepared here nor committed.
        """
        await self._streaming().commit_prepared(message)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """Remove a prepared transaction."""
        await self._streaming().rollback_prepared(message)

    # --- the rest of the contract

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Skip a transaction, and clear the request to skip it. A prepared transaction is prepared without rows."""
        opened = self._now
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
        """Clear the LSN of the transaction to skip."""
        await self._define(skip_lsn=INVALID_LSN)

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write ``status.json``."""
        lake = self._lake
        if self._opened is not None and lake is not None:
            await run_in_thread(lambda: write_status(lake.storage, workers, last_error, self._statistics, self._counted))

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Find problems of the lake."""
        found = await run_in_thread(lambda: check_place(self._reach()))
        return [*found, *check_tables(tables)]

    def open_table(self, table: TableName) -> SparkTableSink:
        """The sink for the synchronization of a table."""
        assert self._lock is not None
        if self._location.copy == "executors" and self._opened is not None:
            self._applier.start()
        made = SparkTableSink if self._location.copy == "subscriber" else ExecutorTableSink
        return made(table, lambda: self._known, self._lock, self._catalog, self._statistics, copying=self._location.copying(self._settings))


def _with_table(state: LakeState, table: TableName, entry: TableEntry, position: Lsn) -> LakeState:
    was = state.removed.get(table)
    removed = {name: known for name, known in state.removed.items() if name != table}
    if was is not None and entry.state is TableState.INIT:
        # until the copy is finished, what was landed before belongs to the removed table
        removed[table] = was
        added = LakeTable(id=was.id, entry=entry, generation=max(was.generation, was.begun), added=position)
    elif was is not None and (not was.generation or was.entry.state not in _UNFINISHED):
        added = replace(was, entry=entry, until=None)
    else:
        # the table was never there, or no copy of it was ever finished
        added = LakeTable(id=state.next_id, entry=entry, added=position)
        state = replace(state, next_id=state.next_id + 1)
    return replace(state, tables={**state.tables, table: added}, removed=removed)
