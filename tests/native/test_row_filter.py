"""Row filters (native's topic 028): the examples of the manual's page, step by step, and its other statements.

Source: PostgreSQL manual, Logical Replication, Row Filters. Where the page says CREATE SUBSCRIPTION, a subscription of ours runs;
ALTER SUBSCRIPTION … REFRESH PUBLICATION is the same subscription run again.
"""

from __future__ import annotations

import asyncio

import pytest

from tests.native.native import Nodes
from tests.support.database import Database
from tests.support.replica import replica

_FILTERS = pytest.mark.publisher(min=15, lacks="row filters")
T1 = "CREATE TABLE t1(a int, b int, c text, PRIMARY KEY(a,c))"
T2 = "CREATE TABLE t2(d int, e int, f int, PRIMARY KEY(d))"
T3 = "CREATE TABLE t3(g int, h int, i int, PRIMARY KEY(g))"
P1 = "CREATE PUBLICATION p1 FOR TABLE t1 WHERE (a > 5 AND c = 'NSW')"
P2 = "CREATE PUBLICATION p2 FOR TABLE t1, t2 WHERE (e = 99)"
P3 = "CREATE PUBLICATION p3 FOR TABLE t2 WHERE (d = 10), t3 WHERE (g = 10)"


def make_tables_and_publications(publisher: Database) -> None:
    for statement in (T1, T2, T3, P1, P2, P3):
        publisher.execute(statement)


async def test_walk_through_of_the_manual(publisher18_db: Database, target_db: Database) -> None:
    make_tables_and_publications(publisher18_db)
    target_db.execute(T1)
    async with replica(publisher18_db, target_db, name="s1", publications=["p1"]) as s1:

        async def step(statement: str, published: list[tuple[int, int, str]], subscribed: list[tuple[int, int, str]]) -> None:
            publisher18_db.execute(statement)
            assert publisher18_db.fetch("SELECT * FROM t1 ORDER BY a") == published
            await s1.caught_up()
            assert target_db.fetch("SELECT * FROM t1 ORDER BY a") == subscribed

        rows = [(2, 102, "NSW"), (3, 103, "QLD"), (4, 104, "VIC"), (5, 105, "ACT")]
        rows += [(6, 106, "NSW"), (7, 107, "NT"), (8, 108, "QLD"), (9, 109, "NSW")]
        # the page's subscription finds the table empty: so must ours, for the rows to come as inserts
        await s1.caught_up()
        for row in rows[:-1]:
            publisher18_db.execute(f"INSERT INTO t1 VALUES {row}")
        await step(f"INSERT INTO t1 VALUES {rows[-1]}", rows, [(6, 106, "NSW"), (9, 109, "NSW")])
        statistics = s1.subscription.status.statistics
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (2, 0, 0)
        # both the old and the new row match: UPDATE
        await step(
            "UPDATE t1 SET b = 999 WHERE a = 6",
            [*rows[:4], (6, 999, "NSW"), *rows[5:]],
            [(6, 999, "NSW"), (9, 109, "NSW")],
        )
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (2, 1, 0)
        # only the new row matches: INSERT
        await step(
            "UPDATE t1 SET a = 555 WHERE a = 2",
            [*rows[1:4], (6, 999, "NSW"), *rows[5:], (555, 102, "NSW")],
            [(6, 999, "NSW"), (9, 109, "NSW"), (555, 102, "NSW")],
        )
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (3, 1, 0)
        # only the old row matches: DELETE
        await step(
            "UPDATE t1 SET c = 'VIC' WHERE a = 9",
            [*rows[1:4], (6, 999, "NSW"), *rows[5:7], (9, 109, "VIC"), (555, 102, "NSW")],
            [(6, 999, "NSW"), (555, 102, "NSW")],
        )
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (3, 1, 1)
        # "the row filter has no effect for TRUNCATE commands"
        await step("TRUNCATE t1", [], [])


