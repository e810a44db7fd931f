"""subscriber.testing.comparison.rows: equal rows are equal in any order; every kind of difference is found and counted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import psycopg
import pytest
from psycopg import sql

from subscriber import TableName
from subscriber.testing.comparison.rows import compare_rows
from subscriber.testing.load.tables import create_tables, table_names
from tests.support.database import Database

T = TableName("public", "t")
MADE = """
CREATE TABLE t (id int PRIMARY KEY, v text, r real, n numeric, twice int GENERATED ALWAYS AS (id * 2) STORED);
INSERT INTO t SELECT i, 'v' || i, i / 3.0, i / 7.0 FROM generate_series(1, 100) AS i
"""


class Reader:
    """Reads a PostgreSQL database as if it were of another kind: Python's values."""

    def __init__(self, database: Database) -> None:
        self.database = database

    async def has_columns(self, table: TableName, columns: Sequence[str]) -> bool:
        found = self.database.fetch(
            f"SELECT column_name FROM information_schema.columns WHERE table_schema = '{table.namespace}' AND table_name = '{table.name}'"
        )
        return bool(found) and set(columns) <= {name for (name,) in found}

    async def rows(self, table: TableName, columns: Sequence[str]) -> AsyncIterator[Sequence[object]]:
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        query = sql.SQL("SELECT {} FROM {} ORDER BY random()").format(names, sql.Identifier(table.namespace, table.name))
        with self.database.connect(options="-c timezone=UTC") as session:
            for row in session.execute(query, binary=True):
                yield row


@pytest.fixture
def publisher_and_target(publisher18_db: Database, target_db: Database) -> tuple[Database, Database]:
    for database in (publisher18_db, target_db):
        database.execute(MADE)
    return publisher18_db, target_db


async def test_the_same_rows_in_another_order(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    publisher.execute("UPDATE t SET v = v WHERE id % 3 = 0")
    target.execute("ALTER TABLE t ADD mine int DEFAULT 5")
    (found,) = await compare_rows(publisher.dsn, Reader(target), [T])
    assert found.equal
    assert found.publisher is not None
    assert found.publisher.rows == 100


CHANGES = [
    ("UPDATE t SET v = NULL WHERE id = 1", 1, 1),
    ("UPDATE t SET v = '' WHERE id = 1", 1, 1),
    ("UPDATE t SET r = r + 1e-6 WHERE id = 1", 1, 1),
    ("UPDATE t SET n = n * 1.0 WHERE id = 7", 1, 1),
    ("DELETE FROM t WHERE id = 5", 1, 0),
    ("INSERT INTO t VALUES (101, 'v', 1, 1), (102, 'v', 1, 1)", 0, 2),
    ("UPDATE t a SET v = b.v FROM t b WHERE (a.id, b.id) IN ((1, 2), (2, 1))", 2, 2),
]


@pytest.mark.parametrize(("change", "only_publisher", "only_target"), CHANGES)
async def test_differences(publisher_and_target: tuple[Database, Database], change: str, only_publisher: int, only_target: int) -> None:
    publisher, target = publisher_and_target
    target.execute(change)
    (found,) = await compare_rows(publisher.dsn, Reader(target), [T])
    assert not found.equal
    assert (found.only_publisher, found.only_target) == (only_publisher, only_target)


async def test_duplicates_count(publisher18_db: Database, target_db: Database) -> None:
    for database, times in ((publisher18_db, 3), (target_db, 2)):
        database.execute(f"CREATE TABLE t (v text); INSERT INTO t SELECT 'x' FROM generate_series(1, {times}); INSERT INTO t VALUES ('y')")
    (found,) = await compare_rows(publisher18_db.dsn, Reader(target_db), [T])
    assert (found.only_publisher, found.only_target) == (1, 0)


async def test_missing_column_and_missing_table_differ(publisher_and_target: tuple[Database, Database]) -> None:
    publisher, target = publisher_and_target
    target.execute("ALTER TABLE t DROP v")
    without, absent = await compare_rows(publisher.dsn, Reader(target), [T, TableName("public", "absent")])
    assert without.publisher is not None
    assert (without.target, without.equal) == (None, False)
    assert (absent.publisher, absent.target, absent.equal) == (None, None, False)


async def test_every_type_of_the_loads_tables(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        await create_tables(database.dsn, rows=0)
    # as text in the target, which is what another kind of database has for most types
    names = [
        name for (name,) in target_db.fetch("SELECT attname FROM pg_attribute WHERE attrelid = 'load.specimens'::regclass AND attnum > 1")
    ]
    kept = [name for name in names if name != "twice"]
    await _move_as_text(publisher18_db, target_db, ["id", *kept])
    tables = [table for table in table_names("load") if table.name == "specimens"]
    (found,) = await compare_rows(publisher18_db.dsn, Reader(target_db), tables)
    assert found.equal, found
    assert found.publisher is not None
    assert found.publisher.rows >= 160
    for name in kept:
        target_db.execute(
            f"UPDATE load.specimens SET {name} = {name} || '0' WHERE id = (SELECT max(id) FROM load.specimens WHERE {name} IS NOT NULL)"
        )
    (found,) = await compare_rows(publisher18_db.dsn, Reader(target_db), tables)
    assert not found.equal
    assert found.only_publisher == found.only_target > 0


async def _move_as_text(publisher: Database, target: Database, names: Sequence[str]) -> None:
    target.execute("DROP TABLE load.specimens")
    target.execute(f"CREATE TABLE load.specimens ({', '.join(f'{name} text' for name in names)})")
    columns = ", ".join(names).encode()
    with publisher.connect(options="-c timezone=UTC") as source, target.connect() as sink:
        assert isinstance(source, psycopg.Connection)
        with (
            source.cursor().copy(b"COPY (SELECT " + columns + b" FROM load.specimens) TO STDOUT") as rows,
            sink.cursor().copy(b"COPY load.specimens FROM STDIN") as into,
        ):
            for data in rows:
                into.write(data)
