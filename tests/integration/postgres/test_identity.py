"""The PostgreSQL sink: which row an UPDATE or DELETE means."""

from __future__ import annotations

import asyncio

import pytest

from subscriber.errors import RelationError, TargetUnavailable
from tests.support.database import Database
from tests.support.sink_postgres import UNCHANGED, Binary, Remote, opened


async def test_full_takes_one_of_several_equal_rows(any_target_db: Database) -> None:
    any_target_db.execute("CREATE TABLE t (a int, b text, extra int DEFAULT 5)")
    remote = Remote("t", "a", "b", identity="f")
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, *(remote.insert(1, "x") for _ in range(3)), remote.insert(1, None), remote.insert(None, None))
        await feed.apply(
            remote.update(2, "y", old=(1, "x")), remote.delete(1, "x"), remote.update(3, None, old=(1, None)), remote.delete(None, None)
        )
        assert any_target_db.fetch("SELECT a, b, extra FROM t ORDER BY a") == [(1, "x", 5), (2, "y", 5), (3, None, 5)]
        counted = feed.sink.statistics
        assert (counted.updates, counted.deletes, counted.confl_update_missing, counted.confl_delete_missing) == (2, 2, 0, 0)


async def test_full_in_a_partitioned_table(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE p (a int, b text) PARTITION BY RANGE (a);
        CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10);
        CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)
    """)
    remote = Remote("p", "a", "b", identity="f")
    async with opened(target_db) as feed:
        # rows of both partitions have the same ctid
        await feed.apply(remote.relation, remote.insert(1, "x"), remote.insert(11, "x"), remote.insert(2, "x"), remote.insert(12, "x"))
        await feed.apply(remote.update(13, "moved", old=(1, "x")), remote.delete(12, "x"), remote.update(11, "stays", old=(11, "x")))
        assert target_db.fetch("SELECT tableoid::regclass::text, a, b FROM p ORDER BY a") == [
            ("p1", 2, "x"),
            ("p2", 11, "stays"),
            ("p2", 13, "moved"),
        ]


async def test_full_compares_types_without_equality_by_text(any_target_db: Database) -> None:
    any_target_db.execute("""
        CREATE TYPE pair AS (a int, b json);
        CREATE TYPE whole AS (a int, b text);
        CREATE DOMAIN doc AS json;
        CREATE TABLE t (n int, j json, x jsonpath, p point, js json[], d doc, c pair, w whole, ws whole[], f float8)
    """)
    remote = Remote("t", "n", "j", "x", "p", "js", "d", "c", "w", "ws", "f", identity="f")

    def values(number: int) -> list[object]:
        json = f'{{"k":  {number}}}'
        quoted = json.replace('"', '\\"')
        return [
            number,
            json,
            f"$.a[{number}]",
            f"(1,{number}.0)",
            f'{{"{quoted}"}}',
            json,
            f'(1,"{json.replace(chr(34), chr(34) * 2)}")',
            f"({number},b)",
            f'{{"({number},b)"}}',
            "NaN" if number == 1 else "-0",
        ]

    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, *(remote.insert(*values(number)) for number in (1, 2, 3)))
        await feed.apply(remote.update(*[10, *values(1)[1:]], old=values(1)), remote.delete(*values(2)))
        assert any_target_db.fetch("SELECT n, j->>'k' FROM t ORDER BY n") == [(3, "3"), (10, "1")]
        assert feed.sink.statistics.confl_delete_missing == 0


async def test_full_uses_an_index(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE t (a int, b text, j json);
        CREATE INDEX b_index ON t (b);
        INSERT INTO t SELECT n, 'v' || n, '{}' FROM generate_series(1, 2000) n;
        INSERT INTO t VALUES (0, NULL, NULL)
    """)
    remote = Remote("t", "a", "b", "j", identity="f")
    async with opened(target_db) as feed:
        updates = (remote.update(number, "w", "{}", old=(number, f"v{number}", "{}")) for number in range(1, 40))
        await feed.apply(remote.relation, *updates, remote.update(-1, None, None, old=(0, None, None)))
        assert target_db.value("SELECT count(*) FROM t WHERE b = 'w'") == 39
        assert target_db.value("SELECT a FROM t WHERE b IS NULL") == -1
    target_db.wait("SELECT idx_scan > 0 FROM pg_stat_user_indexes WHERE indexrelname = 'b_index'", True)
    assert target_db.value("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 't'") <= 2  # CREATE INDEX and this test's count


