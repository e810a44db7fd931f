"""Scenarios of bugs that PostgreSQL had once (native's topic 100), and that an apply of another make could have again."""

from __future__ import annotations

from subscriber import SubscriberError
from tests.native.native import Nodes


async def test_bugs_of_the_past(nodes18: Nodes) -> None:
    nodes18.everywhere("""
        CREATE TABLE predicate (a int PRIMARY KEY, b int);
        CREATE FUNCTION double(x int) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT x * 2';
        CREATE INDEX ON predicate (b) WHERE a > double(1); CREATE INDEX ON predicate (double(b));
        CREATE TABLE other_index (a int NOT NULL, b int NOT NULL);
        CREATE UNIQUE INDEX other_a ON other_index (a); CREATE UNIQUE INDEX other_b ON other_index (b);
        CREATE TABLE dropped (a int, b int, c int); ALTER TABLE dropped REPLICA IDENTITY FULL;
        CREATE SCHEMA one; CREATE TABLE one.t (c int);
        CREATE TABLE no_key (a int); CREATE TABLE mixed ("A" int PRIMARY KEY, "select" text, "a ""b" text);
        CREATE TABLE wide (id int PRIMARY KEY)
    """)
    nodes18.in_targets("CREATE SCHEMA two; CREATE TABLE two.t (c int); ALTER TABLE other_index REPLICA IDENTITY USING INDEX other_b")
    nodes18.publisher.execute("ALTER TABLE other_index REPLICA IDENTITY USING INDEX other_a; INSERT INTO other_index VALUES (1, 1), (2, 2)")
    nodes18.publisher.execute("INSERT INTO dropped VALUES (1, 1, 1), (2, NULL, 2)")
    nodes18.everywhere("".join(f"ALTER TABLE wide ADD COLUMN c{i} int;" for i in range(400)))
    nodes18.publisher.execute("INSERT INTO wide (id, c399) VALUES (1, 1); CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        # an index whose predicate and expressions call functions
        nodes18.publisher.execute(
            "INSERT INTO predicate VALUES (1, 2), (5, 6); UPDATE predicate SET b = b + 1; DELETE FROM predicate WHERE a = 5"
        )
        # another replica identity index from now on, the one that the targets have
        nodes18.publisher.execute("ALTER TABLE other_index REPLICA IDENTITY USING INDEX other_b")
        nodes18.publisher.execute("UPDATE other_index SET a = -a WHERE a = 1; DELETE FROM other_index WHERE a = 2")
        # whole rows with a column that was dropped on both sides
        await both.caught_up()
        nodes18.everywhere("ALTER TABLE dropped DROP COLUMN b")
        nodes18.publisher.execute("UPDATE dropped SET a = 100 WHERE c = 1; DELETE FROM dropped WHERE c = 2")
        # tables that are not logged need no replica identity, nor are they sent
        nodes18.publisher.execute("CREATE TEMPORARY TABLE t1 AS SELECT 1 AS a; UPDATE t1 SET a = 2")
        nodes18.publisher.execute("CREATE UNLOGGED TABLE t2 AS SELECT 1 AS a; UPDATE t2 SET a = 2; DELETE FROM t2")
        # names that need quotes, and keywords
        nodes18.publisher.execute("""INSERT INTO mixed VALUES (1, 'x', 'y'); UPDATE mixed SET "A" = 2, "select" = '''' WHERE "A" = 1""")
        # more columns than fit a small statement
        nodes18.publisher.execute("INSERT INTO wide (id, c0, c200) VALUES (2, 0, 200); UPDATE wide SET c399 = 399, id = id + 10")
        await both.equal()
        assert await both.rows("SELECT * FROM other_index") == [(-1, 1)]
        assert await both.rows("SELECT * FROM dropped") == [(100, 1)]
        # a schema renamed in the middle of a transaction, and another one of its name: what is of "two" is no part of the subscription
        nodes18.publisher.execute("""
            BEGIN; INSERT INTO one.t VALUES (1); ALTER SCHEMA one RENAME TO two; CREATE SCHEMA one; CREATE TABLE one.t (c int);
            INSERT INTO one.t VALUES (2); INSERT INTO two.t VALUES (3); COMMIT
        """)
        await both.equal(publisher=False)
        assert await both.rows("SELECT c FROM one.t ORDER BY c") == [(1,), (2,)]
        assert await both.rows("SELECT c FROM two.t") == []
        assert both.native_errors() == []
        assert both.replica.subscription.status.last_error is None


async def test_functions_see_no_search_path(nodes18: Nodes) -> None:
    """A trigger of the target that names a table without its schema finds none: no object is taken for another."""
    nodes18.everywhere("CREATE TABLE t (id int PRIMARY KEY)")
    nodes18.in_targets("""
        CREATE TABLE seen (id int);
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen VALUES (NEW.id); RETURN NEW; END $$;
        CREATE TRIGGER note AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION note(); ALTER TABLE t ENABLE ALWAYS TRIGGER note
    """)
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.publisher.execute("INSERT INTO t VALUES (1)")
        await both.both_report('relation "seen" does not exist', SubscriberError, "undefined table")
        nodes18.in_targets("ALTER FUNCTION note() SET search_path = public")
        await both.equal()
        assert await both.value("SELECT count(*) FROM seen") == 1
