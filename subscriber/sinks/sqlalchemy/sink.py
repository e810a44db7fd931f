"""The sink for databases that SQLAlchemy supports: the class that other packages use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final

from sqlalchemy import inspect, select
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import AsyncConnection

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
    TargetActivity,
    WorkerActivity,
)
from subscriber.catalog.definition import require_name
from subscriber.catalog.statistics import Reporter
from subscriber.catalog.store import writer_key
from subscriber.catalog.subscription_rows import CatalogStateStore, SubscriptionRows
from subscriber.catalog.subscriptions import ensure_subscription, require_unclaimed
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import RelationError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.sinks.apply_counters import Tally
from subscriber.sinks.sqlalchemy.apply.applier import Applier, Owner
from subscriber.sinks.sqlalchemy.apply.prepared_transactions import PreparedTransactions
from subscriber.sinks.sqlalchemy.apply.relation_map import RelationMap
from subscriber.sinks.sqlalchemy.catalog.migration import ensure_catalog
from subscriber.sinks.sqlalchemy.catalog.rows import existing_tables, subscription_rows
from subscriber.sinks.sqlalchemy.catalog.store import SqlAlchemyStore
from subscriber.sinks.sqlalchemy.catalog_tables import PREFIX
from subscriber.sinks.sqlalchemy.checks import check_target, subscription_exists
from subscriber.sinks.sqlalchemy.copy.staging import Staging
from subscriber.sinks.sqlalchemy.copy.table_group import SqlAlchemyTableGroup
from subscriber.sinks.sqlalchemy.copy.table_sync import SqlAlchemyTableSink
from subscriber.sinks.sqlalchemy.schema.names import target_name
from subscriber.sinks.sqlalchemy.schema.table_creation import create_table, unusable, usable
from subscriber.sinks.sqlalchemy.session.activity import activity
from subscriber.sinks.sqlalchemy.session.database import Database, Session
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.locks import Locks
from subscriber.transaction.model import PreparedTransaction, Transaction

__all__ = ["SqlAlchemySink"]

_CLOSE_SECONDS: Final = 5.0
"""How long the target may take to release the locks."""
_CREATED_AT_ONCE: Final = 100
"""How many tables are made by one transaction of SQLite's."""
_PING_SECONDS: Final = 10.0
"""How long an idle session may take to answer."""


class _Open:
    """The objects that exist between ``open`` and ``close``."""

    def __init__(
        self,
        store: SqlAlchemyStore,
        session: Session,
        locks: Locks,
        fence: Fence,
        state: SubscriptionState,
        *,
        make_relations: Callable[[], RelationMap],
        tally: Tally,
        on_durable: Callable[[Lsn], None],
    ) -> None:
        self.session = session
        self.locks = locks
        self.fence = fence
        self.name = state.name
        self._tables = store.database.tables
        self.has_position = state.position is not None
        self.applier = Applier(
            session,
            self._tables,
            fence,
            make_relations(),
            Owner(state.oid),
            position=state.position.lsn if state.position else INVALID_LSN,
            tally=tally,
            committed=on_durable,
        )
        self.two_phase = PreparedTransactions(session, fence, self._tables, self.applier, make_relations)
        self.reporter = Reporter(store.transaction, store.now, state.oid, tally)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that holds the fence."""
        async with self.session.transaction() as connection:
            await self.fence.hold(connection)
            yield connection

    def rows(self, connection: AsyncConnection) -> SubscriptionRows:
        """Return the subscription's rows, in the open transaction."""
        return subscription_rows(connection, self._tables, self.fence.oid)

    @contextlib.asynccontextmanager
    async def changing(self) -> AsyncIterator[SubscriptionRows]:
        """Open a transaction that holds the fence, on the subscription's rows."""
        async with self.transaction() as connection:
            yield self.rows(connection)

    async def clear_skip(self, connection: AsyncConnection) -> None:
        """Clear the LSN of the transaction to skip, in the open transaction."""
        await self.rows(connection).clear_skip()


