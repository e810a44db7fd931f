"""How fast a subscription that has lost its slot is equal again, compared with a copy of everything.

``python -m tests.benchmark.recover [ROWS]`` (``make bench SINK=recover ROWS=…``) copies 20 tables with so many rows together. Then one of a
hundred rows is changed in the target (at random, and in one place), the slot is dropped, and ``recover`` and the next run make both equal.
Measured are the wall time, from before the first connection until all tables are synchronized, and the bytes that the publisher sends.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from typing import Final

from subscriber import Subscription
from subscriber.subscription.management.recover import recover
from subscriber.testing.server import EmbeddedServer
from tests.benchmark.sinks import VERSION
from tests.support.database import Database, ServerAddress

ROWS: Final = 2_000_000
TABLES: Final = 20
GOAL: Final = 0.25
_COLUMNS: Final = "id bigint PRIMARY KEY, at timestamptz, n numeric(12, 2), v text"
_CHANGES: Final = {"at random": "id % 100 = 7", "in one place": "id BETWEEN {first} AND {last}"}


class Proxy:
    """Passes connections on to a server, and counts what it sends. It runs in a thread."""

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self.sent = 0
        self.port = 0
        self._ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._ready.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(*self._address)
        await asyncio.gather(self._copy(reader, to_there), self._copy(there, writer, counts=True))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, counts: bool = False) -> None:
        try:
            while data := await reader.read(1 << 18):
                self.sent += len(data) if counts else 0
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


async def _run(dsn: str, target: str, *, recovers: bool) -> float:
    began = time.monotonic()
    if recovers:
        await recover("bench", target=target, connection=dsn)
    subscription = Subscription("bench", connection=dsn, publications=["pub"], target=target)
    running = asyncio.create_task(subscription.run())
    while len(states := subscription.status.tables) < TABLES or any(entry.state not in "sr" for entry in states.values()):
        if running.done():
            running.result()
        await asyncio.sleep(0.02)
    found = time.monotonic() - began
    subscription.stop()
    await running
    return found


def _measured(proxy: Proxy, dsn: str, target: str, what: str) -> tuple[float, int]:
    before = proxy.sent
    command = [sys.executable, "-m", "tests.benchmark.recover", what, dsn, target]
    found = float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return found, proxy.sent - before


def _compare(publisher: Database, target: Database, through: str, proxy: Proxy, rows: int) -> None:
    each = rows // TABLES
    for number in range(TABLES):
        for database in (publisher, target):
            database.execute(f"CREATE TABLE t{number} ({_COLUMNS})")
        publisher.execute(
            f"INSERT INTO t{number} SELECT g, now() + g * interval '1 s', g / 7.0, md5(g::text) || md5(g::text)"
            f" FROM generate_series(1, {each}) AS g"
        )
    for statement in ("CREATE PUBLICATION pub FOR ALL TABLES", "VACUUM ANALYZE", "CHECKPOINT"):
        publisher.execute(statement)
    seconds, sent = _measured(proxy, through, target.dsn, "copy")
    sys.stdout.write(f"copy of {rows:,} rows: {seconds:.1f} s, {sent / 1e6:,.1f} MB sent\n")
    target.execute("VACUUM ANALYZE")
    for where, condition in _CHANGES.items():
        for number in range(TABLES):
            chosen = condition.format(first=each // 2, last=each // 2 + each // 100 - 1)
            target.execute(f"UPDATE t{number} SET v = 'other' WHERE {chosen}")
        publisher.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        again, sent_again = _measured(proxy, through, target.dsn, "recover")
        for number in range(TABLES):
            assert target.value(f"SELECT count(*) FROM t{number} WHERE v = 'other'") == 0
        sys.stdout.write(
            f"recover, 1 % of the rows differ {where}: {again:.1f} s, {sent_again / 1e6:,.1f} MB sent;"
            f" {again / seconds:.2f} of the time (goal: {GOAL:g}), {sent_again / sent:.3f} of the bytes\n"
        )
        sys.stdout.flush()


def main() -> None:
    """Run it."""
    match sys.argv[1:]:
        case ["copy" | "recover" as what, dsn, target]:
            sys.stdout.write(str(asyncio.run(_run(dsn, target, recovers=what == "recover"))))
        case arguments:
            _measure((int(arguments[0]) if arguments else 0) or ROWS)


def _measure(rows: int) -> None:
    servers = [EmbeddedServer.create(VERSION, settings={"max_wal_size": "8GB"}) for _ in range(2)]
    try:
        for server in servers:
            server.createdb("pub")
        proxy = Proxy(servers[0].host, servers[0].port)
        publisher, target = (Database(ServerAddress(server.dsn(), server.version), "pub") for server in servers)
        _compare(publisher, target, servers[0].dsn("pub", port=str(proxy.port)), proxy, rows)
        publisher.close()
        target.close()
    finally:
        for server in servers:
            server.remove()


if __name__ == "__main__":
    main()
