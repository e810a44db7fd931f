"""Histories of real tables: at each LSN the rows that the publisher had, over all that SQL does to a table."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from subscriber import Lsn, TableName, Until
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from tests.integration.lake.test_replica import subscription
from tests.support.database import Database
from tests.support.lakes import applied

SCD2, DELETED = TableName("public", "t_history"), TableName("public", "u_history")
BIG = "repeat(md5(i::text), 200)"  # stored out of line, so that an UPDATE of other columns does not send it

STATEMENTS = (
    "UPDATE t SET v = 'b' WHERE id < 4",
    "BEGIN; UPDATE t SET v = 'lost' WHERE id = 1; UPDATE t SET v = 'c' WHERE id = 1; INSERT INTO t VALUES (90);"
    "DELETE FROM t WHERE id = 90; COMMIT",
    "UPDATE t SET id = id + 100 WHERE id IN (2, 3)",
    "DELETE FROM t WHERE id IN (102, 5); INSERT INTO t VALUES (5, 'again', 'small')",
    "ALTER TABLE t ADD COLUMN more int; UPDATE t SET more = id WHERE id > 7",
    "ALTER TABLE t REPLICA IDENTITY FULL; UPDATE t SET v = 'full' WHERE id IN (6, 103); DELETE FROM t WHERE id = 8",
    "ALTER TABLE t REPLICA IDENTITY DEFAULT; UPDATE t SET big = 'x' WHERE id = 6",
    "ALTER TABLE t ALTER COLUMN more TYPE bigint; INSERT INTO t VALUES (9000, 'wide', NULL, 5000000000)",
    "TRUNCATE t; INSERT INTO t SELECT i, 'new', " + BIG + " FROM generate_series(1, 3) AS i",
)


def rows_of(path: Path, snapshot: Snapshot, name: TableName) -> list[dict[str, Any]]:
    table = snapshot.tables[name]
    found: list[dict[str, Any]] = DeltaTable(str(path / table.path), version=table.version).to_pyarrow_table().to_pylist()
    return found


def values(item: dict[str, Any]) -> tuple[Any, ...]:
    return item["id"], item["v"], item["big"], item.get("more")


async def test_history_has_the_rows_of_each_lsn(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, big text); ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;"
        "CREATE TABLE u (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t, u;"
        f"INSERT INTO t SELECT i, 'a', {BIG} FROM generate_series(1, 10) AS i; INSERT INTO u SELECT i, 'a' FROM generate_series(1, 4) AS i"
    )
    lake, parameters = tmp_path / "lake", "?history.public.t=scd2&history.public.u=scd2"
    await subscription(publisher18_db, lake, parameters=parameters).run(Until())
    await applied(lake)
    states: dict[Lsn, Counter[tuple[Any, ...]]] = {}
    for statement in STATEMENTS:
        publisher18_db.execute(statement)
        more = ", more" if publisher18_db.value("SELECT count(*) FROM pg_attribute WHERE attname = 'more'") else ", NULL"
        lsn = Lsn.parse(str(publisher18_db.value("SELECT pg_current_wal_insert_lsn()::text")))
        states[lsn] = Counter(publisher18_db.fetch(f"SELECT id, v, big{more} FROM t"))
        if "FULL" in statement:
            await subscription(publisher18_db, lake, parameters=parameters).run(Until())
            await applied(lake)
    publisher18_db.execute("DELETE FROM u WHERE id > 2; UPDATE u SET v = 'b' WHERE id = 1; INSERT INTO u VALUES (3, 'again')")
    await subscription(publisher18_db, lake, parameters=parameters).run(Until())
    snapshot = await applied(lake)
    found = rows_of(lake, snapshot, SCD2)
    for lsn, state in states.items():
        there = [item for item in found if item["_lsn"] <= lsn and (item["_end_lsn"] is None or lsn < item["_end_lsn"])]
        assert Counter(map(values, there)) == state, lsn
    assert not [item for item in found if item["v"] == "lost" or item["id"] == 90]
    assert all(item["_valid_from"] is not None and (item["_valid_to"] is None) == item["_is_current"] for item in found)
    last = {
        item["id"]: (item["v"], item["_is_current"]) for item in sorted(rows_of(lake, snapshot, DELETED), key=lambda item: item["_lsn"])
    }
    assert last == {1: ("b", True), 2: ("a", True), 3: ("again", True), 4: ("a", False)}
