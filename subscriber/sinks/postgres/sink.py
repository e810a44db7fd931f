"""The PostgreSQL sink: the interface of this package for the apply worker."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from subscriber.abc import (
    ApplyStatistics,
    Batch,
    Finding,
    ParallelTransaction,
    Position,
    PublishedTable,
    Query,
    RelationGate,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
    TargetActivity,
    WorkerActivity,
)
from subscriber.catalog.definition import require_name
from subscriber.catalog.subscription_rows import CatalogStateStore
from subscriber.catalog.subscriptions import require_unclaimed
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.postgres.apply.applier import Applier, Owner
from subscriber.sinks.postgres.apply.prepared_transactions import PreparedTransactions
from subscriber.sinks.postgres.catalog.schema import ensure_catalog
from subscriber.sinks.postgres.catalog.session_rows import SessionRows
from subscriber.sinks.postgres.catalog.store import PostgresReporter, PostgresStore
from subscriber.sinks.postgres.catalog.subscriptions import own_subscription
from subscriber.sinks.postgres.checks import check_target, querying, subscription_exists
from subscriber.sinks.postgres.copy.table_group import PostgresTableGroup
from subscriber.sinks.postgres.copy.table_sync import PostgresTableSink
from subscriber.sinks.postgres.parallel.sessions import ParallelSessions, raise_fence
from subscriber.sinks.postgres.parallel.transaction import PostgresParallelTransaction
from subscriber.sinks.postgres.session.activity import Watcher
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.durability import Durability
from subscriber.sinks.postgres.session.locks import table_key, take, writer_number
from subscriber.sinks.postgres.session.origins import Origins, drop_origins, origin_name, sweep_origins
from subscriber.sinks.postgres.session.settings import configure_asyncpg, release_rows_soon
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["PostgresSink"]

_log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
"""Time limit for the final statements of ``close``, so that a target that does not answer cannot block the end of the run."""

_PING_SECONDS: Final = 10.0
"""Time limit for the answer of an idle session."""


class _Open:
    """The state between ``open`` and ``close``."""

    def __init__(
        self,
        session: ApplySession,
        reader: CatalogReader,
        state: SubscriptionState,
        parallel: ParallelSessions,
        *,
        as_owner: bool,
        tally: Tally,
        on_durable: Callable[[Lsn], None],
    ) -> None:
        self.session = session
        self.reader = reader
        self.parallel = parallel
        self.oid = state.oid
        self.name = state.name
        self.rows = SessionRows(session, state.oid)
        self.durability = Durability(reader, on_durable)
        self.has_position = state.position is not None
        position = state.position.lsn if state.position else INVALID_LSN
        relations = RelationMap(reader, as_owner=as_owner, subscription=state.oid)
        self.applier = Applier(session, relations, Owner(state.oid), position=position, tally=tally, committed=self.durability.committed)
        self.two_phase = PreparedTransactions(session, self.rows, self.applier)
        self.reporter = PostgresReporter(PostgresStore(reader), state.oid, tally)

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[SessionRows]:
        """The subscription's rows in a transaction, which is on disk at the end of the block."""
        async with self.session.transaction():
            yield self.rows


