"""An opened SQLAlchemy sink: the stream, the state store and the abilities, on its session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from sqlalchemy import inspect, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.catalog.snapshot_requests import StoredRequests
from subscriber.catalog.statistics import Reporter
from subscriber.catalog.subscription_rows import SubscriptionRows, tell_dropped
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import RelationError, TargetError
from subscriber.interfaces import (
    ApplyStatistics,
    Batch,
    ColumnPlanner,
    NewColumnValues,
    PublishedTable,
    Row,
    SubscriptionState,
    TableEntry,
    TableName,
    TableState,
)
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.catalog_sink import CatalogSink, Owner, nothing_applies
from subscriber.sinks.sqlalchemy.apply.applier import Applier
from subscriber.sinks.sqlalchemy.apply.prepared_transactions import PreparedTransactions
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap
from subscriber.sinks.sqlalchemy.catalog.rows import existing_tables, subscription_rows
from subscriber.sinks.sqlalchemy.catalog.store import SqlAlchemyStore
from subscriber.sinks.sqlalchemy.catalog_tables import PREFIX, TABLES
from subscriber.sinks.sqlalchemy.conflict_log import ConflictLog
from subscriber.sinks.sqlalchemy.copy.sqlalchemy_table_sink import SqlAlchemyTableSink
from subscriber.sinks.sqlalchemy.copy.staging import Staging
from subscriber.sinks.sqlalchemy.copy.table_group import SqlAlchemyTableGroup
from subscriber.sinks.sqlalchemy.repair import repair_rows
from subscriber.sinks.sqlalchemy.schema.column_steps import with_target
from subscriber.sinks.sqlalchemy.schema.names import target_name
from subscriber.sinks.sqlalchemy.schema.reflection import reflect_all
from subscriber.sinks.sqlalchemy.schema.table_creation import create_table, unusable, usable
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.locks import Locks
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.sinks.sqlalchemy.session.settings import short_waits, usual_waits
from subscriber.transaction.column_history import KnownColumns
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["OpenedSqlAlchemySink", "SqlAlchemyTarget", "leave", "table_names"]

_CLOSE_SECONDS: Final = 5.0
"""How long the target may take to release the locks."""
_CREATED_AT_ONCE: Final = 100
"""How many tables are made by one transaction of SQLite's."""
_PING_SECONDS: Final = 10.0
"""How long an idle session may take to answer."""


class SqlAlchemyTarget:
    """What a sink and everything that it opens share.

    Args:
        url: a URL of SQLAlchemy.
        settings: the process's settings.
        options: of the subscription.

    Attributes:
        database: the target.
        log: of conflicts, or None.
        published: the publisher's descriptions of the tables.
        statistics: counters since the sink was created.
        tally: counts there, and remembers what was reported.
        fence: the subscription's, once the sink was opened. It stays the same, so that synchronizations that have begun continue.
    """

    def __init__(self, url: str, settings: Settings, options: SubscriptionOptions) -> None:
        self.database = Database(url, replicates=True)
        self.settings = settings
        self._rules = options.conflict_rules
        self.log: ConflictLog | None = None
        if options.conflict_log:
            table = TableName(*options.conflict_log_table)
            self.log = ConflictLog(table, rows=options.conflict_log_rows, retention=options.conflict_log_retention)
        self.published: dict[TableName, PublishedTable] = {}
        self.statistics = ApplyStatistics()
        self.tally = Tally(self.statistics)
        self.fence: Fence | None = None

    def make_relations(self) -> RelationMap:
        """Plans for the relations of a stream."""
        return RelationMap(self.published, self.settings, self._rules, self.log)

    async def creates(self, connection: AsyncConnection, tables: Sequence[PublishedTable]) -> bool:
        """Whether to create missing tables: as ``create_tables`` says.

        By default they are created only in an SQLite file whose tables all belong to this program, to its subscriptions or to ``tables``.
        """
        if self.settings.create_tables is not None:
            return self.settings.create_tables
        if self.database.path is None:
            return False
        rel = TABLES["pg_subscription_rel"]
        known = [TableName(*row) for row in await connection.execute(select(rel.c.srnspname, rel.c.srrelname))]
        ours = {str(target_name(name)).lower() for name in (*known, *(table.name for table in tables))}
        ours |= {self.log.name.lower()} if self.log is not None else set()
        found = await connection.run_sync(table_names)
        return all(name.startswith(PREFIX) or name.lower() in ours for name in found)


