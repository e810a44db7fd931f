"""An opened PostgreSQL sink: the stream, the state store and the abilities, on its sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from subscriber.catalog.snapshot_requests import StoredRequests
from subscriber.config import SubscriptionOptions
from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    ColumnPlanner,
    ExportSnapshot,
    ParallelTransaction,
    PublishedTable,
    Row,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
)
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.catalog_sink import CatalogSink, Owner, nothing_applies
from subscriber.sinks.postgres.apply.applier import Applier
from subscriber.sinks.postgres.apply.column_changes import with_target
from subscriber.sinks.postgres.apply.prepared_transactions import PreparedTransactions
from subscriber.sinks.postgres.catalog.session_rows import SessionRows
from subscriber.sinks.postgres.catalog.store import PostgresReporter, PostgresStore
from subscriber.sinks.postgres.catalog.target_identity import REBIND_TABLES, follow_tables
from subscriber.sinks.postgres.parallel.sessions import ParallelSessions
from subscriber.sinks.postgres.parallel.transaction import PostgresParallelTransaction
from subscriber.sinks.postgres.session.activity import Watcher
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.durability import Durability
from subscriber.sinks.postgres.session.locks import table_key, take
from subscriber.sinks.postgres.session.origins import Origins, drop_origins
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.snapshots import exporting
from subscriber.sinks.postgres.tables.conflict_log import ConflictLog
from subscriber.sinks.postgres.tables.relation_map import RelationMap
from subscriber.sinks.postgres.tables.table_reader import read_tables
from subscriber.transaction.column_history import KnownColumns
from subscriber.transaction.model import PreparedTransaction, Transaction

if TYPE_CHECKING:
    from subscriber.sinks.postgres.copy.postgres_table_sink import PostgresTableSink
    from subscriber.sinks.postgres.copy.table_group import PostgresTableGroup
    from subscriber.sinks.postgres.parallel.groups import ParallelGroups

__all__ = ["OpenedPostgresSink", "PostgresTarget"]

_log = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 5.0
"""Time limit for the final statements of ``close``, so that a target that does not answer cannot block the end of the run."""

_PING_SECONDS: Final = 10.0
"""Time limit for the answer of an idle session."""


class PostgresTarget:
    """What a sink and everything that it opens share.

    Args:
        target: libpq URL or conninfo of the target database.
        options: options of the subscription.

    Attributes:
        applying: gives sessions that apply.
        copying: gives sessions that synchronize tables.
        statistics: counters since the sink was created.
        tally: counts there, and remembers what was reported.
        origins: the replication origins of the sessions.
    """

    def __init__(self, target: str, options: SubscriptionOptions) -> None:
        self.options = options
        self.rules = options.conflict_rules
        self.log: ConflictLog | None = None
        if options.conflict_log:
            table = TableName(*options.conflict_log_table)
            self.log = ConflictLog(table, rows=options.conflict_log_rows, retention=options.conflict_log_retention)
        self.applying = Target(target)
        self.copying = Target(target)
        self.statistics = ApplyStatistics()
        self.tally = Tally(self.statistics)
        self.origins = Origins(relied_on=options.origin == "none", lost=lambda: self.applying.lost() | self.copying.lost())

    @property
    def as_owner(self) -> bool:
        """Whether changes are made as the owners of the tables."""
        return not self.options.run_as_owner


class OpenedPostgresSink(CatalogSink):
    """A :class:`subscriber.interfaces.OpenedSink` for PostgreSQL 13 to 18.

    Args:
        target: shared with the sink.
        session: applies. It has the writer's lock.
        reader: reads the catalog.
        watcher: observes the sessions.
        state: of the subscription, as stored.
        parallel: sessions for parallel apply.
        workers: the number of sessions that apply groups of transactions (``apply_workers``).
        on_durable: is told what is durable.
    """

    def __init__(
        self,
        target: PostgresTarget,
        session: ApplySession,
        reader: CatalogReader,
        *,
        watcher: Watcher,
        state: SubscriptionState,
        parallel: ParallelSessions,
        workers: int,
        on_durable: Callable[[Lsn], None],
    ) -> None:
        self.session = session
        self.reader = reader
        self._target = target
        self._watcher = watcher
        self._parallel = parallel
        self._rows = SessionRows(session, state.oid)
        self._durability = Durability(reader, on_durable)
        self._closed = False
        position = state.position.lsn if state.position else INVALID_LSN
        owner = Owner(state.oid)
        self._applier = Applier(
            session, self._make_relations(), owner, position=position, tally=target.tally, committed=self._durability.committed
        )
        self._groups: ParallelGroups | None = None
        if workers > 1:
            from subscriber.sinks.postgres.parallel.groups import ParallelGroups  # noqa: PLC0415 -- most runs do not need it

            self._groups = ParallelGroups(parallel, self._applier, reader, workers=workers, pid=session.pid)
        self._two_phase = PreparedTransactions(session, self._rows, self._applier)
        self._reporter = PostgresReporter(PostgresStore(reader), state.oid, target.tally)
        super().__init__(state, target.statistics, applier=self._applier, two_phase=self._two_phase, reporter=self._reporter)

    def _make_relations(self) -> RelationMap:
        return RelationMap(
            self.reader, as_owner=self._target.as_owner, subscription=self._rows.oid, rules=self._target.rules, log=self._target.log
        )

    def follow(self, planner: ColumnPlanner) -> None:
        """See :meth:`subscriber.interfaces.FollowingSink.follow`."""
        self._applier.relations.follow(planner)

    async def store_columns(self, columns: Mapping[TableName, KnownColumns]) -> None:
        """See :meth:`subscriber.interfaces.FollowingSink.store_columns`."""
        tables = await read_tables(self.reader, columns, as_owner=self._target.as_owner)
        await super().store_columns({name: with_target(columns[name], table, learned=True) for name, table in tables.items()})

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[SessionRows]:
        """The subscription's rows. See :meth:`subscriber.catalog.subscription_rows.CatalogStateStore.changing`."""
        async with self.session.transaction():
            yield self._rows

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data. On return it is on disk, and all earlier commits too."""
        self._durability.require_watch()
        if lsn <= self._applier.position and self._durability.idle:
            return
        async with self.session.transaction():
            await self._rows.move_position(lsn)
        self._applier.position = max(lsn, self._applier.position)
        self._durability.committed(self._applier.position, None)

    def _moved(self, before: Lsn) -> None:
        """Report a position that moved and is on disk. If it did not move, the call was repeated, and the position is reported again."""
        if self._applier.position > before or self._durability.idle:
            self._durability.committed(self._applier.position, None)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """The subscription's tables. First waits until no synchronization of a dead process can change them."""
        ended = False
        for relid in await self._rows.in_state(TableState.FINISHEDCOPY):
            # A COMMIT of SYNCDONE may still run. If the state were read as FINISHEDCOPY, the apply worker would skip later changes.
            key = table_key(self.state.oid, relid)
            what = f"synchronization of table with oid {relid}"
            ended |= await take(self.session.fetch, key, what, lost=self._target.copying.lost())
            await self.session.fetch("SELECT pg_catalog.pg_advisory_unlock(%s)", key)
        if ended:
            # the terminated session may have waited for a synchronous standby in COMMIT: this COMMIT waits for the standby too
            async with self.changing() as changing:
                await changing.touch()
        await self.reader.fetch(REBIND_TABLES.format("$1"), self.state.oid)
        await follow_tables(self.reader, self.state.oid)
        return {name: row.entry for name, row in await self._rows.tables()}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables with their first state. Returns the errors of those that do not exist in the target, or are no tables."""
        async with self.changing() as rows:
            return await rows.add_tables(tables, entry)

    async def remove_table(self, table: TableName) -> None:
        """Remove a table from the subscription."""
        found = await self._rows.find(table)
        if found is not None:
            _, relid = found
            async with self.changing() as rows:
                await rows.remove_table(relid)
            if self.session.origin is not None:
                await drop_origins(self.session.fetch, self.state.oid, relid, wait=False)

    async def park(self, tables: Mapping[TableName, TableEntry]) -> Mapping[TableName, TableEntry]:
        """See :meth:`subscriber.interfaces.ParkingSink.park`.

        Raises:
            RelationError: a trigger of another table fires for changes.
            TargetError, TargetUnavailable
        """
        storable = self.reader.storable
        return await super().park({table: replace(entry, error=storable(entry.error or "")) for table, entry in tables.items()})

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state from SYNCDONE to READY. Ignores tables that were dropped in the target: their next change is an error."""
        async with self.changing() as rows:
            found = await rows.rows.relids(list(tables))
            await rows.set_ready({relid: tables[table] for table, relid in found.items() if not isinstance(relid, RelationError)})

    async def apply(self, batch: Batch) -> None:
        """Apply a batch, and store its end LSN in the same transaction. See :meth:`subscriber.interfaces.Stream.apply`."""
        self._require_ready()
        before = self._applier.position
        await (self._groups or self._applier).apply(batch)
        if self._applier.position == before and self._durability.idle:
            self._durability.committed(before, None)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """See :meth:`subscriber.interfaces.Stream.skip`."""
        assert not isinstance(event, CommitPrepared), "it prepares in the target"
        with self._moving():
            if isinstance(event, PreparedTransaction):
                await self._applier.skip(event.transaction)
                await self._two_phase.prepare(PreparedTransaction(event.transaction.without_records(), event.gid), nothing_applies)
                await self.clear_skip()
            else:
                await self._applier.skip(event)
                async with self.session.transaction():
                    await self._rows.move_position(event.end_lsn)
                    await self._rows.clear_skip()
                self._applier.position = max(event.end_lsn, self._applier.position)

    async def ping(self) -> None:
        """See :meth:`subscriber.interfaces.PingedSink.ping`."""
        await self.session.ping(_PING_SECONDS)
        await self.reader.ping(_PING_SECONDS)

    def _require_ready(self) -> None:
        self._durability.require_watch()
        super()._require_ready()

    @property
    def prepares_in_target(self) -> bool:
        """PREPARE TRANSACTION."""
        return True

    async def open_parallel(self, xid: int, gate: Callable[[Relation], bool | None], *, streamed: bool = True) -> ParallelTransaction:
        """Begin to apply a transaction before its end. See :meth:`subscriber.interfaces.ParallelSink.open_parallel`."""
        self._require_ready()
        session = await self._parallel.take()
        try:
            if await self._two_phase.is_done(xid, session):
                # it is streamed again, but its end will not arrive: its locks would be held until its COMMIT PREPARED
                raise TargetError(f"transaction {xid} is prepared in the target already")
        except BaseException:
            await self._parallel.give_back(session)
            raise
        relations = self._make_relations()
        if not streamed:
            relations.adopt(self._applier.relations)
        return PostgresParallelTransaction(
            self._parallel,
            session,
            relations,
            self._applier,
            self._two_phase,
            xid=xid,
            streamed=streamed,
            gate=gate,
            prepared=self._moved,
        )

    async def holding_up(self, waiting: ParallelTransaction | None, others: Sequence[ParallelTransaction]) -> Sequence[ParallelTransaction]:
        """Those of the others for which a running call waits. See :meth:`subscriber.interfaces.ParallelSink.holding_up`."""
        if isinstance(waiting, PostgresParallelTransaction):
            pid = waiting.pid
        else:
            pid = self.session.pid if self._groups is None else self._groups.pid
        ours = {other.pid: other for other in others if isinstance(other, PostgresParallelTransaction)}
        return [ours[found] for found in await self._parallel.holding_up(pid, ours.keys())]

    @property
    def requests(self) -> StoredRequests:
        """Requests of other processes, on the reading session."""
        return StoredRequests(PostgresStore(self.reader), self.state.oid, self.state.name)

    def exporting(self) -> contextlib.AbstractAsyncContextManager[ExportSnapshot]:
        """See :meth:`subscriber.interfaces.ExportingSink.exporting`."""
        return exporting(self._target.applying, self.state.name)

    async def repair(self, table: PublishedTable, key: Sequence[str], keys: Sequence[Row], rows: Sequence[Row]) -> None:
        """See :meth:`subscriber.interfaces.RepairingSink.repair`."""
        from subscriber.sinks.postgres.copy.repair import repair_rows  # noqa: PLC0415 -- as above

        self._require_ready()
        oid, as_owner = self.state.oid, self._target.as_owner
        await repair_rows(self.session, self.reader, table, oid=oid, key=key, keys=keys, rows=rows, as_owner=as_owner)

    def open_table(self, table: TableName) -> PostgresTableSink:
        """The table's synchronization. See :meth:`subscriber.interfaces.OpenedSink.open_table`."""
        from subscriber.sinks.postgres.copy.postgres_table_sink import PostgresTableSink  # noqa: PLC0415 -- as above

        return PostgresTableSink(
            self._target.copying,
            table,
            oid=self.state.oid,
            application_name=self.state.name,
            synchronous_commit=self._target.options.synchronous_commit,
            as_owner=self._target.as_owner,
            tally=self._target.tally,
            origins=self._target.origins,
            rules=self._target.rules,
            log=self._target.log,
        )

    def open_group(self) -> PostgresTableGroup:
        """A group of tables that are synchronized together. See :meth:`subscriber.interfaces.GroupingSink.open_group`."""
        from subscriber.sinks.postgres.copy.table_group import PostgresTableGroup  # noqa: PLC0415 -- as above

        return PostgresTableGroup(
            self._target.copying,
            oid=self.state.oid,
            application_name=self.state.name,
            synchronous_commit=self._target.options.synchronous_commit,
            as_owner=self._target.as_owner,
            origins=self._target.origins,
            fenced=self._parallel.fence_query,
            is_current=lambda: not self._closed,
        )

    async def close(self) -> None:
        """Flush commits, release the lock, and disconnect. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._target.tally.close()
        async with contextlib.AsyncExitStack() as closing:
            # each is closed even if this call is cancelled
            for each in (self.reader, self.session, self._durability, self._parallel):
                closing.push_async_callback(each.close)
            if self._groups is not None:
                closing.push_async_callback(self._groups.close)
            try:
                await self._watcher.close()
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._leave()
            except TargetError:
                # commits that are not on disk were not acknowledged, so the publisher sends them again
                return
            except TimeoutError:
                _log.warning("the target did not finish the last requests within %.0f s: its sessions are closed", _CLOSE_SECONDS)

    async def _leave(self) -> None:
        if self._groups is not None:
            await self._groups.close()
        await self._parallel.close()
        with contextlib.suppress(TargetError):
            await self._reporter.count(None)
        await self._durability.close()
        if not self._durability.idle and self.session.usable:
            # a commit that waits for the disk also flushes all earlier commits
            lsn = self._applier.position
            async with self.session.transaction():
                await self._rows.move_position(lsn)
            self._durability.committed(lsn, None)
