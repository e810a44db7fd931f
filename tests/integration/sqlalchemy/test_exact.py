"""A row is found by exactly the same value, also if the target's columns treat values as equal, pad, strip or cut them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ApplyError
from subscriber.interfaces import TableEntry, TableState
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.sqlalchemy.apply.relation_plan import RelationPlan
from subscriber.sinks.sqlalchemy.apply.statements import delete_row
from subscriber.sinks.sqlalchemy.schema.reflection import reflect
from subscriber.sinks.sqlalchemy.schema.table_creation import check
from subscriber.sinks.sqlalchemy.schema.target_table import load_target_table
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.sink import SqlAlchemySink
from subscriber.testing.compliance import ComplianceTarget
from subscriber.testing.compliance.feed import Feed
from subscriber.testing.compliance.sample_messages import Table
from tests.sinks.targets import MariaDBTarget, SqliteTarget
from tests.support.mariadb_database import MariaDatabase

BPCHAR = 1042


@pytest.fixture
def sqlite_target(tmp_path: Path) -> SqliteTarget:
    return SqliteTarget(tmp_path / "replica.db")


async def fed(target: ComplianceTarget, *tables: Table, settings: Settings | None = None) -> Feed:
    """A sink, open, for tables that the target has already."""
    feed = Feed(target)
    sink = feed.sink
    assert isinstance(sink, SqlAlchemySink)
    if settings is not None:
        feed.sink = SqlAlchemySink(sink._target, options=SubscriptionOptions(), settings=settings)
    await feed.open()
    await feed.describe(*tables)
    for table in tables:
        await feed.opened.add_tables([table.name], TableEntry(TableState.READY))
    return feed


def typed(table: Table, name: str, oid: int, modifier: int = -1) -> Relation:
    """The table's relation, where one column has a type that the scenarios do not know."""
    columns = [Column(column.name, oid, modifier, key=column.key) if column.name == name else column for column in table.relation.columns]
    return replace(table.relation, columns=tuple(columns))


@pytest.mark.parametrize("full", [False, True])
async def test_blanks_behind_a_char(mariadb_db: MariaDatabase, full: bool) -> None:
    """char(n) comes with its blanks, and MariaDB gives CHAR(n) back without."""
    target = MariaDBTarget(mariadb_db)
    key = "" if full else ", PRIMARY KEY (k)"
    mariadb_db.execute(f"CREATE TABLE c (k char(5) NOT NULL, v text{key})")
    table = Table("c", "k" if full else "*k", "v", full=full)
    feed = await fed(target, table)
    before = [("ab   ", "old"), ("     ", "old"), ("abcde", "old")]
    await feed.apply(typed(table, "k", BPCHAR, 9), *(table.insert(*row) for row in before))
    await feed.apply(*(table.update(row[0], "new", old=row if full else None) for row in before[:2]))
    await feed.expect(table, ("ab", "new"), ("", "new"), ("abcde", "old"))
    await feed.apply(table.delete("ab   ", "new" if full else None), table.delete("abcde", "old" if full else None))
    await feed.expect(table, ("", "new"))
    assert (feed.sink.statistics.confl_update_missing, feed.sink.statistics.confl_delete_missing) == (0, 0)
    await feed.close()


async def test_blanks_that_mariadb_would_cut_off(mariadb_db: MariaDatabase) -> None:
    mariadb_db.execute("CREATE TABLE l (id int PRIMARY KEY, v varchar(3), w tinytext)")
    table = Table("l", "*id int4", "v", "w")
    feed = await fed(MariaDBTarget(mariadb_db), table)
    done = await feed.apply(table.relation, table.insert(1, "a  ", " " * 255))
    for row in ((2, "a   ", ""), (2, "", " " * 256)):
        with pytest.raises(ApplyError, match="a value with trailing blanks beyond the"):
            await feed.apply(table.insert(*row))
    assert await feed.position() == done.end_lsn
    await feed.expect(table, (1, "a  ", " " * 255))
    await feed.close()


@pytest.mark.parametrize(
    ("definition", "nulls"),
    [
        ("k text PRIMARY KEY, v text", True),
        ("k int PRIMARY KEY, v text", True),
        ("k text, v text, PRIMARY KEY (k, v)", True),
        ("k INTEGER PRIMARY KEY, v text", False),
        ("k text NOT NULL PRIMARY KEY, v text", False),
    ],
)
async def test_null_in_a_primary_key_of_sqlite(sqlite_target: SqliteTarget, definition: str, nulls: bool) -> None:
    sqlite_target._execute(f"CREATE TABLE n ({definition})")
    table = Table("n", "k int4" if "k int" in definition.lower() else "k", "v", full=True)
    feed = await fed(sqlite_target, table)
    null = None if nulls else 3
    await feed.apply(table.relation, table.insert(1, "a"), table.insert(2, "a"), table.insert(null, "a"))
    await feed.apply(table.update(1, "b", old=(1, "a")), table.update(null, "b", old=(null, "a")))
    await feed.expect(table, (1, "b"), (2, "a"), (null, "b"))
    await feed.apply(table.delete(2, "a"), table.delete(null, "b"))
    await feed.expect(table, (1, "b"))
    assert (feed.sink.statistics.confl_update_missing, feed.sink.statistics.confl_delete_missing) == (0, 0)
    await feed.close()


