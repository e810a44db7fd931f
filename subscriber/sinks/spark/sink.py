"""The lake as a sink: what is acknowledged lies in its landing zone, durably; whoever applies it may be slow, or away.

Transactions are gathered for ``batch_delay`` or ``batch_size``, whatever comes first, and landed together (``lander.py``). The position
is the end of the last manifest, or that of ``position.json`` where it is further.

With ``confirm=applied`` the position that counts, for acknowledging and for starting again, is the applier's: what was landed behind
it comes again after a restart, and is dropped.

After an error of one transaction those before it are still there. After any other, what was gathered is lost: the position in memory is
then wrong, and every call refuses until the sink is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NoReturn

from subscriber.abc import (
    ApplyStatistics,
    Batch,
    Capabilities,
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
)
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import (
    ApplyError,
    ConfigurationError,
    DataLossError,
    ProtocolError,
    RelationError,
    SubscriberError,
    SubscriptionChanged,
    TargetError,
    TargetUnavailable,
)
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.sinks.spark.applied import read_cut
from subscriber.sinks.spark.beside import ApplierThread
from subscriber.sinks.spark.checks import check_place, check_tables
from subscriber.sinks.spark.definition import DEFINITION, LakeDefinition, read_definition, read_generation, write_definition
from subscriber.sinks.spark.lake import LANDING, Lake, LakeTable
from subscriber.sinks.spark.lander import Lander, encode_transaction, unhurried
from subscriber.sinks.spark.landing import LandingZone
from subscriber.sinks.spark.location import Location
from subscriber.sinks.spark.lock import FileLock
from subscriber.sinks.spark.manifest import read_manifests
from subscriber.sinks.spark.status import read_counters, write_status
from subscriber.sinks.spark.storage import Storage
from subscriber.sinks.spark.subscriptions import OID, require_name
from subscriber.sinks.spark.tablesync import ExecutorTableSink, SparkTableSink
from subscriber.sinks.spark.twophase import PreparedFiles
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["SparkSink"]

_REFUSALS: Final = (ApplyError, RelationError, ProtocolError, ConfigurationError)
"""Errors that are one transaction's."""
_UNFINISHED: Final = frozenset({TableState.INIT, TableState.DATASYNC})
_LOOK_SECONDS: Final = 0.2
"""How often the applier's position is looked at, with ``confirm=applied``."""


class _Opened:
    """What there is between open and close."""

    def __init__(self, lander: Lander, on_durable: Callable[[Lsn], None]) -> None:
        self.lander = lander
        self.on_durable = on_durable
        self.tasks: list[asyncio.Task[None]] = []
        self.failure: SubscriberError | None = None
        self._reported = INVALID_LSN

    def report(self, lsn: Lsn) -> None:
        """Everything up to there is durable. What is told never goes back."""
        self._reported = max(self._reported, lsn)
        self.on_durable(self._reported)


