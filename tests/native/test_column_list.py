"""Column lists (native's topic 031)."""

from __future__ import annotations

from tests.native.native import Nodes


async def test_listed_columns_alone(nodes18: Nodes) -> None:
    nodes18.publisher.execute("""
        CREATE TABLE plain (a int PRIMARY KEY, "B" int, c int); CREATE TABLE odd ("a'" int PRIMARY KEY, "B" text, "c'" int);
        CREATE TYPE color AS ENUM ('blue', 'red'); CREATE TABLE enums (a int PRIMARY KEY, b color, c int, d text);
        CREATE TABLE root (a int PRIMARY KEY, b text, c timestamptz DEFAULT now()) PARTITION BY LIST (a);
        CREATE TABLE root_1 PARTITION OF root FOR VALUES IN (1, 2, 3); CREATE TABLE root_2 PARTITION OF root DEFAULT;
        CREATE TABLE by_index (a int NOT NULL, b int NOT NULL, c int, d int); CREATE UNIQUE INDEX key ON by_index (b, a);
        ALTER TABLE by_index REPLICA IDENTITY USING INDEX key;
        CREATE TABLE twice (a int PRIMARY KEY, b int, c int); CREATE TABLE insert_only (a int, b text);
        CREATE TABLE reordered (a int PRIMARY KEY, b text, c int);
        CREATE PUBLICATION pub FOR TABLE plain (a, "B"), odd ("c'", "a'"), enums (a, b, d), by_index (a, b, d),
            twice (a, b), reordered (c, a);
        CREATE PUBLICATION again FOR TABLE twice (a, b);
        CREATE PUBLICATION roots FOR TABLE root (a, b) WITH (publish_via_partition_root = true);
        CREATE PUBLICATION ins FOR TABLE insert_only (b) WITH (publish = 'insert')
    """)
    nodes18.in_targets("""
        CREATE TABLE plain (a int PRIMARY KEY, "B" int, c int DEFAULT 5); CREATE TABLE odd ("a'" int PRIMARY KEY, "c'" int);
        CREATE TYPE color AS ENUM ('red', 'blue'); CREATE TABLE enums (a int PRIMARY KEY, b color, d text);
        CREATE TABLE root (a int PRIMARY KEY, b text) PARTITION BY RANGE (a); CREATE TABLE root_all PARTITION OF root DEFAULT;
        CREATE TABLE by_index (d int, b int, a int PRIMARY KEY); CREATE TABLE twice (a int PRIMARY KEY, b int, own int);
        CREATE TABLE insert_only (b text); CREATE TABLE reordered (c int, own text DEFAULT 'own', a int PRIMARY KEY)
    """)
    nodes18.publisher.execute("""
        INSERT INTO plain SELECT i, i, i FROM generate_series(1, 9) AS i; INSERT INTO odd SELECT i, 'b', i FROM generate_series(1, 9) AS i;
        INSERT INTO enums SELECT i, 'red', i, 'd' FROM generate_series(1, 9) AS i;
        INSERT INTO root SELECT i, 'b' FROM generate_series(1, 9) AS i;
        INSERT INTO by_index SELECT i, i, i, i FROM generate_series(1, 9) AS i; INSERT INTO twice SELECT * FROM plain;
        INSERT INTO insert_only VALUES (1, 'copied'); INSERT INTO reordered SELECT i, 'b', i FROM generate_series(1, 9) AS i
    """)
    async with nodes18.followed("pub", "again", "roots", "ins") as both:
        await both.equal(publisher=False)
        for step in (
            'INSERT INTO plain VALUES (10, 10, 10); UPDATE plain SET "B" = -1 WHERE a = 1; UPDATE plain SET c = -1',
            "UPDATE plain SET a = -a WHERE a < 4",
            "INSERT INTO odd VALUES (10, 'x', 1); UPDATE odd SET \"B\" = 'y', \"c'\" = -1 WHERE \"a'\" < 4",
            'DELETE FROM odd WHERE "a\'" = 9',
            "INSERT INTO enums VALUES (10, 'blue', 1, 'x')",
            "UPDATE enums SET b = 'blue', c = -1, d = d || a WHERE a < 4; UPDATE enums SET c = 0",
            "INSERT INTO root VALUES (10, 'x'); UPDATE root SET a = a + 20 WHERE a < 3; UPDATE root SET c = NULL",
            "UPDATE root SET b = 'y' WHERE a > 8",
            "INSERT INTO by_index VALUES (10, 10, 10, 10); UPDATE by_index SET c = -1; UPDATE by_index SET b = b + 100 WHERE a < 4",
            "DELETE FROM by_index WHERE a = 5; UPDATE twice SET c = 0; UPDATE twice SET b = 0 WHERE a = 1",
            "INSERT INTO twice VALUES (10, 1, 1)",
            "INSERT INTO insert_only VALUES (2, 'new'); UPDATE insert_only SET b = 'x'; DELETE FROM insert_only",
            "UPDATE reordered SET c = c * 10, b = NULL WHERE a > 4; INSERT INTO reordered VALUES (10, 'x', 1)",
        ):
            nodes18.publisher.execute(step)
        await both.equal(publisher=False)
        for columns, table in (
            ('a, "B"', "plain"),
            ('"a\'", "c\'"', "odd"),
            ("a, b::text, d", "enums"),
            ("a, b", "root"),
            ("a, b, d", "by_index"),
            ("a, b", "twice"),
            ("a, c", "reordered"),
        ):
            assert len(await both.same(f"SELECT {columns} FROM {table} ORDER BY 1")) >= 8
        assert await both.rows("SELECT b FROM insert_only ORDER BY b") == [("copied",), ("new",)]
        assert await both.value("SELECT count(*) FROM plain WHERE c = 5 OR c IS NULL") == 10
        await both.assert_no_errors()


