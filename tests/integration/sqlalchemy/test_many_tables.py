"""Many tables in targets of SQLAlchemy: what is asked does not grow with their number, and small ones are copied in groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from subscriber import Subscription, TableState, Until, check
from subscriber.sinks.sqlalchemy.copy.table_group import SqlAlchemyTableGroup
from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import QUICK
from tests.support.sqlalchemy_targets import OtherTarget
from tests.support.table_groups import BeforeCopy, hook_before_copy, record_snapshot_slots

FEW, MANY = 2, 40
SLOTS = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()"


@pytest.fixture
def statements() -> Iterator[list[str]]:
    """Every statement that a target is sent, except SHOW CREATE TABLE: nothing else of MariaDB tells all that it does."""
    statements: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not statement.startswith("SHOW CREATE TABLE"):
            statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    yield statements
    event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return record_snapshot_slots(monkeypatch)


@pytest.fixture
def before_copy(monkeypatch: pytest.MonkeyPatch) -> BeforeCopy:
    return hook_before_copy(monkeypatch, SqlAlchemyTableGroup)


def make(publisher: Database, target: OtherTarget, first: int, last: int, rows: int = 0) -> list[str]:
    names = [f"t{number}" for number in range(first, last)]
    for name in names:
        publisher.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text); INSERT INTO {name} SELECT g, 'x' FROM generate_series(1, {rows}) g"
        )
        target.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v {'longtext' if target.kind == 'mariadb' else 'text'})")
    publisher.execute("DROP PUBLICATION IF EXISTS pub; CREATE PUBLICATION pub FOR ALL TABLES")
    return names


def subscription_to(publisher: Database, target: OtherTarget) -> Subscription:
    return Subscription(f"many_{publisher.name}", connection=publisher.conninfo(), publications=["pub"], target=target.url, settings=QUICK)


def same_rows(publisher: Database, target: OtherTarget, tables: list[str]) -> None:
    for table in tables:
        query = f"SELECT id, v FROM {table} ORDER BY 1"
        assert [tuple(row) for row in target.fetch(query)] == publisher.fetch(query), table


async def test_no_more_is_asked_for_many_tables(publisher18_db: Database, other_target: OtherTarget, statements: list[str]) -> None:
    """Fifteen queries a table took 78 s for 3,000 tables; a first run's states were read once for each table."""
    counts = []
    for first, last in ((0, FEW), (FEW, MANY)):
        make(publisher18_db, other_target, first, last)
        statements.clear()
        assert await check("many", connection=publisher18_db.dsn, publications=["pub"], target=other_target.url) == []
        counts.append(len(statements))
    # SQLAlchemy reads the keys and indexes of SQLite's tables one by one, in the process itself
    each = 8 if other_target.kind == "sqlite" else 0
    assert counts[1] - counts[0] <= each * (MANY - FEW)
    subscription = subscription_to(publisher18_db, other_target)
    statements.clear()
    await subscription.run(Until())
    assert {entry.state for entry in subscription.status.tables.values()} <= {TableState.SYNCDONE, TableState.READY}
    assert len([statement for statement in statements if "next_oid" in statement]) < 10
    assert (
        len([statement for statement in statements if "pg_subscription_rel.srsubid" in statement and statement.startswith("SELECT")]) < 30
    )


async def test_two_snapshots_for_all_tables(publisher18_db: Database, other_target: OtherTarget, snapshots: list[bool]) -> None:
    """A slot, a snapshot and several sessions a table took 37 s (SQLite) and 136 s (MariaDB) for 200 tables of 500 rows."""
    tables = make(publisher18_db, other_target, 0, 10, rows=1200)
    await subscription_to(publisher18_db, other_target).run(Until())
    same_rows(publisher18_db, other_target, tables)
    assert snapshots == [True, True]
    publisher18_db.execute(";".join(f"UPDATE {table} SET v = 'y' WHERE id = 1; DELETE FROM {table} WHERE id = 2" for table in tables))
    await subscription_to(publisher18_db, other_target).run(Until())
    same_rows(publisher18_db, other_target, tables)
    assert publisher18_db.fetch(SLOTS) == [(f"many_{publisher18_db.name}",)]


async def test_tables_that_leave_their_group(
    publisher18_db: Database, other_target: OtherTarget, snapshots: list[bool], before_copy: BeforeCopy
) -> None:
    """One has rows already, one changes while it is copied, and one is larger than it seemed."""
    tables = make(publisher18_db, other_target, 0, 5, rows=2)
    other_target.execute("INSERT INTO t0 VALUES (100, 'local')")
    publisher18_db.execute("INSERT INTO t1 SELECT g, repeat('x', 1000000) FROM generate_series(10, 20) AS g")
    subscription = subscription_to(publisher18_db, other_target)

    async def change(table: str) -> None:
        if table == "t2":
            publisher18_db.execute("INSERT INTO t2 VALUES (50, 'new'); UPDATE t2 SET v = 'changed' WHERE id = 1")
            lsn = publisher18_db.current_lsn()
            async with asyncio.timeout(WAIT_SECONDS):
                while subscription.status.received < lsn:
                    await asyncio.sleep(0.02)

    before_copy(change)
    await subscription.run(Until())
    other_target.execute("DELETE FROM t0 WHERE id = 100")
    same_rows(publisher18_db, other_target, tables)
    assert snapshots.count(False) >= 2
    assert subscription.status.last_error is None
