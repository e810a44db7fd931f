"""Hundreds of refusals by the target, one after another: the subscription continues as soon as the cause is removed."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from subscriber.protocol.lsn import Lsn
from tests.integration.lake.test_bad_input import T, arguments, run
from tests.support.database import WAIT_SECONDS, Database
from tests.support.lakes import applied, assert_same, fill
from tests.support.program import Program, confirmed, running
from tests.support.sqlalchemy_targets import ALL, Replica, write_locked

ALL_COLUMNS = "SELECT id, v, c FROM t ORDER BY id"
REFUSALS = 25
MANY_REFUSALS = 400
TIMES = pytest.mark.parametrize(
    "refusals", [REFUSALS, pytest.param(MANY_REFUSALS, marks=[pytest.mark.endurance, pytest.mark.timeout(900)])]
)


def quickly(pair: Replica) -> list[str]:
    """Arguments of a run that hardly pauses between attempts."""
    return ["-vv", *(argument.replace("=200ms", "=5ms") for argument in pair.arguments())]


def refused(program: Program, times: int) -> None:
    """Wait until so many attempts have failed; the time counts from each one to the next."""
    seen, deadline = 0, time.monotonic() + WAIT_SECONDS
    while seen < times:
        assert program.process.poll() is None, program.errors
        found = program.errors.count("next attempt in")
        if found > seen:
            seen, deadline = found, time.monotonic() + WAIT_SECONDS
        assert time.monotonic() < deadline, f"it stands still after {seen} refusals: {program.errors[-3000:]}"
        time.sleep(0.05)


def goes_on_after(pair: Replica, refusals: int) -> None:
    with running(*quickly(pair)) as program:
        pair.target.follows()
        pair.publisher.execute("ALTER TABLE t ADD c int; INSERT INTO t VALUES (2000, 'new', 1)")
        refused(program, refusals)
        pair.target.execute("ALTER TABLE t ADD c int")
        pair.target.wait(ALL_COLUMNS, pair.publisher.fetch(ALL_COLUMNS))
        assert "Traceback" not in program.errors
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    pair.acknowledged()


@pytest.mark.parametrize("other_target", ["native", "sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)], indirect=True)
@TIMES
def test_refusals_one_after_another(other_replica: Replica, refusals: int) -> None:
    goes_on_after(other_replica, refusals)


@TIMES
async def test_refusals_of_a_lake(publisher18_db: Database, small_disk: Path, refusals: int) -> None:
    """Its disk is full: nothing can be landed."""
    publisher, lake = publisher18_db, small_disk / "lake"
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'copied')")

    def landed(lsn: Lsn) -> None:
        slot = f"slot_name = 'lake_{publisher.name}'"
        publisher.wait(f"SELECT confirmed_flush_lsn >= '{lsn}' FROM pg_replication_slots WHERE {slot}", True)

    assert run(publisher, lake).status == 0
    with running("-vv", *arguments(publisher, lake), "-c", "wal_retrieve_retry_interval=5ms") as program:
        landed(publisher.current_lsn())
        ballast = fill(small_disk)
        publisher.execute("INSERT INTO t SELECT i, repeat(md5(i::text), 10) FROM generate_series(2, 500) AS i")
        lsn = publisher.current_lsn()
        refused(program, refusals)
        assert Lsn.parse(confirmed(publisher, f"lake_{publisher.name}")) < lsn
        ballast.unlink()
        landed(lsn)
        assert "Traceback" not in program.errors
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    assert_same(lake, await applied(lake), publisher, [T])


@contextlib.contextmanager
def locked(request: pytest.FixtureRequest, kind: str, rows: str) -> Iterator[None]:
    """Another session of the target locks these rows while the block lasts."""
    session = request.getfixturevalue("mariadb_db" if kind == "mariadb" else "target_db").connect()
    with contextlib.closing(session), session.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM {rows} FOR UPDATE")
        yield
        cursor.execute("ROLLBACK")


@pytest.mark.parametrize("other_target", ["mariadb"], indirect=True)
def test_refusals_while_no_report_can_be_written(other_replica: Replica, request: pytest.FixtureRequest) -> None:
    pair = other_replica
    with running(*quickly(pair)) as program:
        pair.target.follows()
        with locked(request, pair.target.kind, pair.target.ours("worker")):
            pair.publisher.execute("ALTER TABLE t ADD c int; INSERT INTO t VALUES (2000, 'new', 1)")
            # the first of them closes the session in which a report waits
            refused(program, 3)
        pair.target.execute("ALTER TABLE t ADD c int")
        pair.target.wait(ALL_COLUMNS, pair.publisher.fetch(ALL_COLUMNS))
        assert "Traceback" not in program.errors


@pytest.mark.endurance
def test_a_file_that_is_locked_for_longer_than_the_timeout(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    assert pair.target.path is not None
    with running(*quickly(pair)) as program:
        pair.target.follows()
        for _ in range(2):
            logged = program.errors.count("is locked by another program")
            with write_locked(pair.target.path):
                pair.publisher.execute("INSERT INTO t SELECT max(id) + 1, 'new' FROM t")
                for times in (1, 2):
                    program.says("is locked by another program", logged + times)
            pair.target.wait(ALL, pair.publisher.fetch(ALL))
        assert "Traceback" not in program.errors
