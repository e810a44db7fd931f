"""Rows and statements that are larger than the target takes: MariaDB's ``max_allowed_packet``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase
from tests.support.program import running, subscriber
from tests.support.sqlalchemy_targets import OtherTarget, Replica, replica_of

KB, MB = 1024, 1024**2
SECRET = "seldom-seen"
SUMS = "SELECT id, length(v), md5(v) FROM t ORDER BY id"


@contextlib.contextmanager
def packets_of(database: MariaDatabase, size: int) -> Iterator[None]:
    """The server's limit for sessions that begin from now on."""
    before = database.value("SELECT @@GLOBAL.max_allowed_packet")
    database.execute(f"SET GLOBAL max_allowed_packet = {size}")
    try:
        yield
    finally:
        database.execute(f"SET GLOBAL max_allowed_packet = {before}")


@pytest.fixture
def pair(publisher18_db: Database, mariadb_db: MariaDatabase) -> Replica:
    return replica_of(publisher18_db, OtherTarget("mariadb", mariadb_db.url, mariadb_db.fetch, mariadb_db.execute))


def refused(errors: str, *said: str) -> None:
    """One line names the row."""
    line = next(line for line in errors.splitlines() if "max_allowed_packet of the target is 1,048,576" in line)
    for text in (r"needs a statement of 3,\d\d\d,\d\d\d bytes", "SET GLOBAL max_allowed_packet = 4194304", *said):
        assert re.search(text, line), line
    assert SECRET not in errors
    assert "lost" not in errors


def test_a_row_of_the_stream_is_named_and_applied_once_it_fits(pair: Replica, mariadb_db: MariaDatabase) -> None:
    with packets_of(mariadb_db, MB):
        with running(*pair.arguments()) as program:
            pair.target.follows()
            pair.publisher.execute("INSERT INTO t VALUES (2000, 'before')")
            # two of them are half as large as what is sent: each quote is escaped
            pair.publisher.execute(f"INSERT INTO t SELECT i, '{SECRET}' || repeat('''', {3 * MB // 2}) FROM generate_series(3000, 3001) i")
            program.says("finished at")
            refused(program.errors, r'INSERT" for replication target relation "public\.t"', r"in transaction \d+, finished at [0-9A-F]+/")
            pair.target.wait("SELECT max(id) FROM t", [(2000,)])
            mariadb_db.execute(f"SET GLOBAL max_allowed_packet = {4 * MB}")
            pair.target.wait("SELECT max(id) FROM t", [(3001,)])
        assert pair.target.fetch(SUMS) == pair.publisher.fetch(SUMS)


def test_a_row_of_a_copy_is_named_and_copied_once_it_fits(pair: Replica, mariadb_db: MariaDatabase) -> None:
    pair.publisher.execute(f"INSERT INTO t VALUES (3000, '{SECRET}' || repeat('x', {3 * MB}))")
    with packets_of(mariadb_db, MB):
        done = subscriber(*pair.arguments("--until-caught-up"))
        assert done.status == 1
        refused(done.errors, r'while copying table "public\.t"')
        mariadb_db.execute(f"SET GLOBAL max_allowed_packet = {4 * MB}")
        assert subscriber(*pair.arguments("--until-caught-up")).status == 0
    assert pair.target.fetch(SUMS) == pair.publisher.fetch(SUMS)


def caught_up(pair: Replica) -> None:
    """Without ``catches_up``'s silence: there is a warning about the packet."""
    done = subscriber(*pair.arguments("--until-caught-up"))
    assert done.status == 0, done.errors
    pair.same()


def test_rows_that_fit_one_by_one_are_sent_in_parts(pair: Replica, mariadb_db: MariaDatabase) -> None:
    """The drivers put up to 1 MB into one INSERT."""
    pair.more += ["-o", "two_phase=true"]
    rows = "SELECT i, repeat(chr(10) || 'x', 10000) FROM generate_series({}, {}) AS i"
    with packets_of(mariadb_db, 64 * KB):
        pair.publisher.execute("INSERT INTO t " + rows.format(2001, 2020))
        caught_up(pair)
        pair.publisher.execute("INSERT INTO t " + rows.format(3001, 3020))
        pair.publisher.execute("UPDATE t SET v = v || 'more' WHERE id > 2000; DELETE FROM t WHERE id = 2002")
        pair.publisher.execute(f"BEGIN; INSERT INTO t {rows.format(4001, 4020)}; PREPARE TRANSACTION 'large'")
        caught_up(pair)
        pair.publisher.execute("COMMIT PREPARED 'large'")
        caught_up(pair)


def test_check_warns_of_a_small_packet(pair: Replica, mariadb_db: MariaDatabase) -> None:
    with packets_of(mariadb_db, MB):
        done = subscriber(*(each for each in pair.arguments(verb="check") if not each.startswith(("-c", "wal_retrieve"))))
        assert "max_allowed_packet = 1048576 of the target" in done.output
    assert done.status == 0