class SparkSink:
    """A :class:`subscriber.abc.Sink`.

    Args:
        target: the URL, see :mod:`subscriber.sinks.spark.location`.
        options: of the subscription.
        settings: of the process.
        defined: the subscription was made by a verb, and is not made by :meth:`open`.

    Raises:
        ConfigurationError: a URL or an option that a lake does not take.
    """

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        if options.binary:
            raise ConfigurationError("the lake reads values in text format", hint="use binary = false")
        self._location = Location.parse(target)
        self._settings = settings
        self._defined = defined
        self._counted: dict[str, int] = {}
        self._storage: Storage | None = None
        self._lake: Lake | None = None
        self._lock: FileLock | None = None
        self._opened: _Opened | None = None
        self._calls = asyncio.Lock()
        self._catalog = asyncio.Lock()
        self._table_sinks = 0
        self._statistics = ApplyStatistics()
        self._applier = ApplierThread(self._location)

    @property
    def capabilities(self) -> Capabilities:
        """Prepared transactions are kept apart until they are committed; copies may run in parallel; the rest is the applier's."""
        return Capabilities(
            two_phase=True,
            parallel_copy=True,
            given_tables=False,
            constraints=False,
            shared_tables=False,
            several_subscriptions=False,
            binary=False,
            counts_missing=False,
            copies_visible=False,
        )

    @property
    def statistics(self) -> ApplyStatistics:
        """What was landed since the sink was made."""
        return self._statistics

    # --- opening and closing

    def _reach(self) -> Storage:
        if self._storage is None:
            self._storage = Storage.open(self._location)
        return self._storage

    async def exists(self, name: str) -> bool:
        """Whether the lake is there, and of this subscription.

        Raises:
            TargetError: it is of another one, or something else lies there.
        """
        require_name(name)
        lake = await unhurried(lambda: Lake.find(self._reach()))
        if self._defined and (lake is None or lake.dropped or lake.name != name):
            return False
        if lake is not None:
            self._require_ours(lake, name)
        return lake is not None

    def _require_ours(self, lake: Lake | None, name: str) -> Lake:
        gone = lake is None or lake.dropped or lake.name != name
        if self._defined and gone:
            raise SubscriptionChanged(f'subscription "{name}" was dropped or renamed just now', hint="look what there is")
        assert lake is not None
        if lake.dropped or lake.name != name:
            what = f'what dropped subscription "{lake.name}" left' if lake.dropped else f'of subscription "{lake.name}", not "{name}"'
            raise TargetError(f"the lake in {self._location} is {what}", hint="give each subscription a directory of its own")
        return lake

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        """Lock the lake, make it if there is none, and recover the landing zone.

        Raises:
            TargetUnavailable, TargetError, SubscriptionInUse, DataLossError
        """
        storage = self._reach()
        if self._lock is None:
            path = storage.root / "lock" if storage.root is not None else None
            self._lock = FileLock(path, f"the lake in {self._location} is in use by another process", "stop that subscriber first")
        found = await unhurried(lambda: Lake.find(storage))
        if found is not None or self._defined:
            self._require_ours(found, name)
        await unhurried(lambda: storage.make_directory(""))
        self._lock.take()
        try:
            # what was read before the lock was ours may have changed since; and tables that are being copied go on storing their states
            async with self._catalog:
                lake = self._require_ours(await unhurried(lambda: self._found_or_made(storage, name)), name)
                self._lake = lake
            self._counted = await unhurried(lambda: read_counters(storage))
            position = lake.position
            zone = LandingZone(storage, LANDING, position.lsn if position is not None else INVALID_LSN)
            await unhurried(zone.recover)
        except BaseException:
            self._lock.give_back()
            raise
        landed = max(zone.last, position.lsn if position is not None else INVALID_LSN)
        self._opened = _Opened(Lander(zone, self._table_id, self._statistics, landed), on_durable)
        self._opened.tasks.append(asyncio.create_task(self._land_in_time(self._opened)))
        if self._location.confirm == "applied":
            self._opened.tasks.append(asyncio.create_task(self._watch_applied(self._opened)))
        return await self._state(lake, landed)

    def _found_or_made(self, storage: Storage, name: str) -> Lake | None:
        lake = Lake.find(storage)
        if lake is None and not self._defined:
            # left by a create that was killed
            storage.delete([DEFINITION])
            return Lake.make(storage, name)
        return lake

    async def _state(self, lake: Lake, landed: Lsn) -> SubscriptionState:
        position = lake.position
        if position is not None:
            known = landed
            if self._location.confirm == "applied":
                known = min(landed, await self._applied(lake))
            position = replace(position, lsn=known)
        state = lake.state
        definition, generation = await unhurried(lambda: (read_definition(lake.storage), read_generation(lake.storage)))
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
        )

    async def _define(self, **changes: Any) -> None:
        """Change what the verbs defined; nothing, if its command line defines the subscription."""
        storage = self._known.storage

        def store() -> None:
            definition = read_definition(storage)
            if definition is not None:
                write_definition(storage, replace(definition, **changes))

        async with self._catalog:
            await unhurried(store)

    async def _applied(self, lake: Lake) -> Lsn:
        """Up to where nothing that was landed is still to be applied. Copies of tables are none of this."""
        assert self._opened is not None
        landed = max(self._opened.lander.zone.last, lake.position.lsn if lake.position is not None else INVALID_LSN)

        def look() -> Lsn:
            cut = read_cut(lake.storage)
            waiting = read_manifests(lake.storage, LANDING, cut.lsn if cut is not None else INVALID_LSN)
            return waiting[0].begin if waiting else landed

        return await unhurried(look)

    async def close(self) -> None:
        """Land what was gathered, unless the sink has failed; stop; unlock."""
        opened, self._opened = self._opened, None
        if opened is None:
            return
        assert self._lock is not None
        for task in opened.tasks:
            task.cancel()
        await asyncio.gather(*opened.tasks, return_exceptions=True)
        try:
            if opened.failure is not None:
                opened.lander.forget()
            elif opened.lander.gathered is not None:
                async with self._calls:
                    await self._land(opened)
        finally:
            await unhurried(self._applier.stop)
            self._lock.give_back()

    @property
    def _now(self) -> _Opened:
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
            await unhurried(lambda: self._known.change(**changes))

    async def slot_names(self) -> frozenset[str]:
        """Of the subscription, and of tables that catch up."""
        lake = self._known
        own = [lake.position.slot_name] if lake.position is not None else []
        return frozenset([*own, *(table.position.slot_name for table in lake.state.tables.values() if table.position is not None)])

    async def set_publications(self, publications: Sequence[str]) -> None:
        """Store them."""
        await self._change(publications=tuple(publications))

    async def refreshed(self) -> None:
        """Forget a pending refresh."""
        await self._define(pending_refresh=None)

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one on another timeline."""
        opened = self._now
        async with self._calls:
            await self._land(opened)
            if self._location.confirm == "applied" and self._known.position is not None:
                # the LSN is the applier's, and behind what is landed: only the timeline is new
                position = replace(position, lsn=max(position.lsn, opened.lander.position))
            await unhurried(lambda: self._known.set_position(position))
            opened.lander.position = max(opened.lander.position, position.lsn)

    async def set_two_phase(self, state: TwoPhaseState) -> None:
        """Store ``subtwophasestate``."""
        await self._change(two_phase=state)

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """Not asked for: what is not built in is text in the lake, whatever the publisher's catalog says of it."""

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables."""
        return {name: table.entry for name, table in self._known.state.tables.items()}

    async def add_table(self, table: TableName, entry: TableEntry) -> None:
        """Add a table; it begins behind what was landed. One that was removed before keeps its number, and its rows until it is copied."""
        position = self._now.lander.position
        async with self._catalog:
            state = self._known.state
            was = state.removed.get(table)
            copied = entry.state is TableState.INIT
            next_id = state.next_id
            # a copy that was begun and did not finish leaves nothing to go on with
            if was is not None and (copied or not was.generation or was.entry.state not in _UNFINISHED):
                added = replace(was, entry=entry, until=was.until if copied else None)
            else:
                added = LakeTable(id=next_id, entry=entry, added=position)
                next_id += 1
            removed = {name: known for name, known in state.removed.items() if name != table}
            await unhurried(lambda: self._known.change(next_id=next_id, tables={**state.tables, table: added}, removed=removed))

    async def remove_table(self, table: TableName) -> None:
        """Forget a table. Its Delta tables stay, and get what was landed for it until now."""
        opened = self._now
        async with self._calls, self._failing(opened):
            await self._land(opened)
        async with self._catalog:
            state = self._known.state
            known = state.tables.get(table)
            if known is None:
                return
            until = known.until if known.entry.state in _UNFINISHED else max(opened.lander.position, known.entry.lsn or INVALID_LSN)
            removed = {**state.removed, table: replace(known, position=None, until=until)}
            rest = {name: other for name, other in state.tables.items() if name != table}
            await unhurried(lambda: self._known.change(tables=rest, removed=removed))

    async def set_ready(self, table: TableName, lsn: Lsn) -> None:
        """SYNCDONE to READY."""
        async with self._catalog:
            known = self._known.state.tables.get(table)
            if known is not None and known.entry.state is TableState.SYNCDONE:
                await unhurried(lambda: self._known.change_table(table, entry=TableEntry(TableState.READY, lsn)))

    # --- the stream

    async def apply(self, batch: Batch) -> None:
        """Take a batch; it is landed now if there is enough, else soon."""
        opened = self._now
        self._applier.start()
        if self._known.position is None:
            raise TargetError(f'subscription "{self._known.name}" has no position yet', hint="report this")
        async with self._calls, self._failing(opened):
            await opened.lander.take(batch)
            full = opened.lander.size >= self._location.batch_size or not self._location.batch_delay
            if full or opened.lander.gathered is None:
                await self._land(opened)

    async def advance(self, lsn: Lsn) -> None:
        """Land what was gathered, and store the position; with ``confirm=applied``, return once it is applied."""
        opened = self._now
        self._applier.start()
        async with self._calls, self._failing(opened):
            await self._land(opened)
            await self._store_position(opened, lsn)
        if self._location.confirm == "applied":
            while await self._applied(self._known) < lsn:  # noqa: ASYNC110 -- another process writes it
                await asyncio.sleep(_LOOK_SECONDS)
        opened.report(lsn)

    async def _land(self, opened: _Opened) -> None:
        """Make durable what was taken, rows or none, and report it."""
        before = opened.lander.zone.last
        await opened.lander.land()
        position = opened.lander.position
        if position > max(before, opened.lander.zone.last):
            await self._store_position(opened, position)
        self._report(opened, position)

    async def _store_position(self, opened: _Opened, lsn: Lsn) -> None:
        lake = self._known
        stored = lake.position
        if stored is None or lsn <= max(stored.lsn, opened.lander.zone.last):
            return
        moved = replace(stored, lsn=lsn)
        await unhurried(lambda: lake.set_position(moved))
        opened.lander.position = max(opened.lander.position, lsn)

    def _report(self, opened: _Opened, lsn: Lsn) -> None:
        if self._location.confirm == "landed" and self._known.position is not None:
            opened.report(lsn)

    @contextlib.asynccontextmanager
    async def _failing(self, opened: _Opened) -> AsyncIterator[None]:
        """After an error nothing more is taken: what was gathered is lost, and comes again."""
        try:
            yield
        except SubscriberError as error:
            if isinstance(error, _REFUSALS) and not opened.lander.lost:
                raise  # of one transaction, which left nothing
            # the rooms above open the sink again after an error of the target, and only then
            opened.failure = error if isinstance(error, TargetError) else TargetUnavailable("what was to be landed is lost: it comes again")
            opened.lander.forget()
            raise
        except asyncio.CancelledError:
            opened.failure = TargetUnavailable("a batch was cut off")
            opened.lander.forget()
            raise

    async def _land_in_time(self, opened: _Opened) -> None:
        """Land what has waited for ``batch_delay``. An error is told by the next call."""
        loop = asyncio.get_running_loop()
        while opened.failure is None:
            gathered = opened.lander.gathered
            pause = (
                max(self._location.batch_delay, _LOOK_SECONDS) if gathered is None else gathered + self._location.batch_delay - loop.time()
            )
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            with contextlib.suppress(SubscriberError):
                async with self._calls, self._failing(opened):
                    await self._land(opened)

    async def _watch_applied(self, opened: _Opened) -> None:
        reported = INVALID_LSN
        while opened.failure is None:
            try:
                applied = await self._applied(self._known)
            except SubscriberError as error:
                opened.failure = error
                return
            if applied > reported and self._known.position is not None:
                reported = applied
                opened.report(min(applied, opened.lander.position))
            await asyncio.sleep(_LOOK_SECONDS)

    # --- two-phase

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Keep the transaction's rows apart; durable on return, the position behind them."""
        opened, files = self._now, PreparedFiles(self._known.storage)
        transaction, gid = prepared.transaction, prepared.gid
        async with self._calls, self._failing(opened):
            await self._land(opened)
            if await unhurried(lambda: files.is_there(transaction.xid, gid)):
                await opened.lander.described.learn(transaction)
            else:
                batch = await unhurried(lambda: files.begin(transaction.xid, gid))
                try:
                    await encode_transaction(
                        transaction, gate, batch, described=opened.lander.described, table_ids=self._table_id, statistics=self._statistics
                    )
                except BaseException:
                    batch.discard()
                    raise
                await unhurried(lambda: files.prepare(batch, transaction, gid))
                self._statistics.transactions += 1
            await transaction.discard()
            await self._store_position(opened, transaction.end_lsn)
            self._report(opened, opened.lander.position)

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """Land its rows as of the commit.

        Raises:
            DataLossError: it was never prepared here, nor committed.
        """
        opened, files = self._now, PreparedFiles(self._known.storage)
        async with self._calls, self._failing(opened):
            await self._land(opened)
            position, zone = opened.lander.position, opened.lander.zone
            if message.end_lsn > position:
                landed = await unhurried(lambda: files.commit(message, zone.directory))
                if landed is None:
                    raise DataLossError(
                        f"the lake has no prepared transaction of xid {message.xid}, which was committed at {message.commit_lsn}",
                        hint="it was prepared before this lake began: start over in a new directory",
                    )
                if landed:
                    await unhurried(lambda: zone.add(landed, position, message.end_lsn, transactions=1, commit_time=message.commit_time))
                    opened.lander.position = message.end_lsn
                else:
                    await self._store_position(opened, message.end_lsn)
            await unhurried(lambda: files.forget(message.xid, message.gid))
            self._report(opened, opened.lander.position)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """Forget it."""
        opened, files = self._now, PreparedFiles(self._known.storage)
        async with self._calls, self._failing(opened):
            await self._land(opened)
            await unhurried(lambda: files.forget(message.xid, message.gid))
            await self._store_position(opened, message.rollback_end_lsn)
            self._report(opened, opened.lander.position)

    # --- the rest of the contract

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool]) -> NoReturn:
        """Not with a lake."""
        raise AssertionError("the capability is not declared")

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        """Nothing of a lake waits."""
        return []

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """Pass over a transaction, and forget that it was to be; a prepared one is prepared without rows."""
        opened = self._now
        if isinstance(event, CommitPrepared):
            # in this order: COMMIT PREPARED of what is forgotten, if it came again, would be a loss
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
        """Forget the transaction to be skipped."""
        await self._define(skip_lsn=INVALID_LSN)

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write ``status.json``."""
        lake = self._lake
        if self._opened is not None and lake is not None:
            await unhurried(lambda: write_status(lake.storage, workers, last_error, self._statistics, self._counted))

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """What would go wrong in the lake."""
        found = await unhurried(lambda: check_place(self._reach()))
        return [*found, *check_tables(tables)]

    def open_table(self, table: TableName) -> SparkTableSink:
        """The table's synchronization."""
        assert self._lock is not None
        if self._location.copy == "executors" and self._opened is not None:
            self._applier.start()
        made = SparkTableSink if self._location.copy == "subscriber" else ExecutorTableSink
        return made(table, lambda: self._known, self._lock, self._catalog, self._statistics, copying=self._location.copying(self._settings))
