"""Tables of SQL targets are compared with the publisher's, and only what differs is written."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace as changed

import pytest

from subscriber import Settings, Subscription, SubscriptionOptions, TableName, alter_subscription, crash_points
from subscriber.errors import PublisherUnavailable
from subscriber.subscription.management.recover import recover
from subscriber.subscription.run import reconciliation
from subscriber.verification import tables
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import until
from tests.support.replica import at_work
from tests.support.sqlalchemy_targets import OtherTarget

ROWS = 2000
SETTINGS = Settings(wal_retrieve_retry_interval=0.2, create_tables=True, max_copy_workers_per_table=1)
RECONCILED = re.compile(r'table "public\.(\w+)" was reconciled: (\d+) rows were compared, (\d+) written, (\d+) deleted')
RESUMED = re.compile(r'copy of table "public\.(\w+)" was resumed: (\d+) rows were kept, (\d+) copied')
TABLES = f"""
CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10, 2), at timestamptz, f float8, u int UNIQUE);
CREATE TABLE words (word text PRIMARY KEY, v int); CREATE TABLE bag (v text, n int); ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO t SELECT i, 'v' || i, i / 7.0, timestamptz '2024-01-01' + i * interval '1 s', i / 3.0, i FROM generate_series(1, {ROWS}) AS i;
INSERT INTO words SELECT 'wör' || i, i FROM generate_series(1, 500) AS i;
INSERT INTO bag SELECT 'b', i % 3 FROM generate_series(1, 100) AS i;
ANALYZE; CREATE PUBLICATION pub FOR ALL TABLES
"""
QUERIES = ("SELECT id, v, n, f, u FROM t ORDER BY id", "SELECT word, v FROM words ORDER BY word", "SELECT v, n FROM bag ORDER BY v, n")


def subscription_of(
    publisher: Database, target: OtherTarget, settings: Settings, *, name: str = "other", copy_data: bool | str
) -> Subscription:
    return Subscription(
        f"{name}_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=target.url,
        options=SubscriptionOptions(copy_data=copy_data),  # type: ignore[arg-type]
        settings=settings,
    )


async def ran(subscription: Subscription, publisher: Database, act: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run until it has caught up."""
    async with at_work(subscription):
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        if act is not None:
            await act()
            await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)


def assert_same(publisher: Database, target: OtherTarget) -> None:
    for query in QUERIES:
        here = [tuple(None if value is None else str(value) for value in row) for row in publisher.fetch(query)]
        there = [tuple(None if value is None else str(value) for value in row) for row in target.fetch(query)]
        assert sorted(map(_plain, there)) == sorted(map(_plain, here))


def _plain(row: tuple[str | None, ...]) -> tuple[str, ...]:
    # numbers have several texts
    return tuple("" if value is None else value.rstrip("0").rstrip(".") if "." in value else value for value in row)


