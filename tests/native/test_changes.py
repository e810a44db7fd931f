"""Inserts, updates and deletes in all the ways a row can be named (native's topic 001)."""

from __future__ import annotations

import pytest

from subscriber import ApplyError
from tests.native.native import Nodes

# each table is filled with ids 1 to 20 before the copy
TABLES = """
    CREATE TABLE keyed (id int PRIMARY KEY, v text);
    CREATE TABLE by_index (id int NOT NULL, code text NOT NULL, v text);
    CREATE UNIQUE INDEX by_index_code ON by_index (code) INCLUDE (v);
    ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_code;
    CREATE TABLE by_row (id int, v text);
    ALTER TABLE by_row REPLICA IDENTITY FULL;
    CREATE TABLE append_only (id int, v text);
    CREATE TABLE two_columns (v text, region text, id int, PRIMARY KEY (region, id));
    CREATE TABLE nothing ();
    CREATE UNLOGGED TABLE unlogged (id int PRIMARY KEY);
    CREATE TABLE big (id int PRIMARY KEY, n int, data text);
    ALTER TABLE big ALTER COLUMN data SET STORAGE EXTERNAL;
    CREATE TABLE big_by_row (n int, data text);
    ALTER TABLE big_by_row ALTER COLUMN data SET STORAGE EXTERNAL, REPLICA IDENTITY FULL;
    CREATE TABLE parent (id int PRIMARY KEY, v text);
    CREATE TABLE child (PRIMARY KEY (id)) INHERITS (parent);
"""
ROWS = """
    INSERT INTO keyed SELECT i, 'copied' FROM generate_series(1, 20) AS i;
    INSERT INTO by_index SELECT i, 'c' || i, 'copied' FROM generate_series(1, 20) AS i;
    INSERT INTO by_row SELECT i % 5, nullif(i % 2, 0)::text FROM generate_series(1, 20) AS i;
    INSERT INTO append_only SELECT i, 'copied' FROM generate_series(1, 20) AS i;
    INSERT INTO two_columns SELECT 'copied', 'r' || i % 3, i FROM generate_series(1, 20) AS i;
    INSERT INTO big SELECT i, 0, repeat(i::text, 3000) FROM generate_series(1, 20) AS i;
    INSERT INTO big_by_row SELECT i % 4, repeat((i % 4)::text, 3000) FROM generate_series(1, 20) AS i;
    INSERT INTO parent SELECT i, 'parent' FROM generate_series(1, 20) AS i;
    INSERT INTO child SELECT i, 'child' FROM generate_series(21, 40) AS i;
    INSERT INTO nothing DEFAULT VALUES;
"""
STEPS = (
    "INSERT INTO keyed VALUES (30, 'new'); UPDATE keyed SET v = 'changed' WHERE id < 5; DELETE FROM keyed WHERE id BETWEEN 10 AND 12",
    # keys that move, onto one another and back, in one statement and in one transaction
    "UPDATE keyed SET id = id + 100 WHERE id > 15; UPDATE keyed SET id = -id; UPDATE keyed SET id = id + 1000; UPDATE keyed SET v = NULL",
    "INSERT INTO keyed VALUES (1, 'a'); DELETE FROM keyed WHERE id = 1; INSERT INTO keyed VALUES (1, 'b')",
    "UPDATE keyed SET id = 2 WHERE id = 1",
    "UPDATE by_index SET code = 'd' || id, v = 'moved' WHERE id < 8; UPDATE by_index SET id = id + 1; DELETE FROM by_index WHERE id > 18",
    # equal rows, and rows with nulls, one by one and all together
    "UPDATE by_row SET v = 'changed' WHERE ctid = (SELECT min(ctid) FROM by_row WHERE id = 3)",
    "DELETE FROM by_row WHERE ctid = (SELECT min(ctid) FROM by_row WHERE v IS NULL); UPDATE by_row SET id = NULL WHERE id = 2",
    "UPDATE by_row SET v = NULL WHERE id IS NULL; INSERT INTO by_row VALUES (NULL, NULL), (NULL, NULL); DELETE FROM by_row WHERE id = 4",
    "INSERT INTO append_only SELECT i, NULL FROM generate_series(1, 5) AS i",
    "UPDATE two_columns SET region = 'r' || id; DELETE FROM two_columns WHERE id % 2 = 0; UPDATE two_columns SET v = v || id",
    "INSERT INTO nothing DEFAULT VALUES; INSERT INTO nothing DEFAULT VALUES; INSERT INTO unlogged VALUES (1)",
    # what is too long for the row stays where it is if it is not changed, its key or not
    "UPDATE big SET n = n + 1; UPDATE big SET id = id + 100 WHERE id < 5; UPDATE big SET data = 'short' WHERE id = 7",
    "UPDATE big SET n = 2, data = repeat('x', 5000) WHERE id = 8; UPDATE big SET data = NULL WHERE id = 9; DELETE FROM big WHERE id = 10",
    "UPDATE big_by_row SET n = n + 10 WHERE n < 2; DELETE FROM big_by_row WHERE ctid = (SELECT min(ctid) FROM big_by_row WHERE n = 3)",
    "UPDATE parent SET v = v || id; DELETE FROM parent WHERE id % 7 = 0; DELETE FROM ONLY parent WHERE id < 5",
    "INSERT INTO child VALUES (50)",
    # as many transactions as one batch takes, and one transaction with everything
    "UPDATE keyed SET v = 'all'; UPDATE by_index SET v = 'all'; UPDATE two_columns SET v = 'all'; DELETE FROM by_row; DELETE FROM big",
)


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
async def test_every_way_to_name_a_row(nodes18: Nodes, binary: bool) -> None:
    nodes18.everywhere(TABLES)
    nodes18.publisher.execute(f"{ROWS}; CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed(binary=binary) as both:
        await both.equal()
        for step in STEPS:
            nodes18.publisher.execute(step)
        await both.equal()
        assert await both.value("SELECT count(*) FROM nothing") == 3
        assert await both.value("SELECT count(*) FROM unlogged") == 0
        assert await both.value("SELECT count(*) FROM ONLY parent") == nodes18.publisher.value("SELECT count(*) FROM ONLY parent") > 0
        await both.assert_no_errors()


async def test_operations_that_are_not_published(nodes18: Nodes) -> None:
    nodes18.everywhere("".join(f"CREATE TABLE {name} (id int PRIMARY KEY, v text);" for name in ("i", "u", "d", "t", "n")))
    for name, what in (("i", "insert"), ("u", "update"), ("d", "delete"), ("t", "truncate"), ("n", "")):
        nodes18.publisher.execute(f"INSERT INTO {name} SELECT g, 'copied' FROM generate_series(1, 10) AS g")
        nodes18.publisher.execute(f"CREATE PUBLICATION pub_{name} FOR TABLE {name} WITH (publish = '{what}')")
    async with nodes18.followed("pub_i", "pub_u", "pub_d", "pub_t", "pub_n") as both:
        # the copy does not ask which operations are published
        await both.equal()
        for name in ("i", "u", "d", "t", "n"):
            nodes18.publisher.execute(f"INSERT INTO {name} VALUES (11, 'new'); UPDATE {name} SET v = 'changed' WHERE id <= 5")
            nodes18.publisher.execute(f"DELETE FROM {name} WHERE id = 10; DELETE FROM {name} WHERE id = 11")
        await both.equal(publisher=False)
        counts = " UNION ALL ".join(f"SELECT '{name}', count(*), count(*) FILTER (WHERE v = 'changed') FROM {name}" for name in "iudn")
        assert await both.rows(f"{counts} ORDER BY 1") == [("d", 9, 0), ("i", 11, 0), ("n", 10, 0), ("u", 10, 5)]
        nodes18.publisher.execute("TRUNCATE i, u, d, t, n")
        await both.equal(publisher=False)
        assert await both.value("SELECT count(*) FROM t") == 0
        assert await both.value("SELECT count(*) FROM i") == 11


async def test_rows_that_the_target_has_not(nodes18: Nodes) -> None:
    """Changes of them are passed over."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE f (id int, v text); ALTER TABLE f REPLICA IDENTITY FULL")
    nodes18.publisher.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 10) AS i; INSERT INTO f SELECT * FROM t")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        nodes18.in_targets("DELETE FROM t WHERE id IN (1, 2, 3); DELETE FROM f WHERE id IN (1, 2, 3); UPDATE f SET v = 'own' WHERE id = 4")
        nodes18.publisher.execute("UPDATE t SET v = 'y' WHERE id < 6; UPDATE t SET id = id + 100 WHERE id = 2; DELETE FROM t WHERE id = 3")
        nodes18.publisher.execute("UPDATE f SET v = 'y' WHERE id < 6; DELETE FROM f WHERE id = 3; INSERT INTO t VALUES (200, 'last')")
        await both.equal(publisher=False)
        assert await both.rows("SELECT id, v FROM t WHERE v <> 'x' ORDER BY id") == [(4, "y"), (5, "y"), (200, "last")]
        assert await both.rows("SELECT id, v FROM f WHERE v <> 'x' ORDER BY id") == [(4, "own"), (5, "y")]
        statistics = both.replica.subscription.status.statistics
        assert (statistics.confl_update_missing, statistics.confl_delete_missing) == (8, 2)
        assert both.native_errors() == []


async def test_a_row_that_is_there_already(nodes18: Nodes) -> None:
    """Retried until the conflicting row is removed; until then nothing of its transaction stays."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text UNIQUE)")
    nodes18.publisher.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b'); CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.in_targets("INSERT INTO t VALUES (9, 'own')")
        nodes18.publisher.execute("UPDATE t SET v = 'changed' WHERE id = 1; INSERT INTO t VALUES (9, 'x')")
        words = 'violates unique constraint "t_pkey"'
        # 18 names the conflict instead
        await both.both_report("conflict detected on relation", ApplyError, words)
        assert both.native.fetch("SELECT * FROM t ORDER BY 1") == both.ours.fetch("SELECT * FROM t ORDER BY 1")
        assert both.ours.value("SELECT v FROM t WHERE id = 1") == "a"
        nodes18.in_targets("DELETE FROM t WHERE id = 9")
        await both.equal()
        nodes18.in_targets("INSERT INTO t VALUES (8, 'own')")
        nodes18.publisher.execute("UPDATE t SET v = 'own' WHERE id = 1")
        await both.both_report("conflict detected on relation", ApplyError, 'violates unique constraint "t_v_key"')
        nodes18.in_targets("DELETE FROM t WHERE id = 8")
        await both.equal()
