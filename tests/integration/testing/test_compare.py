"""subscriber.testing.comparison.checksums: finds every difference between two databases, and none where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator

import psycopg
import pytest

from subscriber.abc import TableName
from subscriber.testing.comparison.checksums import PreparedComparison, TableComparison, compare, compare_prepared, published_tables
from subscriber.testing.load.tables import create_tables, table_names
from tests.support.database import Database

ITEMS = TableName("public", "items")
_DEFINITION = "CREATE TABLE items (id integer PRIMARY KEY, a text, b text, at timestamptz DEFAULT '2020-01-01 00:00+00')"


@pytest.fixture
def publisher_and_target(publisher18_db: Database, target_db: Database) -> tuple[Database, Database]:
    for database in (publisher18_db, target_db):
        database.execute(_DEFINITION)
        database.execute("INSERT INTO items SELECT i, 'a' || i, 'b' || i FROM generate_series(1, 1000) i")
    return publisher18_db, target_db


async def compare_one(publisher_and_target: tuple[Database, Database], table: TableName = ITEMS, samples: int = 0) -> TableComparison:
    [found] = await compare(publisher_and_target[0].dsn, publisher_and_target[1].dsn, [table], samples=samples)
    return found


async def test_order_of_rows_and_columns_does_not_matter(publisher_and_target: tuple[Database, Database]) -> None:
    target = publisher_and_target[1]
    target.execute("DROP TABLE items; CREATE TABLE items (more integer DEFAULT 7, b text, at timestamptz, a text, id integer)")
    target.execute(
        "INSERT INTO items (id, a, b, at) SELECT i, 'a' || i, 'b' || i, '2020-01-01 00:00+00' FROM generate_series(1000, 1, -1) i"
    )
    found = await compare_one(publisher_and_target)
    assert found.equal
    assert found.publisher is not None
    assert found.publisher.rows == 1000
    assert (found.only_publisher, found.only_target) == (0, 0)


async def test_settings_of_role_and_database_do_not_matter(publisher_and_target: tuple[Database, Database]) -> None:
    target = publisher_and_target[1]
    for setting in ("timezone = 'Asia/Tokyo'", "datestyle = 'German'", "extra_float_digits = 0", "bytea_output = 'escape'"):
        target.execute(f"ALTER DATABASE {target.name} SET {setting}")
    for database in publisher_and_target:
        database.execute(
            "ALTER TABLE items ADD f float8 DEFAULT 0.1::float8 + 0.2, ADD d bytea DEFAULT '\\x00ff', ADD n interval DEFAULT '1 mon 2 d'"
        )
    assert (await compare_one(publisher_and_target)).equal


async def test_no_rows_are_equal(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(_DEFINITION)
    found = await compare_one((publisher18_db, target_db))
    assert found.equal
    assert found.publisher is not None
    assert found.publisher.rows == 0


@pytest.mark.parametrize(
    ("change", "only_publisher", "only_target", "keys"),
    [
        pytest.param("DELETE FROM items WHERE id = 17", 1, 0, {"(17)"}, id="a row is missing"),
        pytest.param("INSERT INTO items VALUES (5000, 'x', 'y')", 0, 1, {"(5000)"}, id="a row too many"),
        pytest.param("UPDATE items SET a = 'other' WHERE id = 17", 1, 1, {"(17)"}, id="a value changed"),
        pytest.param("UPDATE items SET a = NULL WHERE id = 17", 1, 1, {"(17)"}, id="a value is NULL"),
        pytest.param("UPDATE items SET a = b, b = a WHERE id = 17", 1, 1, {"(17)"}, id="values swapped between columns"),
        pytest.param(
            "UPDATE items SET a = CASE id WHEN 17 THEN 'a18' ELSE 'a17' END WHERE id IN (17, 18)",
            *(2, 2, {"(17)", "(18)"}),
            id="values swapped between rows",
        ),
        pytest.param("UPDATE items SET at = at + interval '1 microsecond' WHERE id = 17", 1, 1, {"(17)"}, id="a microsecond"),
    ],
)
async def test_finds(
    publisher_and_target: tuple[Database, Database], change: str, only_publisher: int, only_target: int, keys: set[str]
) -> None:
    publisher_and_target[1].execute(change)
    found = await compare_one(publisher_and_target, samples=10)
    assert not found.equal
    assert (found.only_publisher, found.only_target) == (only_publisher, only_target)
    assert set(found.samples) == keys


async def test_gives_no_keys_unless_asked(publisher_and_target: tuple[Database, Database]) -> None:
    publisher_and_target[1].execute("DELETE FROM items WHERE id = 17")
    assert (await compare_one(publisher_and_target)).samples == ()
    publisher_and_target[1].execute("DELETE FROM items")
    found = await compare_one(publisher_and_target, samples=3)
    assert len(found.samples) == 3
    assert found.only_publisher == 1000


@pytest.mark.parametrize(
    ("in_publisher", "in_target", "differing"),
    [
        ("(1, 'x'), (2, 'y')", "(1, 'x'), (2, 'y'), (2, 'y')", (0, 1)),
        ("(1, 'x'), (1, 'x'), (1, 'x')", "(1, 'x')", (2, 0)),
        ("(1, 'x'), (1, 'x'), (2, 'y')", "(1, 'x'), (2, 'y'), (2, 'y')", (1, 1)),
        ("(1, 'x'), (1, 'x')", "(2, 'y'), (2, 'y')", (2, 2)),
        ("(1, '')", "(1, NULL)", (1, 1)),
        ("(1, 'x,')", "(1, 'x')", (1, 1)),
    ],
)
async def test_duplicates(
    publisher18_db: Database, target_db: Database, in_publisher: str, in_target: str, differing: tuple[int, int]
) -> None:
    for database, rows in ((publisher18_db, in_publisher), (target_db, in_target)):
        database.execute("CREATE TABLE items (a integer, b text)")
        database.execute(f"INSERT INTO items VALUES {rows}")
    found = await compare_one((publisher18_db, target_db))
    assert not found.equal
    assert (found.only_publisher, found.only_target) == differing


async def test_missing_table_or_column_is_no_equality(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    target.execute("ALTER TABLE items DROP COLUMN b")
    found = await compare_one(publisher_and_target)
    assert not found.equal
    assert found.target is None
    target.execute("DROP TABLE items")
    assert (await compare_one(publisher_and_target)).target is None
    publisher.execute("DROP TABLE items")
    assert not (await compare_one(publisher_and_target)).equal


async def test_generated_columns_are_not_compared(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE items (id integer, g integer GENERATED ALWAYS AS (id * 2) STORED); INSERT INTO items VALUES (1)")
    target_db.execute("CREATE TABLE items (id integer, g integer GENERATED ALWAYS AS (id * 3) STORED); INSERT INTO items VALUES (1)")
    assert (await compare_one((publisher18_db, target_db))).equal


async def test_partitioned_on_one_side_inherited_on_neither(publisher18_db: Database, target_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE items (id integer) PARTITION BY LIST (id); CREATE TABLE items_rest PARTITION OF items DEFAULT")
    target_db.execute("CREATE TABLE items (id integer); CREATE TABLE heir () INHERITS (items); INSERT INTO heir VALUES (99)")
    for database in (publisher18_db, target_db):
        database.execute("INSERT INTO items SELECT generate_series(1, 10)")
    assert (await compare_one((publisher18_db, target_db))).equal


async def test_every_type_between_two_versions(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        await create_tables(database.dsn, rows=1000)
    found = await compare(publisher18_db.dsn, target_db.dsn, table_names("load"))
    assert [comparison.table for comparison in found if not comparison.equal] == []
    assert all(comparison.publisher is not None and comparison.publisher.rows > 0 for comparison in found)


async def test_published_tables_follow_the_publications(publisher18_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE b (id int); CREATE TABLE a (id int); CREATE TABLE c (id int)")
    publisher18_db.execute("CREATE PUBLICATION p1 FOR TABLE b, a; CREATE PUBLICATION p2 FOR TABLE a")
    assert await published_tables(publisher18_db.dsn, ["p1", "p2"]) == [TableName("public", "a"), TableName("public", "b")]
    assert await published_tables(publisher18_db.dsn, ["p2", "absent"]) == [TableName("public", "a")]


@pytest.fixture
async def prepared(publisher_and_target: tuple[Database, Database]) -> AsyncIterator[int]:
    """The publisher's xid of a transaction that is prepared there."""
    async with await psycopg.AsyncConnection.connect(publisher_and_target[0].dsn, autocommit=True) as connection:
        await connection.execute("BEGIN")
        await connection.execute("INSERT INTO items VALUES (5000)")
        cursor = await connection.execute("SELECT pg_current_xact_id()::xid::text")
        row = await cursor.fetchone()
        assert row is not None
        await connection.execute("PREPARE TRANSACTION 'mine'")
        yield int(row[0])


async def test_prepared_transactions_are_matched_by_xid(publisher_and_target: tuple[Database, Database], prepared: int) -> None:
    publisher, target = publisher_and_target
    assert await compare_prepared(publisher.dsn, target.dsn) == PreparedComparison(frozenset({prepared}), frozenset())
    target.execute("BEGIN; INSERT INTO items VALUES (5000); PREPARE TRANSACTION 'somebody else''s'")
    assert not (await compare_prepared(publisher.dsn, target.dsn)).equal
    target.execute(f"BEGIN; PREPARE TRANSACTION 'pg_gid_16400_{prepared}'")
    assert (await compare_prepared(publisher.dsn, target.dsn)).equal
    target.execute(f"BEGIN; PREPARE TRANSACTION 'pg_gid_16400_{prepared + 1}'")
    assert not (await compare_prepared(publisher.dsn, target.dsn)).equal
