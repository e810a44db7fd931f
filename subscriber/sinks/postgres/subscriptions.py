"""The catalog of subscriptions in a PostgreSQL target: a :class:`subscriber.catalog.Catalog`.

Verbs and the launcher meet through it alone. A verb claims a subscription by an advisory lock; NOTIFY wakes the launcher, which sees the
claim in pg_locks, ends that worker, and starts it again when the claim is gone. A verb that is killed loses its claim with its session.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

import asyncpg

from subscriber.abc import TwoPhaseState
from subscriber.catalog import Definition
from subscriber.config import STORED
from subscriber.errors import SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.sinks.postgres.catalog import ensure_catalog, insert_subscription, option_cast, require_name
from subscriber.sinks.postgres.definitions import DEFINITION_COLUMNS, definition
from subscriber.sinks.postgres.errors import translated
from subscriber.sinks.postgres.locks import CATALOG_KEY, LAUNCHER_KEY, take, verb_key, writer_key
from subscriber.sinks.postgres.origin import asyncpg_run, drop_origins
from subscriber.sinks.postgres.reading import CatalogReader
from subscriber.sinks.postgres.target import Target

__all__ = ["PostgresCatalog"]

_CHANNEL: Final = "subscriber"

_STOP_SECONDS: Final = 20.0
"""How long a verb waits for whoever runs the subscription: a worker may need some seconds for the batch at hand."""

_SUBSCRIPTIONS: Final = f"""
SELECT {DEFINITION_COLUMNS}, s.subconninfo, p.remote_lsn::text AS position
FROM subscriber.pg_subscription s LEFT JOIN subscriber."position" p ON p.srsubid = s.oid AND p.srrelid = 0
ORDER BY s.subname
"""  # noqa: S608 (constants)

_LOCKS: Final = """
SELECT ((l.classid::int8 << 32) | l.objid::int8) AS key
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = pg_catalog.current_database()
WHERE l.locktype = 'advisory' AND l.objsubid = 1
"""

# attribute of a definition or of its options -> column and cast
_COLUMNS: Final = {
    "name": ("subname", "text::name"),
    "enabled": ("subenabled", "boolean"),
    "conninfo": ("subconninfo", "text"),
    "slot_name": ("subslotname", "text::name"),
    "publications": ("subpublications", "text[]"),
    "two_phase": ("subtwophasestate", 'text::"char"'),
    "skip_lsn": ("subskiplsn", "text::pg_lsn"),
    "made": ("submade", "boolean"),
    "pending_refresh": ("subrefresh", "boolean"),
    **{name: (each.column, option_cast(each)) for name, each in STORED.items()},
}

_ROLE: Final = "SELECT oid, pg_catalog.pg_has_role(oid, 'MEMBER') AS member FROM pg_catalog.pg_roles WHERE rolname = $1::text::name"

_PREPARED: Final = """
SELECT gid FROM pg_catalog.pg_prepared_xacts
WHERE database = pg_catalog.current_database() AND gid LIKE $1 ORDER BY prepared
"""


class PostgresCatalog:
    """See :class:`subscriber.catalog.Catalog`. Made by :meth:`open`."""

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self._reader = CatalogReader(connection)
        self._connection = connection
        self._changed = asyncio.Event()

    @classmethod
    async def open(cls, target: str, application_name: str) -> PostgresCatalog:
        """Connect, and make the catalog if it is not there.

        Raises:
            ConfigurationError: the target's text is neither URL nor conninfo.
            TargetUnavailable, TargetError
        """
        where = Target(target)
        like = await where.connect(application_name)
        try:
            connection = await where.connect_asyncpg(like, application_name)
        finally:
            await like.close()
        catalog = cls(connection)
        try:
            with translated():
                await connection.execute("SELECT pg_catalog.set_config('search_path', '', false)")
            await ensure_catalog(connection)
            with translated():
                await connection.add_listener(_CHANNEL, catalog._notified)
            connection.add_termination_listener(catalog._notified)
        except BaseException:
            connection.terminate()
            raise
        return catalog

    def _notified(self, *_: object) -> None:
        self._changed.set()

    async def _fetch(self, query: str, /, *parameters: object) -> list[tuple[object, ...]]:
        """With placeholders of psycopg's kind, for :func:`take`."""
        for number in range(1, len(parameters) + 1):
            query = query.replace("%s", f"${number}", 1)
        return [tuple(row.values()) for row in await self._reader.fetch(query, *parameters)]

    async def subscriptions(self) -> Sequence[Definition]:
        """All, by name.

        Raises:
            TargetUnavailable, TargetError
        """
        locks = {row["key"] for row in await self._reader.fetch(_LOCKS)}
        return [definition(row, claimed=verb_key(row["oid"]) in locks) for row in await self._reader.fetch(_SUBSCRIPTIONS)]

    async def _find(self, name: str) -> Definition:
        for found in await self.subscriptions():
            if found.name == name:
                return found
        raise _no_such(name)

    @contextlib.asynccontextmanager
    async def create(self, definition: Definition) -> AsyncIterator[Definition]:
        """Store a new one, claimed.

        Raises:
            ConfigurationError: its name is too long.
            TargetError: subscription already exists.
        """
        require_name(definition.name)
        with translated():
            async with self._connection.transaction():
                await self._connection.execute("SELECT pg_catalog.pg_advisory_xact_lock($1)", CATALOG_KEY)
                if await self._connection.fetchval("SELECT true FROM subscriber.pg_subscription WHERE subname = $1", definition.name):
                    raise _exists(definition.name)
                oid = await insert_subscription(self._connection, definition.name)
                # before anybody sees it
                await self._connection.execute("SELECT pg_catalog.pg_advisory_lock($1)", verb_key(oid))
                values = {name: getattr(definition, name) for name in ("conninfo", "slot_name", "publications", "two_phase")}
                values |= {name: getattr(definition.options, name) for name in STORED} | {"enabled": False, "made": False}
                await self._update(oid, values)
        try:
            yield await self._find(definition.name)
        finally:
            await self._release(oid)

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
        await take(self._fetch, verb_key(oid), what)
        try:
            # before the look at the writer's lock: whoever takes that later sees it
            await self._reader.fetch(
                "UPDATE subscriber.pg_subscription SET subgeneration = subgeneration + 1 WHERE oid = $1::int8::oid", oid
            )
            await self._notify()
            try:
                await take(self._fetch, writer_key(oid), what, wait=_STOP_SECONDS)
            except SubscriptionInUse as error:
                # nothing was done: whoever runs it may go on
                await self._reader.fetch(
                    "UPDATE subscriber.pg_subscription SET subgeneration = subgeneration - 1 WHERE oid = $1::int8::oid", oid
                )
                error.hint = "it is run by a process that does not follow the catalog (subscriber run --connection): stop that first"
                raise
            await self._reader.fetch("SELECT pg_catalog.pg_advisory_unlock($1)", writer_key(oid))
            found = await self._find(name)
            if found.oid != oid:
                raise TargetError(f'subscription "{name}" was made anew just now', hint="try again")
            found.require_understood()
            yield found
        finally:
            await self._release(oid)

    async def _release(self, oid: int) -> None:
        # a session that is lost has released it, and the launcher looks once a second anyway
        with contextlib.suppress(TargetUnavailable):
            await self._reader.fetch("SELECT pg_catalog.pg_advisory_unlock($1)", verb_key(oid))
            await self._notify()

    async def _notify(self) -> None:
        await self._reader.fetch("SELECT pg_catalog.pg_notify($1, '')", _CHANNEL)

    async def update(self, oid: int, changes: Mapping[str, Any]) -> None:
        """Change columns, on disk when it returns.

        Raises:
            ConfigurationError: the new name is too long.
            TargetError: the new name is taken.
        """
        if "name" in changes:
            require_name(changes["name"])
        with translated():
            try:
                async with self._connection.transaction():
                    await self._connection.execute("SET LOCAL synchronous_commit = 'local'")
                    await self._update(oid, changes)
            except asyncpg.UniqueViolationError:
                raise _exists(str(changes.get("name"))) from None
        await self._notify()

    async def _update(self, oid: int, changes: Mapping[str, Any]) -> None:
        columns = [_COLUMNS[name] for name in changes]
        assignments = ", ".join(f"{column} = ${number}::{cast}" for number, (column, cast) in enumerate(columns, 2))
        values = [_value(name, value) for name, value in changes.items()]
        # names are ours, values are parameters
        await self._connection.execute(f"UPDATE subscriber.pg_subscription SET {assignments} WHERE oid = $1", oid, *values)  # noqa: S608

    async def set_owner(self, oid: int, role: str) -> None:
        """See :meth:`subscriber.catalog.OwnedCatalog.set_owner`.

        Raises:
            TargetError: there is no such role, or this one cannot become it.
            TargetUnavailable
        """
        with translated():
            async with self._connection.transaction():
                found = await self._connection.fetchrow(_ROLE, role)
                if found is None:
                    raise TargetError(
                        f'role "{role}" does not exist', sqlstate="42704", hint="CREATE ROLE in the target, or correct the name"
                    )
                if not found["member"]:
                    raise TargetError(f'must be able to SET ROLE "{role}"', sqlstate="42501", hint="GRANT the role to the target's user")
                await self._connection.execute("UPDATE subscriber.pg_subscription SET subowner = $2 WHERE oid = $1", oid, found["oid"])
        await self._notify()

    async def remove(self, oid: int) -> Sequence[str]:
        """Remove one whole, its replication origins first: if that is refused, nothing is half done.

        Raises:
            SubscriptionInUse: a session still has one of the origins.
            TargetUnavailable, TargetError
        """
        await drop_origins(asyncpg_run(self._connection), oid)
        with translated():
            async with self._connection.transaction():
                await self._connection.execute("SET LOCAL synchronous_commit = 'local'")
                for table, column in (
                    ("pg_subscription_rel", "srsubid"),
                    ('"position"', "srsubid"),
                    ("copy_part", "srsubid"),
                    ("prepared_transaction", "srsubid"),
                    ("worker", "subid"),
                    ("subscription_stats", "subid"),
                    ("pg_subscription", "oid"),
                ):
                    await self._connection.execute(f"DELETE FROM subscriber.{table} WHERE {column} = $1", oid)  # noqa: S608
        return await self.prepared_transactions(oid)

    async def note_error(self, oid: int, text: str, details: str | None = None) -> None:
        """Where status shows it.

        Raises:
            TargetUnavailable
        """
        await self._reader.fetch(
            "UPDATE subscriber.subscription_stats SET last_error = $2, last_error_time = pg_catalog.now() WHERE subid = $1::int8::oid",
            oid,
            self._reader.storable(text),
        )
        if details is not None:
            await self._reader.fetch(
                "INSERT INTO subscriber.worker (subid, relid, lock_key, worker_type, details) VALUES ($1::int8::oid, 0, $2, 'apply', $3)"
                " ON CONFLICT (subid, relid) DO UPDATE SET details = excluded.details",
                oid,
                writer_key(oid),
                details,
            )

    async def reset_statistics(self, name: str) -> None:
        """What ``pg_stat_reset_subscription_stats`` does.

        Raises:
            TargetError: it does not exist.
            TargetUnavailable
        """
        done = await self._reader.fetch(
            "SELECT subscriber.pg_stat_reset_subscription_stats(oid) FROM subscriber.pg_subscription WHERE subname = $1", name
        )
        if not done:
            raise _no_such(name)

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        """Those of native-like names.

        Raises:
            TargetUnavailable
        """
        return [row["gid"] for row in await self._reader.fetch(_PREPARED, f"pg\\_gid\\_{oid}\\_%")]

    async def become_launcher(self, lost: int | None = None) -> int:
        """Take the launcher's lock. See :meth:`subscriber.catalog.Catalog.become_launcher`.

        Raises:
            SubscriptionInUse: another session has it.
        """
        try:
            await take(self._fetch, LAUNCHER_KEY, "the launcher of this target", lost=() if lost is None else (lost,))
        except SubscriptionInUse as error:
            error.hint = "one `subscriber run --target` serves all subscriptions of a target: stop the other one first"
            raise
        return self._connection.get_server_pid()

    async def wait(self, timeout: float) -> None:
        """Return on a notification, when the session is lost, or after ``timeout`` seconds.

        Raises:
            TargetUnavailable: it is lost.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        self._changed.clear()
        if self._connection.is_closed():
            raise TargetUnavailable("the session with the target's catalog was lost", hint="it passes by itself, unless the target is down")

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        self._connection.remove_termination_listener(self._notified)
        await self._reader.close()


def _exists(name: str) -> TargetError:
    return TargetError(f'subscription "{name}" already exists', sqlstate="42710", hint="choose another name, or drop that one first")


def _value(name: str, value: object) -> object:
    if name in STORED:
        return STORED[name].stored(value)
    match name:
        case "two_phase":
            return TwoPhaseState(value).value if isinstance(value, str) else value
        case "skip_lsn":
            return str(value)
        case "publications":
            return list(value) if isinstance(value, tuple | list) else value
        case _:
            return value


def _no_such(name: str) -> TargetError:
    return TargetError(f'subscription "{name}" does not exist', sqlstate="42704", hint="subscriber status lists those that do")
