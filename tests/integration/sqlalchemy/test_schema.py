"""Tables of other databases: made and widened from what the publisher says, and judged as they are."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from sqlalchemy import delete, func, insert, inspect, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import Finding, PublishedTable, TableName
from subscriber.errors import RelationError
from subscriber.sinks.sqlalchemy.copy.staging import Staging
from subscriber.sinks.sqlalchemy.schema import table_creation as schema
from subscriber.sinks.sqlalchemy.schema.reflection import reflect
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable, load_target_table
from subscriber.sinks.sqlalchemy.session.database import Database as Target
from subscriber.sinks.sqlalchemy.session.errors import ChangeRefused
from subscriber.types import TypeFact, TypeKind
from tests.support.mariadb_database import MariaDatabase
from tests.support.sqlalchemy_targets import OtherTarget

INT4, TEXT, BYTEA, FLOAT8, DATE, JSON, TIMESTAMP = 23, 25, 17, 701, 1082, 114, 1114
MOOD = TypeFact(20_000, "app", "mood", TypeKind.ENUM, labels=("sad", "ok"))


def described(*columns: tuple[str, int], name: str = "public.t", key: tuple[str, ...] = (), identity: str = "d") -> PublishedTable:
    """A published table; of columns with these names and types; the key is its primary key too, unless that is replaced."""
    namespace, _, table = name.partition(".")
    names = tuple(column for column, _ in columns)
    return PublishedTable(
        name=TableName(namespace, table),
        relation_id=1,
        kind="r",
        columns=names,
        key_columns=names if identity == "f" else key,
        replica_identity=identity,
        column_types=tuple(oid for _, oid in columns),
        column_modifiers=(-1,) * len(columns),
        primary_key=key,
        not_null=frozenset(key),
    )


OpenTransaction = Callable[[], contextlib.AbstractAsyncContextManager[AsyncConnection]]


@pytest.fixture
async def transaction(other_target: OtherTarget) -> AsyncIterator[OpenTransaction]:
    """Transactions in a target of each kind."""
    target = Target(other_target.url, replicates=True)
    yield target.writing
    await target.close()


@pytest.fixture
async def mariadb_transaction(mariadb_db: MariaDatabase) -> AsyncIterator[OpenTransaction]:
    target = Target(mariadb_db.url, replicates=True)
    yield target.writing
    await target.close()


@pytest.fixture
async def sqlite_transaction(sqlite_file: OtherTarget) -> AsyncIterator[OpenTransaction]:
    target = Target(sqlite_file.url, replicates=True)
    yield target.writing
    await target.close()


async def store(connection: AsyncConnection, target: TargetTable, *rows: tuple[str | None, ...]) -> None:
    statement = insert(target.table).values({plan.name: plan.parameter(f"p{index}") for index, plan in enumerate(target.columns)})
    for row in rows:
        await connection.execute(statement, bound(target, row))


def bound(target: TargetTable, row: tuple[str | None, ...]) -> dict[str, object]:
    pairs = enumerate(zip(target.columns, row, strict=True))
    return {f"p{index}": None if value is None else plan.text(value.encode()) for index, (plan, value) in pairs}


async def count(connection: AsyncConnection, target: TargetTable) -> int:
    return int((await connection.execute(select(func.count()).select_from(target.table))).scalar() or 0)


def messages(findings: list[Finding], severity: str = "error") -> list[str]:
    assert all(finding.hint for finding in findings)
    return [finding.message for finding in findings if finding.severity == severity]


async def test_names_of_all_kinds(transaction: OpenTransaction, other_target: OtherTarget) -> None:
    names = [
        "a b",
        "Ünïcode",
        "per%cent%s",
        ":colon",
        'quo"te',
        "select",
        "it's",
        "x?y",
        "(p)",
        "tab\there.",
        "$1",
        "back\\slash",
    ]
    if other_target.kind != "mariadb":
        names += ["back`tick", "new\nline", "blank behind ", "🐘"]
    columns = [("Id", INT4), *((name, TEXT) for name in names)]
    table = described(*columns, name='S x.Tä"bl:e %s', key=("Id",))
    async with transaction() as connection:
        assert await schema.check(connection, [table], creating=True) == []
        await schema.create_table(connection, table)
    async with transaction() as connection:
        assert await schema.check(connection, [table]) == []
        target = await load_target_table(connection, table)
        assert [plan.name for plan in target.columns] == list(table.columns)
        await store(connection, target, ("1", *names), ("2", *names))
        row = bound(target, ("1", *names))
        changed = update(target.table).values({names[0]: target.columns[1].parameter("new")}).where(target.columns[0].matches("p0"))
        assert (await connection.execute(changed, {"new": "other", "p0": row["p0"]})).rowcount == 1
        found = (await connection.execute(select(*(target.table.c[name] for name in names)))).all()
        assert sorted(map(tuple, found)) == sorted([("other", *names[1:]), tuple(names)])
        gone = delete(target.table).where(*(plan.matches(f"p{index}") for index, plan in enumerate(target.columns)))
        assert (await connection.execute(gone, bound(target, ("2", *names)))).rowcount == 1
        assert await count(connection, target) == 1


async def test_keys_of_created_tables(transaction: OpenTransaction) -> None:
    columns = (("a", INT4), ("b", TEXT), ("c", TEXT))
    other_identity = replace(described(*columns, name="public.other", key=("a",), identity="i"), key_columns=("b", "c"))
    only_identity = replace(described(*columns, name="public.only", identity="i"), key_columns=("b",))
    full = described(*columns, name="public.whole", identity="f")
    full_with_key = replace(described(*columns, name="public.keyed", identity="f"), primary_key=("c", "a"), not_null=frozenset({"a", "c"}))
    nothing = described(*columns, name="public.nothing", identity="n")
    async with transaction() as connection:
        for table in (other_identity, only_identity, full, full_with_key, nothing):
            await schema.create_table(connection, table)
        plans = {
            table.name.name: await load_target_table(connection, table)
            for table in (other_identity, only_identity, full, full_with_key, nothing)
        }
        assert {name: (plan.key, plan.unique) for name, plan in plans.items()} == {
            "other": ((1, 2), (0,)),
            "only": ((1,), (1,)),
            "whole": (None, None),
            "keyed": ((2, 0), (2, 0)),
            "nothing": (None, None),
        }
        (slow,) = messages(await schema.check(connection, [other_identity, only_identity, full, full_with_key, nothing]), "warning")
        assert slow.startswith('table "public.whole" of the target has no key')
        await store(connection, plans["other"], ("1", "x", "y"), ("2", "x", "z"))
        await store(connection, plans["whole"], ("1", None, None), ("1", None, None))
    with pytest.raises(ChangeRefused):
        async with transaction() as connection:
            await store(connection, plans["other"], ("3", "x", "y"))
    with pytest.raises(ChangeRefused):
        async with transaction() as connection:
            await store(connection, plans["other"], ("3", None, "y"))


async def test_text_keys_are_told_apart_as_postgresql_does(transaction: OpenTransaction) -> None:
    keys = ["a", "A", "a ", "ä", "á", "ａ", "", " ", "ss", "ß", "\t", "🐘", "🐍"]
    table = described(("k", TEXT), ("b", BYTEA), key=("k", "b"))
    async with transaction() as connection:
        await schema.create_table(connection, table)
        target = await load_target_table(connection, table)
        await store(connection, target, *((key, blob) for key in keys for blob in ("\\x", "\\x00", "\\x0000")))
        for key in keys:
            query = (
                select(func.count())
                .select_from(target.table)
                .where(*(plan.matches(f"p{index}") for index, plan in enumerate(target.columns)))
            )
            assert (await connection.execute(query, bound(target, (key, "\\x00")))).scalar() == 1


async def test_columns_are_added(transaction: OpenTransaction) -> None:
    before = described(("id", INT4), key=("id",))
    after = replace(described(("f", FLOAT8), ("id", INT4), ("m%", MOOD.oid), ("d", DATE), key=("id",)), types=(MOOD,))
    async with transaction() as connection:
        await schema.create_table(connection, before)
        await store(connection, await load_target_table(connection, before), ("1",))
    async with transaction() as connection:
        assert messages(await schema.check(connection, [after])) == [
            'logical replication target relation "public.t" is missing replicated columns: "f", "m%", "d"'
        ]
        assert await schema.check(connection, [after], adding=True) == []
        incomplete = await load_target_table(connection, after)
        assert incomplete.missing == ("f", "m%", "d")
        assert [plan.column is None for plan in incomplete.columns] == [True, False, True, True]
        assert (incomplete.key, incomplete.unique) == ((1,), (1,))
        with pytest.raises(RelationError, match="is missing replicated columns"):
            incomplete.require_complete()
        assert await schema.add_columns(connection, after) == ("f", "m%", "d")
        assert await schema.add_columns(connection, after) == ()
    async with transaction() as connection:
        assert await schema.check(connection, [after]) == []
        target = await load_target_table(connection, after)
        await store(connection, target, ("1.5", "2", "sad", "2024-01-01"))
        assert await count(connection, target) == 2


async def test_missing_table_and_unsuitable_columns_are_found(transaction: OpenTransaction, other_target: OtherTarget) -> None:
    table = described(("id", INT4), ("g", INT4), ("v", TEXT), key=("id",))
    async with transaction() as connection:
        (missing,) = await schema.check(connection, [table])
        assert missing.message == 'logical replication target relation "public.t" does not exist'
        assert "--create-tables" in missing.hint
        assert await schema.check(connection, [table], creating=True) == []
    generated = "int GENERATED ALWAYS AS (id + 1) STORED"
    other_target.execute(f"CREATE TABLE t (id int PRIMARY KEY, g {generated}, v text)")
    async with transaction() as connection:
        assert messages(await schema.check(connection, [table])) == [
            'logical replication target relation "public.t" has incompatible generated column: "g"'
        ]
    other_target.execute("DROP TABLE t")
    other_target.execute("CREATE TABLE t (id int PRIMARY KEY, g int, v text, mine int NOT NULL, filled int NOT NULL DEFAULT 1)")
    async with transaction() as connection:
        assert messages(await schema.check(connection, [table])) == [
            'column "mine" of table "public.t" is NOT NULL in the target, has no default and is not published'
        ]
    other_target.execute("DROP TABLE t")
    other_target.execute("CREATE TABLE t (id int NOT NULL, g int, v text)")
    async with transaction() as connection:
        (doubled,) = messages(await schema.check(connection, [table]), "warning")
        assert doubled.startswith('table "public.t" of the target has no unique key within its replica identity (id)')


async def test_columns_that_do_not_fit(sqlite_transaction: OpenTransaction, sqlite_file: OtherTarget) -> None:
    sqlite_file.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, v INTEGER, j JSON)")
    table = described(("id", INT4), ("v", TEXT), key=("id",))
    async with sqlite_transaction() as connection:
        (found,) = await schema.check(connection, [table])
        assert found.message == 'column "v" of table "public.t": type text cannot be stored without loss in a column of type INTEGER'
        assert found.hint == "make it a text column in the target"
        both = replace(described(("id", INT4), ("ID", TEXT), key=("id",)), name=TableName("public", "u"))
        assert messages(await schema.check(connection, [both], creating=True)) == [
            'columns "id" and "ID" of table "public.u" have the same name in the target'
        ]


async def test_tables_of_mariadb(mariadb_transaction: OpenTransaction, mariadb_db: MariaDatabase) -> None:
    table = described(("k", TEXT), ("v", INT4), key=("k",))
    mariadb_db.execute("CREATE TABLE t (k varchar(20) COLLATE utf8mb4_general_ci PRIMARY KEY, v int) ENGINE = MyISAM")
    async with mariadb_transaction() as connection:
        findings = await schema.check(connection, [table])
        assert messages(findings) == ['table "public.t" of the target has storage engine myisam, which has no transactions']
        (collated,) = messages(findings, "warning")
        assert collated.startswith('key column "k" of table "public.t" has a collation in the target under which different keys are equal')
    mariadb_db.execute("ALTER TABLE t ENGINE = InnoDB")
    mariadb_db.execute("INSERT INTO t VALUES ('a', 1)")
    async with mariadb_transaction() as connection:
        target = await load_target_table(connection, table)
        gone = delete(target.table).where(target.columns[0].matches("p0"))
        # another key than the target's, though its collation thinks otherwise
        assert (await connection.execute(gone, {"p0": "A"})).rowcount == 0
        assert (await connection.execute(gone, {"p0": "a"})).rowcount == 1
    long = described(("k" * 65, TEXT), ("v ", INT4), ("🐘", INT4), ("a\nb", INT4), name="public.u")
    async with mariadb_transaction() as connection:
        assert messages(await schema.check(connection, [long], creating=True)) == [
            f'column "{"k" * 65}" of table "public.u": names have at most 64 characters in the target',
            'column "v " of table "public.u": no name ends with a blank in the target',
            'column "🐘" of table "public.u": names have no characters beyond U+FFFF in the target',
            'column "a\nb" of table "public.u": names with a line break or a backtick cannot be read back in the target',
        ]


async def test_a_key_that_is_too_long_for_mariadb(mariadb_transaction: OpenTransaction) -> None:
    table = described(("k", TEXT), key=("k",))
    async with mariadb_transaction() as connection:
        await schema.create_table(connection, table)
        target = await load_target_table(connection, table)
        await store(connection, target, ("🐘" * 750,))
    with pytest.raises(ChangeRefused):
        async with mariadb_transaction() as connection:
            await store(connection, target, ("k" * 751,))


async def test_the_binary_format_is_refused_where_it_says_too_little(sqlite_transaction: OpenTransaction) -> None:
    table = described(("id", INT4), ("price", 790), ("class", 2205), key=("id",))
    async with sqlite_transaction() as connection:
        assert await schema.check(connection, [table], creating=True) == []
        findings = await schema.check(connection, [table], creating=True, binary=True)
    assert [finding.message.split(":")[0] for finding in findings] == [
        'column "price" of table "public.t"',
        'column "class" of table "public.t"',
    ]
    assert {finding.hint for finding in findings} == {"set binary = false on the subscription"}


async def test_a_server_with_another_sql_mode(mariadb_db: MariaDatabase) -> None:
    """One under which names are quoted otherwise, and a value that does not fit is cut."""
    mode = mariadb_db.value("SELECT @@GLOBAL.sql_mode")
    table = described(("key", INT4), ("v", TEXT), key=("key",))
    mariadb_db.execute("SET GLOBAL sql_mode = 'ANSI'")
    target = Target(mariadb_db.url, replicates=True)
    try:
        async with target.writing() as connection:
            await schema.create_table(connection, table)
            await store(connection, await load_target_table(connection, table), ("1", "x"))
            found = (await connection.exec_driver_sql("SELECT @@SESSION.sql_mode")).scalar()
    finally:
        mariadb_db.execute("SET GLOBAL sql_mode = %s", [mode])
        await target.close()
    assert "STRICT_ALL_TABLES" in str(found)
    assert "ANSI_QUOTES" not in str(found)
    assert mariadb_db.fetch("SELECT * FROM t") == [(1, "x")]


async def test_a_staging_table_has_no_columns_that_are_computed(transaction: OpenTransaction, other_target: OtherTarget) -> None:
    other_target.execute("CREATE TABLE t (id int PRIMARY KEY, g int GENERATED ALWAYS AS (id + 1) STORED, v varchar(9))")
    other_target.execute("INSERT INTO t (id, v) VALUES (1, 'there')")
    table = described(("id", INT4), ("v", TEXT), key=("id",))
    staging = Staging(7)
    async with transaction() as connection:
        found = await reflect(connection, table.name)
        assert found is not None
        await staging.make(connection, found)
        target = await load_target_table(connection, table)
        like = staging.like(target)
        made = await connection.run_sync(lambda sync: inspect(sync).get_columns(like.name, schema=like.schema))
        assert [column["name"] for column in made] == ["id", "v"]
        await store(connection, replace(target, table=like), ("2", "copied"))
        await staging.move(connection, target, "error")
    assert other_target.fetch("SELECT id, g, v FROM t ORDER BY id") == [(1, 2, "there"), (2, 3, "copied")]


async def test_a_timestamp_that_null_becomes_the_current_time_in(mariadb_transaction: OpenTransaction) -> None:
    """Older servers do so, whatever sql_mode says: a NULL of the publisher would be lost silently."""
    table = described(("id", INT4), ("at", TIMESTAMP), ("other", TIMESTAMP), ("never", TIMESTAMP), key=("id",))
    table = replace(table, not_null=frozenset({"id", "never"}))
    said = 'column "at" of table "public.t" is TIMESTAMP NOT NULL in the target, where NULL becomes the current time'
    async with mariadb_transaction() as connection:
        await connection.exec_driver_sql("SET SESSION explicit_defaults_for_timestamp = 0")
        await connection.exec_driver_sql(
            "CREATE TABLE t (id int PRIMARY KEY, at timestamp(6) NOT NULL DEFAULT '2000-01-01', other timestamp(6) NULL, "
            "never timestamp(6) NOT NULL DEFAULT '2000-01-01')"
        )
        await connection.exec_driver_sql("INSERT INTO t VALUES (1, NULL, NULL, '2000-01-01')")
        assert (await connection.exec_driver_sql("SELECT at IS NULL, other IS NULL FROM t")).one() == (0, 1)
        assert messages(await schema.check(connection, [table])) == [said]
        await connection.exec_driver_sql("SET SESSION explicit_defaults_for_timestamp = 1")
        assert messages(await schema.check(connection, [table])) == []
