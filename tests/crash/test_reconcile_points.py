"""``recover``: its run ends at each step of a reconciliation, while the publisher's rows change. Then both sides are equal.

The other crash points are reached with the fake publisher (``tests/crash_points``), which computes no checksums.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash.process import RunProcess
from tests.support.database import Database
from tests.support.examples import some_and_others
from tests.support.program import subscriber

ROWS = 1500
ENDS = 86
CODE = """
import os, sys
from subscriber import crash_points
from subscriber.cli.main import main
from subscriber.subscription.run import reconciliation
from subscriber.verification import tables

tables._RANGE_ROWS, reconciliation._ROWS = 300, 20

def reached(name):
    if name == {point!r}:
        os._exit({ends})

with crash_points.watched(reached):
    sys.exit(main(sys.argv[1:]))
"""
RECONCILE = ("reconcile.planned", "reconcile.rows_written", "reconcile.replaced")
# tables by themselves: each has a slot, and states of its own
ALONE = (3, ("copy.slot_created", *RECONCILE, "copy.finished"))
# copies have these points, too
AS_IN_COPIES = (3, ("copy.started", "copy.stored", "copy.caught_up", "copy.synchronized"))
# so many share a snapshot, and each is one transaction
IN_GROUPS = (6, (*RECONCILE, "group.copied", "group.stored"))


@pytest.mark.crash
@some_and_others(["count", "points"], [ALONE, IN_GROUPS], [AS_IN_COPIES])
def test_ends_at_each_step(count: int, points: Sequence[str], publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    names = [f"t{number}" for number in range(count)]
    for database in (publisher18_db, target_db):
        for name in names:
            database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v int, u int UNIQUE)")
    for name in names:
        publisher18_db.execute(f"INSERT INTO {name} SELECT i, 0, i FROM generate_series(1, {ROWS}) AS i")
    publisher18_db.execute("ANALYZE; CREATE PUBLICATION pub FOR ALL TABLES")
    settings = ("wal_retrieve_retry_interval=200ms", "max_sync_workers_per_subscription=1")
    run = RunProcess(publisher18_db, target_db.dsn, tmp_path, options=(), settings=settings)
    run.catch_up(60)
    stop, empty = threading.Event(), list[str]()

    def write() -> None:
        with publisher18_db.connect() as connection:
            while not stop.is_set():
                # the last one rests, so that tables of a group are finished there
                for name in names[:-1]:
                    connection.execute(f"UPDATE {name} SET v = v + 1 WHERE id % 500 = 7; DELETE FROM {name} WHERE id = 8".encode())
                    connection.execute(f"INSERT INTO {name} VALUES (8, 0, 8)".encode())
                time.sleep(0.3)

    def read() -> None:
        with target_db.connect() as connection:
            while not stop.is_set():
                for name in names:
                    # the rows that no one changes are there at any time
                    row = connection.execute(f"SELECT count(*) FROM {name} WHERE id BETWEEN 100 AND 200".encode()).fetchone()
                    empty.extend([name] if row != (101,) else [])
                time.sleep(0.05)

    threads = [threading.Thread(target=work) for work in (write, read)]
    for thread in threads:
        thread.start()
    try:
        for point in points:
            for name in names:
                target_db.execute(f"""
                    UPDATE {name} SET v = -1 WHERE id % 100 = 50; DELETE FROM {name} WHERE id BETWEEN 900 AND 960;
                    INSERT INTO {name} VALUES (-1, 0, -1), (1000000, 0, -2) ON CONFLICT DO NOTHING;
                    UPDATE {name} SET u = -u WHERE id IN (3, 1400)
                """)
            done = subscriber("recover", run.name, f"--target={target_db.dsn}", f"--connection={publisher18_db.dsn}", "--force")
            assert done.status == 0, done.errors
            run.code = CODE.format(point=point, ends=ENDS)
            assert run.start("--until-caught-up").wait(60) == ENDS, (point, run.log())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    run.code = ""
    run.catch_up(60)
    for name in names:
        query = f"SELECT id, v, u FROM {name} ORDER BY id"
        assert target_db.fetch(query) == publisher18_db.fetch(query)
    assert not empty
    assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert publisher18_db.fetch(slots) == [(run.name,)]
