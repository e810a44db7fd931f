"""``schema_change = follow``: the process ends between ALTER TABLE and the row that needs it, and before the commit, in streams as well.

It ends at each occurrence of each point. The next process finds what was done: at the end, columns and rows are those of the publisher.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from subscriber import crash_points
from subscriber.cli.main import main
from tests.crash.process import QUICK, RunProcess
from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase
from tests.support.sqlalchemy_targets import OtherTarget, sqlite_target

ENDS = 86
OPTIONS = ("two_phase=false", "streaming=on")
POINTS = {
    "native": ("columns.changed", "postgres.changes_sent", "postgres.end_sent", "postgres.committed"),
    "sqlite": ("columns.changed", "sqlalchemy.changes_made", "sqlalchemy.committed"),
    "mariadb": ("columns.changed", "sqlalchemy.changes_made", "sqlalchemy.committed"),
}
TABLE = "CREATE TABLE {} (id int PRIMARY KEY, a int NOT NULL, b int NOT NULL, z varchar(5) NOT NULL)"
COLUMNS = "SELECT attname::text FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped"
CHANGES = """
INSERT INTO t VALUES (9{n}1, 1, 2, 'z'); ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b;
ALTER TABLE t ADD c{n} int DEFAULT {n}; INSERT INTO t (id, a, b, z) VALUES (9{n}2, 3, 4, 'z'); DELETE FROM t WHERE id = {n}
"""
STREAM = """
BEGIN; INSERT INTO u SELECT i, 1, 2, 'z' FROM generate_series({n}0000, {n}3000) AS i;
ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b; ALTER TABLE t RENAME c{n} TO d{n};
ALTER TABLE t ALTER z TYPE varchar({n}0); ALTER TABLE t ADD e{n} int NOT NULL DEFAULT 5;
INSERT INTO t SELECT i, 5, 6, 'z' FROM generate_series({n}0000, {n}3000) AS i;
SAVEPOINT s; ALTER TABLE t RENAME a TO never; INSERT INTO t SELECT i, 5, 6, 'z' FROM generate_series({n}3001, {n}6000) AS i; ROLLBACK TO s;
UPDATE u SET a = 9 WHERE id = {n}0001; ALTER TABLE u RENAME a TO a{n}; COMMIT;
ALTER TABLE u RENAME a{n} TO a; INSERT INTO u VALUES ({n}, 1, 2, 'z');
ALTER TABLE t DROP e{n}; INSERT INTO t (id, a, b, z) VALUES (9{n}3, 3, 4, 'z')
"""


def end_at(arguments: Sequence[str], point: str, occurrence: int, log: Path) -> None:
    """Run in a process of its own. It ends at once when a point is reached for the n-th time."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    count = 0

    def reached(name: str) -> None:
        nonlocal count
        count += name == point
        if count == occurrence:
            os._exit(ENDS)

    with crash_points.watched(reached):
        sys.exit(main([*arguments]))


@pytest.fixture
def other(request: pytest.FixtureRequest, tmp_path: Path) -> OtherTarget:
    if request.param == "native":
        database: Database = request.getfixturevalue("target_db")
        return OtherTarget("native", database.dsn, database.fetch, database.execute)
    if request.param == "sqlite":
        return sqlite_target(tmp_path / "replica.db")
    found: MariaDatabase = request.getfixturevalue("mariadb_db")
    return OtherTarget("mariadb", found.url, found.fetch, found.execute)


@pytest.mark.crash_points
@pytest.mark.timeout(300)
@pytest.mark.parametrize("other", POINTS, indirect=True)
def test_ends_at_each_step(publisher18_db: Database, other: OtherTarget, tmp_path: Path) -> None:
    for table in ("t", "u"):
        publisher18_db.execute(TABLE.format(table))
        if other.kind == "native":
            other.execute(TABLE.format(table))
    publisher18_db.execute("INSERT INTO t SELECT i, i, 2 * i, 'z' FROM generate_series(1, 50) AS i; CREATE PUBLICATION pub FOR TABLE t, u")
    create = () if other.kind == "native" else ("create_tables=on",)
    run = RunProcess(publisher18_db, other.url, tmp_path, OPTIONS, (*QUICK, "schema_change=follow", "dropped_columns=drop", *create))
    run.catch_up(60)
    # a run that finds the tables ready learns their columns
    while other.fetch(f"SELECT count(*) FROM {other.ours('pg_subscription_rel')} WHERE srcolumns IS NULL") != [(0,)]:
        publisher18_db.execute("INSERT INTO u SELECT count(*), 0, 0, 'z' FROM u")
        run.catch_up(60)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["subscriber.cli.main", "subscriber.sinks.postgres.sink", "subscriber.sinks.sqlalchemy.sink", __name__])
    ends = {}
    for number, point in enumerate(POINTS[other.kind], start=1):
        for statement in f"{CHANGES};{STREAM}".format(n=number).split(";"):
            publisher18_db.execute(statement)
        for occurrence in range(1, 30):
            arguments = (run.arguments("--until-caught-up"), point, occurrence, tmp_path / "log")
            process = context.Process(target=end_at, args=arguments)
            process.start()
            process.join(60)
            assert process.exitcode in (0, ENDS), run.log()
            if process.exitcode == 0:
                break
            ends[point] = occurrence
    print(ends)
    assert set(ends) == set(POINTS[other.kind])
    columns = [name for (name,) in publisher18_db.fetch(COLUMNS)]
    # dropped columns are gone
    assert len(other.fetch("SELECT * FROM t LIMIT 1")[0]) == len(columns)
    for query in (f"SELECT {', '.join(columns)} FROM t ORDER BY id", "SELECT id, a, b, z FROM u ORDER BY id"):
        assert other.fetch(query) == publisher18_db.fetch(query)
