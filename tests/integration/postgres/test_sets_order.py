"""Runs of changes that are applied as sets: the changes that need an order keep it, and those that need not be made are not."""

from __future__ import annotations

from typing import Any

import pytest

from subscriber.errors import TargetError
from subscriber.protocol import tuples
from subscriber.sinks.postgres.apply import forms
from tests.integration.postgres.conftest import Sent
from tests.support.database import Database
from tests.support.sink_postgres import UNCHANGED, Remote, opened


async def test_updates_of_the_same_rows_are_made_in_turns(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, 0 FROM generate_series(1, 20) AS g")
    # the publisher's v is a text
    remote = Remote("t", "*id", "v", types={"id": 23})
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, *(remote.update(number, value) for number in range(1, 21) for value in (1, 2, 3)))
        assert len(sent) == 3
        assert target_db.fetch("SELECT DISTINCT v FROM t") == [(3,)]
        assert feed.sink.statistics.updates == 60


async def test_overwritten_updates_are_counted_but_not_made(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int, w text); INSERT INTO t SELECT g, 0, '' FROM generate_series(1, 9) AS g")
    remote = Remote("t", "*id", "v", "w", types={"id": 23, "v": 23})
    async with opened(target_db) as feed:
        updates = [remote.update(number, value, "é") for value in (1, 2, 3) for number in range(1, 10)]
        await feed.apply(remote.relation, *updates, remote.delete(9, None, None), remote.insert(9, 9, "new"))
        assert (len(sent), sent.omitted) == (2, 19)
        assert target_db.fetch("SELECT v, w, count(*) FROM t GROUP BY 1, 2 ORDER BY 1") == [(3, "é", 8), (9, "new", 1)]
        statistics = feed.sink.statistics
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (1, 27, 1)
        # the unchanged value is that of the update before
        await feed.apply(*(remote.update(number, 4, value) for value in ("kept", UNCHANGED) for number in range(1, 10)))
        assert target_db.fetch("SELECT DISTINCT v, w FROM t") == [(4, "kept")]
        # a row is missing: each of its changes is a conflict
        await feed.apply(*(remote.update(number, value, "") for value in (5, 6) for number in range(5, 15)), remote.delete(10, None, None))
        assert (statistics.updates, statistics.confl_update_missing, statistics.confl_delete_missing) == (55, 10, 1)
    target_db.wait("SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 't'", 8 + 18 + 15)


@pytest.mark.parametrize(
    ("table", "bad", "sqlstate"),
    [
        ("CREATE TABLE t (id int PRIMARY KEY, v int CHECK (v > 0))", 0, "23514"),
        ("CREATE TABLE t (id int PRIMARY KEY, v int NOT NULL)", None, "23502"),
        ("CREATE TABLE t (id int PRIMARY KEY, v int, w int GENERATED ALWAYS AS (1 / v) STORED)", 0, "22012"),
        ("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE INDEX ON t ((1 / v))", 0, "22012"),
        ("CREATE TABLE t (id int PRIMARY KEY, v int); CREATE INDEX ON t (id) WHERE 1 / v = 0", 0, "22012"),
        ("CREATE TABLE t (id int PRIMARY KEY, v smallint)", 40_000, "22003"),
        ("CREATE TABLE t (id int PRIMARY KEY, v positive)", 0, "23514"),
    ],
)
async def test_overwritten_update_that_the_target_rejects(target_db: Database, sent: Sent, table: str, bad: object, sqlstate: str) -> None:
    target_db.execute("CREATE DOMAIN positive AS int CHECK (VALUE > 0)")
    target_db.execute(table)
    remote = Remote("t", "*id", "v", types={"id": 23, "v": 23})
    async with opened(target_db) as feed:
        with pytest.raises(TargetError) as raised:
            await feed.apply(remote.relation, remote.insert(1, 1), *(remote.update(1, value) for value in (1, 2, 3, 4, bad, 5, 6, 7, 8)))
        assert raised.value.sqlstate == sqlstate


async def test_table_that_becomes_checked(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 1)")
    remote = Remote("t", "*id", "v", types={"id": 23, "v": 23})
    updates = [remote.update(1, value) for value in (1, 2, 3, 4, 0, 5, 6, 7, 8)]
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, *updates)
        assert sent.omitted == 8
        target_db.execute("CREATE INDEX ON t ((1 / v))")
        with pytest.raises(TargetError) as raised:
            await feed.apply(*updates)
        assert raised.value.sqlstate == "22012"


