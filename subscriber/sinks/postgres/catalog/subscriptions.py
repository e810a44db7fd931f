"""The catalog of subscriptions in a PostgreSQL target, for the verbs, the launcher and ``status``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Final

from subscriber.catalog import Definition, Observation
from subscriber.catalog.model import PG_SUBSCRIPTION
from subscriber.catalog.observe import observe as observe_store
from subscriber.catalog.store import Rows
from subscriber.catalog.subscriptions import StoredCatalog, ensure_subscription
from subscriber.config import SubscriptionOptions
from subscriber.errors import TargetError
from subscriber.sinks.postgres.catalog.rows import PostgresRows
from subscriber.sinks.postgres.catalog.schema import catalog_version, ensure_catalog
from subscriber.sinks.postgres.catalog.store import PostgresStore
from subscriber.sinks.postgres.catalog.target_identity import FOLLOW_TABLES, REBIND_TABLES, accept, require_own_target
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.libpq_session import LibpqSession
from subscriber.sinks.postgres.session.origins import catalog_run, drop_origins
from subscriber.sinks.postgres.session.settings import CATALOG_SETTINGS
from subscriber.sinks.postgres.session.target import Target

__all__ = ["PostgresCatalog", "observe", "own_subscription"]

_APPLICATION: Final = "subscriber status"

_ROLE: Final = "SELECT pg_catalog.pg_has_role(oid, 'MEMBER') AS member FROM pg_catalog.pg_roles WHERE rolname = $1::text::name"

_SHOW_OWNER: Final = """
UPDATE subscriber.pg_subscription SET subowner = current_user
WHERE oid = $1::int8::oid AND subconninfo IS NULL AND subowner <> current_user
"""


class PostgresCatalog(StoredCatalog[PostgresStore]):
    """See :class:`subscriber.catalog.Catalog`. :meth:`open` creates it."""

    @classmethod
    async def open(cls, target: str, application_name: str) -> PostgresCatalog:
        """Connect, and create the catalog if it does not exist.

        Raises:
            ConfigurationError: ``target`` is neither a URL nor a conninfo.
            TargetUnavailable, TargetError
        """
        store = await _connected(target, application_name)
        try:
            await ensure_catalog(store.reader.connection)
        except BaseException:
            store.reader.connection.terminate()
            raise
        return cls(store)

    async def become_launcher(self, lost: int | None = None) -> int | None:
        """See :meth:`subscriber.catalog.Catalog.become_launcher`.

        Raises:
            SubscriptionInUse: another launcher is at work.
            ConfigurationError, TargetUnavailable, TargetError
        """
        await self.store.listen()
        return await super().become_launcher(lost)

    async def set_owner(self, oid: int, role: str) -> None:
        """See :meth:`subscriber.catalog.OwnedCatalog.set_owner`.

        Raises:
            TargetError: there is no such role, or the session's role cannot become it.
            TargetUnavailable
        """
        reader = self.store.reader
        found = await reader.fetch(_ROLE, role)
        if not found:
            raise TargetError(f'role "{role}" does not exist', sqlstate="42704", hint="CREATE ROLE in the target, or correct the name")
        if not found[0]["member"]:
            raise TargetError(f'must be able to SET ROLE "{role}"', sqlstate="42501", hint="GRANT the role to the target's user")
        await reader.fetch("UPDATE subscriber.pg_subscription SET subowner = $2::text::name WHERE oid = $1::int8::oid", oid, role)
        await self.store.notify()

    @contextlib.asynccontextmanager
    async def claim(self, name: str) -> AsyncIterator[Definition]:
        """See :meth:`subscriber.catalog.Catalog.claim`.

        Raises:
            ConfigurationError: the subscription's rows are a copy of another target's.
            TargetError, TargetUnavailable, SubscriptionInUse
        """
        async with super().claim(name) as found:
            await require_own_target(self._execute, found.oid, name)
            yield found

    def claim_copied(self, name: str) -> contextlib.AbstractAsyncContextManager[Definition]:
        """See :meth:`subscriber.catalog.MovableCatalog.claim_copied`."""
        return super().claim(name)

    async def _look_again(self, rows: Rows, oid: int, *, accept_target: bool) -> None:
        """Find tables that were renamed, or restored.

        Raises:
            ConfigurationError: the rows are a copy of another target's.
            RelationError: a table of the subscription is missing.
            TargetError, TargetUnavailable
        """
        assert isinstance(rows, PostgresRows)
        if accept_target:
            await accept(rows, rows.execute, oid, reconciled=True)
        else:
            (row,) = await rows.select(PG_SUBSCRIPTION, {"oid": oid})
            await require_own_target(rows.execute, oid, row["subname"])
            await rows.execute(REBIND_TABLES.format("$1"), oid)
            await rows.execute(FOLLOW_TABLES, oid)

    async def accept_target(self, name: str) -> None:
        """See :meth:`subscriber.catalog.MovableCatalog.accept_target`.

        Raises:
            RelationError: a table of the subscription is missing.
            TargetError, TargetUnavailable, SubscriptionInUse
        """
        async with super().claim(name) as found, self.store.transaction() as rows:
            await accept(rows, rows.execute, found.oid)

    async def _execute(self, query: str, /, *args: object) -> Sequence[Sequence[Any]]:
        return [tuple(row.values()) for row in await self.store.reader.fetch(query, *args)]

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove a subscription with all its rows. Its replication origins are dropped first; if that fails, nothing else is removed.

        Raises:
            SubscriptionInUse: a session still uses one of the origins.
            TargetUnavailable, TargetError
        """
        await drop_origins(catalog_run(self.store.reader.connection), oid)
        return await super().remove(oid)


async def own_subscription(reader: CatalogReader, name: str, options: SubscriptionOptions, *, known: bool) -> int:
    """Find or create the subscription of a run. See :func:`subscriber.catalog.subscriptions.ensure_subscription`.

    A subscription that the command line of ``run`` defines belongs to the role of its latest run.

    Raises:
        SubscriptionChanged: this process knew the subscription, and it was dropped.
        TargetUnavailable, TargetError
    """
    oid = await ensure_subscription(PostgresStore(reader), name, options, known=known)
    await reader.fetch(_SHOW_OWNER, oid)
    return oid


async def observe(target: str) -> Sequence[Observation]:
    """The observations of all subscriptions, sorted by name; empty if there is no catalog.

    Raises:
        ConfigurationError: ``target`` is neither a URL nor a conninfo.
        TargetUnavailable: the target cannot be reached.
        TargetError: a missing privilege, or a catalog of another version.
    """
    store = await _connected(target, _APPLICATION)
    try:
        if await catalog_version(catalog_run(store.reader.connection)) is None:
            return []
        await store.look()
        return await observe_store(store)
    finally:
        await store.close()


async def _connected(target: str, application_name: str) -> PostgresStore:
    where = Target(target)
    session = await where.connect(application_name, CATALOG_SETTINGS)
    return PostgresStore(CatalogReader(LibpqSession(session)), partial(where.connect_asyncpg, session, application_name, CATALOG_SETTINGS))
