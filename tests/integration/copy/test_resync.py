"""``alter --resync``: one table again, while the others continue."""

from __future__ import annotations

import asyncio

import pytest

from subscriber import SubscriptionOptions, TableName, alter_subscription, check, crash_points
from subscriber.apply.all_changes import OWN_ROWS
from subscriber.errors import ConfigurationError, PublisherUnavailable, RelationError
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.observation import until
from tests.support.program import subscriber

T = TableName("public", "t")
QUERIES = ("SELECT id, v FROM t ORDER BY id", "SELECT v FROM bag ORDER BY v", "SELECT id FROM other ORDER BY id")


async def test_one_table_again(publisher_db: Database, target_db: Database) -> None:
    for database in (publisher_db, target_db):
        database.execute("""
            CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE bag (v int); CREATE TABLE other (id int PRIMARY KEY);
            INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i; INSERT INTO bag SELECT i FROM generate_series(1, 20) AS i
        """)
    publisher_db.execute("ALTER TABLE bag REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE t, bag, other")
    # filled by something else, and not quite equal
    target_db.execute("DELETE FROM t WHERE id = 7; UPDATE bag SET v = 0 WHERE v = 3; INSERT INTO other VALUES (-1)")
    name = await create(publisher_db, target_db, options=SubscriptionOptions(copy_data="reconcile"))
    async with launched(target_db):
        for query in QUERIES:
            await same(publisher_db, target_db, name, query)
        for copy in (False, True):
            target_db.execute("""
                UPDATE t SET v = 'wrong' WHERE id % 10 = 1; DELETE FROM t WHERE id = 2; INSERT INTO bag VALUES (99);
                ALTER TABLE t ADD COLUMN IF NOT EXISTS own int DEFAULT 5; UPDATE t SET own = id
            """)
            publisher_db.execute("INSERT INTO other SELECT coalesce(max(id), 0) + 1 FROM other")
            by = ("--by", "copy") if copy else ()
            arguments = ("alter", name, f"--target={target_db.dsn}", "--resync=public.t", "--resync=public.bag", *by)
            done = await asyncio.to_thread(subscriber, *arguments)
            assert done.status == 0, done.errors
            publisher_db.execute("UPDATE t SET v = 'later' WHERE id = 50; INSERT INTO other SELECT max(id) + 1 FROM other")
            for query in QUERIES:
                await same(publisher_db, target_db, name, query)
            assert target_db.value("SELECT count(*) FROM t WHERE own IS DISTINCT FROM id") == 1
        publisher_db.execute("ALTER PUBLICATION pub DROP TABLE other")
        for table, message in (("other", "is not published any more"), ("nosuch", "is not published any more")):
            done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target_db.dsn}", f"--resync=public.{table}")
            assert (done.status, message in done.errors, done.errors.count("\n")) == (1, True, 1)
        done = await asyncio.to_thread(subscriber, "alter", name, f"--target={target_db.dsn}", "--by=copy")
        assert (done.status, "--by needs --resync" in done.errors) == (1, True)
        for query in QUERIES[:2]:
            await same(publisher_db, target_db, name, query)


