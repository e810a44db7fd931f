"""How fast a target of SQLAlchemy catches up, compared with the publisher's own limit and with a plain script.

``python -m tests.benchmark.sinks sqlite|mariadb [ROWS [SIZE]]`` (``make bench SINK=… ROWS=… SIZE=…``) writes so many inserts and then
updates of the same rows, in transactions of SIZE rows, each three times. Then four programs read what was written, each from its own
slot that was created before:

* ``pg_recvlogical`` into ``/dev/null``: what the publisher needs to decode and send;
* :mod:`tests.benchmark.plain_script`: psycopg2's replication cursor, every change executed by itself;
* the same, but with ``executemany`` for the changes of a transaction;
* this program, from the start of its run to the durability of the last row. Its garbage collector is set as the command sets it.

They take turns, in another order each time: other work on the machine affects all of them. Given are medians. All commits are synchronous,
of the script and of ours, and rows are compared at the end. The start of each counts, so there are enough rows for it not to.

Without SIZE (or with 0) it is done for each of :data:`SIZES`: one row a transaction, as applications write that save one thing at a time;
ten, an order with its lines; a thousand, a batch job. The script waits for the disk once a transaction, and this program once a batch: how
many times as fast it can be depends on SIZE and on the disk. No program is faster than the publisher: the output also gives
how many times as fast as the script the publisher is, which is the upper limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from subscriber import Settings, Subscription, SubscriptionOptions, Until
from subscriber.cli.collector import settle_collector
from subscriber.protocol.lsn import Lsn
from subscriber.testing.binaries import find_binaries
from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress
from tests.support.mariadb_database import MariaDatabase

ROUNDS: Final = 3
SIZES: Final = {1: 60_000, 10: 100_000, 1000: 300_000}
"""Rows of a transaction, and in all."""
VERSION: Final = 18
WAIT: Final = 600.0
Kind = Literal["inserts", "updates"]
Sample = tuple[float, float]
"""Seconds, and seconds of the program's processor time."""
KINDS: Final[tuple[Kind, ...]] = ("inserts", "updates")
SLOTS: Final = ("bench_limit", "bench_script", "bench_many")
LIMIT: Final = "pg_recvlogical"
SCRIPT: Final = "plain script"
MANY: Final = "executemany"
OURS: Final = "subscriber"
GOALS: Final[dict[Kind, float]] = {"inserts": 5.0, "updates": 3.0}
"""How many times as fast as the script it has to be."""
SQLITE_GOAL: Final = 1.5
"""How many times the publisher's own time it may take on inserts into SQLite."""

COLUMNS: Final = "id BIGINT NOT NULL PRIMARY KEY, a INTEGER NOT NULL, b INTEGER, c TEXT"
SUMS: Final = "SELECT count(*), sum(id), sum(a), sum(b), sum(length(c)) FROM t"
_WRITE: Final[dict[Kind, str]] = {
    "inserts": "INSERT INTO t SELECT g, g % 1000, g / 7, md5(g::text) FROM generate_series(first + 1, first + {size}) AS g",
    # in an order that is not that of the keys
    "updates": "UPDATE t SET a = a + 1, c = md5(c) WHERE id IN (SELECT {start} + 1 + (first - {start} + g * 7919::bigint) % {rows} "
    "FROM generate_series(0, {size} - 1) AS g)",
}


class Targets:
    """Targets of one kind, each with an empty table ``t``."""

    def make(self, name: str) -> str:
        """Make another one; return its URL."""
        raise NotImplementedError

    def sums(self, url: str) -> tuple[Any, ...]:
        """What the rows of a target amount to."""
        raise NotImplementedError


class _Sqlite(Targets):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, name: str) -> str:
        url = f"sqlite:///{self._directory / name}.db"
        with contextlib.closing(self._connect(url)) as connection:
            connection.execute(f"CREATE TABLE t ({COLUMNS})")
        return url

    def _connect(self, url: str) -> sqlite3.Connection:
        return sqlite3.connect(url.removeprefix("sqlite:///"))

    def sums(self, url: str) -> tuple[Any, ...]:
        with contextlib.closing(self._connect(url)) as connection:
            return tuple(connection.execute(SUMS).fetchone())


