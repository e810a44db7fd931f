"""The sink for databases that SQLAlchemy supports: the class that other packages use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from subscriber.catalog.definition import require_name
from subscriber.catalog.store import writer_key
from subscriber.catalog.subscriptions import ensure_subscription, require_unclaimed
from subscriber.config import Settings, SubscriptionOptions
from subscriber.interfaces import (
    ApplyStatistics,
    Finding,
    PublishedTable,
    TargetActivity,
)
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.sqlalchemy.catalog.creation import ensure_catalog
from subscriber.sinks.sqlalchemy.catalog.rows import subscription_rows
from subscriber.sinks.sqlalchemy.catalog.store import SqlAlchemyStore
from subscriber.sinks.sqlalchemy.catalog_tables import TABLES
from subscriber.sinks.sqlalchemy.checks import check_target, subscription_exists
from subscriber.sinks.sqlalchemy.opened_sqlalchemy_sink import OpenedSqlAlchemySink, SqlAlchemyTarget, leave, table_names
from subscriber.sinks.sqlalchemy.session.activity import activity
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.fence import Fence
from subscriber.sinks.sqlalchemy.session.locks import Locks

__all__ = ["SqlAlchemySink"]


class SqlAlchemySink:
    """A :class:`subscriber.interfaces.Sink` for SQLite, MariaDB, MySQL, and other databases for which SQLAlchemy has an async driver.

    Args:
        target: a URL of SQLAlchemy.
        options: the subscription's parameters.
        settings: the process's settings.
        defined: the subscription was created by ``subscriber create``: :meth:`open` does not create it.

    Raises:
        ConfigurationError: the text is not a URL, or there is no driver for this kind of database.
    """

    supports_two_phase = True
    logs_conflicts = True
    # such a database does not tell which origin changed a row last, and when
    conflict_rules: Mapping[str, Collection[str]] = MappingProxyType(
        {"insert_exists": ("apply_remote", "keep_local"), "update_missing": ("insert", "error"), "delete_missing": ("error",)}
    )

    def __init__(self, target: str, *, options: SubscriptionOptions, settings: Settings, defined: bool = False) -> None:
        self._target = target
        self._defined = defined
        # a subscription that existed is not created again: no process would run the new one
        self._known = defined
        self._shared = SqlAlchemyTarget(target, settings, options)
        self._options = options
        self._settings = settings
        self._opened: OpenedSqlAlchemySink | None = None
        self._lost: int | None = None

    @property
    def statistics(self) -> ApplyStatistics:
        """Counters since the sink was created."""
        return self._shared.statistics

    async def exists(self, name: str) -> bool:
        """Whether the target has the subscription. See :meth:`subscriber.interfaces.Sink.exists`."""
        require_name(name)
        async with Database(self._target, create=False) as database:
            found = await subscription_exists(database, name)
        self._known = found or self._defined
        return found

    async def open(self, name: str, on_durable: Callable[[Lsn], None]) -> OpenedSqlAlchemySink:
        """See :meth:`subscriber.interfaces.Sink.open`.

        The state is read after the fence was raised, so that no transaction of an earlier writer can change it any more.

        Raises:
            SubscriptionChanged: it was dropped or renamed after it was created by a verb, or after this sink had found or opened it.
            TargetUnavailable, TargetError, SubscriptionInUse
        """
        require_name(name)
        database = self._shared.database
        try:
            await ensure_catalog(database)
            if self._shared.log is not None:
                await self._shared.log.open(database, name)
            session = await database.connect()
            locks = Locks(database, session)
            store = SqlAlchemyStore(database, locks)
            try:
                oid = await ensure_subscription(store, name, self._options, known=self._known)
                await locks.take(writer_key(oid), f'subscription "{name}"', lost=self._lost)
                self._lost = session.number
                if not self._defined:
                    await require_unclaimed(store, oid, name)
                fence = self._shared.fence
                if fence is None or fence.oid != oid:
                    fence = self._shared.fence = Fence(oid)
                async with session.transaction() as connection:
                    await fence.raise_(connection)
                fence.raised()
                async with session.transaction() as connection:
                    await fence.hold(connection)
                    state = await subscription_rows(connection, oid).subscription()
            except BaseException:
                await leave(locks, session)
                raise
        except BaseException:
            await database.close()
            raise
        self._known = True
        self._opened = OpenedSqlAlchemySink(self._shared, session, locks, fence=fence, state=state, store=store, on_durable=on_durable)
        return self._opened

    async def activity(self) -> TargetActivity:
        """See :meth:`subscriber.interfaces.WatchedSink.activity`."""
        return await activity(self._shared.database, self._opened.session if self._opened is not None else None)

    async def check(self, tables: Sequence[PublishedTable], *, two_phase: bool) -> list[Finding]:
        """Return all problems that these tables would meet in the target. See :meth:`subscriber.interfaces.Sink.check`."""
        async with Database(self._target, create=False) as database:
            creating = self._settings.create_tables
            if creating is None:
                creating = database.path is not None and (not database.path.exists() or await self._would_create(database, tables))
            return await check_target(database, tables, self._options, self._settings, creating=creating, log=self._shared.log)

    async def _would_create(self, database: Database, tables: Sequence[PublishedTable]) -> bool:
        async with database.reading() as connection:
            found = await connection.run_sync(table_names)
            if TABLES["pg_subscription_rel"].name not in found:
                return not found
            return await self._shared.creates(connection, tables)
