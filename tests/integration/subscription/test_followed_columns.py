"""``schema_change = follow`` into PostgreSQL: renamed, dropped, added and retyped columns of the publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from subscriber import ConfigurationError, RelationError, Settings, Subscription, SubscriptionOptions, crash_points
from tests.support.database import Database
from tests.support.replica import QUICK, Replica, replica
from tests.support.roles import role

FOLLOW = replace(QUICK, schema_change="follow")
DROP = replace(FOLLOW, dropped_columns="drop")
TABLE = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b int)"
COLUMNS = """
SELECT attname, format_type(atttypid, atttypmod), pg_get_expr(adbin, adrelid)
  FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
 WHERE attrelid = 't'::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attname
"""
SWAP = "ALTER TABLE t RENAME a TO x; ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b"
ROWS = "SELECT to_jsonb(t) FROM t ORDER BY id"


@asynccontextmanager
async def following(
    publisher: Database,
    target: Database,
    table: str = TABLE,
    *,
    there: str = "",
    root: bool = False,
    own: str = "",
    published: str = "t",
    publish: str = "",
    full: bool = False,
    settings: Settings = FOLLOW,
    **options: Any,
) -> AsyncIterator[Replica]:
    publisher.execute(table)
    target.execute(there or table)
    if own:
        target.execute(f"ALTER TABLE t ADD {own}")
    publisher.execute("INSERT INTO t SELECT i, i, 2 * i FROM generate_series(1, 100) AS i")
    if full:
        publisher.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    publisher.execute(f"CREATE PUBLICATION pub FOR TABLE {published} WITH ({publish or f'publish_via_partition_root = {root}'})")
    async with replica(publisher, target, settings=settings, **options) as found:
        await found.caught_up()
        await known(target)
        yield found


async def known(target: Database) -> None:
    """Wait until the columns of all tables are known."""
    await asyncio.to_thread(target.wait, "SELECT bool_and(srcolumns IS NOT NULL) FROM subscriber.pg_subscription_rel", True)


async def followed(found: Replica) -> None:
    """The columns and rows of both sides are equal, and nothing failed."""
    await found.same(ROWS)
    await found.same(COLUMNS)
    assert found.subscription.status.last_error is None


async def test_renames(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (101, 1, 2)")
        await followed(found)
        # swapped, with and without rows between
        publisher18_db.execute("ALTER TABLE t RENAME b TO x; ALTER TABLE t RENAME c TO b; ALTER TABLE t RENAME x TO c")
        publisher18_db.execute("UPDATE t SET b = 7 WHERE id = 5")
        await followed(found)
        publisher18_db.execute("""
            ALTER TABLE t RENAME b TO x; INSERT INTO t VALUES (102, 1, 2); ALTER TABLE t RENAME c TO b; INSERT INTO t VALUES (103, 1, 2);
            ALTER TABLE t RENAME x TO c; INSERT INTO t VALUES (104, 1, 2)
        """)
        await followed(found)
        # rolled back; renamed and back; renamed, and a new column gets the old name; of the key
        publisher18_db.execute("BEGIN; ALTER TABLE t RENAME b TO never; INSERT INTO t VALUES (105, 1, 2); ROLLBACK")
        publisher18_db.execute("ALTER TABLE t RENAME b TO y; ALTER TABLE t RENAME y TO b; INSERT INTO t VALUES (106, 1, 2)")
        publisher18_db.execute("ALTER TABLE t RENAME b TO z; ALTER TABLE t ADD b int DEFAULT 9; INSERT INTO t VALUES (107, 1, 2)")
        await followed(found)
        publisher18_db.execute('ALTER TABLE t RENAME id TO "K y"; UPDATE t SET z = 0 WHERE "K y" = 3; DELETE FROM t WHERE "K y" = 4')
        publisher18_db.execute('ALTER TABLE t RENAME "K y" TO id')
        publisher18_db.execute("INSERT INTO t VALUES (108, 1, 2)")
        await followed(found)


async def test_dropped_columns_stay_without_not_null(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("ALTER TABLE t DROP a; INSERT INTO t VALUES (101, 1); UPDATE t SET b = 0 WHERE id = 2")
        await found.same("SELECT id, b FROM t ORDER BY id")
        assert target_db.fetch("SELECT id, a FROM t WHERE id IN (1, 2, 101) ORDER BY id") == [(1, 1), (2, 2), (101, None)]
        # and a new column, with a row between
        publisher18_db.execute(
            "ALTER TABLE t DROP b; INSERT INTO t VALUES (102); ALTER TABLE t ADD c int DEFAULT 3; INSERT INTO t VALUES (103)"
        )
        await found.same("SELECT id, c FROM t ORDER BY id")
        # without a row between, but untouched columns tell which one it is
        publisher18_db.execute("ALTER TABLE t ADD d int, ADD e int; INSERT INTO t VALUES (104)")
        await found.same("SELECT id, c, d, e FROM t ORDER BY id")
        await found.caught_up()
        publisher18_db.execute("ALTER TABLE t DROP d, ADD f int DEFAULT 4; INSERT INTO t VALUES (105, 1, 2, 3)")
        await found.same("SELECT id, c, e, f FROM t ORDER BY id")
        publisher18_db.execute("ALTER TABLE t ADD i int GENERATED ALWAYS AS IDENTITY, ADD j int GENERATED BY DEFAULT AS IDENTITY")
        target_db.execute("ALTER TABLE t ADD i int GENERATED ALWAYS AS IDENTITY, ADD j int GENERATED BY DEFAULT AS IDENTITY")
        publisher18_db.execute("INSERT INTO t VALUES (106, 1, 2, 3)")
        await found.same("SELECT id, c, e, f, i, j FROM t ORDER BY id")
        publisher18_db.execute("ALTER TABLE t DROP i, DROP j; INSERT INTO t VALUES (107, 1, 2, 3)")
        await found.same("SELECT id, c, e, f FROM t ORDER BY id")
        assert found.subscription.status.last_error is None


async def test_dropped_columns_are_dropped(publisher18_db: Database, target_db: Database) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b int, c int, d int, z int)"
    async with following(publisher18_db, target_db, table, settings=DROP, own="own int") as found:
        publisher18_db.execute("ALTER TABLE t DROP a; INSERT INTO t VALUES (101, 1); UPDATE t SET b = 0 WHERE id = 2")
        await found.same("SELECT id, b, c, d, z FROM t ORDER BY id")
        # its name for another one, and a new one with the name that became free
        publisher18_db.execute("ALTER TABLE t DROP b; ALTER TABLE t RENAME c TO b; ALTER TABLE t ADD a int DEFAULT 7")
        publisher18_db.execute("INSERT INTO t VALUES (102, 1, 2, 3, 4)")
        await found.same("SELECT id, b, d, z, a FROM t ORDER BY id")
        # one transaction, with rows before and after
        publisher18_db.execute(
            "BEGIN; UPDATE t SET d = 5 WHERE id = 1; ALTER TABLE t DROP d, ADD d int DEFAULT 1; DELETE FROM t WHERE id = 9; COMMIT"
        )
        publisher18_db.execute("INSERT INTO t VALUES (103, 1, 2, 3, 4)")
        await found.same("SELECT id, b, z, a, d FROM t ORDER BY id")
        assert target_db.value("SELECT count(own) FROM t") == 0
        assert found.subscription.status.last_error is None
        target_db.execute(
            'CREATE INDEX "I b" ON t (b, id); ALTER TABLE t ADD CONSTRAINT z CHECK (z > -1); CREATE VIEW v AS SELECT z FROM t'
        )
        target_db.execute("CREATE MATERIALIZED VIEW w AS SELECT count(*) FROM t WHERE z > 5")
        publisher18_db.execute("ALTER TABLE t DROP b, DROP z; INSERT INTO t VALUES (104)")
        statements = 'execute there: DROP INDEX public."I b"; or keep'
        await failed(found, 'column "b" of table "public.t" was dropped on the publisher, and indexes', statements)
        target_db.execute('DROP INDEX "I b"')
        statements = "ALTER TABLE public.t DROP CONSTRAINT z; DROP MATERIALIZED VIEW public.w; DROP VIEW public.v"
        await failed(found, 'column "z" of table "public.t" was dropped on the publisher', f"execute there: {statements}; or keep")
        target_db.execute(statements)
        await found.same("SELECT id, a, d FROM t ORDER BY id")
        target_db.execute("ALTER TABLE t DROP own")
        await found.same(COLUMNS)
    # another subscription has the table
    async with replica(publisher18_db, target_db, name="other", copy_data=False) as found:
        await found.caught_up()
    async with replica(publisher18_db, target_db, settings=DROP) as found:
        publisher18_db.execute("ALTER TABLE t DROP a; INSERT INTO t VALUES (105)")
        await found.same("SELECT id, d FROM t ORDER BY id")
        assert target_db.value("SELECT count(a) FROM t WHERE id < 104") == 102


async def test_types(publisher18_db: Database, target_db: Database) -> None:
    table = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b numeric(9, 2) DEFAULT 1)"
    async with following(publisher18_db, target_db, table) as found:
        publisher18_db.execute("ALTER TABLE t ALTER a TYPE bigint, ALTER id TYPE bigint; INSERT INTO t VALUES (10000000000, 1, 2)")
        await followed(found)
        publisher18_db.execute("ALTER TABLE t ALTER b TYPE numeric(20, 1); ALTER TABLE t ADD v varchar(3) DEFAULT 'abc'")
        publisher18_db.execute("UPDATE t SET a = 1 WHERE id = 7")
        await followed(found)
        publisher18_db.execute("ALTER TABLE t ADD n int, ADD m varchar(3); UPDATE t SET a = 1 WHERE id = 6")
        await followed(found)
        publisher18_db.execute(
            "ALTER TABLE t ALTER v TYPE text, ALTER b TYPE int; ALTER TABLE t RENAME v TO w; UPDATE t SET w = 'long' WHERE id = 8"
        )
        await followed(found)
        # what a cast may change is not followed
        publisher18_db.execute("ALTER TABLE t ALTER a TYPE text USING 'x' || a; UPDATE t SET a = 'y' WHERE id = 9")
        await failed(found, 'column "a" of table "public.t" has type text on the publisher and bigint in the target', "TYPE text USING")
        target_db.execute("ALTER TABLE t ALTER a TYPE text USING 'x' || a")
        await found.same(ROWS)
        # a type that only the target has is kept if the publisher's values stay the same
        target_db.execute("ALTER TABLE t ALTER b TYPE numeric, ALTER n TYPE numeric")
        publisher18_db.execute(
            "ALTER TABLE t ALTER n TYPE bigint, ALTER b TYPE numeric(9, 2); INSERT INTO t VALUES (101, 'a', 1.5, 'b', 2)"
        )
        await failed(found, 'column "b" of table "public.t" has type numeric(9,2) on the publisher and numeric in the target', "--resync")
        target_db.execute("ALTER TABLE t ALTER b TYPE numeric(9, 2)")
        await found.same("SELECT id, a, b, w, n::text FROM t ORDER BY id")


async def failed(found: Replica, message: str, hint: str) -> None:
    """Wait for an error."""
    async with asyncio.timeout(30):
        while message not in str(error := found.subscription.status.last_error):
            await asyncio.sleep(0.05)
    assert hint in str(getattr(error, "hint", None))


async def test_streamed_transactions(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db, streaming="parallel") as found:
        publisher18_db.execute("""
            BEGIN; INSERT INTO t SELECT i, i, 1 FROM generate_series(1000, 9000) AS i; ALTER TABLE t RENAME a TO x;
            ALTER TABLE t RENAME b TO a; ALTER TABLE t RENAME x TO b; UPDATE t SET a = 5 WHERE id % 100 = 0;
            SAVEPOINT s; ALTER TABLE t RENAME a TO never; INSERT INTO t SELECT i, i, 1 FROM generate_series(10000, 12000) AS i;
            ROLLBACK TO s;
            ALTER TABLE t ADD c int DEFAULT 7; INSERT INTO t SELECT i, i, 1 FROM generate_series(10000, 12000) AS i; COMMIT
        """)
        await followed(found)


async def test_what_is_not_certain(publisher18_db: Database, target_db: Database) -> None:
    """DROP and ADD of one name, and of the last column, between two rows."""
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("ALTER TABLE t DROP b; ALTER TABLE t ADD b int DEFAULT 5; INSERT INTO t VALUES (101, 1)")
        await failed(found, "it is not certain how", "--resync public.t")
        assert target_db.fetch("SELECT count(*), sum(b) FROM t") == [(100, 10100)]


@pytest.mark.parametrize("root", [False, True])
async def test_partitions(publisher18_db: Database, target_db: Database, root: bool) -> None:
    parts = "; ".join(f"CREATE TABLE p{n} PARTITION OF t FOR VALUES FROM ({n * 50}) TO ({n * 50 + 50})" for n in range(5))
    table = f"CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b int) PARTITION BY RANGE (id); {parts}"
    async with following(publisher18_db, target_db, table, root=root) as found:
        publisher18_db.execute(
            "ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (101, 1, 2), (151, 1, 2); UPDATE t SET c = 0 WHERE id = 1"
        )
        await followed(found)
        # each partition is described again, and the first one has changed the table for all of them
        swap = SWAP.replace("RENAME a", "RENAME c").replace("TO a", "TO c")
        publisher18_db.execute(f"{swap}; INSERT INTO t VALUES (104, 1, 2); UPDATE t SET c = 0 WHERE id IN (4, 61, 151)")
        await followed(found)
        publisher18_db.execute("""
            BEGIN; UPDATE t SET b = 1 WHERE id IN (2, 55); ALTER TABLE t RENAME c TO a; ALTER TABLE t ADD d int DEFAULT 4;
            INSERT INTO t VALUES (102, 1, 2, 3); COMMIT; UPDATE t SET d = 1 WHERE id IN (2, 60)
        """)
        await followed(found)
        publisher18_db.execute("ALTER TABLE t DROP b; UPDATE t SET d = 2 WHERE id IN (3, 61)")
        await found.same("SELECT id, a, d FROM t ORDER BY id")
        assert found.subscription.status.last_error is None
    async with replica(publisher18_db, target_db, settings=DROP) as found:
        publisher18_db.execute("CREATE INDEX ON t (d)")
        target_db.execute("CREATE INDEX i ON t (d)")
        publisher18_db.execute("ALTER TABLE t DROP d; UPDATE t SET a = 2 WHERE id IN (3, 61)")
        await failed(found, 'column "d" of table', "execute there: DROP INDEX public.i; or keep")
        target_db.execute("DROP INDEX i")
        await found.same("SELECT id, a FROM t ORDER BY id")
        publisher18_db.execute("ALTER TABLE t ADD d int; UPDATE t SET d = 1 WHERE id IN (4, 62)")
        await found.same("SELECT id, a, d FROM t ORDER BY id")


async def test_partitions_whose_columns_have_another_order(publisher18_db: Database, target_db: Database) -> None:
    """Each partition has numbers of its own, on both sides."""
    here = """
        CREATE TABLE t (id int, a int NOT NULL, b int) PARTITION BY RANGE (id);
        CREATE TABLE p0 (gone int, b int, id int, a int NOT NULL); ALTER TABLE p0 DROP gone;
        CREATE TABLE p1 (a int NOT NULL, b int, id int);
        ALTER TABLE t ATTACH PARTITION p0 FOR VALUES FROM (0) TO (60); ALTER TABLE t ATTACH PARTITION p1 FOR VALUES FROM (60) TO (1000);
        ALTER TABLE t ADD PRIMARY KEY (id)
    """
    there = here.replace("gone int, b int, id int, a int NOT NULL", "a int NOT NULL, id int, gone int, b int")
    async with following(publisher18_db, target_db, here, there=there) as found:
        publisher18_db.execute(f"{SWAP}; UPDATE t SET a = 0 WHERE id IN (4, 61); INSERT INTO t VALUES (0, 1, 2), (101, 1, 2)")
        await followed(found)
        publisher18_db.execute("ALTER TABLE t RENAME a TO c; ALTER TABLE t ADD d int DEFAULT 7; UPDATE t SET c = 1 WHERE id IN (6, 62)")
        await followed(found)
        publisher18_db.execute("ALTER TABLE t ALTER c TYPE bigint; ALTER TABLE t DROP b; UPDATE t SET c = 1 WHERE id IN (5, 63)")
        await found.same("SELECT id, c, d FROM t ORDER BY id")
        assert found.subscription.status.last_error is None


async def test_generated_columns(publisher18_db: Database, target_db: Database) -> None:
    """The publication has them; in the target they are ordinary columns."""
    table = "CREATE TABLE t (id int PRIMARY KEY, a int NOT NULL, b int, g int GENERATED ALWAYS AS (a + 1) STORED)"
    there = table.replace("GENERATED ALWAYS AS (a + 1) STORED", "")
    async with following(publisher18_db, target_db, table, there=there, publish="publish_generated_columns = stored") as found:
        publisher18_db.execute("ALTER TABLE t RENAME g TO h; ALTER TABLE t RENAME a TO g; INSERT INTO t VALUES (101, 1, 2)")
        await found.same(ROWS)
        # its expression is dropped: now it is a column as others are
        publisher18_db.execute(
            "ALTER TABLE t ALTER h DROP EXPRESSION; INSERT INTO t VALUES (102, 1, 2, 9); UPDATE t SET h = 5 WHERE id = 3"
        )
        await found.same(ROWS)
        publisher18_db.execute("ALTER TABLE t ADD k int GENERATED ALWAYS AS (g * 2) STORED; INSERT INTO t VALUES (103, 1, 2, 3)")
        await failed(found, "the new column", "--resync public.t")
        target_db.execute("ALTER TABLE t ADD k int")
        await found.caught_up()


@pytest.mark.parametrize(("published", "full"), [("t (id, a)", False), ("t WHERE (a > 10)", True)])
async def test_names_in_the_publication(publisher18_db: Database, target_db: Database, published: str, full: bool) -> None:
    """A column list and a row filter of the publication know a renamed column by its number."""
    async with following(publisher18_db, target_db, published=published, full=full) as found:
        publisher18_db.execute("ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (101, 1, 2), (102, 11, 2)")
        publisher18_db.execute("UPDATE t SET c = 0 WHERE id = 50; UPDATE t SET c = 160 WHERE id = 60")
        await found.caught_up()
        expected = publisher18_db.fetch(f"SELECT id, c FROM t {'WHERE c > 10' if full else ''} ORDER BY id")
        assert target_db.fetch("SELECT id, c FROM t ORDER BY id") == expected
        assert found.subscription.status.last_error is None


async def test_large_transactions_that_are_rolled_back(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db, streaming="on") as found:
        large = f"{SWAP}; ALTER TABLE t ADD c int DEFAULT 7; INSERT INTO t SELECT i, i, 1 FROM generate_series(1000, 9000) AS i"
        publisher18_db.execute(f"BEGIN; INSERT INTO t VALUES (102, 1, 2); {large}; ROLLBACK")
        publisher18_db.execute("INSERT INTO t VALUES (101, 1, 2)")
        await followed(found)
        publisher18_db.execute(f"BEGIN; INSERT INTO t VALUES (102, 1, 2); SAVEPOINT s; {large}; ROLLBACK TO s; {large}; COMMIT")
        await followed(found)


async def test_one_session_reads_the_catalog(publisher18_db: Database, target_db: Database) -> None:
    """The bug was a new connection for each Relation message."""
    session = f"SELECT pid FROM pg_stat_activity WHERE datname = '{publisher18_db.name}' AND application_name LIKE '%schema%'"
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (101, 1, 2)")
        await followed(found)
        (pid,) = publisher18_db.fetch(session)
        publisher18_db.execute("ALTER TABLE t RENAME c TO d; INSERT INTO t VALUES (102, 1, 2)")
        await followed(found)
        assert publisher18_db.fetch(session) == [pid]
        # one that was lost meanwhile is replaced
        publisher18_db.execute(f"SELECT pg_terminate_backend({pid[0]})")
        publisher18_db.execute("ALTER TABLE t RENAME d TO e; INSERT INTO t VALUES (103, 1, 2)")
        await followed(found)
        assert publisher18_db.fetch(session) not in ([], [pid])
    await asyncio.to_thread(publisher18_db.wait, session, [])


async def test_restarts(publisher18_db: Database, target_db: Database) -> None:
    """What was known is stored; a start without the setting forgets it."""
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("ALTER TABLE t RENAME a TO c")
        await found.caught_up()
    publisher18_db.execute("INSERT INTO t VALUES (101, 1, 2); ALTER TABLE t RENAME b TO a; UPDATE t SET a = 3 WHERE id = 5")
    publisher18_db.execute("ALTER TABLE t RENAME c TO b; UPDATE t SET b = 3 WHERE id = 6; ALTER TABLE t ADD d int; ALTER TABLE t DROP d")
    async with replica(publisher18_db, target_db, settings=FOLLOW) as found:
        await followed(found)
    async with replica(publisher18_db, target_db) as found:
        publisher18_db.execute("INSERT INTO t VALUES (102, 1, 2)")
        await found.caught_up()
        assert target_db.value("SELECT srcolumns FROM subscriber.pg_subscription_rel") is None
    async with replica(publisher18_db, target_db, settings=FOLLOW) as found:
        await known(target_db)
        publisher18_db.execute("ALTER TABLE t RENAME b TO e; INSERT INTO t VALUES (103, 1, 2)")
        await followed(found)


async def test_a_column_that_blocks(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db, own="own int DEFAULT 7") as found:
        # one that the target had when the columns were learned, as after --resync
        publisher18_db.execute("ALTER TABLE t ADD own int; INSERT INTO t (id, a) VALUES (110, 1)")
        await failed(found, 'has another column "own"', 'execute: ALTER TABLE "public"."t" DROP COLUMN "own"')
        target_db.execute("ALTER TABLE t DROP own")
        await found.same(ROWS)
        publisher18_db.execute("ALTER TABLE t DROP b; INSERT INTO t VALUES (101, 1); ALTER TABLE t ADD b int DEFAULT 5")
        publisher18_db.execute("INSERT INTO t VALUES (102, 1)")
        await failed(found, 'has another column "b"', 'execute: ALTER TABLE "public"."t" DROP COLUMN "b"')
        target_db.execute("ALTER TABLE t DROP b")
        await found.same(ROWS)
        # what was done in the target before is not done again
        target_db.execute("ALTER TABLE t RENAME a TO x; ALTER TABLE t ADD y int DEFAULT 1; ALTER TABLE t ALTER b TYPE bigint")
        publisher18_db.execute("ALTER TABLE t RENAME a TO x; ALTER TABLE t ADD y int DEFAULT 1; ALTER TABLE t ALTER b TYPE bigint")
        publisher18_db.execute("INSERT INTO t VALUES (103, 1, 2, 3)")
        await found.same(ROWS)
        for database in (target_db, publisher18_db):
            database.execute("ALTER TABLE t RENAME b TO z; ALTER TABLE t RENAME x TO b; ALTER TABLE t RENAME z TO x")
        publisher18_db.execute("INSERT INTO t VALUES (104, 1, 2, 3)")
        await found.same(ROWS)
        # before the publisher, with a row in between
        swap = "ALTER TABLE t RENAME b TO z; ALTER TABLE t RENAME x TO b; ALTER TABLE t RENAME z TO x"
        target_db.execute(swap)
        publisher18_db.execute("INSERT INTO t VALUES (105, 1, 2, 3)")
        await failed(found, 'column "b" of table "public.t" has been renamed to "x" in the target', "--resync public.t")
        target_db.execute(swap)
        await found.same(ROWS)


@pytest.mark.parametrize("statement", ["ALTER TABLE t RENAME b TO own; ALTER TABLE t ALTER own TYPE text", "ALTER TABLE t DROP b"])
async def test_a_column_that_is_lost(publisher18_db: Database, target_db: Database, statement: str) -> None:
    """The bug was that the column was added, with NULL in all rows."""
    async with following(publisher18_db, target_db) as found:
        publisher18_db.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR ALL TABLES")
        target_db.execute(statement)
        publisher18_db.execute("INSERT INTO t VALUES (101, 1, 2)")
        await failed(found, 'column "b" of table "public.t" has been renamed or dropped in the target', "--resync public.t")
        assert "b" not in [name for name, *_ in target_db.fetch(COLUMNS)]


async def test_a_role_that_may_not_do_it(publisher18_db: Database, target_db: Database) -> None:
    with role(target_db, "LOGIN") as limited:
        for database in (publisher18_db, target_db):
            database.execute(TABLE)
        target_db.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON t TO {limited.name}")
        target_db.execute(f"GRANT SET ON PARAMETER session_replication_role TO {limited.name}")
        target_db.execute(f"GRANT CREATE ON DATABASE {target_db.name} TO {limited.name}")
        publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
        async with replica(publisher18_db, target_db, settings=FOLLOW, target_url=limited.conninfo, run_as_owner=True) as found:
            await found.caught_up()
            await known(target_db)
            publisher18_db.execute("ALTER TABLE t RENAME a TO c; ALTER TABLE t ADD d int; INSERT INTO t VALUES (1, 2, 3, 4)")
            statements = 'ALTER TABLE "public"."t" RENAME COLUMN "a" TO "c"; ALTER TABLE "public"."t" ADD COLUMN "d" integer DEFAULT NULL'
            await failed(found, "must be owner of table t", statements)
            target_db.execute(statements)
            await found.same(ROWS)


def test_not_with_two_phase() -> None:
    with pytest.raises(ConfigurationError, match="not available with two_phase"):
        Subscription(
            "s", connection="x", publications=["p"], target="postgresql://", options=SubscriptionOptions(two_phase=True), settings=FOLLOW
        )


async def test_what_existing_rows_have_is_not_known(publisher18_db: Database, target_db: Database) -> None:
    async with following(publisher18_db, target_db):
        pass
    # the catalog is later than the first row
    publisher18_db.execute(
        "INSERT INTO t VALUES (101, 1, 2); ALTER TABLE t ADD c float8 DEFAULT random(); INSERT INTO t VALUES (102, 1, 2)"
    )
    async with replica(publisher18_db, target_db, settings=FOLLOW) as found:
        await failed(found, "the publisher has rewritten the table", "--resync public.t")
        # that adds it
        target_db.execute("ALTER TABLE t ADD c float8")
        await found.caught_up()
        publisher18_db.execute("ALTER PUBLICATION pub SET TABLE t (id, a, b, c)")
        publisher18_db.execute("ALTER TABLE t ADD d int; UPDATE t SET d = 5 WHERE id = 1")
        await found.caught_up()
        publisher18_db.execute("ALTER PUBLICATION pub SET TABLE t (id, a, b, c, d); UPDATE t SET d = 6 WHERE id = 2")
        await failed(found, "it may have been left out of the publication", "--resync public.t")


async def test_a_column_that_is_renamed_while_the_copy_catches_up(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("INSERT INTO t SELECT i, i, 2 * i FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")

    def write(point: str) -> None:
        if point == "copy.slot_created":
            publisher18_db.execute("INSERT INTO t VALUES (101, 1, 2)")
        elif point == "copy.finished":
            publisher18_db.execute("ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (102, 1, 2)")

    with crash_points.watched(write), pytest.raises(RelationError, match="it may be a column that was renamed"):
        async with replica(publisher18_db, target_db, settings=FOLLOW) as found:
            await found.running
    assert target_db.fetch("SELECT count(*), sum(a) FROM t WHERE id <= 100") == [(100, 5050)]
