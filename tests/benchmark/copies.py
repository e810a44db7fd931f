"""How fast a table is copied into a target of SQLAlchemy, compared with a script that reads a cursor and writes with ``executemany``.

``python -m tests.benchmark.copies sqlite|mariadb [ROWS]`` (``make bench SINK=copy TARGET=… ROWS=…``) copies one table by the script
(:mod:`tests.benchmark.copy_script`) and by this program. They take turns, in a process each; given are medians. Measured is, in both, from
before the first connection until all rows are committed: wall time, and processor time of the process, without that of the servers. This
program also creates its catalog and a slot in that time, commits every 10,000 rows, and can resume.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from subscriber import Subscription
from subscriber.cli.collector import settle_collector
from subscriber.testing.server import EmbeddedServer
from tests.benchmark.sinks import COLUMNS, SUMS, VERSION, WAIT, Targets, targets_of
from tests.support.database import Database, ServerAddress

ROUNDS: Final = 5
ROWS: Final = 300_000
OURS: Final = "subscriber"
SCRIPT: Final = "script"
GOAL: Final = 1.0


async def _ours(dsn: str, url: str) -> tuple[float, float]:
    subscription = Subscription("bench", connection=dsn, publications=["pub"], target=url)
    began, processor = time.monotonic(), time.process_time()
    running = asyncio.create_task(subscription.run())
    while not (states := subscription.status.tables) or any(entry.state not in "sr" for entry in states.values()):
        if running.done():
            running.result()
        await asyncio.sleep(0.005)
    found = time.monotonic() - began, time.process_time() - processor
    subscription.stop()
    await running
    return found


def _run(who: str, dsn: str, url: str) -> tuple[float, float]:
    module = "tests.benchmark.copies" if who == OURS else "tests.benchmark.copy_script"
    command = [sys.executable, "-m", module, *([OURS] if who == OURS else []), dsn, url]
    wall, cpu = subprocess.run(command, check=True, timeout=WAIT, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(wall), float(cpu)


def _compare(publisher: Database, sink: str, targets: Targets, rows: int) -> None:
    publisher.execute(f"CREATE TABLE t ({COLUMNS})")
    publisher.execute(f"INSERT INTO t SELECT g, g % 1000, g / 7, md5(g::text) FROM generate_series(1, {rows}) AS g")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    publisher.execute("VACUUM ANALYZE t")
    expected = tuple(None if value is None else int(value) for value in publisher.fetch(SUMS)[0])
    found: dict[str, list[tuple[float, float]]] = {OURS: [], SCRIPT: []}
    for number in range(ROUNDS):
        for who in sorted(found, reverse=bool(number % 2)):
            url = targets.make(f"{who}{number}")
            found[who].append(_run(who, publisher.conninfo(), url))
            assert targets.sums(url) == expected, (targets.sums(url), expected)
            if who == OURS:
                publisher.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
        sys.stdout.write(f"round {number + 1}: " + "; ".join(_line(who, *found[who][-1]) for who in found) + "\n")
        sys.stdout.flush()
    medians = {who: [statistics.median(some) for some in zip(*found[who], strict=True)] for who in found}
    ratios = [ours / script for ours, script in zip(medians[OURS], medians[SCRIPT], strict=True)]
    sys.stdout.write(f"{sink}, copy of {rows} rows, median of {ROUNDS}: " + "; ".join(_line(who, *medians[who]) for who in found) + "\n")
    sys.stdout.write(f"  times the script's: {ratios[0]:.2f} wall (goal: {GOAL:g}), {ratios[1]:.2f} CPU\n")


def _line(who: str, wall: float, cpu: float) -> str:
    return f"{who} {wall:.2f} s, CPU {cpu:.2f} s"


def main() -> None:
    """Run it."""
    if sys.argv[1:2] == [OURS]:
        settle_collector()  # as the program does
        sys.stdout.write("{} {}\n".format(*asyncio.run(_ours(*sys.argv[2:]))))
        return
    sink = sys.argv[1] if len(sys.argv) > 1 else "sqlite"
    rows = (int(sys.argv[2]) if len(sys.argv) > 2 else 0) or ROWS
    server = EmbeddedServer.create(VERSION, settings={"max_wal_size": "8GB"})
    try:
        server.createdb("pub")
        publisher = Database(ServerAddress(server.dsn(), server.version), "pub")
        with tempfile.TemporaryDirectory(prefix="bench-") as directory, targets_of(sink, Path(directory)) as targets:
            _compare(publisher, sink, targets, rows)
        publisher.close()
    finally:
        server.remove()


if __name__ == "__main__":
    main()
