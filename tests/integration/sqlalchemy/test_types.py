"""Every type of PostgreSQL's catalogue into tables of other databases, from texts and from the binary format, and back.

Values are read back through drivers of the test's own.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from subscriber.interfaces import PublishedTable
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.sqlalchemy.schema import table_creation as schema
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, load_target_table, source_types
from subscriber.sinks.sqlalchemy.session.database import Database as Target
from subscriber.types import ValueRefused, copy_decoder
from subscriber.types.codec import binary_problem
from subscriber.verification.values import normalizer
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.session import Session
from tests.support import every_type
from tests.support.database import Database
from tests.support.mariadb_database import MariaDatabase
from tests.support.program import subscriber
from tests.support.sqlalchemy_targets import OtherTarget, sqlite_target

NUMBERS_OUT_OF_REACH = {"NaN", "Infinity", "-Infinity"}


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    publisher18_db.execute(every_type.SETUP)
    every_type.create_table(publisher18_db, "t")
    every_type.fill(publisher18_db, "t")
    publisher18_db.execute("CREATE PUBLICATION p FOR TABLE app.t")
    return publisher18_db


@pytest.fixture(params=["sqlite", "mariadb"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> OtherTarget:
    """An empty database."""
    if request.param == "sqlite":
        return sqlite_target(tmp_path / "target.db")
    maria: MariaDatabase = request.getfixturevalue("mariadb_db")
    return OtherTarget("mariadb", maria.url, maria.fetch, maria.execute)


async def published(database: Database) -> PublishedTable:
    session = await Session.connect(database.dsn, application_name="test")
    try:
        (table,) = await published_tables(session, ["p"])
    finally:
        await session.close()
    return table


def copied(database: Database, columns: Sequence[str], *, binary: bool) -> list[tuple[bytes | None, ...]]:
    """The rows, as COPY gives them to a session with the publisher."""
    options = "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c timezone=UTC -c search_path="
    decoder = copy_decoder(len(columns), binary=binary)
    with database.connect(options=options, client_encoding="UTF8") as connection:
        names = ", ".join(f'"{name}"' for name in columns)
        query = f"COPY (SELECT {names} FROM app.t ORDER BY id) TO STDOUT {'BINARY' if binary else ''}"
        with connection.cursor().copy(query.encode()) as copy:
            rows = [row for data in copy for row in decoder.feed(bytes(data))]
    decoder.finish()
    return rows


def type_names(database: Database) -> dict[str, str]:
    """PostgreSQL's names of the columns' types, of domains their base's."""
    return dict(
        database.fetch("""
            SELECT a.attname, format_type(COALESCE(NULLIF(u.typbasetype, 0), NULLIF(t.typbasetype, 0), t.oid), NULL)
              FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid LEFT JOIN pg_type AS u ON u.oid = t.typbasetype
             WHERE a.attrelid = 'app.t'::regclass AND a.attnum > 0
        """)
    )


def read_back(target: OtherTarget, columns: Sequence[str]) -> dict[int, dict[str, Any]]:
    """The rows as the target's own driver gives them."""
    names = ", ".join(columns)
    rows = target.fetch(f"SELECT {names} FROM app__t ORDER BY id")
    return {int(row[0]): dict(zip(columns[1:], row[1:], strict=True)) for row in rows}


class Bound:
    """The published rows as parameters of a target's statements, and what was refused."""

    def __init__(self, table: TargetTable, rows: Sequence[tuple[bytes | None, ...]], *, binary: bool) -> None:
        self.refused: set[tuple[str, int]] = set()
        self.hints: set[str | None] = set()
        self.rows: list[dict[str, object]] = []
        for number, row in enumerate(rows):
            bound: dict[str, object] = {}
            for index, (plan, value) in enumerate(zip(table.columns, row, strict=True)):
                try:
                    bound[f"p{index}"] = None if value is None else (plan.binary if binary else plan.text)(value)
                except ValueRefused as refused:
                    self.hints.add(refused.hint)
                    self.refused.add((plan.name, number))
                    bound[f"p{index}"] = None
            self.rows.append(bound)


