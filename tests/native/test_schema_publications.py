"""Publications of schemas (native's topic 025): what is in the schema when a change is made is what counts."""

from __future__ import annotations

from tests.native.native import Nodes


async def test_tables_of_schemas(nodes18: Nodes) -> None:
    nodes18.everywhere("""
        CREATE SCHEMA one; CREATE SCHEMA two; CREATE SCHEMA aside;
        CREATE TABLE one.t (id int PRIMARY KEY); CREATE TABLE one.u (id int PRIMARY KEY); CREATE TABLE two.t (id int PRIMARY KEY);
        CREATE TABLE aside.t (id int PRIMARY KEY); CREATE TABLE public.t (id int PRIMARY KEY);
        CREATE TABLE one.parent (id int PRIMARY KEY) PARTITION BY RANGE (id);
        CREATE TABLE one.low PARTITION OF one.parent FOR VALUES FROM (0) TO (10);
        CREATE TABLE aside.high PARTITION OF one.parent FOR VALUES FROM (10) TO (20);
    """)
    nodes18.publisher.execute(
        "INSERT INTO one.t VALUES (1); INSERT INTO two.t VALUES (2); INSERT INTO aside.t VALUES (3); INSERT INTO one.parent VALUES (1)"
    )
    nodes18.publisher.execute("INSERT INTO one.parent VALUES (11); CREATE PUBLICATION pub FOR TABLES IN SCHEMA one, two, TABLE public.t")
    async with nodes18.followed() as both:
        # partitions follow their root's schema, in any schema of their own
        await both.equal()
        nodes18.publisher.execute(
            "INSERT INTO one.u VALUES (1); INSERT INTO two.t VALUES (3); INSERT INTO aside.t VALUES (4); INSERT INTO t VALUES (5)"
        )
        nodes18.publisher.execute("INSERT INTO one.parent VALUES (2), (12); UPDATE one.parent SET id = 13 WHERE id = 2; DELETE FROM one.t")
        await both.equal()
        assert await both.value("SELECT count(*) FROM aside.t") == 0
        assert await both.rows("SELECT id FROM one.parent ORDER BY id") == [(1,), (11,), (12,), (13,)]
        # a table that leaves the schema is left out from then on
        nodes18.publisher.execute("INSERT INTO one.u VALUES (2); ALTER TABLE one.u SET SCHEMA aside; INSERT INTO aside.u VALUES (3)")
        await both.equal(publisher=False)
        assert await both.rows("SELECT id FROM one.u ORDER BY id") == [(1,), (2,)]
        # a schema that is taken out and put in again: changes in between are lost, and earlier rows stay
        nodes18.publisher.execute("ALTER PUBLICATION pub DROP TABLES IN SCHEMA two; INSERT INTO two.t VALUES (4)")
        nodes18.publisher.execute("ALTER PUBLICATION pub ADD TABLES IN SCHEMA two; INSERT INTO two.t VALUES (5)")
        await both.equal(publisher=False)
        assert await both.rows("SELECT id FROM two.t ORDER BY id") == [(2,), (3,), (5,)]
        nodes18.publisher.execute("TRUNCATE one.t, t")
        await both.equal(publisher=False)
        await both.assert_no_errors()


async def test_a_table_that_comes_later(nodes18: Nodes) -> None:
    """It is not part of the subscription before a refresh: its changes are left out, and must not stop the others."""
    nodes18.everywhere("CREATE SCHEMA one; CREATE TABLE one.t (id int PRIMARY KEY)")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA one")
    async with nodes18.followed() as both:
        nodes18.everywhere("CREATE TABLE one.later (id int PRIMARY KEY)")
        nodes18.publisher.execute("INSERT INTO one.later VALUES (1); INSERT INTO one.t VALUES (1)")
        await both.equal(publisher=False)
        assert await both.value("SELECT count(*) FROM one.later") == 0
        assert await both.value("SELECT count(*) FROM one.t") == 1
        assert both.native_errors() == []
