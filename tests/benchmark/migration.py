"""How long a migration takes, beside ``pg_dump`` and ``pg_restore -j 2``.

``python -m tests.benchmark.migration [ROWS]`` (``make bench SINK=migration ROWS=…``) moves 60 tables with indexes and foreign keys from one
server to another, by each contender into an empty database, in turns:

- ``migrate``: ``subscriber migrate --until-ready --no-verify --jobs 2``, with two table synchronizations;
- ``dump``: ``pg_dump --format=directory --jobs=2``, then ``pg_restore --jobs=2``, then ANALYZE, which ``migrate`` has done, too;
- ``pgcopydb``: ``pgcopydb clone --table-jobs 2 --index-jobs 2``, where it is installed, then ANALYZE.

It prints wall times, the steps of the migration, and the ratio to the fastest of the others.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from subscriber.testing.binaries import find_binaries
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress

ROWS: Final = 5_000_000
TABLES: Final = 60
ROUNDS: Final = 3
JOBS: Final = 2
GOAL: Final = 1.0
SETTINGS: Final = {"shared_buffers": "1GB", "max_wal_size": "8GB", "checkpoint_timeout": "1h", "autovacuum": "off", "fsync": "off"}
TABLE: Final = """
CREATE TABLE t{number} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, parent bigint REFERENCES t{parent}, code text NOT NULL UNIQUE,
    amount numeric(12, 2), remark text, changed timestamptz NOT NULL);
CREATE INDEX ON t{number} (parent); CREATE INDEX ON t{number} (changed, amount)
"""
FILL: Final = """
INSERT INTO t{number} (parent, code, amount, remark, changed)
SELECT {parent}, md5(i::text), i % 9973 / 7.0, repeat('remark ', i % 5), timestamptz '2024-01-01 UTC' + i * interval '1 s'
  FROM generate_series(1, {rows}) AS i
"""
SUMS: Final = "SELECT count(*), sum(id), sum(amount), sum(hashtext(code)) FROM t{number}"


def _fill(publisher: Database, rows: int) -> None:
    for number in range(TABLES):
        parent = max(number - 1, 0)
        publisher.execute(TABLE.format(number=number, parent=parent))
        publisher.execute(FILL.format(number=number, rows=rows // TABLES, parent="NULL" if number == 0 else "i"))
    publisher.execute("VACUUM ANALYZE")


def _migrate(publisher: Database, target: Database) -> float:
    command = [sys.executable, "-m", "subscriber", "migrate", "bench", "--from", publisher.dsn, "--to", target.dsn, "--until-ready"]
    command += ["--no-verify", "--jobs", str(JOBS), "--bindir", str(find_binaries(18)), "-c", f"max_sync_workers_per_subscription={JOBS}"]
    began = time.monotonic()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.monotonic() - began
    steps = [line.removeprefix("subscriber: ") for line in done.stderr.splitlines() if line.endswith(" s")]
    print(f"migrate {seconds:8.2f} s: {', '.join(each for each in steps if each.count(':') == 1 and ' in ' not in each)}")
    subprocess.run(
        [sys.executable, "-m", "subscriber", "drop", "bench", "--target", target.dsn], check=True, capture_output=True, text=True
    )
    publisher.execute("DROP PUBLICATION bench")
    return seconds


def _dump(publisher: Database, target: Database) -> float:
    programs = find_binaries(18)
    with tempfile.TemporaryDirectory() as directory:
        archive = str(Path(directory) / "archive")
        began = time.monotonic()
        dump = [str(programs / "pg_dump"), "--format=directory", f"--jobs={JOBS}", f"--file={archive}", f"--dbname={publisher.dsn}"]
        subprocess.run(dump, check=True)
        subprocess.run([str(programs / "pg_restore"), f"--jobs={JOBS}", f"--dbname={target.dsn}", archive], check=True)
    target.execute("ANALYZE")
    seconds = time.monotonic() - began
    print(f"dump    {seconds:8.2f} s")
    return seconds


def _pgcopydb(publisher: Database, target: Database) -> float:
    environment = {**os.environ, "PATH": f"{find_binaries(18)}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory() as directory:
        command = ["pgcopydb", "clone", "--dir", f"{directory}/work", "--source", publisher.dsn, "--target", target.dsn]
        command += ["--table-jobs", str(JOBS), "--index-jobs", str(JOBS)]
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True, env=environment)
    target.execute("ANALYZE")
    seconds = time.monotonic() - began
    print(f"pgcopydb {seconds:7.2f} s")
    return seconds


def _check(publisher: Database, target: Database) -> None:
    indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'public'"
    keys = "SELECT count(*) FROM pg_constraint WHERE contype = 'f' AND convalidated"
    for query in (indexes, keys, *(SUMS.format(number=number) for number in (0, TABLES - 1))):
        assert target.fetch(query) == publisher.fetch(query), query


def main(arguments: list[str]) -> int:
    """Run the benchmark."""
    rows = int(arguments[0]) if arguments and int(arguments[0]) else ROWS
    contenders = {"migrate": _migrate, "dump": _dump, **({"pgcopydb": _pgcopydb} if shutil.which("pgcopydb") else {})}
    found: dict[str, list[float]] = {who: [] for who in contenders}
    servers = [EmbeddedServer.create(18, settings=SETTINGS) for _ in range(2)]
    try:
        publisher, administered = (Database(ServerAddress(server.dsn(), 18), "postgres") for server in servers)
        _fill(publisher, rows)
        for number in range(ROUNDS):
            for who, contender in contenders.items():
                name = f"{who}{number}"
                administered.execute(f"CREATE DATABASE {name}")
                target = Database(ServerAddress(servers[1].dsn(), 18), name)
                found[who].append(contender(publisher, target))
                _check(publisher, target)
                target.close()
                administered.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        for server in servers:
            server.remove()
    medians = {who: statistics.median(seconds) for who, seconds in found.items()}
    own = medians.pop("migrate")
    fastest = min(medians, key=medians.__getitem__)
    ratio = own / medians[fastest]
    print(
        f"{rows:,} rows, {TABLES} tables: migrate takes {ratio:.2f} times as long as {fastest}, the fastest of the others (goal: {GOAL:g})"
    )
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