async def store(target: OtherTarget, table: PublishedTable, rows: Sequence[tuple[bytes | None, ...]], *, binary: bool) -> Bound:
    """Make the table, put the rows into it, and find each of them by all of its values."""
    opened = Target(target.url, replicates=True)
    try:
        async with opened.writing() as connection:
            assert await schema.check(connection, [table], creating=True, binary=binary) == []
            await schema.create_table(connection, table)
            await schema.create_table(connection, table)
            assert await schema.check(connection, [table], binary=binary) == []
            plan = await load_target_table(connection, table)
            plan.require_complete()
        bound = Bound(plan, rows, binary=binary)
        statement = insert(plan.table).values({column.name: column.parameter(f"p{index}") for index, column in enumerate(plan.columns)})
        async with opened.writing() as connection:
            for row in bound.rows:
                await connection.execute(statement, row)
        relation = Relation(
            table.relation_id,
            table.name.namespace,
            table.name.name,
            "f",
            tuple(
                Column(name, oid, modifier, True)
                for name, oid, modifier in zip(table.columns, table.column_types, table.column_modifiers, strict=True)
            ),
        )
        async with opened.writing() as connection:
            whole = await load_target_table(connection, relation, table)
            for row in bound.rows:
                # as an UPDATE or DELETE finds it, with REPLICA IDENTITY FULL and no key
                predicates = {
                    column.name: whole.table.c[column.name].is_(None) if row[f"p{index}"] is None else column.matches(f"p{index}")
                    for index, column in enumerate(whole.columns)
                }
                query = select(func.count()).select_from(whole.table)
                if (await connection.execute(query.where(*predicates.values()), row)).scalar() != 1:
                    each = {name: (await connection.execute(query.where(found), row)).scalar() for name, found in predicates.items()}
                    pytest.fail(f"row {row['p0']} is not found by {[name for name, count in each.items() if count == 0]}")
    finally:
        await opened.close()
    return bound


def narrowed(database: Database, table: PublishedTable) -> list[str]:
    """Publish only what has a binary format that can be read."""
    types = dict(source_types(table))
    left_out = {"c_aclitem", "a_aclitem", "c_gtsvector", "a_gtsvector", *(name for name in table.columns if binary_problem(types[name]))}
    kept = [name for name in table.columns if name not in left_out]
    database.execute(f"ALTER PUBLICATION p SET TABLE app.t ({', '.join(kept)})")
    return kept


def compare(database: Database, target: OtherTarget, columns: Sequence[str], refused: set[tuple[str, int]]) -> None:
    names = type_names(database)
    found = read_back(target, columns)
    expected = every_type.texts(database, "t")
    assert found.keys() == {number for number, _ in expected}
    for number, row in expected:
        for name in columns[1:]:
            if (name, number) in refused:
                assert found[number][name] is None
                continue
            as_text = normalizer(names[name])
            if isinstance(found[number][name], float) and target.kind == "mariadb" and row[name] == "-0":
                # MariaDB has one zero only (docs/reference/types-sql.md)
                assert found[number][name] == 0
                continue
            assert (name, number, as_text(found[number][name])) == (name, number, as_text(row[name]))


def out_of_reach(database: Database) -> set[tuple[str, int]]:
    """What the types that MariaDB's columns are made of do not hold."""
    names = {"c_float4", "c_float8"}
    moments = {"c_date", "c_timestamp", "c_timestamptz"}
    found = set()
    for number, row in every_type.texts(database, "t"):
        found |= {(name, number) for name in names if row[name] in NUMBERS_OUT_OF_REACH}
        for name in moments:
            text = row[name]
            if text is not None and (text.endswith(("infinity", "BC")) or len(text.split("-")[0]) > 4):
                found.add((name, number))
    return found


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_every_type_into_a_table_made_for_it(source: Database, target: OtherTarget, binary: bool) -> None:
    table = await published(source)
    if binary:
        kept = narrowed(source, table)
        table = await published(source)
        assert list(table.columns) == kept
    bound = await store(target, table, copied(source, table.columns, binary=binary), binary=binary)
    assert bound.refused == (out_of_reach(source) if target.kind == "mariadb" else set())
    assert bound.hints <= {"make the column a text column in the target"}
    compare(source, target, table.columns, bound.refused)