async def test_lists_that_change(nodes18: Nodes) -> None:
    """A column that comes into the list, one that leaves it, and the key that moves within it."""
    nodes18.everywhere("CREATE TABLE t (a int PRIMARY KEY, b int, c int, d int)")
    nodes18.publisher.execute(
        "INSERT INTO t SELECT i, i + 100, i, i FROM generate_series(1, 5) AS i; CREATE PUBLICATION pub FOR TABLE t (a, b)"
    )
    async with nodes18.followed() as both:
        nodes18.publisher.execute(
            "UPDATE t SET b = b * 2, c = c * 3; ALTER PUBLICATION pub SET TABLE t (a, b, c); INSERT INTO t VALUES (6, 60, 600, 6000)"
        )
        nodes18.publisher.execute(
            "UPDATE t SET c = c + 1 WHERE a IN (1, 6); ALTER PUBLICATION pub SET TABLE t (a, d, b); UPDATE t SET c = 0, d = 7 WHERE a = 2"
        )
        await both.equal(publisher=False)
        assert await both.rows("SELECT a, c, d FROM t ORDER BY a") == [
            (1, 4, None),
            (2, None, 7),
            (3, None, None),
            (4, None, None),
            (5, None, None),
            (6, 601, None),
        ]
        # the key on another listed column, then on both
        await both.caught_up()
        nodes18.everywhere("ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t ADD PRIMARY KEY (b)")
        nodes18.publisher.execute(
            "UPDATE t SET a = a * 10 WHERE b < 210; UPDATE t SET b = b + 1000 WHERE a = 3; DELETE FROM t WHERE b = 60"
        )
        await both.equal(publisher=False)
        nodes18.publisher.execute(
            "ALTER TABLE t DROP CONSTRAINT t_pkey; INSERT INTO t VALUES (8, 8, 8, 8); ALTER TABLE t ADD PRIMARY KEY (a, b)"
        )
        nodes18.publisher.execute("UPDATE t SET d = 9; DELETE FROM t WHERE a = 8")
        await both.equal(publisher=False)
        assert len(await both.same("SELECT a, b, d FROM t ORDER BY a")) == 5
        await both.assert_no_errors()