@pytest.mark.parametrize("suffix", ["STRICT", "WITHOUT ROWID"])
async def test_a_primary_key_that_is_never_null(sqlite_target: SqliteTarget, suffix: str) -> None:
    sqlite_target._execute(f"CREATE TABLE n (k text PRIMARY KEY, v text) {suffix}")
    database = Database(f"sqlite:///{sqlite_target._path}")
    async with database.reading() as connection:
        found = await reflect(connection, Table("n", "k", "v").name)
    await database.close()
    assert found is not None
    assert (found.not_null, found.keys) == (frozenset("k"), (("k",),))


@pytest.mark.parametrize("kind", ["text", ""])
@pytest.mark.parametrize("full", [False, True])
async def test_a_column_of_sqlite_under_which_keys_are_equal(sqlite_target: SqliteTarget, full: bool, kind: str) -> None:
    """The key is exact, the column is not."""
    sqlite_target._execute(f"CREATE TABLE u (a {kind} COLLATE NOCASE NOT NULL, v text)")
    sqlite_target._execute("CREATE UNIQUE INDEX i ON u (a COLLATE BINARY)")
    table = Table("u", "*a", "v", full=full)
    feed = await fed(sqlite_target, table)
    await feed.apply(table.relation, *(table.insert(key, "old") for key in ("a", "A", "b", "B")))
    await feed.apply(table.update("A", "new", old=("A", "old") if full else None))
    await feed.expect(table, ("a", "old"), ("A", "new"), ("b", "old"), ("B", "old"))
    await feed.apply(table.delete("b", "old" if full else None))
    await feed.expect(table, ("a", "old"), ("A", "new"), ("B", "old"))
    await feed.close()


async def test_check_warns_of_collations_of_sqlite(sqlite_target: SqliteTarget) -> None:
    for name, collation in (("n", "NOCASE"), ("r", "rtrim"), ("b", "binary")):
        sqlite_target._execute(f"CREATE TABLE {name} (a text NOT NULL COLLATE {collation} PRIMARY KEY, v text COLLATE NOCASE)")
    database = Database(f"sqlite:///{sqlite_target._path}")
    async with database.reading() as connection:
        findings = await check(connection, [Table(name, "*a", "v").published for name in "nrb"])
    await database.close()
    warned = 'key column "a" of table "public.{}" has a collation in the target under which different keys are equal'
    assert [(finding.severity, finding.message) for finding in findings] == [("warning", warned.format(name)) for name in "nr"]


async def test_keys_of_sqlite_are_looked_up_in_their_index(sqlite_target: SqliteTarget) -> None:
    database = Database(f"sqlite:///{sqlite_target._path}")
    table = Table("k", "*a", "v")
    plans = []
    for collation, index in (("BINARY", "BINARY"), ("NOCASE", "BINARY"), ("NOCASE", "NOCASE")):
        sqlite_target._execute("DROP TABLE IF EXISTS k")
        sqlite_target._execute(f"CREATE TABLE k (a text NOT NULL COLLATE {collation}, v text)")
        sqlite_target._execute(f"CREATE UNIQUE INDEX i ON k (a COLLATE {index})")
        async with database.reading() as connection:
            target = await load_target_table(connection, table.relation)
            statement = delete_row(target, connection.dialect, frozenset())
        ((*_, plan),) = sqlite_target._execute(f"EXPLAIN QUERY PLAN {statement.sql}", statement.pick([None, None, "x", None]))
        plans.append(plan)
    await database.close()
    assert plans == ["SEARCH k USING INDEX i (a=?)"] * 3


async def test_statements_are_not_kept_without_bound(sqlite_target: SqliteTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a key there is one for each set of columns that are NULL."""
    plans: list[RelationPlan] = []
    init = RelationPlan.__init__

    def noted(self: RelationPlan, *arguments: Any, **more: Any) -> None:
        plans.append(self)
        init(self, *arguments, **more)

    monkeypatch.setattr(RelationPlan, "__init__", noted)
    names = [f"c{number}" for number in range(10)]
    sqlite_target._execute(f"CREATE TABLE w ({', '.join(f'{name} text' for name in names)})")
    table = Table("w", *names, full=True)
    rows = [[None if pattern >> number & 1 else "x" for number in range(10)] for pattern in range(600)]
    feed = await fed(sqlite_target, table)
    await feed.apply(table.relation, *(table.insert(*row) for row in rows))
    await feed.apply(*(table.update(*row[:9], "new", old=row) for row in rows))
    await feed.expect(table, *((*row[:9], "new") for row in rows))
    await feed.apply(*(table.delete(*row[:9], "new") for row in rows[1:]))
    await feed.expect(table, (*rows[0][:9], "new"))
    assert plans
    assert max(len(plan._forms) for plan in plans) <= 256
    assert feed.sink.statistics.confl_delete_missing == 0
    await feed.close()
