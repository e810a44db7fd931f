"""What a verification compares: types and keys that differ on both sides, partitions, tables without a key, ranges."""

from __future__ import annotations

import pytest

from subscriber import RelationError, repair
from subscriber.verification.model import RowKind
from subscriber.verification.row_sql import column_sql
from tests.support.database import Database
from tests.support.every_type import SPECIMENS
from tests.support.replica import replica
from tests.support.verification import NUMBERS, SHOWN, Replicated, named, only, verified

UNREADABLE = {"pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"}
READABLE = tuple(each for each in SPECIMENS if each.name.removeprefix("c_").removeprefix("a_") not in UNREADABLE)
"""PostgreSQL accepts no text of the others."""


async def test_an_error_of_a_query_shows_no_value(replicated: Replicated, target_db: Database) -> None:
    there = "CREATE TABLE t (id int PRIMARY KEY, v json)"
    async with replicated("CREATE TABLE t (id int PRIMARY KEY, v jsonb)", "INSERT INTO t VALUES (1, '[]')", there=there) as found:
        # JSONB cannot hold it
        target_db.execute(r"""UPDATE t SET v = '"a value \u0000"'""")
        report = await verified(found)
        reason = only(report).left_out
        assert reason is not None
        assert "SQLSTATE 22P05" in reason
        assert "a value" not in reason
        assert not report.equal


async def test_names_and_repairs_rows_whose_keys_have_another_type(replicated: Replicated, target_db: Database) -> None:
    there = "CREATE TABLE t (id text PRIMARY KEY, v int)"
    async with replicated(NUMBERS, "INSERT INTO t VALUES (1, 1), (2, 2), (3, 3)", there=there) as found:
        assert (await verified(found)).equal
        target_db.execute("INSERT INTO t VALUES ('none', 1), ('01', 1), ('9223372036854775808', 1); DELETE FROM t WHERE id = '3'")
        target_db.execute("UPDATE t SET v = 0 WHERE id = '2'")
        report = await verified(found)
        assert named(only(report)) == [
            ("different", ("2",), ("v",)),
            ("extra", ("01",), ()),
            ("extra", ("9223372036854775808",), ()),
            ("extra", ("none",), ()),
            ("missing", ("3",), ()),
        ]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


@pytest.mark.parametrize(("here", "there"), [("char(4)", "text"), ("text", "char(4)")])
async def test_keys_with_trailing_blanks(replicated: Replicated, target_db: Database, here: str, there: str) -> None:
    sql = "CREATE TABLE t (id int, code {}, v numeric, PRIMARY KEY (id, code))"
    async with replicated(
        sql.format(here), "INSERT INTO t VALUES (1, 'ab ', 5), (2, 'c', 1), (3, 'd ', 1)", there=sql.format(there)
    ) as found:
        assert (await verified(found)).equal
        target_db.execute("UPDATE t SET v = -v WHERE id = 1; DELETE FROM t WHERE id = 2")
        report = await verified(found)
        assert not report.equal
        # the text of char(n) lacks the blanks by which the other side may tell rows apart
        if here == "char(4)":
            with pytest.raises(RelationError, match="a key whose text is another one in the target"):
                await repair(report, target=target_db.dsn)
        else:
            assert not await repair(report, target=target_db.dsn)
        assert target_db.fetch("SELECT id, v::int FROM t ORDER BY id") == [(1, -5), (3, 1)]


async def test_times_in_keys_have_their_zone(replicated: Replicated, target_db: Database) -> None:
    # the bug was a text that means another moment in a target with a time zone
    target_db.execute(f"ALTER DATABASE {target_db.name} SET timezone = 'Asia/Tokyo'")
    moments = "VALUES ('2024-07-01 12:00+00'::timestamptz, 1), ('2024-07-01 03:00+00', 2), ('2024-07-01 21:00+00', 3)"
    async with replicated("CREATE TABLE t (at timestamptz PRIMARY KEY, v int)", f"INSERT INTO t {moments}") as found:
        target_db.execute("UPDATE t SET v = 0 WHERE v = 1; DELETE FROM t WHERE v = 2")
        report = await verified(found)
        assert named(only(report)) == [
            ("different", ("2024-07-01 12:00:00+00",), ("v",)),
            ("missing", ("2024-07-01 03:00:00+00",), ()),
        ]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal
        await found.same("SELECT * FROM t ORDER BY v")


async def test_compares_types_that_the_target_stores_differently(replicated: Replicated, target_db: Database) -> None:
    here = "a smallint, b numeric(8, 3), c char(5), d varchar(9), e int, f numeric, g json, h jsonb,"
    here += " i timestamp, j timestamptz, k date, l real"
    there = "a int, b numeric, c text, d text, e numeric, f numeric(20, 6), g jsonb, h json,"
    there += " i timestamptz, j timestamp, k timestamp, l float8"
    # a time that does not exist in the target's time zone
    values = """1, 2, 1.5, 'ab', 'cd', 7, 1.25, '{"b":1, "a" :2,"b":3}', '{"b":1, "a" :2}', '2024-03-31 02:30:00.5',
        '2024-07-01 12:00:00+05', '2024-01-01', 1e10"""
    target_db.execute(f"ALTER DATABASE {target_db.name} SET timezone = 'Europe/Berlin'")
    tables = (f"CREATE TABLE t (id {kind} PRIMARY KEY, {columns})" for kind, columns in (("int", here), ("bigint", there)))
    async with replicated(next(tables), f"INSERT INTO t VALUES ({values}); INSERT INTO t VALUES (2)", there=next(tables)) as found:
        report = await verified(found)
        assert report.equal, report.to_json()
        target_db.execute("UPDATE t SET b = 1.501 WHERE id = 1; UPDATE t SET d = '' WHERE id = 2")
        target_db.execute("""UPDATE t SET g = '{"b": 1}', i = i + interval '1 s', l = 1e10 + 1 WHERE id = 1""")
        assert named(only(await verified(found))) == [("different", ("1",), ("b", "g", "i", "l")), ("different", ("2",), ("d",))]


