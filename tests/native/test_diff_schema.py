"""Targets whose tables have other columns than the publisher's (native's topic 008)."""

from __future__ import annotations

from subscriber import ApplyError, RelationError
from tests.native.native import Nodes


async def test_columns_in_another_order_and_more_of_them(nodes18: Nodes) -> None:
    nodes18.publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text, n int); CREATE TABLE f (a int, b text)")
    nodes18.publisher.execute("ALTER TABLE f REPLICA IDENTITY FULL; INSERT INTO t SELECT i, 'copied', i FROM generate_series(1, 5) AS i")
    nodes18.publisher.execute("INSERT INTO f SELECT i % 2, 'x' FROM generate_series(1, 6) AS i; CREATE PUBLICATION pub FOR ALL TABLES")
    nodes18.in_targets("""
        CREATE TABLE t (word text DEFAULT 'own', n int, dropped int, c bigint GENERATED ALWAYS AS (n * 2) STORED, number serial, v text,
                        id int, missing int, called text DEFAULT 'at ' || 7);
        ALTER TABLE t DROP COLUMN dropped, ADD PRIMARY KEY (number, id); ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id);
        CREATE TABLE f (b text, a int, always_null int); CREATE INDEX ON f (a, always_null)
    """)
    async with nodes18.followed() as both:
        await both.equal()
        nodes18.in_targets("UPDATE t SET word = 'changed here', missing = 9 WHERE id = 1")
        nodes18.publisher.execute(
            "UPDATE t SET v = 'changed', n = n * 10 WHERE id < 4; INSERT INTO t VALUES (6, 'new', 6); DELETE FROM t WHERE id = 5"
        )
        nodes18.publisher.execute(
            "UPDATE f SET a = 7 WHERE ctid = (SELECT min(ctid) FROM f WHERE a = 1); DELETE FROM f WHERE a = 0; INSERT INTO f VALUES (8)"
        )
        await both.equal()
        # serial values were drawn by both, in the order of the copy
        assert await both.rows("SELECT id, v, n, c, word, missing, number, called FROM t ORDER BY id") == [
            (1, "changed", 10, 20, "changed here", 9, 1, "at 7"),
            (2, "changed", 20, 40, "own", None, 2, "at 7"),
            (3, "changed", 30, 60, "own", None, 3, "at 7"),
            (4, "copied", 4, 8, "own", None, 4, "at 7"),
            (6, "new", 6, 12, "own", None, 6, "at 7"),
        ]
        await both.assert_no_errors()


# what the target's table is made into, the change, the native message, how it is fixed
REFUSED = {
    "missing column": (
        "DROP COLUMN n",
        "INSERT INTO t VALUES (1, 'a', 1)",
        'logical replication target relation "public.t" is missing replicated column: "n"',
        "ADD COLUMN n int",
    ),
    "missing columns": (
        "DROP COLUMN n, DROP COLUMN v",
        "DELETE FROM t",
        'logical replication target relation "public.t" is missing replicated columns: "v", "n"',
        "ADD COLUMN n int, ADD COLUMN v text",
    ),
    "generated column": (
        "DROP COLUMN n, ADD COLUMN n int GENERATED ALWAYS AS (id) STORED",
        "UPDATE t SET v = 'b'",
        'logical replication target relation "public.t" has incompatible generated column: "n"',
        "ALTER COLUMN n DROP EXPRESSION",
    ),
    "no key": (
        "DROP CONSTRAINT t_pkey",
        "INSERT INTO t VALUES (1, 'a', 1); UPDATE t SET v = 'b'",
        # 18 leaves out the word "column" that comes next in 16
        'logical replication target relation "public.t" has neither REPLICA IDENTITY index nor PRIMARY KEY',
        "ADD PRIMARY KEY (id)",
    ),
    "wider key": (
        "DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, n)",
        "DELETE FROM t",
        'publisher did not send replica identity column expected by the logical replication target relation "public.t"',
        "DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id)",
    ),
    "wrong type": (
        "ALTER COLUMN v TYPE int USING length(v)",
        "INSERT INTO t VALUES (1, 'a', 1)",
        "invalid input syntax for type integer",
        "ALTER COLUMN v TYPE text",
    ),
}


async def test_changes_that_do_not_fit_the_target_table(nodes18: Nodes) -> None:
    """Both report the same, and continue once the target fits."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text, n int)")
    nodes18.publisher.execute("INSERT INTO t SELECT i, 'copied', i FROM generate_series(10, 15) AS i; CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        for name, (execute_in_targets, change, words, repair) in REFUSED.items():
            await both.equal()
            nodes18.in_targets(f"ALTER TABLE t {execute_in_targets}")
            before = both.ours.fetch("SELECT id FROM t ORDER BY id")
            nodes18.publisher.execute(change)
            if name == "wrong type":
                await both.both_report(words, ApplyError, "invalid text representation")
            else:
                await both.both_report(words, RelationError)
            assert [target.fetch("SELECT id FROM t ORDER BY id") for target in (both.native, both.ours)] == [before, before]
            nodes18.in_targets(f"ALTER TABLE t {repair}")
            # the fixed table has lost values that the publisher will not send again
            nodes18.publisher.execute("TRUNCATE t; INSERT INTO t SELECT i, 'again', i FROM generate_series(20, 25) AS i")
        await both.equal()
