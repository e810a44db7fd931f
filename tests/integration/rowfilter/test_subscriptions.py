"""``where.SCHEMA.TABLE``: subscriptions with row filters of their own, for publishers of every version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from subscriber import Settings, SubscriptionOptions, alter_subscription, check, create_subscription, transactions, verify
from subscriber.consumer.received import ReceivedTransaction
from subscriber.errors import ConfigurationError
from subscriber.rowfilter import RowFilterError
from tests.support.database import Database
from tests.support.managed import catch_up, create, launched
from tests.support.replica import QUICK, replica, subscription_of
from tests.support.sqlalchemy_targets import sqlite_target

TABLE = "CREATE TABLE orders (id int PRIMARY KEY, amount numeric, note text)"
OTHER = "CREATE TABLE other (id int PRIMARY KEY)"
WHERE = {"public.orders": "id > 5 AND id <> 100"}
ROWS = "SELECT id, amount, note FROM orders ORDER BY id"


async def has(target: Database, table: str, ids: list[int]) -> None:
    await asyncio.to_thread(target.wait, f"SELECT array_agg(id ORDER BY id) FROM {table}", [(ids,)])


def _fill(publisher: Database) -> Database:
    publisher.execute(f"{TABLE}; {OTHER}; CREATE PUBLICATION pub FOR ALL TABLES")
    publisher.execute("INSERT INTO orders SELECT n, n, 'copied' FROM generate_series(1, 10) AS n; INSERT INTO other VALUES (1)")
    return publisher


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    return _fill(publisher18_db)


@pytest.fixture
def any_source(publisher_db: Database) -> Database:
    return _fill(publisher_db)


@pytest.mark.parametrize("binary", [False, pytest.param(True, marks=pytest.mark.matrix)])
async def test_copy_and_changes(any_source: Database, target_db: Database, binary: bool) -> None:
    if binary and any_source.version < 14:
        pytest.skip("the publisher has no binary format")
    target_db.execute(f"{TABLE}; {OTHER}")
    any_source.execute("ALTER TABLE orders REPLICA IDENTITY FULL; ALTER TABLE orders ALTER note SET STORAGE EXTERNAL")
    large = "repeat('x', 5000)"
    any_source.execute(f"UPDATE orders SET note = {large} WHERE id = 2")
    where = {"public.orders": "(amount > 5 AND id <> 100) OR note IS NULL"}
    matching = f"SELECT id, amount, note FROM orders WHERE {where['public.orders']} ORDER BY id"
    async with replica(any_source, target_db, where=where, binary=binary) as running:

        async def same() -> int:
            await running.caught_up()
            rows = any_source.fetch(matching)
            assert target_db.fetch(ROWS) == rows
            return len(rows)

        assert await same() == 5
        statistics = running.subscription.status.statistics
        any_source.execute("INSERT INTO orders VALUES (11, 11, 'in'), (12, 1, 'out'), (100, 100, 'out'), (13, NULL, NULL)")
        assert await same() == 7
        assert statistics.inserts == 2
        # in, with a value that is not sent; out; within; outside
        any_source.execute("UPDATE orders SET amount = 20 WHERE id = 2; UPDATE orders SET amount = 0 WHERE id = 7")
        any_source.execute("UPDATE orders SET amount = 9 WHERE id = 6; UPDATE orders SET amount = 2 WHERE id = 3")
        assert await same() == 7
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (3, 1, 1)
        any_source.execute("DELETE FROM orders WHERE id IN (1, 8)")
        assert await same() == 6
        assert statistics.deletes == 2
        any_source.execute("INSERT INTO other SELECT generate_series(2, 100); TRUNCATE orders")
        assert await same() == 0
        assert target_db.value("SELECT count(*) FROM other") == 100


@pytest.mark.publisher(min=14, lacks="streaming of running transactions")
async def test_streamed_transactions(any_source: Database, target_db: Database) -> None:
    target_db.execute(f"{TABLE}; {OTHER}")
    any_source.execute(f"ALTER DATABASE {any_source.name} SET logical_decoding_work_mem = '64kB'")
    async with replica(
        any_source, target_db, where={"public.orders": "id % 3 = 0"}, settings=Settings(logical_decoding_work_mem=256 * 1024)
    ) as running:
        await running.caught_up()
        with any_source.connect() as session:
            session.execute("BEGIN")
            session.execute("INSERT INTO orders SELECT n, n, repeat('y', 100) FROM generate_series(11, 6000) AS n")
            session.execute("SAVEPOINT a; UPDATE orders SET note = 'no'; ROLLBACK TO a; UPDATE orders SET id = id + 7001 WHERE id > 5000")
            session.execute("COMMIT")
        await running.caught_up()
        assert target_db.fetch(ROWS) == any_source.fetch("SELECT id, amount, note FROM orders WHERE id % 3 = 0 ORDER BY id")


async def test_another_target(source: Database, tmp_path: Path) -> None:
    target = sqlite_target(tmp_path / "copy.db")

    class AsDatabase:
        dsn = target.url

    settings = Settings(wal_retrieve_retry_interval=0.2, create_tables=True)
    async with replica(source, AsDatabase(), where=WHERE, settings=settings) as running:  # type: ignore[arg-type]
        await running.caught_up()
        source.execute("INSERT INTO orders VALUES (11, 11), (100, 100), (0, 0)")
        await running.caught_up()
        assert [row[0] for row in target.fetch("SELECT id FROM orders ORDER BY id")] == [6, 7, 8, 9, 10, 11]


@pytest.mark.publisher(min=15, lacks="row filters")
@pytest.mark.matrix
async def test_filters_of_the_publication_apply_too(publisher_db: Database, target_db: Database) -> None:
    publisher_db.execute(
        f"{TABLE}; CREATE PUBLICATION pub FOR TABLE orders WHERE (id < 8); INSERT INTO orders SELECT generate_series(1, 10)"
    )
    target_db.execute(TABLE)
    async with replica(publisher_db, target_db, where=WHERE) as running:
        await running.caught_up()
        publisher_db.execute("INSERT INTO orders VALUES (-1), (100); UPDATE orders SET id = 0 WHERE id = 6")
        await running.caught_up()
        assert [row[0] for row in target_db.fetch("SELECT id FROM orders")] == [7]


@pytest.mark.parametrize("via_root", [False, True])
@pytest.mark.matrix
async def test_filter_of_the_root_or_of_the_partition(publisher_db: Database, target_db: Database, via_root: bool) -> None:
    if via_root and publisher_db.version < 13:
        pytest.skip("the publisher has no publish_via_partition_root")
    tables = "CREATE TABLE parent (a int PRIMARY KEY) PARTITION BY RANGE (a); CREATE TABLE child PARTITION OF parent DEFAULT"
    publisher_db.execute(f"{tables}; CREATE PUBLICATION pub FOR TABLE parent WITH (publish_via_partition_root = {via_root})")
    target_db.execute(tables)
    publisher_db.execute("INSERT INTO parent VALUES (1), (9)")
    async with replica(publisher_db, target_db, where={"public.parent": "a < 5", "public.child": "a >= 5"}) as running:
        await running.caught_up()
        publisher_db.execute("INSERT INTO parent VALUES (2), (4), (6); INSERT INTO child VALUES (3), (5), (7)")
        await running.caught_up()
        assert [row[0] for row in target_db.fetch("SELECT a FROM parent ORDER BY a")] == ([1, 2, 3, 4] if via_root else [5, 6, 7, 9])


async def test_verify(source: Database, target_db: Database) -> None:
    target_db.execute(f"{TABLE}; {OTHER}")
    async with replica(source, target_db, where=WHERE) as running:
        await running.caught_up()
        name = running.subscription.name
        report = await verify(name, target=target_db.dsn, connection=source.conninfo())
        assert [(str(table.table), table.equal, table.left_out) for table in report.tables] == [
            ("public.orders", True, None),
            ("public.other", True, None),
        ]


async def test_transactions(source: Database) -> None:
    options = SubscriptionOptions(where=WHERE)
    found: list[tuple[str, Any]] = []
    async with transactions(source.conninfo(), publications=["pub"], options=options) as stream:
        source.execute("INSERT INTO orders VALUES (11, 1, 'in'), (0, 1, 'out'); UPDATE orders SET id = 3000 WHERE id = 3")
        async for received in stream:
            assert isinstance(received, ReceivedTransaction)
            found = [(change.kind, getattr(change, "new", {}).get("id")) async for change in received]
            break
    assert found == [("insert", "11"), ("insert", "3000")]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            {"public.orders": "note = 'x'"},
            'row filter of table public.orders: cannot update table "orders": Column used in the publication',
        ),
        ({"public.orders": "missing = 1"}, 'row filter of table public.orders: column "missing" does not exist'),
        (
            {"public.orders": "id"},
            "row filter of table public.orders: argument of PUBLICATION WHERE must be type boolean",
        ),
        ({"public.absent": "id = 1"}, "row filter of table public.absent: the table is not published"),
        ({"public.orders": "id > 5", "public.other": "id = 1"}, None),
    ],
)
async def test_check(source: Database, target_db: Database, where: dict[str, str], message: str | None) -> None:
    target_db.execute(f"{TABLE}; {OTHER}")
    options = SubscriptionOptions(where=where)
    found = await check("checked", connection=source.conninfo(), publications=["pub"], target=target_db.dsn, options=options)
    messages = [finding.message for finding in found]
    assert messages == [] if message is None else messages[0].startswith(message), messages


async def test_filter_that_is_refused(source: Database, target_db: Database) -> None:
    with pytest.raises(RowFilterError) as caught:
        subscription_of(source, target_db, where={"public.orders": "now() > '2020-01-01'"})
    assert "User-defined or built-in mutable functions are not allowed." in caught.value.one_line()
    assert 'row filter of table "public.orders"' in caught.value.one_line()
    with pytest.raises(ConfigurationError, match="not of the form"):
        SubscriptionOptions(where={"orders": "id > 5"})


async def test_filter_that_fails_for_a_row_stops_the_run(source: Database, target_db: Database) -> None:
    target_db.execute(f"{TABLE}; {OTHER}")
    subscription = subscription_of(source, target_db, where={"public.orders": "100 / id > 0"})
    running = asyncio.create_task(subscription.run())
    await subscription.wait_for(source.current_lsn(), 30)
    source.execute("INSERT INTO orders VALUES (0)")
    with pytest.raises(RowFilterError, match="division by zero"):
        await asyncio.wait_for(running, 30)


async def test_stored_and_altered(source: Database, target_db: Database) -> None:
    target_db.execute(f"{TABLE}; {OTHER}")
    name = await create(source, target_db, options=SubscriptionOptions(where=WHERE))
    stored = "SELECT subwhere FROM subscriber.pg_subscription"
    assert target_db.value(stored) == '{"public.orders": "id > 5 AND id <> 100"}'
    async with launched(target_db, name):
        # a copy that is not finished would start again, with the filter of then
        await asyncio.to_thread(catch_up, source, target_db, name)
        await has(target_db, "orders", [6, 7, 8, 9, 10])
    async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
        await subscription.set({"where": {"public.other": "id = 7"}})
    async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
        await subscription.set({"where": {"public.orders": ""}})
    assert target_db.value(stored) == '{"public.other": "id = 7"}'
    async with launched(target_db, name):
        source.execute("INSERT INTO orders VALUES (0); INSERT INTO other VALUES (6), (7)")
        await has(target_db, "orders", [0, 6, 7, 8, 9, 10])
        await has(target_db, "other", [1, 7])
    with pytest.raises(RowFilterError):
        async with alter_subscription(name, target=target_db.dsn, settings=QUICK) as subscription:
            await subscription.set({"where": {"public.orders": "random() < 1"}})


async def test_stored_in_a_lake(source: Database, tmp_path: Path) -> None:
    target, name = f"spark://{tmp_path / 'lake'}", f"lake_{source.name}"
    options = SubscriptionOptions(where=WHERE)
    await create_subscription(name, connection=source.conninfo(), publications=["pub"], target=target, options=options, settings=QUICK)
    async with alter_subscription(name, target=target, settings=QUICK) as subscription:
        await subscription.set({"where": {"public.other": "id = 7"}})
    (document,) = (tmp_path / "lake").rglob("definition.json")
    where = json.loads(document.read_text())["document"]["options"]["where"]
    assert json.loads(where) == {"public.orders": "id > 5 AND id <> 100", "public.other": "id = 7"}