async def test_finds_one_row_in_ranges_of_keys_and_of_blocks(publisher18_db: Database, target_db: Database) -> None:
    table = "CREATE TABLE {0} (id int PRIMARY KEY, v text)"
    for database in (publisher18_db, target_db):
        database.execute(table.format("in_order") + ";" + table.format("shuffled"))
    publisher18_db.execute("""
        INSERT INTO in_order SELECT i, md5(i::text) FROM generate_series(1, 120000) AS i;
        INSERT INTO shuffled SELECT id, v FROM in_order ORDER BY v;
        ANALYZE in_order, shuffled;
        CREATE PUBLICATION pub FOR ALL TABLES
    """)
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up(60)
        target_db.execute("UPDATE in_order SET v = 'x' WHERE id = 77777; UPDATE shuffled SET v = 'x' WHERE id = 77777")
        report = await verified(found)
        in_order, shuffled = report.tables
        assert in_order.ranges > 1
        assert in_order.differing_ranges == 1
        assert named(in_order) == named(shuffled) == [("different", ("77777",), ("v",))]
        assert in_order.publisher_rows == in_order.target_rows == shuffled.publisher_rows == shuffled.target_rows == 120000
        # NULL is in one of the ranges, too
        for table in ("in_order", "shuffled"):
            target_db.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_pkey, ALTER id DROP NOT NULL")
            target_db.execute(f"INSERT INTO {table} VALUES (NULL, 'x')")
        report = await verified(found)
        for each in report.tables:
            assert [(kind, key) for kind, key, _ in named(each)] == [("different", ("77777",)), ("extra", (None,))]


async def test_compares_partition_roots_and_column_lists(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    columns = "id int, part int, v text, hidden text"
    publisher18_db.execute(f"""
        CREATE TABLE root ({columns}, doubled int GENERATED ALWAYS AS (part * 2) STORED, PRIMARY KEY (id, part)) PARTITION BY LIST (part);
        CREATE TABLE one PARTITION OF root FOR VALUES IN (1); CREATE TABLE two PARTITION OF root FOR VALUES IN (2);
        INSERT INTO root SELECT i, 1 + i % 2, 'v', 'h' FROM generate_series(1, 1000) AS i;
        CREATE PUBLICATION pub FOR TABLE root (id, part, v) WITH (publish_via_partition_root)
    """)
    # the target is not partitioned, and a table inherits from it
    target_db.execute(f"CREATE TABLE root ({columns}, PRIMARY KEY (id, part)); CREATE TABLE child () INHERITS (root)")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        target_db.execute("INSERT INTO child VALUES (1, 1, 'not replicated', NULL); UPDATE root SET hidden = 'not replicated'")
        report = await verified(found, changed=True)
        assert (report.equal, only(report).publisher_rows, only(report).target_rows) == (True, 1000, 1000)
        target_db.execute("DELETE FROM ONLY root WHERE id = 4")
        report = await verified(found, changed=True)
        assert named(only(report)) == [("missing", ("4", "1"), ())]
        await repair(report, target=target_db.dsn)
        assert (await verified(found)).equal


async def test_compares_a_table_without_key_as_a_multiset(replicated: Replicated, target_db: Database) -> None:
    async with replicated(
        "CREATE TABLE t (v text, n int); ALTER TABLE t REPLICA IDENTITY FULL",
        "INSERT INTO t VALUES ('a', 1), ('a', 1), ('a', 1), (NULL, 2)",
    ) as found:
        assert (await verified(found)).equal
        target_db.execute("DELETE FROM t WHERE ctid = (SELECT min(ctid) FROM t); INSERT INTO t VALUES ('b', NULL), ('b', NULL)")
        report = await verified(found, limits=SHOWN)
        assert [(each.kind, each.count, each.publisher or each.target) for each in only(report).differences] == [
            (RowKind.MISSING, 1, {"v": "a", "n": "1"}),
            (RowKind.EXTRA, 2, {"v": "b", "n": None}),
        ]
        assert await repair(report, target=target_db.dsn) == {}


def test_different_values_have_different_hashes(publisher18_db: Database) -> None:
    """Also where PostgreSQL's own hash of the type is equal: it ignores the sign of a numeric, and folds a timestamp to 32 bits."""
    values = {
        "numeric": ["5", "-5", "5.0", "50000", "0", "NaN", "Infinity", "-Infinity", None],
        "timestamp": ["epoch", "2000-01-01", "2000-01-01 01:11:34.967297", "1999-12-31 23:59:59.999999", "infinity", "-infinity", None],
        "timestamptz": ["epoch", "4714-11-24 00:00:00+00 BC", "2024-10-27 00:30:00.000001+00", "infinity", "-infinity", None],
        "int8": ["0", "-1", "4294967296", "4294967297", "1", "-4294967296", None],
    }
    for kind, texts in values.items():
        hashed = column_sql("v", kind, kind, null=True, same_modifier=True).hashed("7")
        found = set()
        for zone in ("UTC", "Europe/Berlin"):
            publisher18_db.execute(f"SET timezone = '{zone}'")
            listed = ", ".join("(NULL)" if text is None else f"('{text}')" for text in texts)
            found.add(
                tuple(
                    row[0] for row in publisher18_db.fetch(f"SELECT {hashed} FROM (VALUES {listed}) AS t(text), CAST(text AS {kind}) AS v")
                )
            )
        assert len(found) == 1, kind
        assert all(len(set(hashes)) == len(texts) for hashes in found), kind