async def test_keyed_changes_use_the_index_of_a_table_that_was_empty(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE TABLE other (id int)")
    target_db.execute("VACUUM ANALYZE t")
    remote, other = Remote("t", "*id", "v"), Remote("other", "id", relation_id=2)
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, other.relation, *(remote.update(number, 0) for number in range(7)))
        await feed.apply(*(remote.insert(number, 0) for number in range(3000)))
        # changes of another table between them, so that they are no runs
        await feed.apply(*(change for number in range(3000) for change in (remote.update(number, 1), other.insert(1))))
        assert feed.sink.statistics.updates == 3000
    target_db.wait("SELECT idx_scan >= 3000 FROM pg_stat_user_tables WHERE relname = 't'", True)
    assert target_db.value("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 't'") <= 1


async def test_full_publisher_with_a_key_in_the_target(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "id", "v", identity="f")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, "a"), remote.insert(2, "b"))
        target_db.execute("UPDATE t SET v = 'changed here'")
        # found by the key alone, as native
        await feed.apply(remote.update(3, "c", old=(1, "a")), remote.delete(2, "b"))
        assert target_db.fetch("SELECT * FROM t") == [(3, "c")]


async def test_replica_identity_index_of_the_target_comes_first(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, code text NOT NULL, v text);
        CREATE UNIQUE INDEX code_index ON t (code); ALTER TABLE t REPLICA IDENTITY USING INDEX code_index;
        INSERT INTO t VALUES (100, 'a', 'old')
    """)
    remote = Remote("t", "id", "*code", "v", identity="i")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.update(1, "a", "new"))
        assert target_db.fetch("SELECT * FROM t") == [(1, "a", "new")]


async def test_stricter_key_in_the_target(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (a int PRIMARY KEY, b int, v text)")
    remote = Remote("t", "*a", "*b", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, 1, "x"), remote.update(1, 2, "y", old=(1, 1, None)), remote.update(1, 2, "z"))
        assert target_db.fetch("SELECT * FROM t") == [(1, 2, "z")]


async def test_wider_key_in_the_target_is_refused(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (a int, b int, PRIMARY KEY (a, b))")
    remote = Remote("t", "*a", "b")
    expected = 'publisher did not send replica identity column expected by the logical replication target relation "public.t"'
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, 1))
        with pytest.raises(RelationError) as caught:
            await feed.apply(remote.update(1, 2))
        assert str(caught.value) == expected
        with pytest.raises(RelationError, match="publisher did not send"):
            await feed.apply(remote.delete(1, None))


@pytest.mark.parametrize("key", ["", ", PRIMARY KEY (a) DEFERRABLE", ", UNIQUE (a)"])
async def test_no_key_in_the_target(target_db: Database, key: str) -> None:
    target_db.execute(f"CREATE TABLE t (a int NOT NULL, b int{key})")
    remote = Remote("t", "*a", "b")
    expected = (
        'logical replication target relation "public.t" has neither REPLICA IDENTITY index nor PRIMARY KEY column '
        "and published relation does not have REPLICA IDENTITY FULL"
    )
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1, 1))
        with pytest.raises(RelationError) as caught:
            await feed.apply(remote.update(1, 2))
        assert str(caught.value) == expected
        assert 'during message type "UPDATE" for replication target relation "public.t"' in caught.value.one_line()
        full = Remote("t", "a", "b", identity="f")
        await feed.apply(full.relation, full.update(1, 2, old=(1, 1)))
        assert target_db.fetch("SELECT * FROM t") == [(1, 2)]


async def test_binary_keys(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v")

    def number(value: int) -> Binary:
        return Binary(value.to_bytes(4, "big"))

    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(number(1), "a"), remote.insert(2, Binary(b"b")))
        await feed.apply(remote.update(number(3), UNCHANGED, old=(number(1), None)), remote.delete(number(2), None))
        assert target_db.fetch("SELECT * FROM t") == [(3, "a")]


@pytest.mark.matrix
async def test_operators_of_a_schema_outside_the_search_path(any_target_db: Database) -> None:
    # a base type made from int4's functions, with operators of its own: what an extension installs
    any_target_db.execute("""
        CREATE SCHEMA ext;
        CREATE TYPE ext.num;
        CREATE FUNCTION ext.num_in(cstring) RETURNS ext.num LANGUAGE internal IMMUTABLE STRICT AS 'int4in';
        CREATE FUNCTION ext.num_out(ext.num) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'int4out';
        CREATE TYPE ext.num (INPUT = ext.num_in, OUTPUT = ext.num_out, LIKE = int4);
        CREATE FUNCTION ext.eq(ext.num, ext.num) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS 'int4eq';
        CREATE FUNCTION ext.lt(ext.num, ext.num) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS 'int4lt';
        CREATE FUNCTION ext.le(ext.num, ext.num) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS 'int4le';
        CREATE FUNCTION ext.gt(ext.num, ext.num) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS 'int4gt';
        CREATE FUNCTION ext.ge(ext.num, ext.num) RETURNS bool LANGUAGE internal IMMUTABLE STRICT AS 'int4ge';
        CREATE FUNCTION ext.cmp(ext.num, ext.num) RETURNS int LANGUAGE internal IMMUTABLE STRICT AS 'btint4cmp';
        CREATE OPERATOR ext.= (LEFTARG = ext.num, RIGHTARG = ext.num, FUNCTION = ext.eq);
        CREATE OPERATOR ext.< (LEFTARG = ext.num, RIGHTARG = ext.num, FUNCTION = ext.lt);
        CREATE OPERATOR ext.<= (LEFTARG = ext.num, RIGHTARG = ext.num, FUNCTION = ext.le);
        CREATE OPERATOR ext.> (LEFTARG = ext.num, RIGHTARG = ext.num, FUNCTION = ext.gt);
        CREATE OPERATOR ext.>= (LEFTARG = ext.num, RIGHTARG = ext.num, FUNCTION = ext.ge);
        CREATE OPERATOR CLASS ext.num_ops DEFAULT FOR TYPE ext.num USING btree AS
            OPERATOR 1 ext.<, OPERATOR 2 ext.<=, OPERATOR 3 ext.=, OPERATOR 4 ext.>=, OPERATOR 5 ext.>,
            FUNCTION 1 ext.cmp(ext.num, ext.num);
        CREATE DOMAIN ext.dom AS ext.num;
        CREATE TABLE keyed (id ext.num PRIMARY KEY, v text);
        CREATE TABLE domained (id ext.dom PRIMARY KEY, v text);
        CREATE TABLE whole (id ext.num, d ext.dom, a ext.num[], v text)
    """)
    keyed, domained = Remote("keyed", "*id", "v", relation_id=1), Remote("domained", "*id", "v", relation_id=2)
    whole = Remote("whole", "id", "d", "a", "v", identity="f", relation_id=3)
    async with opened(any_target_db) as feed:
        for remote in (keyed, domained):
            await feed.apply(remote.relation, remote.insert(1, "a"), remote.insert(2, "b"), remote.update(1, "c"), remote.delete(2, None))
        await feed.apply(whole.relation, whole.insert(1, 2, "{3}", "a"), whole.update(1, 2, "{4}", "b", old=(1, 2, "{3}", "a")))
        for table in ("keyed", "domained"):
            assert any_target_db.fetch(f"SELECT id::text, v FROM {table}") == [("1", "c")]
        assert any_target_db.fetch("SELECT id::text, d::text, a::text, v FROM whole") == [("1", "2", "{4}", "b")]


async def test_row_changed_meanwhile_under_full_is_not_missed(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (a int, b text); INSERT INTO t VALUES (1, 'x')")
    remote = Remote("t", "a", identity="f")
    async with opened(target_db) as feed:
        with target_db.connect() as other:
            other.execute("BEGIN; UPDATE t SET b = 'y'")
            applying = asyncio.create_task(feed.apply(remote.relation, remote.update(2, old=(1,))))
            async with asyncio.timeout(20):
                while not target_db.value("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                    await asyncio.sleep(0.01)
            other.execute("COMMIT")
            with pytest.raises(TargetUnavailable, match="was changed by another session"):
                await applying
        assert target_db.fetch("SELECT * FROM t") == [(1, "y")]
        await feed.apply(remote.relation, remote.update(2, old=(1,)))
        assert target_db.fetch("SELECT * FROM t") == [(2, "y")]