async def test_trigger_sees_all_earlier_changes_and_no_later_ones(target_db: Database) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE seen (rows int); CREATE TABLE watched (id int PRIMARY KEY);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN INSERT INTO public.seen SELECT count(*) FROM public.t; RETURN NULL; END';
        CREATE TRIGGER look AFTER INSERT OR UPDATE ON watched FOR EACH ROW EXECUTE FUNCTION look();
        ALTER TABLE watched ENABLE ALWAYS TRIGGER look;
    """)
    remote, watched = (Remote(name, "*id", types={"id": 23}, relation_id=number) for number, name in enumerate(("t", "watched")))
    async with opened(target_db) as feed:
        rows = [remote.insert(number) for number in range(12)]
        # the second one changes the key
        await feed.apply(remote.relation, watched.relation, *rows[:3], watched.insert(1), *rows[3:7], watched.update(2, old=[1]), *rows[7:])
        assert target_db.fetch("SELECT rows FROM seen") == [(3,), (7,)]


async def test_changes_keep_their_order_if_equal_keys_may_differ_in_bytes(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id numeric PRIMARY KEY, v text, w text); INSERT INTO t SELECT generate_series(1, 9), '', ''")
    remote = Remote("t", "*id", "v", "w", types={"id": 1700})
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.update(2, "a", "a"), remote.update("1.0", "b", UNCHANGED), remote.update("1.00", "c", "c"))
        assert target_db.fetch("SELECT v, w FROM t WHERE id = 1") == [("c", "c")]


async def test_changes_keep_their_order_if_another_index_is_unique(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE); INSERT INTO t SELECT g, g FROM generate_series(1, 9) AS g")
    remote = Remote("t", "*id", "u", types={"id": 23})
    async with opened(target_db) as feed:
        with pytest.raises(TargetError) as raised:
            await feed.apply(remote.relation, remote.delete(2, None), remote.insert(50, 5), remote.delete(5, None))
        assert raised.value.sqlstate == "23505"
        assert feed.sink.statistics.confl_insert_exists == 1


@pytest.mark.parametrize("more", ["UNIQUE", ""])
async def test_changes_are_read_once(target_db: Database, monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    target_db.execute(f"CREATE TABLE t (id int PRIMARY KEY, u int {more})")
    remote = Remote("t", "*id", "u", types={"id": 23, "u": 23})
    read = tuples.records_alike
    counts: list[int] = []

    def counted(*arguments: Any, **named: Any) -> list[bytes]:
        rows = read(*arguments, **named)
        counts.append(len(rows))
        return rows

    monkeypatch.setattr(forms, "records_alike", counted)
    async with opened(target_db) as feed:
        changes = [one for number in range(300) for one in (remote.insert(number, number), remote.update(number, number))]
        await feed.apply(remote.relation, *changes)
        assert target_db.fetch("SELECT count(*), sum(u) FROM t") == [(300, 44850)]
    assert sum(counts) == 600


async def test_table_and_its_partition_share_their_order(any_target_db: Database) -> None:
    any_target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int) PARTITION BY RANGE (id); CREATE TABLE low PARTITION OF t DEFAULT")
    root, leaf = (Remote(name, "*id", "v", types={"id": 23}, relation_id=number) for number, name in enumerate(("t", "low")))
    async with opened(any_target_db) as feed:
        inserts = [one for number in range(10) for one in (leaf.insert(number, 0), root.update(number, 1), leaf.update(number, 2))]
        await feed.apply(root.relation, leaf.relation, *inserts)
        assert any_target_db.fetch("SELECT count(*), min(v) FROM t") == [(10, 2)]
        assert feed.sink.statistics.confl_update_missing == 0


async def test_updates_with_whole_old_rows(target_db: Database, sent: Sent) -> None:
    target_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, w int); INSERT INTO t SELECT g, 'kept', 0 FROM generate_series(1, 40) AS g"
    )
    remote = Remote("t", "id", "v", "w", identity="f", types={"id": 23})
    async with opened(target_db) as feed:
        numbers = range(1, 41)
        await feed.apply(
            remote.relation,
            *(remote.update(number, "new" if number < 20 else UNCHANGED, number, old=[number, "", None]) for number in numbers),
        )
        assert [one.message_type for one in sent] == ["UPDATE", "UPDATE"]
        assert target_db.fetch("SELECT v, count(*), sum(w) FROM t GROUP BY 1 ORDER BY 1") == [("kept", 21, 630), ("new", 19, 190)]
        # the key of one row changes
        await feed.apply(*(remote.update(number if number != 20 else 99, None, 0, old=[number, "", None]) for number in numbers))
        assert target_db.fetch("SELECT count(*), max(id), sum(w) FROM t") == [(40, 99, 0)]
        assert feed.sink.statistics.updates == 80
        assert feed.sink.statistics.confl_update_missing == 0


@pytest.mark.parametrize(
    "default",
    [
        "DEFAULT currval('parents_here_seq')",
        "DEFAULT lastval()",
        "counted",
    ],
)
async def test_defaults_that_see_the_order(target_db: Database, default: str) -> None:
    target_db.execute("CREATE TABLE parents (id int PRIMARY KEY, here bigserial)")
    target_db.execute(
        "CREATE FUNCTION parents_so_far() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM public.parents); END'"
    )
    target_db.execute("CREATE DOMAIN counted AS bigint DEFAULT parents_so_far()")
    column = default if default == "counted" else f"bigint {default}"
    target_db.execute(f"CREATE TABLE children (id int PRIMARY KEY, here {column})")
    parents = Remote("parents", "*id", types={"id": 23}, relation_id=1)
    children = Remote("children", "*id", types={"id": 23}, relation_id=2)
    async with opened(target_db) as feed:
        changes = [remote.insert(number) for number in range(10) for remote in (parents, children)]
        await feed.apply(parents.relation, children.relation, *changes)
    assert target_db.fetch("SELECT id, here FROM children ORDER BY id") == [(number, number + 1) for number in range(10)]