async def test_partition_example_of_the_manual(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE parent(a int PRIMARY KEY) PARTITION BY RANGE(a)")
        database.execute("CREATE TABLE child PARTITION OF parent DEFAULT")
    publisher18_db.execute(
        "CREATE PUBLICATION p4 FOR TABLE parent WHERE (a < 5), child WHERE (a >= 5) WITH (publish_via_partition_root=true)"
    )
    async with replica(publisher18_db, target_db, name="s4", publications=["p4"]) as s4:
        await s4.caught_up()
        publisher18_db.execute("INSERT INTO parent VALUES (2), (4), (6)")
        publisher18_db.execute("INSERT INTO child VALUES (3), (5), (7)")
        assert publisher18_db.fetch("SELECT * FROM parent ORDER BY a") == [(2,), (3,), (4,), (5,), (6,), (7,)]
        await s4.caught_up()
        assert target_db.fetch("SELECT * FROM parent ORDER BY a") == [(2,), (3,), (4,)]
        publisher18_db.execute("DROP PUBLICATION p4")
        publisher18_db.execute("CREATE PUBLICATION p4 FOR TABLE parent, child WHERE (a >= 5) WITH (publish_via_partition_root=false)")
    async with replica(publisher18_db, target_db, name="s4", publications=["p4"]) as s4:
        # what the page does not show: the refresh adds child, and copies it through its own filter
        await s4.caught_up()
        assert target_db.fetch("SELECT * FROM child ORDER BY a") == [(2,), (3,), (4,), (5,), (6,), (7,)]
        publisher18_db.execute("TRUNCATE parent")
        publisher18_db.execute("INSERT INTO parent VALUES (2), (4), (6)")
        publisher18_db.execute("INSERT INTO child VALUES (3), (5), (7)")
        assert publisher18_db.fetch("SELECT * FROM parent ORDER BY a") == [(2,), (3,), (4,), (5,), (6,), (7,)]
        await s4.caught_up()
        assert target_db.fetch("SELECT * FROM child ORDER BY a") == [(5,), (6,), (7,)]


@_FILTERS
async def test_filters_of_several_publications_are_ored(publisher_db: Database, target_db: Database) -> None:
    make_tables_and_publications(publisher_db)
    for statement in (T1, T2, T3):
        target_db.execute(statement)
    # copied: t1 whole (p2 has no filter for it), t2 by either filter, t3 by its only one; NULL is not true
    publisher_db.execute("INSERT INTO t1 VALUES (1, 1, 'NSW'), (6, 6, 'QLD'), (7, 7, 'NSW')")
    publisher_db.execute("INSERT INTO t2 VALUES (10, 1, 1), (11, 99, 1), (12, 1, 99), (13, NULL, 1)")
    publisher_db.execute("INSERT INTO t3 VALUES (9, 1, 1), (10, 1, 1)")
    async with replica(publisher_db, target_db, name="s1", publications=["p1", "p2", "p3"]) as s1:
        await s1.caught_up()
        assert target_db.fetch("SELECT a, b, c FROM t1 ORDER BY a") == [(1, 1, "NSW"), (6, 6, "QLD"), (7, 7, "NSW")]
        assert target_db.fetch("SELECT d FROM t2 ORDER BY d") == [(10,), (11,)]
        assert target_db.fetch("SELECT g FROM t3 ORDER BY g") == [(10,)]
        assert s1.subscription.status.statistics.inserts == 0
        # followed; e is no part of the replica identity, so that p2 and p3 allow no UPDATE of t2 at all
        publisher_db.execute("INSERT INTO t1 VALUES (2, 2, 'VIC'); UPDATE t1 SET c = 'ACT' WHERE a = 7; DELETE FROM t1 WHERE a = 1")
        publisher_db.execute("INSERT INTO t2 VALUES (14, 99, 1), (15, NULL, 1), (16, 98, 1)")
        publisher_db.execute("UPDATE t3 SET h = 2 WHERE g = 10; UPDATE t3 SET g = 8 WHERE g = 9")
        await s1.caught_up()
        assert target_db.fetch("SELECT a, b, c FROM t1 ORDER BY a") == [(2, 2, "VIC"), (6, 6, "QLD"), (7, 7, "ACT")]
        assert target_db.fetch("SELECT d FROM t2 ORDER BY d") == [(10,), (11,), (14,)]
        assert target_db.fetch("SELECT g, h FROM t3 ORDER BY g") == [(10, 2)]
        publisher_db.execute("UPDATE t3 SET g = 20 WHERE g = 10; UPDATE t3 SET g = 10 WHERE g = 8")
        await s1.caught_up()
        assert target_db.fetch("SELECT g, h FROM t3 ORDER BY g") == [(10, 1)]


async def test_a_publication_of_everything_makes_filters_redundant(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE SCHEMA s; CREATE TABLE s.t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION filtered FOR TABLE s.t WHERE (id > 100)")
    publisher18_db.execute("CREATE PUBLICATION whole_schema FOR TABLES IN SCHEMA s")
    publisher18_db.execute("INSERT INTO s.t SELECT i, 'copied' FROM generate_series(99, 102) AS i")
    async with replica(publisher18_db, target_db, publications=["filtered", "whole_schema"]) as both:
        await both.same("SELECT id, v FROM s.t ORDER BY id")
        publisher18_db.execute("INSERT INTO s.t VALUES (1, 'followed'); UPDATE s.t SET id = 2 WHERE id = 102")
        assert len(await both.same("SELECT id, v FROM s.t ORDER BY id")) == 5


async def test_initial_copy_ignores_which_operations_are_published(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v int)")
    # by operation: inserts with v > 5, updates and deletes of ids above 10. The copy takes either filter.
    publisher18_db.execute("CREATE PUBLICATION inserts FOR TABLE t WHERE (v > 5) WITH (publish = 'insert')")
    publisher18_db.execute("CREATE PUBLICATION changes FOR TABLE t WHERE (id > 10) WITH (publish = 'update, delete')")
    publisher18_db.execute("INSERT INTO t VALUES (1, 1), (2, 6), (11, 1), (12, 6)")
    async with replica(publisher18_db, target_db, publications=["inserts", "changes"]) as both:
        await both.caught_up()
        assert target_db.fetch("SELECT id, v FROM t ORDER BY id") == [(2, 6), (11, 1), (12, 6)]
        publisher18_db.execute("INSERT INTO t VALUES (3, 1), (4, 6), (13, 1)")
        publisher18_db.execute("UPDATE t SET v = 50 WHERE id IN (2, 11)")
        publisher18_db.execute("DELETE FROM t WHERE id IN (4, 12)")
        publisher18_db.execute("TRUNCATE t")
        await both.caught_up()
        assert target_db.fetch("SELECT id, v FROM t ORDER BY id") == [(2, 6), (4, 6), (11, 50)]


@_FILTERS
async def test_filter_is_kept_while_a_table_catches_up(publisher_db: Database, target_db: Database) -> None:
    """Rows that enter and leave the filter while the copy is held: neither copied wrongly nor lost at the handover."""
    for database in (publisher_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher_db.execute("CREATE PUBLICATION pub FOR TABLE t WHERE (id BETWEEN 100 AND 199)")
    publisher_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 300) AS i")
    with target_db.connect() as holder:
        holder.execute(b"BEGIN; LOCK TABLE t IN SHARE MODE")
        async with asyncio.timeout(60), replica(publisher_db, target_db) as held:
            await asyncio.to_thread(target_db.wait, "SELECT count(*) FROM pg_locks WHERE relation = 't'::regclass AND NOT granted", 1)
            publisher_db.execute("UPDATE t SET id = id + 1000 WHERE id IN (110, 210)")
            publisher_db.execute("UPDATE t SET id = 110 WHERE id = 1210; UPDATE t SET v = 'followed' WHERE id IN (99, 100, 200)")
            publisher_db.execute("DELETE FROM t WHERE id IN (120, 220); INSERT INTO t VALUES (120, 'new'), (401, 'out')")
            holder.execute("COMMIT")
            await held.caught_up()
            expected = publisher_db.fetch("SELECT id, v FROM t WHERE id BETWEEN 100 AND 199 ORDER BY id")
            assert target_db.fetch("SELECT id, v FROM t ORDER BY id") == expected
            assert len(expected) == 100


@_FILTERS
@pytest.mark.matrix
async def test_as_native(nodes: Nodes) -> None:
    """What the filter says of the old and of the new row, under every replica identity, with values that did not come along."""
    nodes.everywhere("""
        CREATE TABLE keyed (a int, b text, c int, PRIMARY KEY (a, b));
        CREATE TABLE by_row (a int, b text, n int); ALTER TABLE by_row REPLICA IDENTITY FULL;
        CREATE TABLE toast (a text, n int NOT NULL, PRIMARY KEY (n), UNIQUE (n)); ALTER TABLE toast ALTER a SET STORAGE EXTERNAL;
        CREATE TABLE toast_row (a text, n int, flag boolean); ALTER TABLE toast_row ALTER a SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
        CREATE TABLE root (a int PRIMARY KEY, b text) PARTITION BY RANGE (a);
        CREATE TABLE low PARTITION OF root FOR VALUES FROM (0) TO (100); CREATE TABLE high PARTITION OF root DEFAULT;
        CREATE TABLE inserts (a int PRIMARY KEY, b text);
        CREATE SCHEMA s; CREATE TABLE s.t (a int PRIMARY KEY)
    """)
    nodes.publisher.execute("""
        CREATE PUBLICATION pub FOR TABLE keyed WHERE (a % 2 = 0 AND b ~ '^x'), by_row WHERE (n > 5 OR b IS NULL), toast WHERE (n < 10),
            toast_row WHERE (length(a) > 2000 AND flag IS NOT FALSE), s.t WHERE (a IN (1, 2, 3) AND (a, a) < (3, 0));
        CREATE PUBLICATION roots FOR TABLE root WHERE (a > 50) WITH (publish_via_partition_root = true);
        CREATE PUBLICATION ins FOR TABLE inserts WHERE (b <> 'no') WITH (publish = 'insert');
        INSERT INTO keyed SELECT i, CASE WHEN i % 3 = 0 THEN 'x' ELSE 'y' END, i FROM generate_series(1, 30) AS i;
        INSERT INTO by_row SELECT i % 10, nullif(i % 4, 0)::text, i % 7 FROM generate_series(1, 40) AS i;
        INSERT INTO toast SELECT repeat('x', 3000), i FROM generate_series(1, 20) AS i;
        INSERT INTO toast_row SELECT repeat('y', i * 200), i, nullif(i % 3, 0) = 1 FROM generate_series(1, 20) AS i;
        INSERT INTO root SELECT i * 10, 'copied' FROM generate_series(1, 20) AS i;
        INSERT INTO inserts VALUES (1, 'yes'), (2, 'no'), (3, NULL);
        INSERT INTO s.t SELECT generate_series(1, 5)
    """)
    async with nodes.followed("pub", "roots", "ins") as both:
        await both.equal(publisher=False)
        for step in (
            "UPDATE keyed SET c = -c; UPDATE keyed SET a = a + 301 WHERE a < 20",
            "UPDATE keyed SET b = 'x' || b WHERE a > 312; DELETE FROM keyed WHERE c < -25",
            "UPDATE keyed SET a = a + 1001, b = reverse(b); INSERT INTO keyed VALUES (100, 'x', 1), (101, 'x', 2), (102, 'y', 3)",
            "UPDATE by_row SET n = n + 2 WHERE a < 4; UPDATE by_row SET b = NULL WHERE n = 5",
            "UPDATE by_row SET b = 'b' WHERE b IS NULL AND a > 5",
            "DELETE FROM by_row WHERE n = 6; INSERT INTO by_row VALUES (1, NULL, NULL), (2, 'x', NULL), (3, 'x', 9)",
            "UPDATE by_row SET a = a + 1",
            # in from outside: the long value that did not change does not come along (the key alone does), and is NULL in both targets
            "UPDATE toast SET n = n - 20 WHERE n BETWEEN 12 AND 14",
            "UPDATE toast SET n = n + 50 WHERE n BETWEEN 1 AND 3; DELETE FROM toast WHERE n = 5",
            "UPDATE toast SET n = n - 100, a = 'short' WHERE n > 15",
            "UPDATE toast_row SET n = n + 100; UPDATE toast_row SET flag = NOT flag",
            "UPDATE toast_row SET a = repeat('z', 2500) WHERE n < 105",
            "UPDATE toast_row SET a = 'short' WHERE n > 115; DELETE FROM toast_row WHERE n = 112; UPDATE toast_row SET flag = NULL",
            "UPDATE root SET a = a + 41 WHERE a < 50; UPDATE root SET a = a - 155 WHERE a > 150",
            "UPDATE root SET b = 'x'; DELETE FROM low WHERE a > 80",
            "INSERT INTO inserts VALUES (4, 'yes'), (5, 'no'), (6, NULL); UPDATE inserts SET b = 'no' WHERE a = 1",
            "DELETE FROM inserts WHERE a = 4",
            "UPDATE s.t SET a = a + 10; UPDATE s.t SET a = a - 12; INSERT INTO s.t VALUES (30)",
        ):
            nodes.publisher.execute(step)
        await both.equal(publisher=False)
        for table, condition in {
            "keyed": "a % 2 = 0 AND b ~ '^x'",
            "by_row": "n > 5 OR b IS NULL",
            "toast_row": "length(a) > 2000 AND flag IS NOT FALSE",
            "root": "a > 50",
            "s.t": "a IN (1, 2)",
        }.items():
            # in any case the target has the rows for which the filter is true now
            rows = f"SELECT {table}::text FROM {table} {{}} ORDER BY 1".replace("s.t::text", "t::text")
            assert both.ours.fetch(rows.format("")) == nodes.publisher.fetch(rows.format(f"WHERE {condition}")) != []
        # no UPDATE, no DELETE, and NULL is not true
        assert await both.rows("SELECT a, b FROM inserts ORDER BY a") == [(1, "yes"), (4, "yes")]
        await both.assert_no_errors()