class OpenedSqlAlchemySink(CatalogSink):
    """A :class:`subscriber.interfaces.OpenedSink` for databases that SQLAlchemy supports.

    Args:
        target: shared with the sink.
        session: applies.
        locks: has the writer's lock.
        fence: raised for this writer.
        state: of the subscription, as stored.
        store: of the catalog.
        on_durable: is told what is durable.
    """

    def __init__(
        self,
        target: SqlAlchemyTarget,
        session: Session,
        locks: Locks,
        *,
        fence: Fence,
        state: SubscriptionState,
        store: SqlAlchemyStore,
        on_durable: Callable[[Lsn], None],
    ) -> None:
        self.session = session
        # the locks of the given store belong to the session that applies
        self._asked_locks = Locks(target.database)
        self.requests = StoredRequests(SqlAlchemyStore(target.database, self._asked_locks), state.oid, state.name)
        self._target = target
        self._database = target.database
        self._locks = locks
        self._fence = fence
        self._not_created: dict[TableName, RelationError] = {}
        self._closed = False
        self._applier = Applier(
            session,
            fence,
            target.make_relations(),
            Owner(state.oid),
            position=state.position.lsn if state.position else INVALID_LSN,
            tally=target.tally,
            committed=on_durable,
        )
        self._two_phase = PreparedTransactions(session, fence, self._applier, self._make_relations)
        reporter = Reporter(store.transaction, store.now, state.oid, target.tally)
        super().__init__(state, target.statistics, applier=self._applier, two_phase=self._two_phase, reporter=reporter)

    @contextlib.asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that holds the fence."""
        async with self.session.transaction() as connection:
            await self._fence.hold(connection)
            yield connection

    def _rows(self, connection: AsyncConnection) -> SubscriptionRows:
        """The subscription's rows, in the open transaction."""
        return subscription_rows(connection, self.state.oid)

    def _make_relations(self) -> RelationMap:
        relations = self._target.make_relations()
        relations.new_values = self._applier.relations.new_values
        return relations

    def fill(self, values: NewColumnValues) -> None:
        """See :meth:`subscriber.interfaces.FillingSink.fill`."""
        self._applier.relations.new_values = values

    def follow(self, planner: ColumnPlanner) -> None:
        """See :meth:`subscriber.interfaces.FollowingSink.follow`."""
        self._applier.relations.follow(planner, self._rows)

    async def store_columns(self, columns: Mapping[TableName, KnownColumns]) -> None:
        """See :meth:`subscriber.interfaces.FollowingSink.store_columns`."""
        async with self._transaction() as connection:
            for name, table in (await reflect_all(connection, list(columns))).items():
                await self._rows(connection).store_columns(name, with_target(columns[name], table, learned=True))

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[SubscriptionRows]:
        """Open a transaction on the subscription's rows. See :meth:`subscriber.catalog.subscription_rows.CatalogStateStore.changing`."""
        async with self._transaction() as connection:
            yield self._rows(connection)

    async def _clear_skip(self, connection: AsyncConnection) -> None:
        """Clear the LSN of the transaction to skip, in the open transaction."""
        await self._rows(connection).clear_skip()

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data. Durable on return."""
        if lsn > self._applier.position:
            await self._applier.move(lsn)
        else:
            self._applier.settled()

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """See :meth:`subscriber.interfaces.DescribedSink.describe_tables`.

        If a table cannot be created, :meth:`add_tables` returns the error.
        """
        self._target.published.update({table.name: table for table in tables})
        # plan the relations again, with the new descriptions
        self._applier.relations.forget_targets()
        async with self.session.snapshot() as connection:
            possible = await usable(connection, tables)
            there = await existing_tables(connection, [table.name for table in possible])
            missing = [table for table in possible if table.name not in there]
            if not missing or not await self._target.creates(connection, tables):
                return
        for table in missing:
            self._not_created.pop(table.name, None)
        # on some databases each commits by itself
        size = _CREATED_AT_ONCE if self._database.path is not None else 1
        for start in range(0, len(missing), size):
            with contextlib.suppress(RelationError):
                await self._create(missing[start : start + size])

    async def _create(self, tables: Sequence[PublishedTable]) -> None:
        async with self._transaction() as connection:
            for table in tables:
                try:
                    await create_table(connection, table)
                except RelationError as error:
                    self._not_created[table.name] = error
                    if self._database.path is None:
                        raise
                    # SQLite takes back that CREATE TABLE only

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """Return the subscription's tables. Remove those dropped in the target. See :meth:`~subscriber.interfaces.StateStore.tables`.

        The fence and the locks on the tables' rows keep synchronizations of an earlier run from storing anything more.
        """
        async with self._transaction() as connection:
            rows = self._rows(connection)
            known = await rows.tables(lock=True)
            there = await existing_tables(connection, [name for name, _ in known])
            # with on_error = park others stay, too, and are parked at their next change
            parks = await rows.parks()
            kept = [(name, row) for name, row in known if name in there or parks or row.entry.state is TableState.PARKED]
            for name, row in known:
                if (name, row) not in kept:
                    await rows.remove_table(row.relid)
                    tell_dropped(name)
        return {name: row.entry for name, row in kept}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables with their first state. See :meth:`subscriber.interfaces.StateStore.add_tables`."""
        async with self._transaction() as connection:
            rows = self._rows(connection)
            known = {name for name, _ in await rows.tables()}
            new = [table for table in tables if table not in known]
            failed = {table: self._not_created[table] for table in new if table in self._not_created}
            failed |= await unusable(connection, new, list(known), self._target.published)
            return {**failed, **await rows.add_tables([table for table in tables if table not in failed], entry)}

    async def remove_table(self, table: TableName) -> None:
        """Remove the entry of a table, its position and its staging table. Its rows stay."""
        async with self.changing() as rows:
            row = await rows.table(table, lock=True)
            if row is None:
                return
            await rows.remove_table(row.relid)
        self._target.published.pop(table, None)
        async with self._transaction() as connection:
            await Staging(row.relid).drop(connection)

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state of tables from SYNCDONE to READY."""
        async with self.changing() as rows:
            for name, row in await rows.tables():
                if name in tables:
                    await rows.set_entry(row.relid, TableEntry(TableState.READY, tables[name]), only_from=TableState.SYNCDONE, srcopy=None)

    async def ping(self) -> None:
        """See :meth:`subscriber.interfaces.PingedSink.ping`."""
        await self.session.ping(_PING_SECONDS)

    async def apply(self, batch: Batch) -> None:
        """Apply a batch together with its end LSN. See :meth:`subscriber.interfaces.Stream.apply`."""
        self._require_ready()
        await self._applier.apply(batch)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """See :meth:`subscriber.interfaces.Stream.skip`."""
        self._require_ready()
        match event:
            case CommitPrepared():
                await self._two_phase.skip(event, self._clear_skip)
            case PreparedTransaction(transaction):
                await self._applier.skip(transaction)
                nothing = PreparedTransaction(transaction.without_records(), event.gid)
                await self._two_phase.prepare(nothing, nothing_applies, self._clear_skip)
            case Transaction():
                await self._applier.skip(event)
                await self._applier.move(event.end_lsn, self._clear_skip)

    @property
    def prepares_in_target(self) -> bool:
        """Prepared transactions are stored."""
        return False

    async def repair(self, table: PublishedTable, key: Sequence[str], keys: Sequence[Row], rows: Sequence[Row]) -> None:
        """See :meth:`subscriber.interfaces.RepairingSink.repair`. It waits for a row's lock for a second only: apply is held meanwhile."""
        kind = self._database.dialect_name
        async with self.changing() as subscription:
            await subscription.require_alone([table.name])
        async with self._transaction() as connection:
            try:
                for statement in short_waits(kind):
                    await connection.exec_driver_sql(statement)
                await repair_rows(connection, table, key=key, keys=keys, rows=rows)
            finally:
                for statement in usual_waits(kind):
                    await connection.exec_driver_sql(statement)

    def open_table(self, table: TableName) -> SqlAlchemyTableSink:
        """Return the table's synchronization, which has its own session."""
        return SqlAlchemyTableSink(
            self._database,
            self._fence,
            table,
            published=self._target.published,
            settings=self._target.settings,
            make_relations=self._target.make_relations,
            tally=self._target.tally,
        )

    def open_group(self) -> SqlAlchemyTableGroup:
        """For tables that are synchronized together. See :meth:`subscriber.interfaces.GroupingSink.open_group`."""
        return SqlAlchemyTableGroup(self._database, self._fence, lambda: not self._closed)

    async def close(self) -> None:
        """Release the writer's lock and disconnect. Idempotent; also after errors."""
        if self._closed:
            return
        self._closed = True
        self._target.tally.close()
        try:
            await leave(self._locks, self.session)
        finally:
            # even if the block above is cancelled
            try:
                with contextlib.suppress(TargetError, TimeoutError):
                    async with asyncio.timeout(_CLOSE_SECONDS):
                        await self._asked_locks.close()
            finally:
                await self._database.close()


async def leave(locks: Locks, session: Session) -> None:
    """Release the locks and close the session."""
    try:
        # a session that is lost, or does not answer, releases its locks when it is closed
        with contextlib.suppress(TargetError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await locks.close()
    finally:
        await session.close()


def table_names(connection: Connection) -> list[str]:
    """The names of all tables of the default schema."""
    return inspect(connection).get_table_names()
