"""How fast ``verify`` compares equal tables, beside clients that read all rows of both sides and compare them.

``python -m tests.benchmark.verification [ROWS]`` (``make bench SINK=verify ROWS=…``) replicates one table between two servers, keeps it
changing, and lets these take turns, in a process each:

- ``verify``: two sessions on each side, as by default;
- ``cursor``: a script with server-side cursors of psycopg, ordered by the key, that compares row by row;
- ``copy``: a script that reads both sides by COPY, ordered by the key, and compares lines: a client can hardly do less.

It prints wall times, the ratios, and how long apply was held. Then it plants one difference, which ``verify`` must find.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from subscriber import Settings, Subscription, VerificationLimits, verify
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress

ROWS: Final = 10_000_000
ROUNDS: Final = 3
GOAL: Final = 5.0
HELD: Final = 0.1
WAIT: Final = 3600.0
SETTINGS: Final = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "1h", "autovacuum": "off", "fsync": "off"}
TABLE: Final = """
CREATE TABLE t (id bigint PRIMARY KEY, account int NOT NULL, amount numeric(12, 2), remark text, changed timestamptz NOT NULL)
"""
FILL: Final = """
INSERT INTO t SELECT i, i % 100000, i % 9973 / 7.0, md5(i::text), timestamptz '2024-01-01 UTC' + i * interval '1 s'
FROM generate_series({}, {}) AS i
"""
WRITE: Final = "UPDATE t SET amount = amount + 1, changed = now() WHERE id = 1 + (random() * {})::bigint"
_PART: Final = 1_000_000
_SET: Final = "SET timezone = 'UTC'; SET extra_float_digits = 3; SET cursor_tuple_fraction = 1"


def _by_cursor(publisher: str, target: str) -> int:
    with psycopg.connect(publisher) as here, psycopg.connect(target) as there:
        cursors = []
        for connection in (here, there):
            connection.execute(_SET)
            cursor = connection.cursor("rows")
            cursor.itersize = 10_000
            cursors.append(cursor.execute("SELECT * FROM t ORDER BY id"))
        return sum(one != other for one, other in zip(*cursors, strict=True))


def _by_copy(publisher: str, target: str) -> int:
    with psycopg.connect(publisher) as here, psycopg.connect(target) as there:
        for connection in (here, there):
            connection.execute(_SET)
        query = "COPY (SELECT * FROM t ORDER BY id) TO STDOUT"
        with here.cursor().copy(query) as one, there.cursor().copy(query) as other:
            return sum(bytes(row) != bytes(same) for row, same in zip(one, other, strict=True))


async def _by_verify(name: str, publisher: str, target: str) -> dict[str, Any]:
    report = await verify(name, target=target, connection=publisher, limits=VerificationLimits())
    return report.to_json()


def _measure(who: str, name: str, publisher: str, target: str) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.benchmark.verification", who, name, publisher, target]
    done = subprocess.run(command, check=True, timeout=WAIT, stdout=subprocess.PIPE, text=True)
    return {**json.loads(done.stdout), "wall": time.monotonic() - began}


@contextmanager
def _writing(publisher: Database, rows: int) -> Iterator[None]:
    """Some hundred small transactions per second, as long as the block lasts."""
    stop = threading.Event()

    def work() -> None:
        with psycopg.connect(publisher.dsn, autocommit=True) as connection:
            while not stop.wait(0.005):
                connection.execute(WRITE.format(rows - 1).encode())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _bench(rows: int) -> int:
    servers = [EmbeddedServer.create(18, settings=SETTINGS) for _ in range(2)]
    try:
        publisher, target = (Database(ServerAddress(server.dsn(), 18), "postgres") for server in servers)
        for database in (publisher, target):
            database.execute(TABLE)
        for begin in range(1, rows + 1, _PART):
            publisher.execute(FILL.format(begin, min(begin + _PART - 1, rows)))
        publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
        publisher.execute("VACUUM ANALYZE t")
        settings = Settings(max_sync_workers_per_subscription=2)
        subscription = Subscription("bench", connection=publisher.dsn, publications=["pub"], target=target.dsn, settings=settings)
        running = asyncio.create_task(subscription.run())
        await subscription.wait_for(publisher.current_lsn(), WAIT)
        target.execute("VACUUM ANALYZE t")
        found: dict[str, list[dict[str, Any]]] = {"verify": [], "cursor": [], "copy": []}
        for _ in range(ROUNDS):
            for who, results in found.items():
                if who == "verify":
                    with _writing(publisher, rows):
                        results.append(await asyncio.to_thread(_measure, who, "bench", publisher.dsn, target.dsn))
                    assert results[-1]["equal"], "both sides are equal"
                    await subscription.wait_for(publisher.current_lsn(), WAIT)
                else:
                    results.append(await asyncio.to_thread(_measure, who, "bench", publisher.dsn, target.dsn))
                    assert results[-1]["differences"] == 0
        target.execute(f"UPDATE t SET remark = 'planted' WHERE id = {rows // 3}")
        planted = await asyncio.to_thread(_measure, "verify", "bench", publisher.dsn, target.dsn)
        subscription.stop()
        await running
    finally:
        for server in servers:
            server.remove()
    return _report(rows, found, planted)


def _report(rows: int, found: dict[str, list[dict[str, Any]]], planted: dict[str, Any]) -> int:
    wall = {who: statistics.median(each["wall"] for each in results) for who, results in found.items()}
    for who, seconds in wall.items():
        ratio = "" if who == "verify" else f", {seconds / wall['verify']:.1f} times as long as verify (goal for cursor: {GOAL:g})"
        print(f"{who:8}{seconds:8.2f} s, {rows / seconds:12,.0f} rows/s{ratio}")
    held = [each["held_seconds"] for each in (*found["verify"], planted)]
    print(f"apply was held for at most {max(held) * 1000:.1f} ms (goal: {HELD * 1000:g})")
    differences = planted["tables"][0]["differences"]
    right = [(each["kind"], each["key"], each["columns"]) for each in differences] == [("different", {"id": str(rows // 3)}, ["remark"])]
    print(f"one planted difference: {'found' if right else 'NOT found'}, in {planted['wall']:.2f} s")
    return 0 if right and wall["cursor"] / wall["verify"] >= GOAL and max(held) < HELD else 1


def main(arguments: list[str]) -> int:
    """Run the benchmark, or one contender in a process of its own."""
    match arguments:
        case ["verify", name, publisher, target]:
            print(json.dumps(asyncio.run(_by_verify(name, publisher, target))))
            return 0
        case ["cursor" | "copy" as who, _, publisher, target]:
            print(json.dumps({"differences": (_by_cursor if who == "cursor" else _by_copy)(publisher, target)}))
            return 0
        case [*rows]:
            return asyncio.run(_bench(int(rows[0]) if rows and int(rows[0]) else ROWS))
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