async def test_only_what_differs_is_written(
    publisher18_db: Database, other_target: OtherTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tables, "_RANGE_ROWS", 300)
    monkeypatch.setattr(reconciliation, "_RANGE_KEYS", 50)
    publisher18_db.execute(TABLES)
    # filled by something else: an earlier subscription
    await ran(subscription_of(publisher18_db, other_target, SETTINGS, name="first", copy_data=True), publisher18_db)
    with caplog.at_level("ERROR"):
        refused = subscription_of(publisher18_db, other_target, SETTINGS, copy_data="reconcile")
        task = asyncio.create_task(refused.run())
        while "also belongs to subscription" not in caplog.text and not task.done():
            await asyncio.sleep(0.05)
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
    assert "also belongs to subscription" in f"{caplog.text}{error}"
    other_target.execute("DELETE FROM subscriber_pg_subscription_rel")
    other_target.execute("DELETE FROM subscriber_pg_subscription WHERE subname LIKE 'first%'")
    for statement in (
        "UPDATE t SET v = 'wrong', n = NULL WHERE id = 10",
        "DELETE FROM t WHERE id = 20",
        "UPDATE t SET v = 'many' WHERE id BETWEEN 700 AND 800",
        "UPDATE t SET u = -1 WHERE id = 30",
        "UPDATE t SET u = 30 WHERE id = 1900",
        "UPDATE t SET u = 1900 WHERE id = 30",
        "INSERT INTO t (id, v) VALUES (9999, 'extra')",
        "UPDATE words SET v = 0 WHERE v = 7",
        "DELETE FROM words WHERE v = 8",
        "DELETE FROM bag WHERE n = 2",
    ):
        other_target.execute(statement)
    points = [point for point in crash_points.POINTS if point.startswith("reconcile.")]

    def fail(point: str) -> None:
        if points and point == points[0]:
            points.pop(0)
            raise PublisherUnavailable("by the test")

    async def change() -> None:
        publisher18_db.execute("UPDATE t SET v = 'later' WHERE id < 50; DELETE FROM t WHERE id = 60")

    with crash_points.watched(fail), caplog.at_level("INFO"):
        await ran(subscription_of(publisher18_db, other_target, SETTINGS, copy_data="reconcile"), publisher18_db, change)
    assert points == []
    assert_same(publisher18_db, other_target)
    found = {table: tuple(map(int, counts)) for table, *counts in RECONCILED.findall(caplog.text)}
    print(found)
    assert found["words"][1] <= 2
    assert found["t"][0] - found["t"][1] > ROWS - 700
    # the position is lost: one command
    publisher18_db.execute(
        f"SELECT pg_drop_replication_slot('other_{publisher18_db.name}');"
        " DELETE FROM t WHERE id = 70; UPDATE t SET v = 'lost' WHERE id = 71"
    )
    name = f"other_{publisher18_db.name}"
    own = "FROM subscriber_position WHERE srrelid = 0 AND srsubid IN (SELECT oid FROM subscriber_pg_subscription)"
    values = "srsubid, 'public', '{}', remote_lsn, remote_lsn, 0, 1, 0, 0, 1, '1', 1, 1, '1', '1'"
    verified = f"INSERT INTO subscriber_verification SELECT {values} {own}"
    proofs = "SELECT relname FROM subscriber_verification"
    other_target.execute(verified.format("t"))
    # the rows of a prepared transaction: the publisher sends it again at the new slot
    prepared = f"SELECT srsubid, 7, 'gid', remote_lsn, remote_lsn, 0, NULL, NULL, 1, 1, 1, 1 {own}"
    other_target.execute(f"INSERT INTO subscriber_prepared_transaction {prepared}")
    planned = await recover(name, target=other_target.url, connection=publisher18_db.conninfo())
    assert "does not exist on the publisher any more" in planned.reason
    assert other_target.fetch("SELECT xid FROM subscriber_prepared_transaction") == []
    assert other_target.fetch(proofs) == []
    # the next run finds no position, and one table that is to be replaced
    async with alter_subscription(name, target=other_target.url) as alteration:
        await alteration.resync([TableName("public", "t")], copy=True)
    await ran(subscription_of(publisher18_db, other_target, SETTINGS, copy_data=True), publisher18_db)
    assert_same(publisher18_db, other_target)
    # one table again, in both ways
    for copy in (False, True):
        other_target.execute("UPDATE t SET v = 'wrong' WHERE id = 80")
        other_target.execute(verified.format("t"))
        other_target.execute(verified.format("words"))
        async with alter_subscription(name, target=other_target.url) as alteration:
            await alteration.resync([TableName("public", "t")], copy=copy)
        assert other_target.fetch(proofs) == [("words",)]
        other_target.execute("DELETE FROM subscriber_verification")
        await ran(subscription_of(publisher18_db, other_target, SETTINGS, copy_data=True), publisher18_db)
        assert_same(publisher18_db, other_target)


async def test_a_copy_that_was_interrupted_is_resumed(
    publisher18_db: Database, other_target: OtherTarget, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tables, "_RANGE_ROWS", 200)
    monkeypatch.setattr("subscriber.sinks.sqlalchemy.copy.sqlalchemy_table_sink._PIECE_ROWS", 300)
    monkeypatch.setattr("subscriber.sinks.sqlalchemy.copy.sqlalchemy_table_sink._PIECE_BYTES", 10_000)
    publisher18_db.execute(TABLES)
    pieces = 0

    def fail(point: str) -> None:
        nonlocal pieces
        if point == "sqlalchemy.rows_copied":
            pieces += 1
            if pieces == 3:
                publisher18_db.execute("UPDATE t SET v = 'meanwhile' WHERE id IN (5, 1500); DELETE FROM t WHERE id = 6")
                raise PublisherUnavailable("by the test")

    settings = changed(SETTINGS, max_sync_workers_per_subscription=1, copy_range_size=64 * 1024)
    with crash_points.watched(fail), caplog.at_level("INFO"):
        await ran(subscription_of(publisher18_db, other_target, settings, copy_data=True), publisher18_db)
    assert_same(publisher18_db, other_target)
    assert [table for table, _, _ in RESUMED.findall(caplog.text)] == ["t"]


