"""A disk that is full, for real: ENOSPC of a small file system, under the target or the spool. Only root may mount one.

A MariaDB of 10.11 whose tables meet ENOSPC mostly ends itself; it may refuse the row instead. Either is one line, and the end is the same.

One line with the remedy, nothing of the transaction, the position where it was; once there is room it continues.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from subscriber.testing.mariadb import EmbeddedMariaDB
from subscriber.testing.mariadb_binaries import WITHOUT_VARIABLE, is_done_without
from tests.integration.sqlalchemy.test_bad_input import SECRET, assert_one_error
from tests.support.database import Database
from tests.support.disk import Disk
from tests.support.mariadb_database import fresh_mariadb_database
from tests.support.program import running, subscriber
from tests.support.sqlalchemy_targets import OtherTarget, replica_of, sqlite_target

MANY = f"INSERT INTO t SELECT i, repeat('{SECRET}', 20) FROM generate_series(10000, 16000) AS i"
"""Some four megabytes."""


def test_the_disk_of_a_sqlite_file(publisher18_db: Database, make_disk: Callable[[int], Disk]) -> None:
    disk = make_disk(16)
    pair = replica_of(publisher18_db, sqlite_target(disk.path / "replica.db"))
    pair.catches_up()
    disk.fill(1_000_000)
    pair.publisher.execute(MANY)
    lsn = pair.publisher.current_lsn()
    assert_one_error(
        subscriber(*pair.arguments("--until-caught-up")), r"no room is left for the SQLite file.*make room on the target's disk"
    )
    assert pair.behind(lsn)
    assert pair.target.fetch("SELECT count(*), max(id) FROM t") == [(1000, 1000)]
    disk.make_room()
    pair.catches_up()


def test_continues_without_a_restart(publisher18_db: Database, make_disk: Callable[[int], Disk]) -> None:
    """A run that is under way when the disk becomes full waits for room."""
    disk = make_disk(16)
    pair = replica_of(publisher18_db, sqlite_target(disk.path / "replica.db"))
    with running(*pair.arguments()) as program:
        pair.target.follows()
        disk.fill(1_000_000)
        pair.publisher.execute(MANY)
        program.says("no room is left for the SQLite file")
        assert pair.target.fetch("SELECT count(*) FROM t") == [(1000,)]
        disk.make_room()
        pair.target.wait("SELECT count(*) FROM t", [(7001,)])
        program.send(signal.SIGTERM)
        done = program.ended()
    assert done.status == 0
    assert SECRET not in done.errors
    pair.same()


def test_a_disk_that_is_full_from_the_start(publisher18_db: Database, make_disk: Callable[[int], Disk]) -> None:
    disk = make_disk(8)
    pair = replica_of(publisher18_db, sqlite_target(disk.path / "replica.db"))
    disk.fill(16_384)
    assert_one_error(subscriber(*pair.arguments("--until-caught-up")), r"SQLite file.*check the disk for free space")
    disk.make_room()
    pair.catches_up()


def test_the_disk_of_the_spool(publisher18_db: Database, scratch: Path, make_disk: Callable[[int], Disk]) -> None:
    disk = make_disk(8)
    pair = replica_of(publisher18_db, sqlite_target(scratch / "replica.db"))
    pair.more = ["-o", "streaming=on", "-c", f"spool_directory={disk.path}", "-c", "logical_decoding_work_mem=64kB"]
    pair.catches_up()
    disk.fill(1_000_000)
    pair.publisher.execute(MANY)
    lsn = pair.publisher.current_lsn()
    assert_one_error(
        subscriber(*pair.arguments("--until-caught-up")),
        r"could not write.*No space left on device.*make room in .*, or set spool_directory",
    )
    assert pair.behind(lsn)
    assert pair.target.fetch("SELECT count(*) FROM t") == [(1000,)]
    assert [path.name for path in disk.path.iterdir() if list(path.glob("*"))] == []
    disk.make_room()
    pair.catches_up()


def test_the_disk_of_a_mariadb(publisher18_db: Database, make_disk: Callable[[int], Disk]) -> None:
    if is_done_without():
        pytest.skip(f"{WITHOUT_VARIABLE} is set")
    disk = make_disk(250)
    disk.path.chmod(0o755)
    with EmbeddedMariaDB.create(directory=disk.path) as server, fresh_mariadb_database(server) as database:
        pair = replica_of(publisher18_db, OtherTarget("mariadb", database.url, database.fetch, database.execute))
        with running(*pair.arguments()) as program:
            pair.target.follows()
            disk.fill(1_000_000)
            pair.publisher.execute(MANY)
            program.says("; next attempt in ")
            disk.make_room()
            server.restart()
            pair.target.wait("SELECT count(*), max(id) FROM t", [(7001, 16_000)])
            program.send(signal.SIGTERM)
            done = program.ended()
        assert done.status == 0
        assert SECRET not in done.errors
        assert "Traceback" not in done.errors
        pair.same()
