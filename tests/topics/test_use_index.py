"""Which row, and by which index, under REPLICA IDENTITY FULL (native's topic 032): the rows have to be the same, an index has to be used."""

from __future__ import annotations

from tests.topics.native import Site

# what the targets have beside the columns a int, b text, c int; enough rows that a scan of the whole table is not cheaper
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
# nulls and equal rows, but for the tables whose index does not allow them
FILL = "INSERT INTO {0} SELECT i, 'b' || i, i % 50 FROM generate_series(1, 3000) AS i"
EQUAL = "INSERT INTO {0} SELECT nullif(i % 3, 0), nullif(i % 2, 0)::text, 1000 FROM generate_series(1, 30) AS i"
CHANGES = (
    "UPDATE {0} SET c = c + 1000 WHERE a BETWEEN 100 AND 110",
    "UPDATE {0} SET a = a + 10000, b = b || 'y' WHERE a BETWEEN 200 AND 205; DELETE FROM {0} WHERE a IN (300, 301, 302)",
    "UPDATE {0} SET c = 2000 WHERE ctid IN (SELECT ctid FROM {0} WHERE c = 1000 ORDER BY a, b, ctid LIMIT 7)",
    "DELETE FROM {0} WHERE ctid IN (SELECT ctid FROM {0} WHERE c = 1000 ORDER BY a DESC, b DESC, ctid LIMIT 5)",
    "UPDATE {0} SET a = NULL WHERE b = 'b400'; UPDATE {0} SET b = NULL WHERE a = 401; DELETE FROM {0} WHERE b = 'b400' OR a = 401",
)


async def test_rows_and_indexes(site: Site) -> None:
    site.everywhere("; ".join(TABLE.format(name) for name in INDEXES))
    for name, index in INDEXES.items():
        site.publisher.execute(f"ALTER TABLE {name} REPLICA IDENTITY FULL; {FILL.format(name)}")
        site.in_targets(index.format(name))
        if name not in {"included", "keyed"}:
            site.publisher.execute(EQUAL.format(name))
    site.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with site.followed() as twins:
        site.in_targets("ANALYZE")
        for name in INDEXES:
            for change in CHANGES:
                if name != "keyed" or "NULL" not in change:
                    site.publisher.execute(change.format(name))
        await twins.equal()
        scans = "SELECT relname::text, idx_scan > 0 FROM pg_stat_user_indexes WHERE indexrelname ~ '_index$' ORDER BY 1"
        # statistics are sent when a session goes idle: ours stays, so wait
        expected = [(name, name in USED) for name in sorted(INDEXES)]
        from tests.integration.observed import eventually

        await eventually(twins.ours, scans, expected)
        await eventually(twins.native, scans, expected)
        await twins.untroubled()


async def test_partitions_with_indexes_of_their_own(site: Site) -> None:
    site.everywhere("CREATE TABLE t (id bigint, n int, v int) PARTITION BY RANGE (n)")
    site.everywhere(
        "CREATE TABLE t_0 PARTITION OF t FOR VALUES FROM (0) TO (10); CREATE TABLE t_1 PARTITION OF t FOR VALUES FROM (10) TO (20)"
    )
    site.publisher.execute(
        "ALTER TABLE t REPLICA IDENTITY FULL; ALTER TABLE t_0 REPLICA IDENTITY FULL; ALTER TABLE t_1 REPLICA IDENTITY FULL"
    )
    site.in_targets("CREATE INDEX ON t (id, n); CREATE INDEX ON t_1 (v)")
    site.publisher.execute("INSERT INTO t SELECT i % 100, i % 20, i % 7 FROM generate_series(0, 500) AS i")
    site.publisher.execute(
        "CREATE PUBLICATION pub FOR TABLE t; CREATE PUBLICATION root FOR TABLE t WITH (publish_via_partition_root = true)"
    )
    for publication in ("pub", "root"):
        if publication == "root":
            site.in_targets("TRUNCATE t")
        async with site.followed(publication, name=f"by_{publication}") as twins:
            site.publisher.execute(
                "UPDATE t SET n = 0 WHERE id = 14; DELETE FROM t WHERE id IN (1, 12); UPDATE t SET v = NULL WHERE id = 5"
            )
            site.publisher.execute("UPDATE t SET n = 19 - n WHERE ctid = (SELECT min(ctid) FROM t_0); DELETE FROM t WHERE v IS NULL")
            await twins.equal(publisher=publication == "root" or True)
            await twins.untroubled()
        site.publisher.execute("INSERT INTO t SELECT i % 100, i % 20, i % 7 FROM generate_series(0, 500) AS i")