class _MariaDB(Targets):
    def __init__(self, server: EmbeddedMariaDB) -> None:
        self._server = server
        self._databases: dict[str, MariaDatabase] = {}

    def make(self, name: str) -> str:
        url = self._server.create_database(name)
        self._databases[url] = database = MariaDatabase(self._server, name)
        database.execute(f"CREATE TABLE t ({COLUMNS}) ENGINE=InnoDB")
        return url

    def sums(self, url: str) -> tuple[Any, ...]:
        return tuple(None if value is None else int(value) for value in self._databases[url].fetch(SUMS)[0])


@contextlib.contextmanager
def targets_of(sink: str, directory: Path) -> Iterator[Targets]:
    if sink == "sqlite":
        yield _Sqlite(directory)
    elif sink == "mariadb":
        # tests spare the disk; what is measured does not
        with EmbeddedMariaDB.create(settings={"debug-no-sync": "0", "innodb-buffer-pool-size": "256M"}) as server:
            yield _MariaDB(server)
    else:
        raise SystemExit(f"no such sink: {sink}: sqlite or mariadb")


def _write(publisher: Database, kind: Kind, start: int, rows: int, size: int) -> Lsn:
    """Write the WAL; where it ends."""
    statement = _WRITE[kind].format(size=size, start=start, rows=rows)
    step = size if kind == "inserts" else size * 7919
    publisher.execute(
        f"DO $$ DECLARE first bigint; BEGIN FOR number IN 0..{rows // size - 1} LOOP "
        f"first := {start} + number * {step}::bigint; {statement}; COMMIT; END LOOP; END $$"
    )
    # the last row is not the end of what a walsender reads
    publisher.execute("SELECT pg_switch_wal()")
    return publisher.current_lsn()


def _limit(publisher: Database, lsn: Lsn) -> float:
    program = find_binaries(VERSION) / "pg_recvlogical"
    command = [str(program), "--start", f"--dbname={publisher.conninfo()}", "--slot=bench_limit", "--file=/dev/null", f"--endpos={lsn}"]
    command += ["--no-loop", "--option=proto_version=1", "--option=publication_names=pub"]
    began = time.monotonic()
    subprocess.run(command, check=True, timeout=WAIT, capture_output=True)
    return time.monotonic() - began


def _script(publisher: Database, slot: str, lsn: Lsn, url: str, *many: str) -> Sample:
    command = [sys.executable, "-m", "tests.benchmark.plain_script", publisher.conninfo(), slot, str(lsn), url, *many]
    wall, cpu = subprocess.run(command, check=True, timeout=WAIT, capture_output=True, text=True).stdout.split()
    return float(wall), float(cpu)


async def _ours(publisher: Database, lsn: Lsn | None, url: str) -> Sample:
    subscription = Subscription(
        "bench",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=url,
        options=SubscriptionOptions(copy_data=False),
        settings=Settings(),
    )
    began, processor = time.monotonic(), time.process_time()
    await asyncio.wait_for(subscription.run(Until(lsn)), WAIT)
    return time.monotonic() - began, time.process_time() - processor


async def _measure(name: str, publisher: Database, lsn: Lsn, urls: dict[str, str]) -> Sample:
    if name == LIMIT:
        return await asyncio.to_thread(_limit, publisher, lsn), 0.0
    if name == SCRIPT:
        return await asyncio.to_thread(_script, publisher, "bench_script", lsn, urls[name])
    if name == MANY:
        return await asyncio.to_thread(_script, publisher, "bench_many", lsn, urls[name], "many")
    return await _ours(publisher, lsn, urls[name])


