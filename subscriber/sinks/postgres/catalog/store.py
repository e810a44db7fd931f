"""A PostgreSQL target with a catalog: a :class:`subscriber.catalog.store.Store`. NOTIFY wakes the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from subscriber.catalog import model
from subscriber.catalog.model import Column, Kind, Table
from subscriber.catalog.statistics import Reporter, Unwritten
from subscriber.catalog.store import Row
from subscriber.errors import TargetUnavailable
from subscriber.interfaces import WorkerActivity
from subscriber.sinks.postgres.catalog.rows import PostgresRows
from subscriber.sinks.postgres.catalog.session_rows import COPY_PART
from subscriber.sinks.postgres.catalog.target_identity import follow_tables
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.libpq_session import LibpqSession
from subscriber.sinks.postgres.session.locks import lock_number, take
from subscriber.sinks.postgres.session.postgres_errors import translated

if TYPE_CHECKING:
    import asyncpg

__all__ = ["PostgresReporter", "PostgresStore"]

_CHANNEL: Final = "subscriber"

_PREPARED_TRANSACTION: Final = Table("prepared_transaction", Column("srsubid", Kind.OID), subscription="srsubid")
_TABLES: Final = (
    model.PG_SUBSCRIPTION_REL,
    model.POSITION,
    COPY_PART,
    _PREPARED_TRANSACTION,
    model.WORKER,
    model.SNAPSHOT_REQUEST,
    model.VERIFICATION,
    model.MIGRATION,
    model.SUBSCRIPTION_STATS,
    model.PG_SUBSCRIPTION,
)

_LOCKS: Final = """
SELECT ((l.classid::int8 << 32) | l.objid::int8) AS key
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_database d ON d.oid = l.database AND d.datname = pg_catalog.current_database()
WHERE l.locktype = 'advisory' AND l.objsubid = 1
"""

# a worker's row is valid only while its lock is held
_LIVE: Final = """
SELECT subid::int8 AS subid, coalesce(relid, 0)::int8 AS relid, pid FROM subscriber.pg_stat_subscription WHERE pid IS NOT NULL
"""

_PREPARED: Final = """
SELECT gid FROM pg_catalog.pg_prepared_xacts
WHERE database = pg_catalog.current_database() AND gid LIKE $1 ORDER BY prepared
"""

_MAY_SEE: Final = "SELECT pg_catalog.has_column_privilege('subscriber.pg_subscription', 'subconninfo', 'SELECT') AS granted"


class PostgresStore:
    """See :class:`subscriber.catalog.store.Store`.

    Args:
        reader: a session whose commits wait until they are on disk.
        connect: opens another one like it, through asyncpg.
    """

    def __init__(self, reader: CatalogReader, connect: Callable[[], Awaitable[asyncpg.Connection[asyncpg.Record]]] | None = None) -> None:
        self.reader = reader
        self._connect = connect
        self._hidden: frozenset[str] = frozenset()
        self._changed = asyncio.Event()

    async def listen(self) -> None:
        """Wake :meth:`wait` on changes, and at the session's end.

        Another session replaces the present one: only asyncpg also reads between two queries.

        Raises:
            ConfigurationError, TargetUnavailable, TargetError
        """
        assert self._connect is not None, "it was opened for verbs"
        listener, before = await self._connect(), self.reader.connection
        self.reader.connection = listener
        await before.close(timeout=None)
        with translated():
            await listener.add_listener(_CHANNEL, self._notified)
        listener.add_termination_listener(self._notified)

    def _notified(self, *_: object) -> None:
        self._changed.set()

    async def look(self) -> None:
        """Find out which columns the role may not read."""
        if not (await self.reader.fetch(_MAY_SEE))[0]["granted"]:
            self._hidden = frozenset({"subconninfo"})

    @property
    def tables(self) -> Sequence[Table]:
        return _TABLES

    @property
    def prepared_tables(self) -> Sequence[Table]:
        return ()

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[PostgresRows]:
        async with self.reader.transaction() as execute:
            yield PostgresRows(execute, "${}".format, self.reader.storable, self._hidden)

    reading = transaction

    async def _fetch(self, query: str, /, *parameters: object) -> list[tuple[object, ...]]:
        """Run a query with psycopg's placeholders, for :func:`take`."""
        for number in range(1, len(parameters) + 1):
            query = query.replace("%s", f"${number}", 1)
        return [tuple(row.values()) for row in await self.reader.fetch(query, *parameters)]

    async def take_lock(self, key: str, what: str, wait: float | None = None, *, lost: int | None = None) -> None:
        await take(self._fetch, lock_number(key), what, wait=wait, lost=() if lost is None else (lost,))

    @property
    def session_number(self) -> int | None:
        """The session's PID."""
        return self.reader.connection.get_server_pid()

    async def release_lock(self, key: str) -> None:
        await self.reader.fetch("SELECT pg_catalog.pg_advisory_unlock($1)", lock_number(key))

    @property
    def has_locks(self) -> bool:
        return True

    async def held_locks(self, keys: Collection[str]) -> Collection[str]:
        held = {row["key"] for row in await self.reader.fetch(_LOCKS)} if keys else set()
        return {key for key in keys if lock_number(key) in held}

    async def live_workers(self, workers: Sequence[Row]) -> Mapping[tuple[int, int], int | None]:
        """The workers whose lock is held, with the PID of the session that holds it."""
        live = {(row["subid"], row["relid"]): row["pid"] for row in await self.reader.fetch(_LIVE)}
        # other workers may have started since the rows were read
        return {key: live[key] for row in workers if (key := (row["subid"], row["relid"])) in live}

    async def shut_out(self, oid: int) -> None:
        """Nothing to do: the session that writes holds the writer's lock, and releases it at its end."""

    async def prepared_transactions(self, oid: int) -> Sequence[str]:
        return [row["gid"] for row in await self.reader.fetch(_PREPARED, f"pg\\_gid\\_{oid}\\_%")]

    async def notify(self) -> None:
        await self.reader.fetch("SELECT pg_catalog.pg_notify($1, '')", _CHANNEL)

    async def wait(self, timeout: float) -> None:
        """Return on a notification, when the session is lost, or after ``timeout`` seconds.

        Raises:
            TargetUnavailable: the session is lost.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        self._changed.clear()
        if self.reader.connection.is_closed():
            raise TargetUnavailable(
                "the session with the target's catalog was lost", hint="temporary error; if it persists, check that the target runs"
            )

    def now(self) -> float:
        return time.time()

    async def close(self) -> None:
        if not isinstance(self.reader.connection, LibpqSession):
            self.reader.connection.remove_termination_listener(self._notified)
        await self.reader.close()


class PostgresReporter(Reporter):
    """A reporter that also follows tables that were renamed or dropped in the target."""

    def __init__(self, store: PostgresStore, oid: int, tally: Unwritten) -> None:
        super().__init__(store.transaction, store.now, oid, tally)
        self._reader = store.reader
        self._subscription = oid

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write the report.

        Raises:
            TargetUnavailable: the session was lost.
        """
        await follow_tables(self._reader, self._subscription)
        await super().report(workers, last_error)