@pytest.mark.parametrize(("binary", "identity"), [(False, "full"), (True, "key")], ids=["text-full", "binary-key"])
async def test_every_type_through_copy_and_stream(publisher18_db: Database, target: OtherTarget, binary: bool, identity: str) -> None:
    source = publisher18_db
    source.execute(every_type.SETUP)
    every_type.create_table(source, "t", "PRIMARY KEY" if identity == "key" else "NOT NULL")
    every_type.fill(source, "t")
    source.execute("CREATE PUBLICATION p FOR TABLE app.t")
    if identity == "full":
        source.execute("ALTER TABLE app.t REPLICA IDENTITY FULL")
    columns = narrowed(source, await published(source)) if binary else ["id", *(specimen.name for specimen in every_type.SPECIMENS)]
    if target.kind == "mariadb":
        # text takes everything, infinity too
        described = ", ".join(f"{name} LONGTEXT COLLATE utf8mb4_nopad_bin" for name in columns[1:])
        target.execute(f"CREATE TABLE app__t (id int {'PRIMARY KEY' if identity == 'key' else 'NOT NULL'}, {described})")
    arguments = [
        *("run", f"--connection={source.dsn}", "--publication=p", f"--target={target.url}", f"--name=types_{source.name}"),
        *("--create-tables", "--until-caught-up", "-o", f"binary={'on' if binary else 'off'}"),
    ]
    done = subscriber(*arguments)
    assert done.status == 0, done.errors
    compare(source, target, columns, set())
    # all values again, as inserts; then each row becomes the next one, and some go
    every_type.fill(source, "t", 100)
    names = ", ".join(columns[1:])
    following = f"(SELECT {names} FROM app.t AS other WHERE other.id = t.id + 1)"
    source.execute(f"UPDATE app.t SET ({names}) = {following} WHERE id % 100 < {every_type.ROWS - 1}")
    source.execute("DELETE FROM app.t WHERE id % 100 IN (0, 3, 7)")
    done = subscriber(*arguments)
    assert done.status == 0, done.errors
    compare(source, target, columns, set())


async def test_a_value_that_a_column_does_not_hold(publisher18_db: Database, mariadb_db: MariaDatabase) -> None:
    source = publisher18_db
    source.execute("CREATE TABLE t (id int PRIMARY KEY, d date); INSERT INTO t VALUES (1, '2024-01-01'); CREATE PUBLICATION p FOR TABLE t")
    arguments = [
        *("run", f"--connection={source.dsn}", "--publication=p", f"--target={mariadb_db.url}", f"--name=types_{source.name}"),
        *("--create-tables", "--until-caught-up"),
    ]
    assert subscriber(*arguments).status == 0
    source.execute("INSERT INTO t VALUES (2, '2024-01-02')")
    source.execute("INSERT INTO t VALUES (3, 'infinity')")
    done = subscriber(*arguments)
    assert done.status == 1
    assert "infinity, or a year before 1 or after 9999, in a date column" in done.errors
    assert 'column "d"' in done.errors
    assert '"public.t"' in done.errors
    assert "make the column a text column in the target" in done.errors
    assert done.errors.count("\n") == 1
    assert mariadb_db.fetch("SELECT id, d FROM t ORDER BY id") == [(1, datetime.date(2024, 1, 1)), (2, datetime.date(2024, 1, 2))]
    mariadb_db.execute("ALTER TABLE t MODIFY d longtext")
    assert subscriber(*arguments).status == 0
    assert mariadb_db.fetch("SELECT id, d FROM t ORDER BY id") == [(1, "2024-01-01"), (2, "2024-01-02"), (3, "infinity")]
