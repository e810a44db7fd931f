"""A run that parks tables is killed: at each of its crash points, and at random moments of a random history."""

from __future__ import annotations

import random
import secrets
import time
from pathlib import Path

import pytest

from tests.crash.process import Process, RunProcess
from tests.support.database import Database
from tests.support.examples import some_and_others
from tests.support.program import slots

TABLES = ("good", "taken", "checked")
PARKING = ("on_error=park", "park_after=1", "park_retry=1s", "streaming=parallel")
STATUS = 77
ENDING = """
import os, sys
from subscriber import crash_points
from subscriber.cli import main
def end(point):
    if point == {point!r}:
        os._exit({status})
with crash_points.watched(end):
    sys.exit(main(sys.argv[1:]))
"""


class ParkingProcess(RunProcess):
    """One that ends at a crash point."""

    point = ""

    def start(self, *more: str) -> Process:
        self.code = ENDING.format(point=self.point, status=STATUS)
        return super().start(*more)


def set_up(publisher: Database, target: Database, directory: Path) -> ParkingProcess:
    for database in (publisher, target):
        for table in TABLES:
            database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v int)")
        # without a key, so that what is applied twice is found
        database.execute("CREATE TABLE history (n int); ALTER TABLE history REPLICA IDENTITY FULL")
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE history, {', '.join(TABLES)}")
    run = ParkingProcess(publisher, target.dsn, directory, options=PARKING)
    run.catch_up(60)
    return run


def require_same(run: ParkingProcess, publisher: Database, target: Database) -> None:
    """All tables come back, and are equal."""
    run.point = ""
    run.start()
    target.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate::text NOT IN ('s', 'r')", 0, 60)
    run.kill()
    run.catch_up(60)
    for table in TABLES:
        query = f"SELECT id, v FROM {table} ORDER BY id"
        assert target.fetch(query) == publisher.fetch(query), table
    assert target.fetch("SELECT n FROM history ORDER BY n") == publisher.fetch("SELECT n FROM history ORDER BY n")
    assert slots(publisher) == [run.name]


@pytest.mark.crash
@some_and_others(["point"], [("park.stored",), ("park.left",)], [("reconcile.planned",), ("copy.synchronized",)])
def test_killed_at_a_point(publisher18_db: Database, target_db: Database, tmp_path: Path, point: str) -> None:
    run = set_up(publisher18_db, target_db, tmp_path)
    try:
        target_db.execute("INSERT INTO taken VALUES (5, 0)")
        publisher18_db.execute(
            "BEGIN; INSERT INTO history VALUES (1); INSERT INTO taken VALUES (4, 4), (5, 5); INSERT INTO good VALUES (1, 1); COMMIT"
        )
        publisher18_db.execute("INSERT INTO history VALUES (2); INSERT INTO taken VALUES (6, 6)")
        run.point = point
        assert run.start().wait(60) == STATUS, run.log()
        publisher18_db.execute("INSERT INTO history VALUES (3); UPDATE taken SET v = 7 WHERE id = 6")
        require_same(run, publisher18_db, target_db)
    finally:
        run.end()


@pytest.mark.crash
def test_slot_of_a_table_that_was_dropped_since_its_copy(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """The process before has left it. It would retain the publisher's WAL."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t, u")
    run = ParkingProcess(publisher18_db, target_db.dsn, tmp_path, options=("on_error=park", "park_after=1"))
    states = "SELECT srrelname::text FROM subscriber.pg_subscription_rel WHERE srsubstate::text = "
    try:
        run.point = "copy.finished"
        assert run.start().wait(60) == STATUS, run.log()
        copied = target_db.value(f"{states} 'f'")
        target_db.execute(f"DROP TABLE {copied}")
        run.point = ""
        run.start()
        target_db.wait(f"{states} 'p'", copied, 60)
        target_db.wait(f"SELECT count(*) FROM ({states} 'r') AS ready", 1, 60)
        publisher18_db.wait(f"SELECT slot_name::text FROM pg_replication_slots WHERE database = '{publisher18_db.name}'", [(run.name,)])
    finally:
        run.end()


@pytest.mark.endurance
@pytest.mark.crash
def test_kills_lose_and_repeat_nothing(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """Rows and constraints of the target reject changes now and then, of transactions of all sizes, while the run is killed."""
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    chosen, number = random.Random(seed), 0
    publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} SET logical_decoding_work_mem = '64kB'")
    run = set_up(publisher18_db, target_db, tmp_path)
    broken = (
        (
            "INSERT INTO taken SELECT i, -1 FROM generate_series({0}, {0} + 40) AS i ON CONFLICT DO NOTHING",
            "DELETE FROM taken WHERE v = -1",
        ),
        ("ALTER TABLE checked ADD CONSTRAINT small CHECK (id < {0}) NOT VALID", "ALTER TABLE checked DROP CONSTRAINT IF EXISTS small"),
        ("ALTER TABLE checked RENAME v TO w", "ALTER TABLE checked RENAME w TO v"),
    )
    try:
        for _ in range(12):
            breaks, mends = chosen.choice(broken)
            target_db.execute(breaks.format(number + 5))
            run.start()
            for _ in range(chosen.randrange(3, 12)):
                rows = chosen.choice((1, 3, 2000))
                statements = [f"INSERT INTO history VALUES ({number})"]
                statements += [
                    f"INSERT INTO {table} SELECT i, {number} FROM generate_series({number + 1}, {number + rows}) AS i"
                    for table in chosen.sample(TABLES, chosen.randrange(1, 4))
                ]
                statements.append(f"UPDATE {chosen.choice(TABLES)} SET v = v + 1 WHERE id > {number - 20}")
                statements.append(f"DELETE FROM {chosen.choice(TABLES)} WHERE id % 17 = {number % 17}")
                chosen.shuffle(statements)
                publisher18_db.execute(f"BEGIN; {'; '.join(statements)}; {chosen.choice(('COMMIT', 'COMMIT', 'ROLLBACK'))}")
                number += rows
                time.sleep(chosen.uniform(0, 0.2))
            time.sleep(chosen.uniform(0, 1.5))
            run.kill()
            target_db.execute(mends)
        require_same(run, publisher18_db, target_db)
    finally:
        run.end()
