"""``schema_change = add`` into PostgreSQL: new columns of the publisher, with what its existing rows have there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from subscriber import RelationError, verify
from tests.support.database import Database
from tests.support.managed import create, launched
from tests.support.program import subscriber
from tests.support.replica import QUICK, Replica, replica
from tests.support.roles import role

ADD = replace(QUICK, schema_change="add")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod), pg_get_expr(adbin, adrelid), attcollation::regcollation::text
  FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
 WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attname
"""


@asynccontextmanager
async def following(publisher: Database, target: Database, **options: Any) -> AsyncIterator[Replica]:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")
    async with replica(publisher, target, settings=ADD, **options) as found:
        await found.caught_up()
        yield found


async def test_existing_rows_get_what_those_of_the_publisher_have(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        # several changes before the next row, a default that is changed later, a column that is dropped again, a rollback
        publisher18_db.execute("ALTER TABLE t ADD a int DEFAULT 7 NOT NULL")
        publisher18_db.execute("""ALTER TABLE t ADD b numeric(10, 2) DEFAULT 1.5, ADD "C d" text COLLATE "C" DEFAULT 'it''s {,"x"\\}'""")
        publisher18_db.execute(
            "ALTER TABLE t ADD e int[] DEFAULT '{1,2}', ADD f timestamptz DEFAULT '2020-01-01 00:00:00+02', ADD g jsonb, ADD h varchar(3)"
        )
        publisher18_db.execute("ALTER TABLE t ALTER a SET DEFAULT 8, ALTER b DROP DEFAULT, ALTER g SET DEFAULT '{}'")
        publisher18_db.execute("ALTER TABLE t ADD gone int DEFAULT 3; ALTER TABLE t DROP gone")
        publisher18_db.execute("BEGIN; ALTER TABLE t ADD never int; UPDATE t SET never = 1; ROLLBACK")
        publisher18_db.execute("INSERT INTO t (id) VALUES (101); UPDATE t SET v = 'w' WHERE id = 1")
        await found.same('SELECT id, v, a, b, "C d", e, f, g FROM t ORDER BY id')
        await found.same(COLUMNS)
        publisher18_db.execute("ALTER TABLE t ADD later int; INSERT INTO t (id, later) VALUES (102, 1); ALTER TABLE t DROP later")
        publisher18_db.execute("INSERT INTO t (id) VALUES (103)")
        await found.same("SELECT id, a FROM t ORDER BY id")
        assert found.subscription.status.last_error is None


async def test_a_column_that_only_part_of_the_stream_has(publisher18_db: Database, target_db: Database) -> None:
    """The catalog does not have it any more: its type is that of the stream."""
    async with following(publisher18_db, target_db) as found:
        with target_db.connect() as reader:
            # apply waits, and the stream is behind the catalog
            reader.execute("BEGIN; LOCK TABLE t IN SHARE MODE")
            publisher18_db.execute("INSERT INTO t VALUES (200, 'waits')")
            publisher18_db.execute("ALTER TABLE t ADD short varchar(3) DEFAULT 'abc'; INSERT INTO t (id) VALUES (201)")
            publisher18_db.execute("ALTER TABLE t DROP short; INSERT INTO t (id) VALUES (202)")
            reader.execute("COMMIT")
        await found.same("SELECT id, v FROM t ORDER BY id")
        assert target_db.fetch("SELECT id FROM t WHERE short IS NOT NULL") == [(201,)]


async def test_later_constraints_and_defaults_of_domains(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE DOMAIN five AS int DEFAULT 5")
    async with following(publisher18_db, target_db) as found:
        with target_db.connect() as reader:
            # apply waits, and the stream is behind the catalog
            reader.execute("BEGIN; LOCK TABLE t IN SHARE MODE")
            publisher18_db.execute("INSERT INTO t VALUES (200, 'waits')")
            publisher18_db.execute("ALTER TABLE t ADD a int DEFAULT 7, ADD d five DEFAULT NULL; INSERT INTO t VALUES (201, 'x', NULL)")
            publisher18_db.execute("UPDATE t SET a = 7 WHERE a IS NULL; ALTER TABLE t ALTER a SET NOT NULL")
            reader.execute("COMMIT")
        await found.same("SELECT id, a, d FROM t ORDER BY id")
        assert found.subscription.status.last_error is None


async def test_a_renamed_column_is_not_a_new_one(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        # without being written again
        publisher18_db.execute("ALTER TABLE t RENAME v TO w; ALTER TABLE t ALTER w TYPE varchar; INSERT INTO t VALUES (101, 'v')")
        async with asyncio.timeout(30):
            while "it may be a column that was renamed" not in str(found.subscription.status.last_error):
                await asyncio.sleep(0.05)
        target_db.execute("ALTER TABLE t RENAME v TO w")
        await found.same("SELECT * FROM t ORDER BY id")


async def test_streamed_and_prepared_transactions(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db, streaming="parallel", two_phase=True) as found:
        await asyncio.to_thread(target_db.wait, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
        publisher18_db.execute("""
            BEGIN; INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1000, 4000) AS i; ALTER TABLE t ADD a int DEFAULT 5;
            INSERT INTO t SELECT i, repeat('x', 100), i FROM generate_series(4001, 9000) AS i; COMMIT
        """)
        gid = f"p_{publisher18_db.name}"
        publisher18_db.execute("BEGIN; ALTER TABLE t ADD b int; INSERT INTO t VALUES (0, 'p', 1, 2)")
        publisher18_db.execute(f"PREPARE TRANSACTION '{gid}'")
        publisher18_db.execute(f"COMMIT PREPARED '{gid}'")
        publisher18_db.execute("ALTER TABLE t ADD c int DEFAULT 1; UPDATE t SET b = 4 WHERE id = 2")
        await found.same("SELECT count(*), sum(a), sum(b), sum(c) FROM t")
        publisher18_db.execute("BEGIN; UPDATE t SET c = 9 WHERE id < 10")
        publisher18_db.execute(f"PREPARE TRANSACTION '{gid}'")
        publisher18_db.execute(f"COMMIT PREPARED '{gid}'")
        await found.same("SELECT count(*), sum(a), sum(b), sum(c) FROM t")


async def test_under_load(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        stop = threading.Event()

        def write() -> None:
            with publisher18_db.connect() as session:
                number = 1000
                while not stop.wait(0.005):
                    number += 1
                    session.execute(f"INSERT INTO t (id) VALUES ({number}); UPDATE t SET v = 'w{number}' WHERE id % 10 = {number % 10}")

        writer = asyncio.create_task(asyncio.to_thread(write))
        for number in range(5):
            default = "" if number == 2 else f" DEFAULT {number}"
            await asyncio.to_thread(publisher18_db.execute, f"ALTER TABLE t ADD c{number} int{default}")
            await found.caught_up()
        stop.set()
        await writer
        # the target gets a column with the first row that has it
        publisher18_db.execute("UPDATE t SET v = 'last' WHERE id = 1")
        await found.same("SELECT * FROM t ORDER BY id")


async def test_a_table_that_was_rewritten_is_reconciled_on_demand(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db)
    async with launched(target_db, settings=ADD):
        await asyncio.to_thread(target_db.wait, "SELECT srsubstate FROM subscriber.pg_subscription_rel", "r")
        publisher18_db.execute("ALTER TABLE t ADD a float8 DEFAULT random(); INSERT INTO t VALUES (101, 'v')")
        await asyncio.to_thread(
            target_db.wait, "SELECT last_error LIKE '%the publisher has rewritten the table%' FROM subscriber.subscription_stats", True
        )
        ended = await asyncio.to_thread(subscriber, "alter", name, "--target", target_db.dsn, "--resync", "public.t")
        assert ended.status == 0, ended.errors
        await asyncio.to_thread(target_db.wait, "SELECT count(*) FROM t", 101)
        await asyncio.to_thread(target_db.wait, "SELECT srsubstate FROM subscriber.pg_subscription_rel", "r")
        assert target_db.fetch("SELECT * FROM t ORDER BY id") == publisher18_db.fetch("SELECT * FROM t ORDER BY id")
        assert (await verify(name, target=target_db.dsn)).equal


@pytest.mark.parametrize("change", ["longer list", "no list", "altered", "schema", "generated"])
async def test_a_column_that_was_left_out_before(publisher18_db: Database, target_db: Database, change: str) -> None:
    """Its values were never sent."""
    publisher18_db.execute(f"{TABLE}; ALTER TABLE t ADD a int DEFAULT 1, ADD g int GENERATED ALWAYS AS (id) STORED")
    publisher18_db.execute("INSERT INTO t VALUES (1, 'v', 2); CREATE PUBLICATION pub FOR TABLE t (id, v)")
    target_db.execute(TABLE)
    if change == "altered":
        publisher18_db.execute("ALTER TABLE t ADD later int; ALTER PUBLICATION pub SET TABLE t (id, v, later)")
        target_db.execute("ALTER TABLE t ADD later int")
    async with replica(publisher18_db, target_db, settings=ADD) as found:
        await found.caught_up()
        publisher18_db.execute(
            {
                "longer list": "ALTER PUBLICATION pub SET TABLE t (id, v, a)",
                "no list": "ALTER PUBLICATION pub SET TABLE t",
                "altered": "ALTER PUBLICATION pub SET TABLE t; ALTER TABLE t ALTER a SET DEFAULT 2, ALTER g DROP EXPRESSION",
                "schema": "ALTER PUBLICATION pub SET TABLES IN SCHEMA public",
                "generated": "ALTER PUBLICATION pub SET TABLE t (id, v, g)",
            }[change]
        )
        publisher18_db.execute("INSERT INTO t VALUES (2, 'v', 3)")
        async with asyncio.timeout(30):
            while (error := found.subscription.status.last_error) is None:
                await asyncio.sleep(0.05)
        assert "it may have been left out of the publication" in str(error)
        assert "--resync public.t" in str(error.hint)
    assert target_db.fetch("SELECT id, v FROM t") == [(1, "v")]


async def test_a_role_that_may_not_do_it(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    with role(target_db, "LOGIN") as limited:
        target_db.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t TO {limited.name}")
        target_db.execute(f"GRANT SET ON PARAMETER session_replication_role TO {limited.name}")
        target_db.execute(f"GRANT CREATE ON DATABASE {target_db.name} TO {limited.name}")
        async with replica(publisher18_db, target_db, settings=ADD, target_url=limited.conninfo, run_as_owner=True) as found:
            await found.caught_up()
            publisher18_db.execute("ALTER TABLE t ADD a int DEFAULT 7; INSERT INTO t VALUES (1)")
            async with asyncio.timeout(30):
                while (error := found.subscription.status.last_error) is None:
                    await asyncio.sleep(0.05)
            assert 'execute: ALTER TABLE "public"."t" ADD COLUMN IF NOT EXISTS "a" integer DEFAULT' in str(error.hint)
            target_db.execute("ALTER TABLE t ADD a int DEFAULT 7")
            await found.same("SELECT * FROM t")


async def test_it_is_an_error_by_default(publisher18_db: Database, target_db: Database) -> None:
    with pytest.raises(RelationError, match='is missing replicated column: "a"'):  # noqa: PT012
        for database in (publisher18_db, target_db):
            database.execute(TABLE)
        publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
        async with replica(publisher18_db, target_db, disable_on_error=True) as found:
            await found.caught_up()
            publisher18_db.execute("ALTER TABLE t ADD a int; INSERT INTO t VALUES (1)")
            await asyncio.wait_for(found.running, 30)
