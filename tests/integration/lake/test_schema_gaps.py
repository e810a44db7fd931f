"""Columns that a table gets while it is followed: earlier rows have the publisher's values, never NULL in their place."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from subscriber import TableName, Until
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from tests.integration.lake.test_replica import subscription
from tests.support.database import Database
from tests.support.lakes import applied, assert_same, lake_rows, storage

T, OTHER = TableName("public", "t"), TableName("public", "other")

STATEMENTS = {
    "ALTER TABLE t ADD COLUMN plain text; UPDATE t SET plain = 'x' WHERE id = 1": False,
    "ALTER TABLE t ADD COLUMN n int NOT NULL DEFAULT 7; UPDATE t SET v = 'y' WHERE id = 2": True,
    "ALTER TABLE t RENAME COLUMN v TO renamed; UPDATE t SET renamed = 'z' WHERE id = 3": True,
    "ALTER TABLE t ADD COLUMN at timestamptz DEFAULT clock_timestamp(); DELETE FROM t WHERE id = 4": True,
    "ALTER TABLE t DROP COLUMN plain; UPDATE t SET renamed = 'again' WHERE id = 1": False,
    "ALTER TABLE t ALTER COLUMN n TYPE bigint; UPDATE t SET n = 5000000000 WHERE id = 2": False,
    "ALTER TABLE t ALTER COLUMN n TYPE numeric(20, 2); UPDATE t SET n = 1.5 WHERE id = 3": True,
    "ALTER TABLE t ALTER COLUMN renamed TYPE char(8); DELETE FROM t WHERE id = 5": True,
    # of a table whose file was written anew, nobody knows
    "ALTER TABLE t ADD COLUMN late int; INSERT INTO t (id, n, late) VALUES (100, 1, 5)": True,
}
"""Whether each of them makes the table be copied again."""


@pytest.fixture
def publisher(publisher18_db: Database) -> Database:
    publisher18_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE other (id int PRIMARY KEY);"
        "INSERT INTO t SELECT i, 'a' FROM generate_series(1, 10) AS i; CREATE PUBLICATION pub FOR TABLE t, other"
    )
    return publisher18_db


async def followed(publisher: Database, lake: Path, parameters: str = "") -> Snapshot:
    publisher.execute("INSERT INTO other SELECT coalesce(max(id), 0) + 1 FROM other")
    await subscription(publisher, lake, parameters=parameters).run(Until())
    return await applied(lake)


def generation(lake: Path) -> int:
    found = Lake.find(storage(lake))
    assert found is not None
    return found.table(T).generation


async def test_rows_have_the_publishers_values_after_each_alter_table(publisher: Database, tmp_path: Path) -> None:
    """The bug was that they were NULL in published snapshots, without a word."""
    lake = tmp_path / "lake"
    await followed(publisher, lake)
    for statement, again in STATEMENTS.items():
        before = generation(lake)
        publisher.execute(statement)
        assert_same(lake, await followed(publisher, lake), publisher, [T, OTHER])
        assert (generation(lake) > before) is again, statement


@pytest.mark.parametrize("policy", ["park", "null"])
async def test_table_is_stopped_or_keeps_null_if_the_user_says_so(
    publisher: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, policy: str
) -> None:
    lake, parameters = tmp_path / "lake", f"?on_schema_gap={policy}"
    caplog.set_level(logging.INFO)
    await followed(publisher, lake, parameters)
    publisher.execute("ALTER TABLE t ADD COLUMN n int NOT NULL DEFAULT 7; UPDATE t SET v = 'y' WHERE id = 2")
    for _ in range(2):
        snapshot = await followed(publisher, lake, parameters)
        assert generation(lake) == 1
        assert_same(lake, snapshot, publisher, [OTHER])
        if policy == "park":
            assert T not in snapshot.tables
            told = snapshot.stopped[T].error
            assert 'earlier rows of table "public.t" lack values: earlier rows have the default of column "n"' in told
            assert "copy it again: subscriber alter" in told
        else:
            assert set(lake_rows(lake, snapshot, T, ["n"])) == {(None,), ("7",)}
