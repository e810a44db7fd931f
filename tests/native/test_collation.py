"""Collations that differ between the sides (native's topic 012): a row is found by the target's.

The embedded servers know no ICU, so there are no nondeterministic collations to try.
"""

from __future__ import annotations

from tests.native.native import Nodes

WORDS = "INSERT INTO {} VALUES ('a', 1), ('B', 2), ('ä', 3), ('Z', 4), ('z z', 5), ('ẞ', 6)"


async def test_keys_under_other_collations(nodes18: Nodes) -> None:
    nodes18.publisher.execute("""
        CREATE TABLE keyed (v text PRIMARY KEY, n int);
        CREATE TABLE by_row (v text, n int); ALTER TABLE by_row REPLICA IDENTITY FULL;
        CREATE TABLE parts (v text PRIMARY KEY, n int)
    """)
    nodes18.in_targets("""
        CREATE TABLE keyed (v text COLLATE pg_c_utf8 PRIMARY KEY, n int);
        CREATE TABLE by_row (v text COLLATE "C.utf8", n int); CREATE INDEX ON by_row (v COLLATE pg_unicode_fast);
        CREATE TABLE parts (v text COLLATE pg_unicode_fast PRIMARY KEY, n int) PARTITION BY RANGE (v);
        CREATE TABLE low PARTITION OF parts FOR VALUES FROM (MINVALUE) TO ('a'); CREATE TABLE high PARTITION OF parts DEFAULT
    """)
    for table in ("keyed", "by_row", "parts"):
        nodes18.publisher.execute(WORDS.format(table))
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        for table in ("keyed", "by_row", "parts"):
            nodes18.publisher.execute(f"UPDATE {table} SET v = upper(v) WHERE n = 1; UPDATE {table} SET n = n + 10 WHERE v >= 'Z'")
            nodes18.publisher.execute(f"DELETE FROM {table} WHERE v = 'ẞ'; INSERT INTO {table} VALUES ('ß', 7), ('b', 8)")
        await both.equal()
        assert len(await both.rows("SELECT tableoid::regclass::text, v, n FROM parts ORDER BY n")) == 7
        await both.assert_no_errors()
