"""subscriber.testing.comparison: finds every difference between two databases at rest, and none where there is none."""

from __future__ import annotations

from pathlib import Path

from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.catalog.inspection import TargetInspection
from subscriber.testing.comparison import PreparedComparison, compare, compare_prepared, published_tables
from subscriber.testing.load.tables import create_tables, table_names
from subscriber.verification.model import TableReport
from tests.support.database import Database

T = TableName("public", "t")
KEYED = "CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 100) AS i"
BAG = "CREATE TABLE t (id int, v text); INSERT INTO t VALUES (1, 'x'), (2, 'y'), (2, 'y'), (3, '')"


async def compare_one(publisher: Database, target: Database) -> TableReport:
    (found,) = await compare(publisher.dsn, target.dsn, [T])
    return found


CHANGES = [
    (KEYED, "UPDATE t SET v = v", []),
    (KEYED, "DELETE FROM t WHERE id = 17", [("missing", 1)]),
    (KEYED, "INSERT INTO t VALUES (500, 'x')", [("extra", 1)]),
    (KEYED, "UPDATE t SET v = NULL WHERE id = 17", [("different", 1)]),
    (KEYED, "UPDATE t SET v = CASE id WHEN 17 THEN 'v18' ELSE 'v17' END WHERE id IN (17, 18)", [("different", 1), ("different", 1)]),
    (BAG, "UPDATE t SET v = v; ALTER TABLE t ADD more int DEFAULT 7", []),
    (BAG, "INSERT INTO t VALUES (2, 'y')", [("extra", 1)]),
    (BAG, "DELETE FROM t WHERE id = 2", [("missing", 2)]),
    (BAG, "UPDATE t SET v = NULL WHERE id = 3", [("extra", 1), ("missing", 1)]),
    (BAG, "CREATE TABLE heir () INHERITS (t); INSERT INTO heir VALUES (9)", []),
]


async def test_finds_differences(publisher18_db: Database, target_db: Database) -> None:
    for made, change, expected in CHANGES:
        for database in (publisher18_db, target_db):
            database.execute(f"DROP TABLE IF EXISTS t CASCADE; {made}")
        target_db.execute(change)
        found = await compare_one(publisher18_db, target_db)
        assert sorted((row.kind.value, row.count) for row in found.differences) == expected, change
        assert found.equal is not bool(expected)
        assert found.publisher_rows == publisher18_db.value("SELECT count(*) FROM t")


async def test_what_cannot_be_compared_is_not_equal(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(KEYED)
    target_db.execute("ALTER TABLE t DROP COLUMN v")
    assert (await compare_one(publisher18_db, target_db)).left_out == "the target has no column v"
    target_db.execute("DROP TABLE t")
    assert (await compare_one(publisher18_db, target_db)).left_out == "it does not exist in the target"
    publisher18_db.execute("DROP TABLE t")
    found = await compare_one(publisher18_db, target_db)
    assert (found.left_out, found.equal) == ("it does not exist on the publisher", False)


async def test_every_type_between_two_databases(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    for database in (publisher18_db, target_db):
        await create_tables(database.dsn, rows=1000)
    found = await compare(publisher18_db.dsn, target_db.dsn, table_names("load"))
    assert [table for table in found if not table.equal] == []
    assert all(table.publisher_rows == table.target_rows > 0 for table in found)
    inspection = TargetInspection(f"sqlite:///{tmp_path / 'copy.db'}")
    await inspection.make_text_table(T, "id", ["v"])
    await inspection.close()
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v float8); INSERT INTO t VALUES (1, 0.1)")
    (other,) = await compare(publisher18_db.dsn, f"sqlite:///{tmp_path / 'copy.db'}", [T])
    assert [(row.kind.value, row.key) for row in other.differences] == [("missing", {"id": "1"})]
    (absent,) = await compare(publisher18_db.dsn, f"sqlite:///{tmp_path / 'copy.db'}", [TableName("load", "history")])
    assert not absent.equal
    assert absent.left_out is not None


async def test_published_tables_follow_the_publications(publisher18_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE b (id int); CREATE TABLE a (id int); CREATE TABLE c (id int)")
    publisher18_db.execute("CREATE PUBLICATION p1 FOR TABLE b, a; CREATE PUBLICATION p2 FOR TABLE a")
    assert await published_tables(publisher18_db.dsn, ["p1", "p2"]) == [TableName("public", "a"), TableName("public", "b")]
    assert await published_tables(publisher18_db.dsn, ["p2", "absent"]) == [TableName("public", "a")]


async def test_prepared_transactions_are_matched_by_xid(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (id int); BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'mine'")
    xid = int(publisher18_db.value("SELECT transaction::text FROM pg_prepared_xacts WHERE gid = 'mine'"))
    assert await compare_prepared(publisher18_db.dsn, target_db.dsn) == PreparedComparison(frozenset({xid}), frozenset())
    target_db.execute("BEGIN; PREPARE TRANSACTION 'somebody else''s'")
    assert not (await compare_prepared(publisher18_db.dsn, target_db.dsn)).equal
    target_db.execute(f"BEGIN; PREPARE TRANSACTION 'pg_gid_16400_{xid}'")
    assert (await compare_prepared(publisher18_db.dsn, target_db.dsn)).equal
    target_db.execute(f"BEGIN; PREPARE TRANSACTION 'pg_gid_16400_{xid + 1}'")
    assert not (await compare_prepared(publisher18_db.dsn, target_db.dsn)).equal