async def test_triggers_that_would_fire(publisher18_db: Database, other_target: OtherTarget, caplog: pytest.LogCaptureFixture) -> None:
    publisher18_db.execute(TABLES)
    subscription = subscription_of(publisher18_db, other_target, SETTINGS, copy_data=True)
    await ran(subscription, publisher18_db)
    body = "DELETE FROM words WHERE v = old.id"
    other_target.execute(
        f"CREATE TRIGGER my_trigger AFTER DELETE ON t {f'BEGIN {body}; END' if other_target.kind == 'sqlite' else f'FOR EACH ROW {body}'}"
    )
    name = f"other_{publisher18_db.name}"
    async with alter_subscription(name, target=other_target.url) as alteration:
        await alteration.resync([TableName("public", "t")], copy=True)
    task = asyncio.create_task(subscription_of(publisher18_db, other_target, SETTINGS, copy_data=True).run())
    while 'trigger "my_trigger" of table "public.t" fires for the rows' not in caplog.text and not task.done():
        await asyncio.sleep(0.05)
    task.cancel()
    (error,) = await asyncio.gather(task, return_exceptions=True)
    assert 'trigger "my_trigger" of table "public.t" fires for the rows' in f"{caplog.text}{error}"
    assert "DROP TRIGGER" in f"{caplog.text}{getattr(error, 'hint', '')}"
    assert_same(publisher18_db, other_target)
    other_target.execute("DROP TRIGGER my_trigger")
    await ran(subscription_of(publisher18_db, other_target, SETTINGS, copy_data=True), publisher18_db)
    assert_same(publisher18_db, other_target)


async def test_keys_that_the_target_may_store_as_other_texts(
    publisher18_db: Database, other_target: OtherTarget, caplog: pytest.LogCaptureFixture
) -> None:
    """They name no rows: the table is compared as one without a key. Or the key stores bytes, which is refused."""
    publisher18_db.execute("""
        CREATE TABLE ints (id int PRIMARY KEY, v int); INSERT INTO ints SELECT i, i FROM generate_series(1, 10) AS i;
        CREATE TABLE times (id timestamptz, v int, PRIMARY KEY (id));
        INSERT INTO times SELECT timestamptz '2024-01-01 UTC' + i * interval '1.5 s', i FROM generate_series(1, 10) AS i;
        CREATE TABLE words (id text PRIMARY KEY, v int); INSERT INTO words VALUES ('a', 1), ('b', 2);
        CREATE TABLE bytes (id text PRIMARY KEY, v int); INSERT INTO bytes VALUES ('a', 1); CREATE PUBLICATION pub FOR ALL TABLES
    """)
    for statement in (
        "CREATE TABLE ints (id varchar(20), v int)",
        "INSERT INTO ints VALUES ('007', 1), ('1', 1), ('2', 5)",
        "CREATE TABLE times (id varchar(60), v int)",
        "INSERT INTO times VALUES ('2024-01-01T00:00:01.5Z', 1), ('2024-01-01 00:00:03+00', 2)",
        "CREATE TABLE words (id varchar(20) COLLATE NOCASE PRIMARY KEY, v int)"
        if other_target.kind == "sqlite"
        else "CREATE TABLE words (id varchar(20) COLLATE utf8mb4_general_ci PRIMARY KEY, v int)",
        "INSERT INTO words VALUES ('A', 1), ('B', 2)",
        f"CREATE TABLE bytes (id {'blob' if other_target.kind == 'sqlite' else 'varbinary(20)'} PRIMARY KEY, v int)",
        "INSERT INTO bytes VALUES ('x', 1)",
    ):
        other_target.execute(statement)
    task = asyncio.create_task(subscription_of(publisher18_db, other_target, SETTINGS, copy_data="reconcile").run())
    try:
        # SQLite has no columns of bytes only
        await until(lambda: other_target.kind == "sqlite" or "stores bytes" in caplog.text, "the error")
        await until(other_target.has_catalog, "the catalog", in_thread=True)
        tables_of = {"ints": 10, "times": 10, "words": 2}
        await until(lambda: all(other_target.states().get(name, "i") in "sr" for name in tables_of), "the tables", in_thread=True)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    for name in tables_of:
        here = publisher18_db.fetch(f"SELECT id::text, v FROM {name} ORDER BY v")
        assert [(str(key), v) for key, v in other_target.fetch(f"SELECT id, v FROM {name} ORDER BY v")] == here
    assert other_target.kind == "sqlite" or other_target.fetch("SELECT v FROM bytes") == [(1,)]
