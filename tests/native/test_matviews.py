"""Materialized views, and what else a publication of all tables leaves out (native's topic 009)."""

from __future__ import annotations

from tests.native.native import Nodes


async def test_materialized_views_are_not_replicated(nodes18: Nodes) -> None:
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY, v text)")
    nodes18.publisher.execute(
        "INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION pub FOR ALL TABLES; CREATE SEQUENCE s; CREATE VIEW w AS SELECT * FROM t"
    )
    async with nodes18.followed(streaming="on") as both:
        # none of these exists in the targets
        nodes18.publisher.execute("CREATE MATERIALIZED VIEW m AS SELECT *, repeat('x', 100) AS r FROM t, generate_series(1, 2000)")
        nodes18.publisher.execute(
            "INSERT INTO t VALUES (2, 'b'); REFRESH MATERIALIZED VIEW m; CREATE UNIQUE INDEX ON m (id, r, v) WHERE false"
        )
        nodes18.publisher.execute(
            "BEGIN; UPDATE t SET v = 'c'; REFRESH MATERIALIZED VIEW m; INSERT INTO w VALUES (3, 'through a view'); COMMIT"
        )
        nodes18.publisher.execute(
            "CREATE MATERIALIZED VIEW k AS SELECT id FROM t; CREATE UNIQUE INDEX ON k (id); DELETE FROM t WHERE id = 1"
        )
        nodes18.publisher.execute("REFRESH MATERIALIZED VIEW CONCURRENTLY k")
        nodes18.publisher.execute("CREATE TEMPORARY TABLE temporary AS SELECT * FROM t; SELECT nextval('s'); SELECT lo_create(0)")
        nodes18.publisher.execute(
            "CREATE UNLOGGED TABLE unlogged AS SELECT * FROM t; DROP MATERIALIZED VIEW m; INSERT INTO t VALUES (4, 'd')"
        )
        await both.equal()
        assert await both.rows("SELECT * FROM t ORDER BY id") == [(2, "c"), (3, "through a view"), (4, "d")]
        await both.assert_no_errors()
