"""A mixed random load on a publisher, with everything that logical replication must handle. It is determined by a seed.

The transactions are those of :mod:`subscriber.testing.load.plans`, on the tables of :mod:`subscriber.testing.load.tables`. Several sessions
run in parallel. Each first runs its share of one transaction of every kind, and then draws kinds by weight. A held kind is run after it is
released.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Mapping
from typing import Final

from psycopg import sql

from subscriber.testing.load.plans import WEIGHTS, Keys, Kind
from subscriber.testing.load.session import Connection, LoadReport, LoadSession, LoadSettings, connect, end_prepared
from subscriber.testing.load.tables import FIRST_FRESH_KEY

__all__ = ["Kind", "LoadReport", "MixedLoad"]

_SIZED: Final = {"accounts": "aid", "branches": "bid", "tellers": "tid", "documents": "id", "measurements": "id", "specimens": "id"}


class MixedLoad:
    """A mixed load on a database that :func:`~subscriber.testing.load.tables.create_tables` filled. Only one load may run on a schema.

    Args:
        dsn: of the publisher's database. ``max_prepared_transactions`` must be at least twice ``sessions``, unless no kind is two-phase.
        seed: the same seed and number of sessions give the same transactions in each session, unless kinds are held.
        rate: transactions per second of all sessions together; None: as many as possible.
        sessions: connections that work at the same time.
        schema: of the tables.
        huge_rows: approximate number of rows that a huge transaction changes.
        weights: frequency of each kind, relative to the others. Kinds that are missing do not occur.
        reconnect: continue after the publisher was restarted or killed (if it returns within a minute).

    Attributes:
        report: the work done so far; may be read while the load runs.
        held: kinds that are currently held back; may be changed while the load runs.
    """

    def __init__(
        self,
        dsn: str,
        *,
        seed: int,
        rate: float | None = None,
        sessions: int = 4,
        schema: str = "load",
        huge_rows: int = 20_000,
        weights: Mapping[Kind, float] = WEIGHTS,
        reconnect: bool = False,
    ) -> None:
        self.report = LoadReport()
        self._settings = LoadSettings(
            dsn=dsn,
            seed=seed,
            rate=rate,
            sessions=sessions,
            schema=schema,
            huge_rows=huge_rows,
            weights=dict(weights),
            reconnect=reconnect,
        )
        self.held = self._settings.held
        self._left_prepared: dict[str, int] = {}

    async def run(self, until: asyncio.Event | None = None, *, seconds: float | None = None, transactions: int | None = None) -> LoadReport:
        """Run transactions until ``until`` is set, for so many seconds, or so many transactions, whichever comes first.

        Transactions that are prepared at the end stay so until :meth:`finish`, which a second run calls first.

        Raises:
            psycopg.Error: the publisher rejected a statement, or is not reachable (for a minute, with ``reconnect``).
        """
        if until is None and seconds is None and transactions is None:
            raise ValueError("a load needs an end: until, seconds or transactions")
        await self.finish()
        run, sizes = await self._begin()
        stop = asyncio.Event()
        count = self._settings.sessions
        sessions = [
            LoadSession(
                self._settings,
                self.report,
                Keys(run=run, session=number, sessions=count, sizes=sizes),
                gid_prefix=f"{self._gid_prefix}{run}_{number}_",
                stop=stop,
            )
            for number in range(count)
        ]
        try:
            async with asyncio.TaskGroup() as group:
                ending = group.create_task(_set_after(stop, until, seconds))
                async with asyncio.TaskGroup() as working:
                    for number, session in enumerate(sessions):
                        working.create_task(session.work(None if transactions is None else len(range(number, transactions, count))))
                ending.cancel()
        except ExceptionGroup as failures:
            raise _first(failures) from None
        finally:
            self._left_prepared = {shelved.gid: shelved.rows for session in sessions for shelved in session.shelves.values()}
        return self.report

    async def finish(self) -> None:
        """Commit or roll back every transaction of a load on these tables that is still prepared. The seed decides which."""
        connection = await connect(self._settings)
        try:
            cursor = await connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid")
            for (gid,) in await cursor.fetchall():
                if gid.startswith(self._gid_prefix):
                    commit = zlib.crc32(f"{self._settings.seed}/{gid}".encode()) % 2 == 0
                    await end_prepared(connection, gid, commit=commit)
                    self.report.prepared_ended(commit=commit, rows=self._left_prepared.get(gid, 0))
        finally:
            await connection.close()

    @property
    def _gid_prefix(self) -> str:
        return f"load_{self._settings.schema}_"

    async def _begin(self) -> tuple[int, dict[str, int]]:
        """Get a number for the run, and the initial number of rows of each table."""
        connection = await connect(self._settings)
        try:
            run = await _integer(connection, sql.SQL("SELECT nextval('load_runs')"))
            largest = sql.SQL("SELECT coalesce(max({key}), 0) FROM {table} WHERE {key} < {first}")
            sizes = {
                table: await _integer(
                    connection, largest.format(key=sql.Identifier(key), table=sql.Identifier(table), first=FIRST_FRESH_KEY)
                )
                for table, key in _SIZED.items()
            }
        finally:
            await connection.close()
        return run, sizes


async def _integer(connection: Connection, query: sql.SQL | sql.Composed) -> int:
    row = await (await connection.execute(query)).fetchone()
    assert row is not None
    return int(row[0])


async def _set_after(stop: asyncio.Event, until: asyncio.Event | None, seconds: float | None) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await (until or asyncio.Event()).wait()
    stop.set()


def _first(failures: ExceptionGroup) -> Exception:
    """Return one of the errors: the sessions fail for the same reason."""
    failure: Exception = failures
    while isinstance(failure, ExceptionGroup):
        failure = failure.exceptions[0]
    return failure
