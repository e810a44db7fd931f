"""The catalog of subscriptions in a target of SQLAlchemy's: a :class:`subscriber.catalog.Catalog`.

Verbs and the launcher meet through it alone, as in a PostgreSQL target. A verb claims a subscription by a lock of its own (:mod:`.locks`);
the launcher sees that lock and ends the worker; the verb waits until the writer's lock is free, and moves the subscription's fence, so that
not even a writer that has lost its lock without knowing writes anything more. A verb that is killed loses its claim with its process.

Most databases tell nobody that a row has changed: :meth:`SqlAlchemyCatalog.wait` is a short pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.catalog import Definition
from subscriber.config import STORED
from subscriber.errors import SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.catalog import definition, require_name, row_values
from subscriber.sinks.sqlalchemy.catalog_types import Unknown
from subscriber.sinks.sqlalchemy.engine import Database
from subscriber.sinks.sqlalchemy.entries import ensure_catalog, insert_subscription
from subscriber.sinks.sqlalchemy.locks import CATALOG_KEY, LAUNCHER_KEY, Locks, verb_key, writer_key
from subscriber.sinks.sqlalchemy.tables import COUNTERS, CatalogTables

__all__ = ["SqlAlchemyCatalog", "remove_rows"]

_log = logging.getLogger(__name__)

_STOP_SECONDS: Final = 20.0
"""How long a verb waits for whoever runs the subscription: a worker may need some seconds for the batch at hand."""
_LAUNCHER_SECONDS: Final = 10.0
"""How long the session of a launcher that was killed may hold its lock."""
_LOOK_SECONDS: Final = 0.25


class SqlAlchemyCatalog:
    """See :class:`subscriber.catalog.Catalog`. Made by :meth:`open`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables
        self._locks = Locks(database)
        self._launches = False

    @classmethod
    async def open(cls, target: str, application_name: str) -> SqlAlchemyCatalog:
        """Connect, and make the catalog if it is not there.

        Raises:
            ConfigurationError: the target's text is no URL of SQLAlchemy's, or its driver is not installed.
            TargetUnavailable, TargetError
        """
        catalog = cls(Database(target, application_name))
        try:
            await ensure_catalog(catalog._database)
        except BaseException:
            await catalog.close()
            raise
        return catalog

    async def subscriptions(self) -> Sequence[Definition]:
        """All, by name.

        Raises:
            TargetUnavailable, TargetError
        """
        subscription, position = self._tables.pg_subscription, self._tables.position
        async with self._database.reading() as connection:
            rows = [dict(row) for row in (await connection.execute(select(subscription))).mappings()]
            query = select(position.c.srsubid, position.c.remote_lsn).where(position.c.srrelid == 0)
            positions = {row.srsubid: row.remote_lsn for row in await connection.execute(query)}
        return [
            definition(self._tables, row, positions.get(row["oid"]), claimed=await self._is_claimed(row["oid"]))
            for row in sorted(rows, key=lambda row: str(row["subname"]))
        ]

    async def _is_claimed(self, oid: int | Unknown) -> bool:
        return not isinstance(oid, Unknown) and await self._locks.held(verb_key(oid))

    async def _find(self, name: str) -> Definition:
        for found in await self.subscriptions():
            if found.name == name:
                return found
        raise TargetError(f'subscription "{name}" does not exist', sqlstate="42704", hint="subscriber status lists those that do")

    @contextlib.asynccontextmanager
    async def create(self, definition: Definition) -> AsyncIterator[Definition]:
        """Store a new one, claimed.

        Raises:
            ConfigurationError: its name is too long.
            TargetError: subscription already exists.
        """
        require_name(definition.name)
        async with contextlib.AsyncExitStack() as claim:
            async with self._alone(), self._database.writing() as connection:
                await self._require_free(connection, definition.name)
                oid = await insert_subscription(connection, self._tables, definition.name)
                # before anybody sees it
                await self._locks.take(verb_key(oid), f'subscription "{definition.name}"')
                claim.push_async_callback(self._release, oid)
                values = {name: getattr(definition, name) for name in ("conninfo", "slot_name", "publications", "two_phase")}
                values |= {name: getattr(definition.options, name) for name in STORED}
                await self._update(connection, oid, values | {"enabled": False, "made": False})
            yield await self._find(definition.name)

    @contextlib.asynccontextmanager
    async def claim(self, name: str) -> AsyncIterator[Definition]:
        """Claim one that is there.

        Raises:
            TargetError: it does not exist, or its row cannot be understood.
            SubscriptionInUse: another verb is at work on it, or whoever runs it does not stop.
        """
        before = await self._find(name)
        before.require_understood()
        oid = before.oid
        what = f'subscription "{name}"'
        await self._locks.take(verb_key(oid), what)
        try:
            # before the look at the writer's lock: whoever takes that later sees it
            await self._next_generation(oid, 1)
            try:
                await self._locks.take(writer_key(oid), what, wait=_STOP_SECONDS)
            except SubscriptionInUse as error:
                # nothing was done: whoever runs it may go on
                await self._next_generation(oid, -1)
                error.hint = "it is run by a process that does not follow the catalog (subscriber run --connection): stop that first"
                raise
            try:
                await self._move_fence(oid)
            finally:
                await self._locks.release(writer_key(oid))
            found = await self._find(name)
            if found.oid != oid:
                raise TargetError(f'subscription "{name}" was made anew just now', hint="try again")
            found.require_understood()
            yield found
        finally:
            await self._release(oid)

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        await self._locks.take(CATALOG_KEY, "the catalog of the target")
        try:
            yield
        finally:
            await self._locks.release(CATALOG_KEY)

    async def _release(self, oid: int) -> None:
        # a session that is lost has released it
        with contextlib.suppress(TargetUnavailable):
            await self._locks.release(verb_key(oid))

    async def _next_generation(self, oid: int, step: int) -> None:
        subscription = self._tables.pg_subscription
        async with self._database.writing() as connection:
            await connection.execute(
                update(subscription).where(subscription.c.oid == oid).values(subgeneration=subscription.c.subgeneration + step)
            )

    async def _move_fence(self, oid: int) -> None:
        fence = self._tables.fence
        async with self._database.writing() as connection:
            await connection.execute(update(fence).where(fence.c.srsubid == oid).values(token=fence.c.token + 1))

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns, durable when it returns.

        Raises:
            ConfigurationError: the new name is too long.
            TargetError: the new name is taken.
        """
        if "name" not in changes:
            async with self._database.writing() as connection:
                await self._update(connection, oid, changes)
            return
        require_name(changes["name"])
        async with self._alone(), self._database.writing() as connection:
            await self._require_free(connection, changes["name"], but=oid)
            await self._update(connection, oid, changes)

    async def _require_free(self, connection: AsyncConnection, name: str, *, but: int | None = None) -> None:
        subscription = self._tables.pg_subscription
        taken = (await connection.execute(select(subscription.c.oid).where(subscription.c.subname == name))).scalar()
        if taken is not None and taken != but:
            raise TargetError(f'subscription "{name}" already exists', sqlstate="42710", hint="choose another name, or drop that one first")

    async def _update(self, connection: AsyncConnection, oid: int, changes: Mapping[str, Any]) -> None:
        subscription = self._tables.pg_subscription
        await connection.execute(update(subscription).where(subscription.c.oid == oid).values(row_values(changes)))

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove one whole. Prepared transactions that wait for their end go with it, with a warning: nothing of them was applied.

        Raises:
            TargetUnavailable, TargetError
        """
        waiting = await self.prepared_transactions(oid)
        async with self._database.writing() as connection:
            await remove_rows(connection, self._tables, oid)
        if waiting:
            _log.warning(
                "prepared transactions were waiting for their COMMIT PREPARED and were removed with the subscription: %s"
                " (hint: if they are committed on the publisher, their changes have to be brought over by hand)",
                ", ".join(waiting),
            )
        return ()

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        """Where status shows it.

        Raises:
            TargetUnavailable
        """
        stats = self._tables.subscription_stats
        async with self._database.writing() as connection:
            await connection.execute(update(stats).where(stats.c.subid == oid).values(last_error=text, last_error_time=time.time()))
            if details is not None:
                worker = self._tables.worker
                await connection.execute(delete(worker).where(worker.c.subid == oid, worker.c.relid == 0))
                await connection.execute(insert(worker).values(subid=oid, relid=0, worker_type="apply", details=details))

    async def reset_statistics(self, name: str) -> None:
        """Zeros in ``subscription_stats``.

        Raises:
            TargetError: it does not exist.
            TargetUnavailable
        """
        oid = (await self._find(name)).oid
        stats = self._tables.subscription_stats
        async with self._database.writing() as connection:
            await connection.execute(
                update(stats).where(stats.c.subid == oid).values({**dict.fromkeys(COUNTERS, 0), "stats_reset": time.time()})
            )

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """The publisher's names of those that wait here.

        Raises:
            TargetUnavailable
        """
        prepared = self._tables.prepared_transaction
        query = select(prepared.c.gid).where(prepared.c.srsubid == oid, prepared.c.complete).order_by(prepared.c.prepare_time)
        async with self._database.reading() as connection:
            return [str(gid) for (gid,) in await connection.execute(query)]

    async def become_launcher(self, lost: int | None = None) -> int | None:
        """Take the launcher's lock. See :meth:`subscriber.catalog.Catalog.become_launcher`.

        Raises:
            SubscriptionInUse: another process has it.
        """
        try:
            await self._locks.take(LAUNCHER_KEY, "the launcher of this target", wait=_LAUNCHER_SECONDS, lost=lost)
        except SubscriptionInUse as error:
            error.hint = "one `subscriber run --target` serves all subscriptions of a target: stop the other one first"
            raise
        self._launches = True
        return self._locks.number

    async def wait(self, timeout: float) -> None:
        """Return a moment later: nobody would tell of a change.

        Raises:
            TargetUnavailable: it was the launcher's, and its lock is lost with the session that held it.
        """
        await asyncio.sleep(min(timeout, _LOOK_SECONDS))
        if self._launches and not await self._locks.held(LAUNCHER_KEY):
            raise TargetUnavailable("the session with the target's catalog was lost", hint="it passes by itself, unless the target is down")

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        await self._locks.close()
        await self._database.close()


async def remove_rows(connection: AsyncConnection, tables: CatalogTables, oid: int) -> None:
    """Remove everything of a subscription, in the transaction that is open."""
    for table, column in tables.of_subscription:
        await connection.execute(delete(table).where(table.c[column] == oid))
