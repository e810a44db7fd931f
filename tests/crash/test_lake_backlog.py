"""Without an applier the subscriber's memory is constant, and only the landing zone grows. When the applier is back, it applies all.

``SUBSCRIBER_BACKLOG_SECONDS`` says how long it is away: seconds in ``make test``, minutes in ``make soak``.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import psycopg
import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.lake import Lake
from tests.crash.process import QUICK
from tests.crash.test_lake import Program, tidy
from tests.support.database import Database
from tests.support.lakes import apply_all, assert_same_large, storage

SECONDS = float(os.environ.get("SUBSCRIBER_BACKLOG_SECONDS", "20"))
T = TableName("public", "t")
_ALLOWED = 40 * 1024**2
"""Bytes that the last third may have more than the second: what allocators keep."""


def rss(pid: int) -> int:
    """Resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def followed(lake: Path) -> bool:
    """The table is copied: later changes are landed."""
    found = Lake.find(storage(lake)) if (lake / "status.json").exists() else None
    return found is not None and [entry.entry.state.value in "sr" for entry in found.state.tables.values()] == [True]


def size_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def write(dsn: str, until: float) -> int:
    """Transactions of 200 rows, updates and long values among them, as fast as half of one core allows; how many rows.

    They are not more than two million: servers and lakes of tests are in memory.
    """
    rows, pause = 0, SECONDS / 10_000
    with psycopg.connect(dsn) as session:
        while time.monotonic() < until:
            begun = time.monotonic()
            with session.transaction():
                session.execute(
                    "INSERT INTO t SELECT i, md5(i::text), repeat(md5(i::text), 20) FROM generate_series(%s::int, %s) AS i",
                    (rows + 1, rows + 200),
                )
                session.execute("UPDATE t SET v = v || 'x' WHERE id > %s - 100 AND id <= %s", (rows, rows))
            rows += 200
            took = time.monotonic() - begun
            time.sleep(max(took, pause - took))
    return rows


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(180 + 3 * SECONDS)
async def test_memory_is_flat_while_no_applier_runs_and_the_backlog_is_applied_later(publisher18_db: Database, tmp_path: Path) -> None:
    publisher, lake = publisher18_db, tmp_path / "lake"
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text, long text); CREATE PUBLICATION pub FOR TABLE t")
    settings = [argument for setting in (*QUICK, f"spool_directory={tmp_path / 'spool'}") for argument in ("-c", setting)]
    subscriber = Program(
        tmp_path,
        "subscriber",
        *("run", "--connection", publisher.conninfo(), "--publication", "pub", "--target", f"spark://{lake}"),
        *("--name", f"lake_{publisher.name}", *settings),
    )
    process = subscriber.start()
    try:
        deadline = time.monotonic() + 60
        while not followed(lake):
            assert time.monotonic() < deadline, subscriber.log()
            await asyncio.sleep(0.05)
        writing = asyncio.create_task(asyncio.to_thread(write, publisher.dsn, time.monotonic() + SECONDS))
        sizes: list[int] = []
        while not writing.done():
            await asyncio.sleep(0.25)
            assert process.poll() is None, subscriber.log()
            sizes.append(rss(process.pid))
        rows = await writing
        publisher.execute("SELECT pg_logical_emit_message(false, 'test', 'end')")
        flushed = "SELECT confirmed_flush_lsn >= '{}' FROM pg_replication_slots WHERE database = current_database()"
        await asyncio.to_thread(publisher.wait, flushed.format(publisher.current_lsn()), True, 60)
        # the first third is for getting to work
        third = len(sizes) // 3
        resident = [max(sizes[third : 2 * third]), max(sizes[2 * third :])]
        backlog, files = size_of(lake / "landing"), len(list((lake / "landing").iterdir()))
        assert resident[1] - resident[0] < _ALLOWED, [size >> 20 for size in sizes]
        # of several batches: a file of rows and a manifest each
        assert files > max(5, SECONDS / 4)
        begun = time.monotonic()
        snapshot = await asyncio.to_thread(apply_all, lake)
        await asyncio.to_thread(tidy, lake)
        took = time.monotonic() - begun
        await asyncio.to_thread(assert_same_large, lake, snapshot, publisher, T)
        left = size_of(lake / "landing")
        assert left < backlog / 10 + 100_000
        grown = " and then ".join(f"{size / 2**20:.0f} MB" for size in resident)
        print(
            f"{SECONDS:g} s, {rows} rows inserted and {rows // 2} changed; resident at most {grown}; backlog {backlog / 2**20:.1f} MB"
            f" in {files} files, applied and logged in {took:.1f} s, {left / 2**20:.1f} MB left"
        )
    finally:
        subscriber.end()
