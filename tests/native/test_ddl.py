"""ALTER TABLE on either side while changes flow (native's topics 006 rewrite and 007 ddl)."""

from __future__ import annotations

from subscriber import RelationError
from tests.native.native import Nodes

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"

# DDL on the publisher, on the targets, the change after it; what the targets hold then
ALTERATIONS = {
    "add column": ("ADD COLUMN c int DEFAULT 5", None, "INSERT INTO t VALUES (10, 'x', 6); UPDATE t SET c = 7 WHERE id = 1"),
    "add volatile column": ("ADD COLUMN c int DEFAULT length(random()::text) * 0", None, "UPDATE t SET v = 'y' WHERE id < 3"),
    "drop column": (
        "DROP COLUMN v",
        "DROP COLUMN v",
        "INSERT INTO t VALUES (10); DELETE FROM t WHERE id = 1; UPDATE t SET id = 11 WHERE id = 2",
    ),
    "drop column here only": ("DROP COLUMN v", "ALTER v SET DEFAULT 'own'", "INSERT INTO t VALUES (10); UPDATE t SET id = 11 WHERE id = 2"),
    "change type": (
        "ALTER v TYPE int USING length(v)",
        "ALTER v TYPE bigint USING length(v)",
        "UPDATE t SET v = v + 1; INSERT INTO t VALUES (10, 10)",
    ),
    "rename column": ("RENAME v TO w", None, "INSERT INTO t VALUES (10, 'x'); UPDATE t SET w = 'y' WHERE id = 3"),
    "move the key": (
        "DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (v)",
        None,
        "UPDATE t SET id = 99 WHERE v = 'v2'; UPDATE t SET v = 'z' WHERE v = 'v3'",
    ),
    "identity full": (
        "DROP CONSTRAINT t_pkey, REPLICA IDENTITY FULL",
        None,
        "UPDATE t SET v = 'w' WHERE id < 3; DELETE FROM t WHERE id = 4",
    ),
    "identity index": ("ADD UNIQUE (v), ALTER v SET NOT NULL", None, "UPDATE t SET v = 'w' || id; DELETE FROM t WHERE id = 4"),
    "rewrite": ("SET LOGGED, ALTER id TYPE bigint", None, "INSERT INTO t VALUES (10, 'x')"),
}


async def test_alterations(nodes18: Nodes) -> None:
    """Of both sides between two transactions, and while changes flow; a table each."""
    nodes18.everywhere("".join(f'CREATE TABLE "{name}" (id int PRIMARY KEY, v text);' for name in ALTERATIONS))
    for name in ALTERATIONS:
        nodes18.publisher.execute(f"INSERT INTO \"{name}\" SELECT i, 'v' || i FROM generate_series(1, 6) AS i")
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        for name, (here, there, change) in ALTERATIONS.items():
            nodes18.publisher.execute(f"INSERT INTO \"{name}\" VALUES (7, 'v7')")
            await both.caught_up()
            altered_there, altered_here = (ddl.replace("t_pkey", f'"{name}_pkey"') for ddl in (there or here, here))
            nodes18.in_targets(f'ALTER TABLE "{name}" {altered_there}')
            nodes18.publisher.execute(f'ALTER TABLE "{name}" {altered_here}')
            nodes18.publisher.execute(change.replace(" t ", f' "{name}" '))
        await both.equal()
        # what only the target has keeps its value
        assert await both.rows('SELECT id, v FROM "drop column here only" WHERE id > 6 ORDER BY id') == [
            (7, "v7"),
            (10, "own"),
            (11, "v2"),
        ]
        assert both.native_errors() == []
        assert both.replica.subscription.status.last_error is None


async def test_rewrites_are_no_changes(nodes18: Nodes) -> None:
    """What VACUUM FULL, CLUSTER and ALTER TABLE rewrite is not sent, alone and in a transaction with changes."""
    nodes18.everywhere(TABLE)
    nodes18.in_targets("ALTER TABLE t ADD COLUMN c text, ADD COLUMN d text")
    nodes18.publisher.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 20) AS i; CREATE PUBLICATION pub FOR TABLE t")
    async with nodes18.followed() as both:
        nodes18.publisher.execute("VACUUM FULL t")
        nodes18.publisher.execute("CLUSTER t USING t_pkey")
        nodes18.publisher.execute("ALTER TABLE t ADD COLUMN c text DEFAULT clock_timestamp()::text || ' here'")
        nodes18.publisher.execute("""
            BEGIN; INSERT INTO t VALUES (21, 'before', 'c'); ALTER TABLE t ADD COLUMN d text DEFAULT clock_timestamp()::text;
            INSERT INTO t VALUES (22, 'after', 'c', 'd'); ALTER TABLE t ALTER COLUMN v TYPE varchar(100);
            UPDATE t SET v = 'mine' WHERE id = 1;
            SAVEPOINT a; ALTER TABLE t DROP COLUMN d; INSERT INTO t VALUES (23, 'gone', 'c'); ROLLBACK TO a;
            DELETE FROM t WHERE id = 2; COMMIT
        """)
        await both.equal(publisher=False)
        # ALTER TABLE's values stay at home; a row that was updated came whole
        assert await both.rows("SELECT id, v FROM t WHERE c IS NOT NULL ORDER BY id") == [(1, "mine"), (21, "before"), (22, "after")]
        assert await both.rows("SELECT id, d FROM t WHERE id > 20 ORDER BY id") == [(21, None), (22, "d")]
        assert both.replica.subscription.status.statistics.inserts == 2
        await both.assert_no_errors()


async def test_publisher_altered_first(nodes18: Nodes) -> None:
    """Nothing is lost and nothing is half done until the target is altered too."""
    nodes18.everywhere(TABLE + ";" + TABLE.replace("t (", "u ("))
    nodes18.publisher.execute("INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        nodes18.publisher.execute(
            "ALTER TABLE t ADD COLUMN c int; UPDATE t SET c = 1; INSERT INTO t VALUES (2, 'b', 2); INSERT INTO u VALUES (1)"
        )
        await both.both_report('logical replication target relation "public.t" is missing replicated column: "c"', RelationError)
        assert both.ours.fetch("SELECT id FROM u") == both.native.fetch("SELECT id FROM u") == []
        nodes18.in_targets("ALTER TABLE t ADD COLUMN c int")
        await both.equal()
        # dropped on the publisher, with changes on the way
        nodes18.publisher.execute("INSERT INTO u VALUES (3); DROP TABLE u; INSERT INTO t VALUES (4)")
        await both.equal()
        assert await both.rows("SELECT id FROM u ORDER BY id") == [(1,), (3,)]


async def test_target_s_table_is_away(nodes18: Nodes) -> None:
    """Both wait for a table of that name."""
    nodes18.everywhere("CREATE SCHEMA aside; " + TABLE + ";" + TABLE.replace("t (", "u ("))
    nodes18.publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with nodes18.followed() as both:
        nodes18.in_targets("ALTER TABLE t SET SCHEMA aside")
        nodes18.publisher.execute("INSERT INTO t VALUES (1); INSERT INTO u VALUES (1)")
        await both.both_report('logical replication target relation "public.t" does not exist', RelationError)
        assert both.ours.value("SELECT count(*) FROM u") == both.native.value("SELECT count(*) FROM u") == 0
        nodes18.in_targets("ALTER TABLE aside.t SET SCHEMA public")
        await both.equal()
