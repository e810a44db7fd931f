"""Memory stays bounded: what ``logical_decoding_work_mem`` is too small for spills, and is applied from there."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.database import Database

ROWS = 1_500_000
LIMIT_MB = 300


@dataclass(frozen=True)
class Peak:
    """Of one process."""

    resident_mb: float
    spooled_mb: float
    seconds: float


def _resident(pid: int) -> float:
    """VmHWM, the peak of this very program; ``ru_maxrss`` would count what pytest held before the exec. 0 once the process has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _run(publisher: Database, target: Database, spool: Path, *options: str) -> Peak:
    """``subscriber run --until-caught-up`` with the default settings; what it took at most."""
    arguments = ["--connection", publisher.conninfo(), "--publication", "pub", "--target", target.dsn, "--name", f"memory_{publisher.name}"]
    for option in options:
        arguments += ["-o", option]
    program = [sys.executable, "-m", "subscriber", "run", *arguments, "-c", f"spool_directory={spool}", "--until-caught-up"]
    began = time.monotonic()
    peak = spooled = 0.0
    with subprocess.Popen(program, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            peak = max(peak, _resident(process.pid))
            # directories go while one looks
            with contextlib.suppress(FileNotFoundError):
                for file in spool.glob("*/*.spool"):
                    spooled = max(spooled, _size(file))
            time.sleep(0.02)
        assert process.stderr is not None
        assert process.returncode == 0, process.stderr.read()
    assert peak > 0
    return Peak(peak, spooled, time.monotonic() - began)


def _size(file: Path) -> float:
    try:
        return file.stat().st_size / 1024**2
    except FileNotFoundError:
        return 0.0


def _prepare(publisher: Database, target: Database, spool: Path, table: str) -> None:
    for database in (publisher, target):
        database.execute(table)
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    _run(publisher, target, spool)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("streaming", ["parallel", "off"])
def test_a_transaction_of_many_rows(publisher18_db: Database, target_db: Database, tmp_path: Path, streaming: str) -> None:
    """Streamed in chunks while it runs, or spilled by the publisher and received in one piece."""
    _prepare(publisher18_db, target_db, tmp_path, "CREATE TABLE t (id int, v int)")
    publisher18_db.execute(f"INSERT INTO t SELECT i, 0 FROM generate_series(1, {ROWS}) AS i")
    peak = _run(publisher18_db, target_db, tmp_path, f"streaming={streaming}")
    print(f"{ROWS} rows, streaming={streaming}: {peak}")
    assert target_db.fetch("SELECT count(*), count(DISTINCT id) FROM t") == [(ROWS, ROWS)]
    assert peak.spooled_mb > 20
    assert peak.resident_mb < LIMIT_MB
    streamed = publisher18_db.value(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = 'memory_{publisher18_db.name}'")
    assert (streamed > 0) == (streaming == "parallel")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_a_transaction_of_large_rows(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """A row is the unit: it is in memory whole, and on its way in and out more than once; but not all rows are."""
    _prepare(publisher18_db, target_db, tmp_path, "CREATE TABLE t (id int, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    publisher18_db.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 327680) FROM generate_series(1, 40) AS i")
    peak = _run(publisher18_db, target_db, tmp_path)
    print(f"40 rows of 10 MB: {peak}")
    query = "SELECT count(*), sum(length(v)), md5(string_agg(md5(v), '' ORDER BY id)) FROM t"
    assert target_db.fetch(query) == publisher18_db.fetch(query)
    assert peak.spooled_mb > 350
    assert peak.resident_mb < LIMIT_MB


LARGE_MB = 64
BASE_MB = 90
"""What the program takes with nothing to do, and some room."""


def _insert_large(publisher: Database, first: int, last: int) -> None:
    publisher.execute(f"INSERT INTO t SELECT i, repeat(md5(i::text), {LARGE_MB * 32768}) FROM generate_series({first}, {last}) AS i")


@pytest.mark.timeout(300)
def test_large_values_are_held_four_times_at_most(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """Copied, then streamed: libpq's two buffers, the record and its value. The bug was that it took eight times the largest value."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); ALTER TABLE t ALTER v SET STORAGE EXTERNAL")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    _insert_large(publisher18_db, 1, 2)
    copying = _run(publisher18_db, target_db, tmp_path)
    _insert_large(publisher18_db, 3, 4)
    streaming = _run(publisher18_db, target_db, tmp_path)
    print(f"values of {LARGE_MB} MB, copying: {copying}, streaming: {streaming}")
    query = "SELECT id, md5(v) FROM t ORDER BY id"
    assert target_db.fetch(query) == publisher18_db.fetch(query)
    assert copying.resident_mb < BASE_MB + 3 * LARGE_MB
    assert streaming.resident_mb < BASE_MB + 4 * LARGE_MB