class PostgresSink(CatalogStateStore):
    """A :class:`subscriber.abc.Sink` for PostgreSQL 13 to 18.

    Args:
        target: libpq URL or conninfo of the target database.
        options: options of the subscription.
        settings: settings of the process.
        defined: the subscription was created by a verb, and must not be created by :meth:`open`.

    Raises:
        ConfigurationError: ``target`` is neither a URL nor a conninfo.
    """

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        self._target = Target(target)
        self._tables_target = Target(target)
        self._watcher: Watcher | None = None
        self._options = options
        self._settings = settings
        self._defined = defined
        # true after this process has seen the subscription: if it is missing later, it was dropped, and must not be created again
        self._known = defined
        self._statistics = ApplyStatistics()
        self._tally = Tally(self._statistics)
        self._origins = Origins(relied_on=options.origin == "none", lost=lambda: self._target.lost() | self._tables_target.lost())
        self._opened: _Open | None = None
        self._identity: tuple[int, str] | None = None

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        return self._statistics

    @property
    def _as_owner(self) -> bool:
        return not self._options.run_as_owner

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise TargetUnavailable("the sink is not open", hint="open it first")
        return self._opened

    def changing(self) -> contextlib.AbstractAsyncContextManager[SessionRows]:
        """The subscription's rows. See :meth:`subscriber.catalog.subscription_rows.CatalogStateStore.changing`.

        Raises:
            TargetUnavailable
        """
        return self._open.changing()

    async def exists(self, name: str) -> bool:
        """Whether the target's catalog has the subscription. See :meth:`subscriber.abc.Sink.exists`.

        Raises:
            TargetUnavailable, TargetError
        """
        require_name(name)
        found = await subscription_exists(self._target, name)
        self._known = found or self._defined
        return found

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        """See :meth:`subscriber.abc.Sink.open`.

        Raises:
            SubscriptionChanged: it was dropped or renamed since it was created.
            TargetUnavailable, TargetError, SubscriptionInUse
        """
        require_name(name)
        await self.close()
        self._watcher = Watcher(name, self._target, self._tables_target)
        session = await ApplySession.connect(self._target, application_name=name, synchronous_commit=self._options.synchronous_commit)
        reader: CatalogReader | None = None
        try:
            reader = await self._connect_reader(session, name)
            await ensure_catalog(reader.connection)
            oid = await own_subscription(reader, name, self._options, known=self._known)
            ended = await take(session.fetch, writer_number(oid), f'subscription "{name}"', lost=self._target.lost())
            if not self._defined:
                await require_unclaimed(PostgresStore(reader), oid, name)
            await reader.read_owner(oid)
            fence, also_ended = await raise_fence(session, oid)
            await session.carry_origin(self._origins, origin_name(oid))
            if session.origin is not None:
                await sweep_origins(session.fetch, oid)
            rows = SessionRows(session, oid)
            state = await rows.subscription()
            if state.position is not None and (ended or also_ended or not session.commits_are_durable):
                # an earlier process may have committed the position without a flush; the position returned here will be acknowledged
                async with session.transaction():
                    await rows.move_position(state.position.lsn)
        except BaseException:
            if reader is not None:
                await reader.close()
            await session.close()
            raise
        self._identity = state.oid, state.name
        self._known = True
        level = self._options.synchronous_commit
        parallel = ParallelSessions(
            self._target,
            reader,
            self._origins,
            oid=oid,
            name=name,
            synchronous_commit=level,
            fence=fence,
            origin=session.origin is not None,
        )
        self._opened = _Open(session, reader, state, parallel, as_owner=self._as_owner, tally=self._tally, on_durable=on_durable)
        return state

    async def _connect_reader(self, session: ApplySession, name: str) -> CatalogReader:
        connection = await self._target.connect_asyncpg(session.connection, name)
        try:
            # this session creates the catalog, which must be on disk
            await configure_asyncpg(connection, "local")
            await release_rows_soon(connection)
        except BaseException:
            connection.terminate()
            raise
        return CatalogReader(connection)

    async def set_position(self, position: Position) -> None:
        """Store the first position, or a position on another timeline."""
        opened = self._open
        async with opened.changing() as rows:
            await rows.save_position(0, position)
        opened.has_position = True
        opened.applier.position = position.lsn

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data. On return it is on disk, and all earlier commits too."""
        opened = self._open
        opened.durability.require_watch()
        if lsn <= opened.applier.position and opened.durability.idle:
            return
        async with opened.session.transaction():
            await opened.rows.move_position(lsn)
        opened.applier.position = max(lsn, opened.applier.position)
        opened.durability.committed(opened.applier.position, None)

    def _report(self, before: Lsn) -> None:
        """Report a position that moved and is on disk. If it did not move, the call was repeated, and the position is reported again."""
        opened = self._open
        if opened.applier.position > before or opened.durability.idle:
            opened.durability.committed(opened.applier.position, None)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables. First waits until no synchronization of a dead process can change them."""
        opened, ended = self._open, False
        for relid in await opened.rows.in_state(TableState.FINISHEDCOPY):
            # A COMMIT of SYNCDONE may still run. If the state were read as FINISHEDCOPY, the apply worker would skip later changes.
            key = table_key(opened.oid, relid)
            what = f"synchronization of table with oid {relid}"
            ended |= await take(opened.session.fetch, key, what, lost=self._tables_target.lost())
            await opened.session.fetch("SELECT pg_catalog.pg_advisory_unlock(%s)", key)
        if ended:
            # the terminated session may have waited for a synchronous standby in COMMIT: this COMMIT waits for the standby too
            async with opened.changing() as changing:
                await changing.touch()
        found: dict[TableName, TableEntry] = {}
        for name, row in await opened.rows.tables():
            if name is not None:
                found[name] = row.entry
            else:
                async with opened.changing() as rows:
                    await rows.remove_table(row.relid)
        return found

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables with their first state. Returns the errors of those that do not exist in the target, or are no tables."""
        async with self._open.changing() as rows:
            return await rows.add_tables(tables, entry)

    async def remove_table(self, table: TableName) -> None:
        """Remove a table from the subscription."""
        opened = self._open
        # tables() removes a table that was dropped in the target
        with contextlib.suppress(RelationError):
            relid = await opened.rows.find_table(table)
            async with opened.changing() as rows:
                await rows.remove_table(relid)
            if opened.session.origin is not None:
                await drop_origins(opened.session.fetch, opened.oid, relid, wait=False)

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state from SYNCDONE to READY. Ignores tables that were dropped in the target: their next change is an error."""
        async with self._open.changing() as rows:
            found = await rows.rows.relids(list(tables))
            await rows.set_ready({relid: tables[table] for table, relid in found.items() if not isinstance(relid, RelationError)})

    async def apply(self, batch: Batch) -> None:
        """Apply a batch, and store its end LSN in the same transaction. See :meth:`subscriber.abc.Sink.apply`.

        Raises:
            ApplyError, RelationError, TargetError, TargetUnavailable
        """
        self._require_ready()
        opened = self._open
        before = opened.applier.position
        await opened.applier.apply(batch)
        if opened.applier.position == before and opened.durability.idle:
            opened.durability.committed(before, None)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """See :meth:`subscriber.abc.Sink.skip`.

        Raises:
            TargetError, TargetUnavailable
        """
        assert not isinstance(event, CommitPrepared), "it prepares in the target"
        self._require_ready()
        opened = self._open
        before = opened.applier.position
        if isinstance(event, PreparedTransaction):
            await opened.applier.skip(event.transaction)
            await opened.two_phase.prepare(event.transaction.without_records(), _nothing_applies)
            await self.clear_skip()
        else:
            await opened.applier.skip(event)
            async with opened.session.transaction():
                await opened.rows.move_position(event.end_lsn)
                await opened.rows.clear_skip()
            opened.applier.position = max(event.end_lsn, before)
        self._report(before)

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """See :meth:`subscriber.abc.Sink.report`.

        Raises:
            TargetUnavailable: the session was lost.
        """
        if self._opened is not None:
            await self._opened.reporter.report(workers, last_error)

    async def ping(self) -> None:
        """See :meth:`subscriber.abc.WatchedSink.ping`.

        Raises:
            TargetUnavailable
        """
        await self._open.session.ping(_PING_SECONDS)
        await self._open.reader.ping(_PING_SECONDS)

    async def activity(self) -> TargetActivity:
        """See :meth:`subscriber.abc.WatchedSink.activity`.

        Raises:
            TargetUnavailable, TargetError
        """
        return await self._watcher.activity() if self._watcher is not None else TargetActivity(math.inf)

    def _require_ready(self) -> None:
        self._open.durability.require_watch()
        if not self._open.has_position:
            raise TargetError(
                f'subscription "{self._open.name}" has no position in the target', hint="call set_position before the first change"
            )

    @property
    def prepares_in_target(self) -> bool:
        """PREPARE TRANSACTION."""
        return True

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Apply a transaction up to PREPARE TRANSACTION. See :meth:`subscriber.abc.Sink.prepare`.

        Raises:
            ApplyError, RelationError, TargetError, TargetUnavailable
        """
        self._require_ready()
        before = self._open.applier.position
        await self._open.two_phase.prepare(prepared.transaction, gate)
        self._report(before)

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """COMMIT PREPARED. See :meth:`subscriber.abc.Sink.commit_prepared`.

        Raises:
            DataLossError: the target has neither the prepared transaction nor the proof that it was committed.
            TargetError, TargetUnavailable
        """
        self._require_ready()
        before = self._open.applier.position
        await self._open.two_phase.commit(message)
        self._report(before)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """ROLLBACK PREPARED. See :meth:`subscriber.abc.Sink.rollback_prepared`.

        Raises:
            TargetError, TargetUnavailable
        """
        self._require_ready()
        before = self._open.applier.position
        await self._open.two_phase.rollback(message)
        self._report(before)

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool]) -> ParallelTransaction:
        """Begin to apply a streamed transaction before its end. See :meth:`subscriber.abc.Sink.open_parallel`.

        Raises:
            TargetUnavailable, TargetError
        """
        self._require_ready()
        opened = self._open
        session = await opened.parallel.take()
        try:
            if await opened.two_phase.is_done(xid, session):
                # it is streamed again, but its end will not arrive: its locks would be held until its COMMIT PREPARED
                raise TargetError(f"transaction {xid} is prepared in the target already")
        except BaseException:
            await opened.parallel.give_back(session)
            raise
        relations = RelationMap(opened.reader, as_owner=self._as_owner, subscription=opened.oid)
        return PostgresParallelTransaction(
            opened.parallel, session, relations, opened.applier, opened.two_phase, xid=xid, gate=gate, prepared=self._report
        )

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        """Those of the others for which a running call waits. See :meth:`subscriber.abc.Sink.holding_up`.

        Raises:
            TargetUnavailable, TargetError
        """
        pid = waiting.pid if isinstance(waiting, PostgresParallelTransaction) else self._open.session.pid
        ours = {other.pid: other for other in others if isinstance(other, PostgresParallelTransaction)}
        return [ours[found] for found in await self._open.parallel.holding_up(pid, ours.keys())]

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Problems that the subscription would have in the target. See :meth:`subscriber.abc.Sink.check`.

        Raises:
            TargetUnavailable: the target cannot be reached.
        """
        origin_none = self._options.origin == "none"
        return await check_target(self._target, tables, two_phase=two_phase, as_owner=self._as_owner, origin_none=origin_none)

    def querying(self) -> contextlib.AbstractAsyncContextManager[Query]:
        """See :meth:`subscriber.abc.PostgresDatabase.querying`."""
        return querying(self._target)

    def open_table(self, table: TableName) -> PostgresTableSink:
        """The table's synchronization. The sink must have been open before, but may be closed now."""
        if self._identity is None:
            raise TargetUnavailable("the sink was never opened", hint="open it first")
        oid, name = self._identity
        return PostgresTableSink(
            self._tables_target,
            table,
            oid=oid,
            application_name=name,
            synchronous_commit=self._options.synchronous_commit,
            as_owner=self._as_owner,
            tally=self._tally,
            origins=self._origins,
        )

    def open_group(self) -> PostgresTableGroup:
        """A group of tables that are synchronized together. See :meth:`subscriber.abc.GroupingSink.open_group`."""
        opened = self._open
        return PostgresTableGroup(
            self._tables_target,
            oid=opened.oid,
            application_name=opened.name,
            synchronous_commit=self._options.synchronous_commit,
            as_owner=self._as_owner,
            origins=self._origins,
            fenced=opened.parallel.fence_query,
            is_current=lambda: self._opened is opened,
        )

    async def close(self) -> None:
        """Flush commits, release the lock, and disconnect. Idempotent."""
        opened, self._opened = self._opened, None
        watcher, self._watcher = self._watcher, None
        self._tally.close()
        if watcher is not None:
            await watcher.close()
        if opened is None:
            return
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._leave(opened)
        except TargetError:
            # commits that are not on disk were not acknowledged, so the publisher sends them again
            return
        except TimeoutError:
            _log.warning("the target did not finish the last requests within %.0f s: its sessions are closed", _CLOSE_SECONDS)
        finally:
            await opened.durability.close()
            await opened.session.close()
            await opened.reader.close()

    async def _leave(self, opened: _Open) -> None:
        await opened.parallel.close()
        with contextlib.suppress(TargetError):
            await opened.reporter.count(None)
        await opened.durability.close()
        if not opened.durability.idle and opened.session.usable:
            # a commit that waits for the disk also flushes all earlier commits
            lsn = opened.applier.position
            async with opened.session.transaction():
                await opened.rows.move_position(lsn)
            opened.durability.committed(lsn, None)


def _nothing_applies(_relation: Relation, _final_lsn: Lsn) -> bool:
    return False