class SqlAlchemySink(CatalogStateStore):
    """A :class:`subscriber.abc.Sink` for SQLite, MariaDB and MySQL, and other databases for which SQLAlchemy has an asynchronous driver.

    Args:
        target: a URL of SQLAlchemy.
        options: the subscription's parameters.
        settings: the process's settings.
        defined: the subscription was created by ``subscriber create``: :meth:`open` does not create it.

    Raises:
        ConfigurationError: the text is not a URL, or there is no driver for this kind of database.
    """

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        self._target = target
        self._defined = defined
        # a subscription that existed is not created again: no process would run the new one
        self._known = defined
        self._database = Database(target, replicates=True)
        self._options = options
        self._settings = settings
        self._statistics = ApplyStatistics()
        self._tally = Tally(self._statistics)
        self._published: dict[TableName, PublishedTable] = {}
        self._opened: _Open | None = None
        self._lost: int | None = None
        self._fence: Fence | None = None
        self._not_created: dict[TableName, RelationError] = {}

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        return self._statistics

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise TargetUnavailable("the sink is not open", hint="open it first")
        return self._opened

    def _make_relations(self) -> RelationMap:
        return RelationMap(self._published, self._settings)

    def changing(self) -> contextlib.AbstractAsyncContextManager[SubscriptionRows]:
        """Open a transaction on the subscription's rows. See :meth:`subscriber.catalog.subscription_rows.CatalogStateStore.changing`.

        Raises:
            TargetUnavailable
        """
        return self._open.changing()

    async def exists(self, name: str) -> bool:
        """Whether the target has the subscription. See :meth:`subscriber.abc.Sink.exists`.

        Raises:
            TargetUnavailable, TargetError
        """
        require_name(name)
        database = Database(self._target, create=False)
        try:
            found = await subscription_exists(database, name)
        finally:
            await database.close()
        self._known = found or self._defined
        return found

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> SubscriptionState:
        """See :meth:`subscriber.abc.Sink.open`.

        The state is read after the fence was raised, so that no transaction of an earlier writer can change it any more.

        Raises:
            SubscriptionChanged: it was dropped or renamed after it was created by a verb, or after this sink had found or opened it.
            TargetUnavailable, TargetError, SubscriptionInUse
        """
        require_name(name)
        await self.close()
        await ensure_catalog(self._database)
        session = await self._database.connect()
        locks = Locks(self._database, session)
        store = SqlAlchemyStore(self._database, locks)
        try:
            oid = await ensure_subscription(store, name, self._options, known=self._known)
            await locks.take(writer_key(oid), f'subscription "{name}"', lost=self._lost)
            self._lost = session.number
            if not self._defined:
                await require_unclaimed(store, oid, name)
            if self._fence is None or self._fence.oid != oid:
                self._fence = Fence(self._database.dialect_name, self._database.tables, oid)
            async with session.transaction() as connection:
                await self._fence.raise_(connection)
            self._fence.raised()
            async with session.transaction() as connection:
                await self._fence.hold(connection)
                state = await subscription_rows(connection, self._database.tables, oid).subscription()
        except BaseException:
            await _leave(locks, session)
            raise
        self._known = True
        self._opened = _Open(
            store,
            session,
            locks,
            self._fence,
            state,
            make_relations=self._make_relations,
            tally=self._tally,
            on_durable=on_durable,
        )
        return state

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one on another timeline. Durable on return."""
        opened = self._open
        async with opened.changing() as rows:
            await rows.save_position(0, position)
        opened.has_position = True
        opened.applier.position = position.lsn

    async def advance(self, lsn: Lsn) -> None:
        """Move the position without data. Durable on return."""
        opened = self._open
        if lsn > opened.applier.position:
            await opened.applier.move(lsn)
        else:
            opened.applier.settled()

    async def describe_tables(self, tables: Sequence[PublishedTable]) -> None:
        """See :meth:`subscriber.abc.DescribedSink.describe_tables`.

        If a table cannot be created, :meth:`add_tables` returns the error.

        Raises:
            TargetError, TargetUnavailable
        """
        self._published.update({table.name: table for table in tables})
        opened = self._open
        # plan the relations again, with the new descriptions
        opened.applier.relations.forget_targets()
        async with opened.session.snapshot() as connection:
            possible = await usable(connection, tables)
            there = await existing_tables(connection, [table.name for table in possible])
            missing = [table for table in possible if table.name not in there]
            if not missing or not await self._creates(connection, tables):
                return
        for table in missing:
            self._not_created.pop(table.name, None)
        # on some databases each commits by itself
        size = _CREATED_AT_ONCE if self._database.path is not None else 1
        for start in range(0, len(missing), size):
            with contextlib.suppress(RelationError):
                await self._create(missing[start : start + size])

    async def _create(self, tables: Sequence[PublishedTable]) -> None:
        async with self._open.transaction() as connection:
            for table in tables:
                try:
                    await create_table(connection, table)
                except RelationError as error:
                    self._not_created[table.name] = error
                    if self._database.path is None:
                        raise
                    # SQLite takes back that CREATE TABLE only

    async def _creates(self, connection: AsyncConnection, tables: Sequence[PublishedTable]) -> bool:
        """Whether to create missing tables: as ``create_tables`` says.

        By default they are created only in an SQLite file whose tables all belong to this program, to its subscriptions or to ``tables``.
        """
        if self._settings.create_tables is not None:
            return self._settings.create_tables
        if self._database.path is None:
            return False
        rel = self._database.tables.pg_subscription_rel
        known = [TableName(*row) for row in await connection.execute(select(rel.c.srnspname, rel.c.srrelname))]
        ours = {str(target_name(name)).lower() for name in (*known, *(table.name for table in tables))}
        found = await connection.run_sync(_table_names)
        return all(name.startswith(PREFIX) or name.lower() in ours for name in found)

    async def tables(self) -> Mapping[TableName, TableEntry]:
        """Return the subscription's tables; remove those that were dropped in the target. See :meth:`subscriber.abc.Sink.tables`.

        The fence and the locks on the tables' rows keep synchronizations of an earlier run from storing anything more.
        """
        opened = self._open
        async with opened.transaction() as connection:
            rows = opened.rows(connection)
            known = await rows.tables(lock=True)
            there = await existing_tables(connection, [name for name, _ in known if name is not None])
            for name, row in known:
                if name not in there:
                    await rows.remove_table(row.relid)
        return {name: row.entry for name, row in known if name is not None and name in there}

    async def add_tables(self, tables: Sequence[TableName], entry: TableEntry) -> Mapping[TableName, RelationError]:
        """Add tables with their first state. See :meth:`subscriber.abc.StateStore.add_tables`."""
        opened = self._open
        async with opened.transaction() as connection:
            rows = opened.rows(connection)
            known = {name for name, _ in await rows.tables() if name is not None}
            new = [table for table in tables if table not in known]
            failed = {table: self._not_created[table] for table in new if table in self._not_created}
            failed |= await unusable(connection, new, list(known), self._published)
            return {**failed, **await rows.add_tables([table for table in tables if table not in failed], entry)}

    async def remove_table(self, table: TableName) -> None:
        """Remove the entry of a table, its position and its staging table. Its rows stay."""
        opened = self._open
        async with opened.changing() as rows:
            row = await rows.table(table, lock=True)
            if row is None:
                return
            await rows.remove_table(row.relid)
        self._published.pop(table, None)
        async with opened.transaction() as connection:
            await Staging(row.relid).drop(connection)

    async def set_ready(self, tables: Mapping[TableName, Lsn]) -> None:
        """Change the state of tables from SYNCDONE to READY."""
        async with self._open.changing() as rows:
            for name, row in await rows.tables():
                if name is not None and name in tables:
                    await rows.set_entry(row.relid, TableEntry(TableState.READY, tables[name]), only_from=TableState.SYNCDONE, srcopy=None)

    async def ping(self) -> None:
        """See :meth:`subscriber.abc.WatchedSink.ping`.

        Raises:
            TargetUnavailable
        """
        await self._open.session.ping(_PING_SECONDS)

    async def activity(self) -> TargetActivity:
        """See :meth:`subscriber.abc.WatchedSink.activity`.

        Raises:
            TargetError
        """
        return await activity(self._database, self._opened.session if self._opened is not None else None)

    def _require_position(self) -> _Open:
        if not self._open.has_position:
            raise TargetError(
                f'subscription "{self._open.name}" has no position in the target', hint="call set_position before the first change"
            )
        return self._open

    async def apply(self, batch: Batch) -> None:
        """Apply a batch together with its end LSN. See :meth:`subscriber.abc.Sink.apply`.

        Raises:
            ApplyError, RelationError, TargetError, TargetUnavailable, SubscriptionInUse
        """
        await self._require_position().applier.apply(batch)

    async def skip(self, event: Transaction | PreparedTransaction | CommitPrepared) -> None:
        """See :meth:`subscriber.abc.Sink.skip`.

        Raises:
            TargetError, TargetUnavailable
        """
        opened = self._require_position()
        match event:
            case CommitPrepared():
                await opened.two_phase.skip(event, opened.clear_skip)
            case PreparedTransaction(transaction):
                await opened.applier.skip(transaction)
                nothing = PreparedTransaction(transaction.without_records(), event.gid)
                await opened.two_phase.prepare(nothing, _nothing_applies, opened.clear_skip)
            case Transaction():
                await opened.applier.skip(event)
                await opened.applier.move(event.end_lsn, opened.clear_skip)

    @property
    def prepares_in_target(self) -> bool:
        """Prepared transactions are stored."""
        return False

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Store a prepared transaction. See :meth:`subscriber.abc.Sink.prepare`.

        Raises:
            TargetError, TargetUnavailable
        """
        await self._require_position().two_phase.prepare(prepared, gate)

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """Apply a prepared transaction. See :meth:`subscriber.abc.Sink.commit_prepared`.

        Raises:
            DataLossError: it is not stored, and was not applied.
            ApplyError, RelationError, TargetError, TargetUnavailable
        """
        await self._require_position().two_phase.commit(message)

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """Delete a prepared transaction. See :meth:`subscriber.abc.Sink.rollback_prepared`.

        Raises:
            TargetError, TargetUnavailable
        """
        await self._require_position().two_phase.rollback(message)

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """See :meth:`subscriber.abc.Sink.report`.

        Raises:
            TargetError, TargetUnavailable
        """
        if self._opened is not None:
            await self._opened.reporter.report(workers, last_error)

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Return all problems that these tables would meet in the target. See :meth:`subscriber.abc.Sink.check`.

        Raises:
            TargetUnavailable, TargetError
        """
        database = Database(self._target, create=False)
        try:
            creating = self._settings.create_tables
            if creating is None:
                creating = database.path is not None and (not database.path.exists() or await self._would_create(database, tables))
            return await check_target(database, tables, self._options, self._settings, creating=creating)
        finally:
            await database.close()

    async def _would_create(self, database: Database, tables: Sequence[PublishedTable]) -> bool:
        async with database.reading() as connection:
            found = await connection.run_sync(_table_names)
            if database.tables.pg_subscription_rel.name not in found:
                return not found
            return await self._creates(connection, tables)

    def open_table(self, table: TableName) -> SqlAlchemyTableSink:
        """Return the table's synchronization, which has its own session."""
        if self._fence is None:
            raise TargetUnavailable("the sink is not open", hint="open it first")
        return SqlAlchemyTableSink(
            self._database, self._fence, table, published=self._published, settings=self._settings, tally=self._tally
        )

    def open_group(self) -> SqlAlchemyTableGroup:
        """For tables that are synchronized together. See :meth:`subscriber.abc.GroupingSink.open_group`."""
        opened = self._open
        return SqlAlchemyTableGroup(self._database, opened.fence, lambda: self._opened is opened)

    async def close(self) -> None:
        """Release the writer's lock and disconnect. Idempotent; also after errors."""
        opened, self._opened = self._opened, None
        self._tally.close()
        try:
            if opened is not None:
                await _leave(opened.locks, opened.session)
        finally:
            # even if the block above is cancelled
            await self._database.close()


async def _leave(locks: Locks, session: Session) -> None:
    try:
        # a session that is lost, or does not answer, releases its locks when it is closed
        with contextlib.suppress(TargetError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await locks.close()
    finally:
        await session.close()


def _table_names(connection: Connection) -> list[str]:
    return inspect(connection).get_table_names()


def _nothing_applies(_relation: Relation, _final_lsn: Lsn) -> bool:
    return False