async def _compare(publisher: Database, sink: str, targets: Targets, rows: int, size: int) -> list[str]:
    """Measure; tell how each round went, and return what came out."""
    publisher.execute(f"CREATE TABLE t ({COLUMNS})")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    for slot in SLOTS:
        publisher.execute(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    urls = {name: targets.make(name.replace(" ", "_")) for name in (SCRIPT, MANY, OURS)}
    await _ours(publisher, None, urls[OURS])  # makes its slot
    names = [LIMIT, *urls]
    samples: dict[Kind, dict[str, list[Sample]]] = {kind: {name: [] for name in names} for kind in KINDS}
    for number in range(ROUNDS):
        for kind in KINDS:
            lsn = await asyncio.to_thread(_write, publisher, kind, number * rows, rows, size)
            for name in names:
                samples[kind][name].append(await _measure(name, publisher, lsn, urls))
            names.append(names.pop(0))
        _tell(f"round {number + 1}: " + "; ".join(_line(kind, {name: got[-1][0] for name, got in samples[kind].items()}) for kind in KINDS))
    expected = tuple(None if value is None else int(value) for value in publisher.fetch(SUMS)[0])
    for url in urls.values():
        assert targets.sums(url) == expected, (targets.sums(url), expected)
    found = [f"{sink}, {rows} rows in transactions of {size}, median of {ROUNDS}:"]
    for kind in KINDS:
        medians, cpu = (
            {name: statistics.median(sample[place] for sample in got) for name, got in samples[kind].items()} for place in range(2)
        )
        own = ", ".join(f"{name} {cpu[name] / rows * 1e6:.1f}" for name in urls)
        found += [f"  {_line(kind, medians)}; their own processor time a row in µs: {own}"]
        found += ["    " + text for text in _verdicts(sink, kind, medians)]
    return found


def _line(kind: Kind, seconds: dict[str, float]) -> str:
    return f"{kind}: " + ", ".join(f"{name} {found:.2f} s" for name, found in seconds.items())


def _verdicts(sink: str, kind: Kind, medians: dict[str, float]) -> list[str]:
    limit, script, ours = medians[LIMIT], medians[SCRIPT], medians[OURS]
    goal, times, most = GOALS[kind], script / ours, script / limit
    outcome = (
        "reached" if times >= goal else "missed" if most >= goal else f"out of reach: the publisher itself is {most:.1f} times as fast"
    )
    texts = [f"{times:.1f} times as fast as the script (to reach: {goal:g}: {outcome}; the publisher: {most:.1f})"]
    share = ours / limit
    text = f"{share:.2f} times the publisher's own time"
    if sink == "sqlite" and kind == "inserts":
        text += f" (at most {SQLITE_GOAL:g}: {'reached' if share <= SQLITE_GOAL else 'missed'})"
    return [*texts, text, f"{ours / medians[MANY]:.2f} times the time of the script with executemany"]


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run it."""
    sink = sys.argv[1] if len(sys.argv) > 1 else "sqlite"
    rows, only = (int(sys.argv[place]) if len(sys.argv) > place else 0 for place in (2, 3))
    server = EmbeddedServer.create(VERSION, settings={"logical_decoding_work_mem": "64MB", "max_wal_size": "8GB"})
    found: list[str] = []
    settle_collector()  # as the program does: the script has a process of its own, too
    try:
        for size in [only] if only else SIZES:
            name = f"pub{size}"
            server.createdb(name)
            publisher = Database(ServerAddress(server.dsn(), server.version), name)
            count = rows or SIZES.get(size, 100_000)
            _tell(f"transactions of {size}")
            with tempfile.TemporaryDirectory(prefix="bench-") as directory, targets_of(sink, Path(directory)) as targets:
                found += asyncio.run(_compare(publisher, sink, targets, count - count % size, size))
            for slot in ("bench", *SLOTS):
                publisher.execute(f"SELECT pg_drop_replication_slot('{slot}')")
            publisher.close()
    finally:
        server.remove()
    for line in found:
        _tell(line)


if __name__ == "__main__":
    main()
