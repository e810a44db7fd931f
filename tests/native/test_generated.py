"""Generated columns on either side (native's topic 011), published as PostgreSQL 18 can or not."""

from __future__ import annotations

from subscriber import RelationError
from tests.native.native import Nodes

ROWS = "INSERT INTO {} (id) SELECT generate_series({}, {})"


async def test_computed_on_each_side(nodes18: Nodes) -> None:
    """What is generated is not sent: the target computes its own, or fills a column that is not generated there with its default."""
    nodes18.publisher.execute("CREATE TABLE both_sides (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 2) STORED)")
    nodes18.in_targets("CREATE TABLE both_sides (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 22) STORED)")
    nodes18.publisher.execute("CREATE TABLE here_only (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 2) STORED)")
    nodes18.in_targets("CREATE TABLE here_only (id int PRIMARY KEY, c int DEFAULT 7)")
    nodes18.publisher.execute("CREATE TABLE by_row (id int); ALTER TABLE by_row REPLICA IDENTITY FULL")
    nodes18.in_targets("CREATE TABLE by_row (id int, c int GENERATED ALWAYS AS (id * 22) STORED)")
    nodes18.in_targets("""
        CREATE TABLE seen (c int, id int);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.seen VALUES (NEW.c, NEW.id); RETURN NULL; END $$;
        CREATE TRIGGER note AFTER INSERT OR UPDATE ON both_sides FOR EACH ROW EXECUTE FUNCTION note();
        ALTER TABLE both_sides ENABLE REPLICA TRIGGER note
    """)
    tables = ("both_sides", "here_only", "by_row")
    for table in tables:
        nodes18.publisher.execute(ROWS.format(table, 1, 5))
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        for table in tables:
            nodes18.publisher.execute(
                f"{ROWS.format(table, 6, 8)}; UPDATE {table} SET id = id + 10 WHERE id > 3; DELETE FROM {table} WHERE id = 1"
            )
        await both.equal()
        expected = [2, 3, *range(14, 19)]
        assert await both.rows("SELECT id, c FROM both_sides ORDER BY id") == [(number, number * 22) for number in expected]
        assert await both.rows("SELECT id, c FROM by_row ORDER BY id") == [(number, number * 22) for number in expected]
        assert await both.rows("SELECT id, c FROM here_only ORDER BY id") == [(number, 7) for number in expected]
        assert (44, 2) in await both.rows("SELECT c, id FROM seen ORDER BY c, id")
        await both.assert_no_errors()


async def test_virtual_ones(nodes18: Nodes) -> None:
    nodes18.everywhere("CREATE TABLE t (id int, v text); ALTER TABLE t REPLICA IDENTITY FULL")
    nodes18.in_targets("ALTER TABLE t ADD COLUMN c text GENERATED ALWAYS AS (v || id)")
    nodes18.publisher.execute("INSERT INTO t SELECT i, 'x' FROM generate_series(1, 6) AS i; CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.publisher.execute("UPDATE t SET v = 'y' WHERE id < 3; DELETE FROM t WHERE id = 4; INSERT INTO t VALUES (7, 'z')")
        await both.equal()
        assert len(await both.rows("SELECT id, v, c FROM t ORDER BY id")) == 6
        await both.assert_no_errors()


async def test_published(nodes18: Nodes) -> None:
    """publish_generated_columns = stored sends them, a column list names them; the target's column must not be generated."""
    nodes18.publisher.execute("""
        CREATE TABLE t (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 2) STORED, v text);
        CREATE TABLE listed (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 3) STORED, v text);
        CREATE TABLE refused (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 2) STORED);
        CREATE PUBLICATION pub FOR TABLE t WITH (publish_generated_columns = stored);
        CREATE PUBLICATION list FOR TABLE listed (id, c)
    """)
    nodes18.in_targets("CREATE TABLE t (id int PRIMARY KEY, c int, v text); CREATE TABLE listed (id int PRIMARY KEY, c int, v text)")
    nodes18.in_targets("CREATE TABLE refused (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 22) STORED)")
    nodes18.publisher.execute("INSERT INTO t SELECT i FROM generate_series(1, 5) AS i; INSERT INTO listed SELECT id FROM t")
    async with nodes18.followed("pub", "list") as both:
        for table in ("t", "listed"):
            nodes18.publisher.execute(
                f"INSERT INTO {table} VALUES (6); UPDATE {table} SET id = id + 10 WHERE id < 3; UPDATE {table} SET v = 'x'"
            )
        await both.equal(publisher=False)
        # the comparison above passes over columns that are generated on the publisher only if it reads them there
        assert await both.rows("SELECT * FROM t ORDER BY id") == nodes18.publisher.fetch("SELECT * FROM t ORDER BY id")
        assert await both.rows("SELECT * FROM listed ORDER BY id") == nodes18.publisher.fetch("SELECT id, c, NULL FROM listed ORDER BY id")
        await both.assert_no_errors()


async def test_published_into_a_generated_one(nodes18: Nodes) -> None:
    nodes18.publisher.execute("CREATE TABLE t (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 2) STORED)")
    nodes18.in_targets("CREATE TABLE t (id int PRIMARY KEY, c int GENERATED ALWAYS AS (id * 22) STORED)")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.publisher.execute("ALTER PUBLICATION pub SET (publish_generated_columns = stored); INSERT INTO t VALUES (1)")
        await both.both_report('logical replication target relation "public.t" has incompatible generated column: "c"', RelationError)
        nodes18.in_targets("ALTER TABLE t ALTER COLUMN c DROP EXPRESSION")
        await both.equal()
        assert await both.rows("SELECT * FROM t") == [(1, 2)]