async def test_what_is_refused(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(two_phase=True))
    async with launched(target_db):
        await asyncio.to_thread(target_db.wait, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
    async with alter_subscription(name, target=target_db.dsn) as alteration:
        with pytest.raises(ConfigurationError, match="when two_phase is enabled"):
            await alteration.resync([T])
        await alteration.disable()
        await alteration.set({"two_phase": False, "origin": "none"})
        await alteration.resync([T])
        # a warning, as for a subscription that begins with it
        assert OWN_ROWS.message in caplog.text
        found = await check(
            "new",
            connection=publisher18_db.dsn,
            publications=["pub"],
            target=target_db.dsn,
            options=SubscriptionOptions(copy_data="reconcile", origin="none"),
        )
        assert OWN_ROWS in found
        with pytest.raises(RelationError, match="is not published any more"):
            await alteration.resync([T, TableName("public", "u")])
        publisher18_db.execute("ALTER PUBLICATION pub SET (publish = 'insert, update')")
        with pytest.raises(RelationError, match="cannot be reconciled: its publications do not publish"):
            await alteration.resync([T])
        await alteration.resync([T], copy=True)
        await alteration.enable()
    async with launched(target_db):
        await same(publisher18_db, target_db, name, "SELECT id FROM t ORDER BY id")


@pytest.mark.parametrize("two_phase", [False, True], ids=["", "two_phase"])
async def test_a_launcher_continues_after_recover(publisher18_db: Database, target_db: Database, two_phase: bool) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    rows = "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i"
    publisher18_db.execute(f"{rows}; CREATE PUBLICATION pub FOR TABLE t")
    if two_phase:
        target_db.execute(rows)
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(two_phase=two_phase, copy_data=not two_phase))
    async with launched(target_db):
        await same(publisher18_db, target_db, name, QUERIES[0])
    publisher18_db.execute(f"""
        SELECT pg_drop_replication_slot('{name}'); DELETE FROM t WHERE id % 10 = 3; UPDATE t SET v = 'x' WHERE id % 10 = 4;
        INSERT INTO t VALUES (5000, 'new')
    """)
    done = await asyncio.to_thread(subscriber, "recover", name, f"--target={target_db.dsn}", f"--connection={publisher18_db.dsn}")
    assert (done.status, f"alter {name} --connection" in done.errors.replace("NAME", name)) == (1, True)
    if two_phase:
        # not enabled before the tables are ready: a transaction that is prepared before a snapshot would be lost
        done = await asyncio.to_thread(subscriber, "recover", name, f"--target={target_db.dsn}")
        assert done.status == 0, done.errors
        assert target_db.value("SELECT subtwophasestate::text FROM subscriber.pg_subscription") == "p"
        assert publisher18_db.value(f"SELECT two_phase FROM pg_replication_slots WHERE slot_name = '{name}'") is False
        publisher18_db.execute(f"SELECT pg_drop_replication_slot('{name}')")
    async with launched(target_db):
        error = "SELECT last_error LIKE '%does not exist on the publisher any more%' FROM subscriber.subscription_stats"
        await asyncio.to_thread(target_db.wait, error, True)
        done = await asyncio.to_thread(subscriber, "recover", name, f"--target={target_db.dsn}")
        assert done.status == 0, done.errors
        await same(publisher18_db, target_db, name, QUERIES[0])
        publisher18_db.execute("UPDATE t SET v = 'later' WHERE id < 100")
        await same(publisher18_db, target_db, name, QUERIES[0])


async def test_a_table_that_is_unpublished_meanwhile(
    publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    for database in (publisher18_db, target_db):
        database.execute("""
            CREATE TABLE bag (v int); INSERT INTO bag SELECT i FROM generate_series(1, 10) AS i; CREATE TABLE other (id int PRIMARY KEY)
        """)
    publisher18_db.execute("ALTER TABLE bag REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR TABLE bag, other")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(copy_data=False))
    async with launched(target_db):
        await same(publisher18_db, target_db, name, QUERIES[1])
    target_db.execute("UPDATE bag SET v = 0 WHERE v = 1")
    async with alter_subscription(name, target=target_db.dsn) as alteration:
        await alteration.resync([TableName("public", "bag")])
    failed = False

    def fail(point: str) -> None:
        nonlocal failed
        if point == "reconcile.planned":
            failed = True
            raise PublisherUnavailable("by the test")

    with crash_points.watched(fail):
        async with launched(target_db):
            await until(lambda: failed, "the interruption")
    publisher18_db.execute("ALTER PUBLICATION pub DROP TABLE bag")
    async with launched(target_db):
        await until(lambda: "is no longer published" in caplog.text, "the table is left out")
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE bag")
    async with launched(target_db):
        await asyncio.to_thread(target_db.wait, "SELECT bool_and(srsubstate::text IN ('s', 'r')) FROM subscriber.pg_subscription_rel", True)
        await same(publisher18_db, target_db, name, QUERIES[1])
