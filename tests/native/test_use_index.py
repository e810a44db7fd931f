"""Which row, and by which index, under REPLICA IDENTITY FULL (native's topic 032): same rows, and by an index."""

from __future__ import annotations

from tests.native.native import Nodes
from tests.support.observation import eventually
from tests.support.replica import replica

# what the targets have in addition to the columns a int, b text, c int; enough rows that a scan of the whole table is not cheaper
INDEXES = {
    "plain": "CREATE INDEX {0}_index ON {0} (a, b)",
    "duplicates": "CREATE INDEX {0}_index ON {0} (c)",
    "hash": "CREATE INDEX {0}_index ON {0} USING hash (b)",
    "included": "CREATE UNIQUE INDEX {0}_index ON {0} (a, c) INCLUDE (b)",
    "with_expression": "CREATE INDEX {0}_index ON {0} (a, (b || 'x'))",
    "leftmost_is_own": "ALTER TABLE {0} ADD COLUMN own int; CREATE INDEX {0}_index ON {0} (own, a)",
    "partial": "CREATE INDEX {0}_index ON {0} (a) WHERE c > 500",
    "expression_alone": "CREATE INDEX {0}_index ON {0} ((a + 1))",
    "descending": "CREATE INDEX {0}_index ON {0} (b DESC NULLS FIRST, a)",
    "keyed": "ALTER TABLE {0} ADD PRIMARY KEY (a, b); CREATE INDEX {0}_index ON {0} (c)",
}
USED = {"plain", "duplicates", "hash", "included", "with_expression", "descending"}
TABLE = "CREATE TABLE {} (a int, b text, c int)"
# nulls and equal rows, but for the tables whose index does not allow them, or does not find them natively
FILL = "INSERT INTO {0} SELECT i, 'b' || i, i % 50 FROM generate_series(1, 3000) AS i"
EQUAL = "INSERT INTO {0} SELECT nullif(i % 3, 0), nullif(i % 2, 0)::text, 1000 FROM generate_series(1, 30) AS i"
CHANGES = (
    "UPDATE {0} SET c = c + 1000 WHERE a BETWEEN 100 AND 110",
    "UPDATE {0} SET a = a + 10000, b = b || 'y' WHERE a BETWEEN 200 AND 205; DELETE FROM {0} WHERE a IN (300, 301, 302)",
    "UPDATE {0} SET c = 2000 WHERE ctid IN (SELECT ctid FROM {0} WHERE c = 1000 ORDER BY a, b, ctid LIMIT 7)",
    "DELETE FROM {0} WHERE ctid IN (SELECT ctid FROM {0} WHERE c = 1000 ORDER BY a DESC, b DESC, ctid LIMIT 5)",
    "UPDATE {0} SET a = NULL WHERE b = 'b400'; UPDATE {0} SET b = NULL WHERE a = 401; DELETE FROM {0} WHERE b = 'b400' OR a = 401",
)


async def test_rows_and_indexes(nodes18: Nodes) -> None:
    nodes18.everywhere("; ".join(TABLE.format(name) for name in INDEXES))
    for name, index in INDEXES.items():
        nodes18.publisher.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL; {FILL.format(name)}")
        nodes18.in_targets(index.format(name))
        if name not in {"included", "keyed", "hash"}:
            nodes18.publisher.execute(EQUAL.format(name))
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        nodes18.in_targets("ANALYZE")
        for name in INDEXES:
            for change in CHANGES:
                if name not in {"keyed", "hash"} or "NULL" not in change:
                    nodes18.publisher.execute(change.format(name))
        await both.equal()
        # a session's statistics are written when it is idle
        used = (
            f"SELECT count(*) FROM pg_stat_user_indexes WHERE schemaname = 'public' AND relname IN ({', '.join(map(repr, sorted(USED)))})"
        )
        await eventually(both.native, f"{used} AND indexrelname ~ '_index$' AND idx_scan > 0", len(USED))
        # our statements are planned: they may use more than native does
        await eventually(both.ours, f"{used} AND indexrelname ~ '_index$' AND idx_scan > 0", len(USED))
        await both.assert_no_errors()


async def test_nulls_under_a_hash_index(nodes18: Nodes) -> None:
    """Native looks for them in the index, which has none, and misses the rows (18.4, 16.14); ours finds them."""
    for database in (nodes18.publisher, nodes18.ours):
        database.execute("CREATE TABLE t (a int, b text); ALTER TABLE t REPLICA IDENTITY FULL")
    nodes18.ours.execute("CREATE INDEX ON t USING hash (b)")
    nodes18.publisher.execute(
        "INSERT INTO t SELECT i, nullif(i % 2, 0)::text FROM generate_series(1, 10) AS i; CREATE PUBLICATION pub FOR TABLE t"
    )
    async with replica(nodes18.publisher, nodes18.ours) as ours:
        await ours.caught_up()
        nodes18.publisher.execute("UPDATE t SET a = -a WHERE a < 5; DELETE FROM t WHERE a > 8; UPDATE t SET b = NULL WHERE a = 7")
        assert len(await ours.same("SELECT a, b FROM t ORDER BY a")) == 8


async def test_partitions_with_indexes_of_their_own(nodes18: Nodes) -> None:
    """Published as partitions and as their root."""
    for table in ("t", "u"):
        nodes18.everywhere(f"""
            CREATE TABLE {table} (id bigint, n int, v int) PARTITION BY RANGE (n);
            CREATE TABLE {table}_0 PARTITION OF {table} FOR VALUES FROM (0) TO (10);
            CREATE TABLE {table}_1 PARTITION OF {table} FOR VALUES FROM (10) TO (20)
        """)
        for name in (table, f"{table}_0", f"{table}_1"):
            nodes18.publisher.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
        nodes18.in_targets(f"CREATE INDEX ON {table} (id, n); CREATE INDEX ON {table}_1 (v)")
        nodes18.publisher.execute(f"INSERT INTO {table} SELECT i % 100, i % 20, i % 7 FROM generate_series(0, 500) AS i")
    nodes18.publisher.execute(
        "CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION root FOR TABLE u WITH (publish_via_partition_root = true)"
    )
    async with nodes18.followed("pub", "root") as both:
        for name in ("t", "u"):
            nodes18.publisher.execute(
                f"UPDATE {name} SET n = 0 WHERE id = 14; DELETE FROM {name} WHERE id IN (1, 12); UPDATE {name} SET v = NULL WHERE id = 5"
            )
            nodes18.publisher.execute(f"UPDATE {name} SET n = 19 - n WHERE id BETWEEN 20 AND 40; DELETE FROM {name} WHERE v IS NULL")
        await both.equal()
        assert await both.value("SELECT count(*) FROM t") == await both.value("SELECT count(*) FROM u") == 486
        await both.assert_no_errors()
