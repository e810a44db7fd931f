"""How long many tables take, compared with PostgreSQL's own subscription.

``python -m tests.benchmark.tables [VERSION [TARGET]]`` (``make bench SINK=tables VERSION=15 TARGET=sqlite``) uses a publisher of that
version. The target has it too, or is ``sqlite`` or ``mariadb``, where there is no native subscription to compare with:

* 200 tables of 500 rows, from the start of ``run`` (from CREATE SUBSCRIPTION) until all are synchronized, three times each, in turns; given
  are the medians, and how many times native's time we take. Two tables at once on both sides.
* 3,000 tables: ``check``, and from the start of ``run`` until all empty tables are ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psycopg

from subscriber import Subscription, TableState, check
from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.server import EmbeddedServer
from tests.support.mariadb_database import MariaDatabase

ROUNDS: Final = 3
TABLES: Final = 200
ROWS: Final = 500
MANY: Final = 3_000
WAIT: Final = 600.0
_AT_ONCE: Final = 100
_COLUMNS: Final = "id bigint PRIMARY KEY, a int NOT NULL, b text"
_NATIVE: Final = "SELECT count(*) FROM pg_subscription_rel WHERE srsubstate NOT IN ('s', 'r')"


Make = Callable[[str, int], tuple[str, Callable[[str], list[tuple[Any, ...]]]]]
"""Makes a target of that name with so many tables; gives its URL, and what fetches from it."""


def make(server: EmbeddedServer, database: str, tables: int, rows: int = 0) -> str:
    """A database with so many tables of so many rows, published; its conninfo."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {database}".encode())
    dsn = server.dsn(database)
    with psycopg.connect(dsn, autocommit=True) as connection:
        for first in range(0, tables, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, tables))
            connection.execute(";".join(f"CREATE TABLE t{number} ({_COLUMNS})" for number in numbers).encode())
            if rows:
                filled = f"SELECT g, g, md5(g::text) FROM generate_series(1, {rows}) AS g"
                connection.execute(";".join(f"INSERT INTO t{number} {filled}" for number in numbers).encode())
        connection.execute("CREATE PUBLICATION pub FOR ALL TABLES; ANALYZE" if rows else "CREATE PUBLICATION pub FOR ALL TABLES")
    return dsn


@contextlib.contextmanager
def targets(kind: str, version: int) -> Iterator[Make]:
    """What makes targets of a kind."""
    if kind == "postgres":
        with EmbeddedServer.create(version) as server:

            def of_postgres(name: str, tables: int) -> tuple[str, Callable[[str], list[tuple[Any, ...]]]]:
                dsn = make(server, name, tables)

                def fetch(query: str) -> list[tuple[Any, ...]]:
                    with psycopg.connect(dsn) as connection:
                        return connection.execute(query.encode()).fetchall()

                return dsn, fetch

            yield of_postgres
    elif kind == "mariadb":
        with EmbeddedMariaDB.create() as maria:

            def of_mariadb(name: str, tables: int) -> tuple[str, Callable[[str], list[tuple[Any, ...]]]]:
                maria.create_database(name)
                database = MariaDatabase(maria, name)
                for number in range(tables):
                    database.execute(f"CREATE TABLE t{number} ({_COLUMNS})")
                return database.url, database.fetch

            yield of_mariadb
    else:
        with tempfile.TemporaryDirectory() as directory:

            def of_sqlite(name: str, tables: int) -> tuple[str, Callable[[str], list[tuple[Any, ...]]]]:
                connection = sqlite3.connect(Path(directory, name), isolation_level=None)
                connection.executescript(f"BEGIN; {';'.join(f'CREATE TABLE t{number} ({_COLUMNS})' for number in range(tables))}; COMMIT")
                return f"sqlite:///{Path(directory, name)}", lambda query: connection.execute(query).fetchall()

            yield of_sqlite


async def ours(publisher: str, target: str, name: str, states: frozenset[TableState]) -> float:
    """Seconds until all tables are in one of the states."""
    subscription = Subscription(name, connection=publisher, publications=["pub"], target=target)
    began = time.monotonic()
    running = asyncio.create_task(subscription.run())
    async with asyncio.timeout(WAIT):
        while not (entries := subscription.status.tables) or any(entry.state not in states for entry in entries.values()):
            if running.done():
                running.result()
            await asyncio.sleep(0.05)
    took = time.monotonic() - began
    subscription.stop()
    await running
    with psycopg.connect(publisher, autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active")
    return took


def native(publisher: str, target: str) -> float:
    """The same of a subscription of PostgreSQL's."""
    with psycopg.connect(target, autocommit=True) as connection:
        began = time.monotonic()
        connection.execute(f"CREATE SUBSCRIPTION native CONNECTION '{publisher}' PUBLICATION pub".encode())
        while connection.execute(_NATIVE.encode()).fetchall() != [(0,)]:
            assert time.monotonic() - began < WAIT
            time.sleep(0.05)
        took = time.monotonic() - began
        connection.execute("DROP SUBSCRIPTION native")
    return took


async def copied(publisher: EmbeddedServer, make_target: Make, *, beside_native: bool) -> None:
    source = make(publisher, "source", TABLES, ROWS)
    times: dict[str, list[float]] = {"subscriber": [], **({"native": []} if beside_native else {})}
    for number in range(ROUNDS):
        for who in sorted(times, reverse=bool(number % 2)):
            destination, fetch = make_target(f"{who}_{number}", TABLES)
            if who == "native":
                times[who].append(await asyncio.to_thread(native, source, destination))
            else:
                times[who].append(await ours(source, destination, f"s{number}", frozenset({TableState.SYNCDONE, TableState.READY})))
            assert sum(fetch(f"SELECT count(*) FROM t{number}")[0][0] for number in range(TABLES)) == TABLES * ROWS
            print(f"{who}: {times[who][-1]:.1f} s", flush=True)
    medians = {who: statistics.median(found) for who, found in times.items()}
    said = f"{TABLES} tables of {ROWS} rows: {medians['subscriber']:.1f} s"
    if beside_native:
        said += f", native {medians['native']:.1f} s: {medians['subscriber'] / medians['native']:.2f} times native's time"
    print(said, flush=True)


async def many(publisher: EmbeddedServer, make_target: Make) -> None:
    source, (destination, _) = make(publisher, "many", MANY), make_target("many", MANY)
    began = time.monotonic()
    assert await check("many", connection=source, publications=["pub"], target=destination) == []
    print(f"check of {MANY} tables: {time.monotonic() - began:.1f} s", flush=True)
    took = await ours(source, destination, "many", frozenset({TableState.READY}))
    print(f"{MANY} empty tables ready: {took:.1f} s")


async def main() -> None:
    version = int(sys.argv[1]) if len(sys.argv) > 1 else 18
    kind = sys.argv[2] if len(sys.argv) > 2 else "postgres"
    with EmbeddedServer.create(version) as publisher, targets(kind, version) as make_target:
        await copied(publisher, make_target, beside_native=kind == "postgres")
        await many(publisher, make_target)


if __name__ == "__main__":
    asyncio.run(main())
