"""Runs of changes that are applied as sets: the results are those of applying them one by one."""

from __future__ import annotations

import asyncio
import re
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Delete, Message
from subscriber.sinks.postgres.apply import set_sender
from tests.conftest import Servers
from tests.integration.postgres.conftest import Sent
from tests.support.change_histories import TABLES, ChangeHistory
from tests.support.database import Database, ServerAddress, drop_database, fresh_database
from tests.support.examples import seeds
from tests.support.observation import eventually
from tests.support.sink_postgres import Feed, Remote, opened, row

_NEVER = 10**9
BATCHES = 25
TABLE_NAMES = (
    *("plain", "typed", "arrays", "bin", "gen_rows", "more_rows", "part_low", "part_rest", "loose", "full_key", "uniq", "numeric_key"),
    *("bare", "seen", "each", "whole", "choosy", "few", "numbered", "hot", "hot_full"),
)


@pytest.fixture
def other_target_db(servers: Servers, target_version: int) -> Iterator[Database]:
    """A second target."""
    with fresh_database(ServerAddress(servers.get("target", target_version).dsn(), target_version), "tgt") as database:
        yield database


@pytest.fixture(autouse=True)
def short_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """UPDATEs and DELETEs are sent as sets from the number on from which INSERTs are: so the tests need few rows."""
    monkeypatch.setattr(set_sender, "_LEAST_FOUND", set_sender._LEAST)


@contextmanager
def shortest(rows: int) -> Iterator[None]:
    """The number of changes from which on a run is sent as a set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(set_sender, "_LEAST", rows)
        patch.setattr(set_sender, "_LEAST_FOUND", rows)
        yield


def _rows(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: database.fetch(f'SELECT x FROM (SELECT t::text COLLATE "C" AS x FROM {name} AS t) AS r ORDER BY x') for name in TABLE_NAMES
    }


def _missed(feed: Feed) -> int:
    return feed.sink.statistics.confl_update_missing + feed.sink.statistics.confl_delete_missing


async def _apply(feed: Feed, batch: list[list[Message]], least: int) -> list[str]:
    """Apply a batch. Returns the error, without numbers that differ between the two targets."""
    with shortest(least):
        try:
            await feed.opened.apply(feed.batch(*(feed.transaction(*messages) for messages in batch)))
        except TargetError as error:
            texts = [type(error).__name__, str(error), str(error.sqlstate), *getattr(error, "__notes__", ())]
            return [re.sub(r"(pg_|transaction |in )\d+", r"\1#", text) for text in texts]
    return []


@seeds(1, 3)
@pytest.mark.matrix
async def test_random_histories_have_the_same_result(
    any_target_db: Database, other_target_db: Database, sent: Sent, attempts: list[bool], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    failed, once = await _same_result(any_target_db, other_target_db, attempts, monkeypatch, seed, {})
    assert failed < BATCHES / 2
    assert sent.omitted
    assert once > BATCHES / 10
    assert {statement.message_type for statement in sent} == {"INSERT", "UPDATE", "DELETE"}
    assert len(sent) > BATCHES


_RULES: tuple[dict[str, str], ...] = (
    {"insert_exists": "apply_remote", "multiple_unique_conflicts": "apply_remote", "update_missing": "insert"},
    {"insert_exists": "keep_local", "update_exists": "keep_local", "multiple_unique_conflicts": "keep_local", "delete_missing": "error"},
    {"insert_exists": "apply_remote", "update_exists": "apply_remote", "insert_exists.public.plain": "error", "update_missing": "error"},
)


@seeds(1, 3)
async def test_random_histories_with_rules_have_the_same_result(
    any_target_db: Database, other_target_db: Database, sent: Sent, attempts: list[bool], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    await _same_result(any_target_db, other_target_db, attempts, monkeypatch, seed, _RULES[seed % len(_RULES)])
    assert {statement.message_type for statement in sent if statement.resolves} == {"INSERT"}


async def _same_result(
    any_target_db: Database,
    other_target_db: Database,
    attempts: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    rules: dict[str, str],
) -> tuple[int, int]:
    """Compare sets with single changes in their order. Returns how many batches failed, and how many were applied at once."""
    history = ChangeHistory(seed)
    for database in (any_target_db, other_target_db):
        database.execute(TABLES)
    failed = once = missed_before = 0
    async with opened(any_target_db, conflict=rules) as together, opened(other_target_db, conflict=rules) as apart:
        monkeypatch.setattr(apart.opened._applier, "_without_sets", None)
        for number in range(BATCHES):
            batch = history.batch()
            attempts.clear()
            errors = await _apply(together, batch, 2)
            tried = list(attempts)
            assert errors == await _apply(apart, batch, _NEVER), f"batch {number}"
            if errors:
                failed += 1
                history.failed()
            assert _rows(any_target_db) == _rows(other_target_db), f"batch {number}"
            assert together.sink.statistics == apart.sink.statistics, f"batch {number}"
            missed = _missed(apart) - missed_before
            missed_before += missed
            if not errors and not missed and not rules:
                assert tried == [True], f"batch {number} was retried"
                once += 1
    return failed, once


async def test_run_across_transactions_is_one_statement(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        first = feed.transaction(remote.relation, *(remote.insert(number, f'"{number}\\') for number in range(30)))
        others = [feed.transaction(remote.insert(number, None)) for number in range(30, 40)]
        await feed.opened.apply(feed.batch(first, *others))
        assert len(sent) == 1
        assert target_db.fetch("SELECT count(*), count(v), min(v) FROM t") == [(40, 30, '"0\\')]
        assert (feed.sink.statistics.inserts, feed.sink.statistics.transactions) == (40, 11)
        assert feed.position() == others[-1].end_lsn


async def test_conflict_in_a_run_is_reported_as_for_one_row(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (25)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        transactions = [feed.transaction(remote.relation, *(remote.insert(number) for number in range(20)))]
        transactions += [feed.transaction(remote.insert(number)) for number in range(20, 30)]
        with pytest.raises(TargetError) as raised:
            await feed.opened.apply(feed.batch(*transactions))
        assert sent
        assert raised.value.sqlstate == "23505"
        assert f"in transaction {transactions[6].xid}, finished at" in "".join(raised.value.__notes__)
        assert feed.position() == transactions[5].end_lsn
        assert target_db.value("SELECT count(*) FROM t") == 26
        assert feed.sink.statistics.confl_insert_exists == 1


async def test_sets_use_the_index_of_a_table_that_was_small(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT g, 0 FROM generate_series(1, 10) AS g")
    target_db.execute("VACUUM ANALYZE t")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation)
        for value in range(10):
            await feed.apply(*(remote.update(number, value) for number in range(1, 11)))
        target_db.execute("INSERT INTO t SELECT g, 0 FROM generate_series(11, 100000) AS g")
        await feed.apply(*(remote.update(number, 1) for number in range(1, 1000)))
        await feed.apply(*(remote.delete(number, None) for number in range(1, 100)))
        assert len(sent) == 12
        assert (feed.sink.statistics.updates, feed.sink.statistics.deletes) == (1099, 99)
    target_db.wait("SELECT n_tup_del FROM pg_stat_user_tables WHERE relname = 't'", 99)
    assert target_db.value("SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = 't'") < 10_000


async def test_missing_rows_and_repeated_keys_in_a_run(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id numeric PRIMARY KEY, v int); INSERT INTO t SELECT g, 0 FROM generate_series(1, 20) AS g")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        repeated = [*range(1, 11), *range(1, 11)]
        await feed.apply(remote.relation, *(remote.update(number, place) for place, number in enumerate(repeated)))
        assert len(sent) == 2
        assert target_db.fetch("SELECT v FROM t WHERE id <= 10 ORDER BY id") == [(value,) for value in range(10, 20)]
        assert feed.sink.statistics.confl_update_missing == 0
        # equal keys with different texts, and a row that is missing
        await feed.apply(*(remote.update(f"{number}.0" if place < 10 else number, place) for place, number in enumerate(repeated)))
        await feed.apply(*(remote.delete(number, None) for number in range(15, 25)))
        assert len(sent) == 4
        assert feed.sink.statistics.updates == 40
        assert (feed.sink.statistics.deletes, feed.sink.statistics.confl_delete_missing) == (6, 4)
        # two misses: from now on its changes are made one by one
        await feed.apply(*(remote.delete(number, None) for number in range(1, 15)))
        assert len(sent) == 4
        assert target_db.value("SELECT count(*) FROM t") == 0


async def test_arrays_of_types_that_have_length_one_by_default(any_target_db: Database, sent: Sent) -> None:
    any_target_db.execute("CREATE TABLE c (id int PRIMARY KEY, v char(4)[]); CREATE TABLE b (id int PRIMARY KEY, v bit(3)[])")
    async with opened(any_target_db) as feed:
        for relation_id, (name, value) in enumerate({"c": "{abcd}", "b": "{101}"}.items()):
            remote = Remote(name, "*id", "v", relation_id=relation_id)
            await feed.apply(remote.relation, *(remote.insert(number, value) for number in range(10)))
            assert any_target_db.fetch(f"SELECT DISTINCT v::text FROM {name}") == [(value,)]
    assert len(sent) == 2


async def test_texts_of_sets_are_converted_to_the_encoding_of_the_target(target_db: Database, sent: Sent) -> None:
    name = f"{target_db.name}_latin1"
    target_db.execute(f"CREATE DATABASE {name} TEMPLATE template0 ENCODING LATIN1 LC_COLLATE 'C' LC_CTYPE 'C'")
    try:
        latin1 = Database(target_db.server, name)
        latin1.execute("CREATE TABLE t (id int PRIMARY KEY, v text, w varchar(3), c char(3), b boolean, n smallint, l text[])")
        remote = Remote("t", "*id", "v", "w", "c", "b", "n", "l")
        values = ("é", "ééé", "é", "t", "-7", "{é,NULL}")
        rows = [remote.insert(number, *values) for number in range(10)]
        async with opened(latin1) as feed:
            await feed.apply(remote.relation, *rows, remote.insert(10, *[None] * 6))
            assert latin1.fetch("SELECT DISTINCT v, w, c, b, n, l FROM t WHERE id < 10") == [("é", "ééé", "é  ", True, -7, ["é", None])]
            assert latin1.value("SELECT num_nulls(v, w, c, b, n, l) FROM t WHERE id = 10") == 6
            assert len(sent) == 1
            with pytest.raises(TargetError, match="22001"):
                await feed.apply(*(remote.insert(number, "é", "éééé", *values[2:]) for number in range(20, 30)))
        latin1.close()
    finally:
        drop_database(target_db.server, name)


async def test_dates_and_times_of_sets(target_db: Database, sent: Sent) -> None:
    moments = "SELECT g, timestamptz '1001-01-01' + g * interval '177 days 12:34:56.789012' FROM generate_series(0, 999) AS g"
    unusual = "VALUES (1000, 'infinity'::timestamptz), (1001, '0044-03-15 BC'), (1002, '25001-01-01'), (1003, NULL)"
    target_db.execute(f"CREATE TABLE s AS SELECT id, m::date AS d, m::timestamp AS t, m FROM ({moments} UNION ALL {unusual}) AS x(id, m)")
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, d date, t timestamp(3), m timestamptz)")
    zones = ("UTC", "Asia/Kolkata", "Europe/London", "America/St_Johns")
    remote = Remote("t", "*id", "d", "t", "m")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation)
        for number, zone in enumerate(zones):
            target_db.execute(f"SET timezone = '{zone}'")
            rows = target_db.fetch(f"SELECT id, d::text, t::text, m::text FROM s WHERE id % 4 = {number} ORDER BY id")
            await feed.apply(*(remote.insert(*row) for row in rows))
    assert (
        target_db.value("SELECT count(*) FROM s JOIN t USING (id) WHERE (s.d, s.t::timestamp(3), s.m) IS NOT DISTINCT FROM (t.d, t.t, t.m)")
        == 1004
    )
    assert len(sent) == 4


async def test_triggers_run_with_the_planner_settings_of_the_session(target_db: Database, sent: Sent) -> None:
    target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 9);
        CREATE TABLE seen (settings text); CREATE TABLE watched (id int);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            INSERT INTO public.seen VALUES (current_setting('enable_hashjoin') || current_setting('enable_mergejoin')); RETURN NULL; END $$;
        CREATE TRIGGER look AFTER INSERT ON watched FOR EACH ROW EXECUTE FUNCTION look();
        ALTER TABLE watched ENABLE ALWAYS TRIGGER look;
    """)
    remote, watched = Remote("t", "*id"), Remote("watched", "*id", relation_id=1)
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, watched.relation, *(remote.delete(number) for number in range(1, 10)), watched.insert(1))
        assert len(sent) == 1
        assert target_db.fetch("SELECT settings FROM seen") == [("onon",)]


@pytest.mark.parametrize(
    "alter",
    [
        "CREATE TRIGGER look AFTER INSERT ON low FOR EACH ROW EXECUTE FUNCTION look(); ALTER TABLE low ENABLE ALWAYS TRIGGER look",
        "ALTER TABLE low ADD CHECK (rows_now() >= 0)",
        "ALTER TABLE t ADD CHECK (rows_now() >= 0)",
    ],
    ids=["trigger of a partition", "constraint of a partition", "constraint"],
)
async def test_table_that_becomes_watched(any_target_db: Database, sent: Sent, alter: str) -> None:
    any_target_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY) PARTITION BY RANGE (id); CREATE TABLE low PARTITION OF t FOR VALUES FROM (0) TO (100);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
        CREATE FUNCTION rows_now() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RETURN (SELECT count(*) FROM public.t); END';
    """)
    remote = Remote("t", "*id")
    async with opened(any_target_db) as feed:
        await feed.apply(remote.relation, *(remote.insert(number) for number in range(10)))
        assert len(sent) == 1
        any_target_db.execute(alter)
        for first in (10, 20):
            await feed.apply(*(remote.insert(number) for number in range(first, first + 10)))
        # the first one was rolled back
        assert len(sent) == 2
        assert any_target_db.value("SELECT count(*) FROM t") == 30


async def test_misses_of_prepared_transactions_count(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        for expected in (1, 2, 2):
            prepared = await feed.prepare(remote.relation, *(remote.delete(number) for number in range(8)))
            await feed.opened.commit_prepared(feed.commit_prepared(prepared))
            assert len(sent) == expected
        assert feed.sink.statistics.confl_delete_missing == 24


async def test_misses_of_parallel_transactions_count(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    remote = Remote("t", "*id")
    records = [encode(replace(remote.relation, xid=900))]
    records += [encode(Delete(remote.relation_id, row(number), None, 900)) for number in range(8)]
    async with opened(target_db) as feed:
        feed.subscribe("public", "t")
        for _ in range(2):
            parallel = await feed.opened.open_parallel(900, lambda _: True)
            with pytest.raises(TargetError, match="misses rows"):
                await parallel.apply(records)
            await parallel.roll_back()
        assert len(sent) == 2
        parallel = await feed.opened.open_parallel(900, lambda _: True)
        await parallel.apply(records)
        await parallel.roll_back()
        assert len(sent) == 2


async def test_miss_of_a_parallel_transaction_counts_once(target_db: Database, sent: Sent, attempts: list[bool]) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 99)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        feed.subscribe("public", "t")
        await feed.apply(remote.relation)
        missing = feed.transaction(*(remote.delete(number) for number in range(8)))
        parallel = await feed.opened.open_parallel(missing.xid, lambda _: True, streamed=False)
        with pytest.raises(TargetError, match="misses rows"):
            await parallel.apply(missing.records)
        await parallel.roll_back()
        await feed.opened.apply(feed.batch(missing))
        assert target_db.value("SELECT count(*) FROM t") == 92
        await feed.apply(*(remote.delete(number) for number in range(8, 16)))
        assert target_db.value("SELECT count(*) FROM t") == 84
        assert len(sent) == 2
        # the transaction is applied without sets at once
        assert attempts == [True, False, True]


async def test_interrupted_set_names_its_transactions(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 20)")
    remote = Remote("t", "*id")
    async with opened(target_db) as feed:
        first = feed.transaction(remote.relation, *(remote.delete(number) for number in range(1, 11)))
        last = feed.transaction(*(remote.delete(number) for number in range(11, 21)))
        with target_db.connect() as other, other.transaction():
            other.execute("SELECT FROM t WHERE id = 15 FOR UPDATE")
            applying = asyncio.create_task(feed.opened.apply(feed.batch(first, last)))
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
            await eventually(target_db, waiting, 1)
            target_db.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
            with pytest.raises(TargetUnavailable) as raised:
                await applying
        assert len(sent) == 1
        (note,) = raised.value.__notes__
        assert f"in transaction {first.xid}, finished at {first.final_lsn}, or in a later one up to transaction {last.xid}" in note


async def test_very_large_rows_are_sent_alone(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v")
    async with opened(target_db) as feed:
        rows = [remote.insert(number, "x" * (600_000 if number > 6 else 9)) for number in range(10)]
        await feed.apply(remote.relation, *rows)
        assert not sent
        assert target_db.fetch("SELECT length(v), count(*) FROM t GROUP BY 1 ORDER BY 1") == [(9, 7), (600_000, 3)]


async def test_values_are_not_all_read_before_they_are_sent(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    remote = Remote("t", "*id", "v", types={"id": 23})
    async with opened(target_db) as feed:
        value = "x" * 16_000
        changes = [one for number in range(1000) for one in (remote.insert(number, value), remote.update(number, value))]
        transaction = feed.transaction(remote.relation, *changes)
        del changes
        tracemalloc.start()
        try:
            await feed.opened.apply(feed.batch(transaction))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert transaction.size > 30_000_000
    assert peak < 10_000_000
    assert {statement.message_type for statement in sent} == {"INSERT", "UPDATE"}


async def test_key_with_another_collation_than_its_column(target_db: Database, sent: Sent) -> None:
    """The rows are those that are equal in the index, and the index finds them."""
    target_db.execute("""
        CREATE TABLE t (k text COLLATE "C" NOT NULL, v int);
        CREATE UNIQUE INDEX i ON t (k COLLATE "POSIX"); ALTER TABLE t REPLICA IDENTITY USING INDEX i;
        INSERT INTO t SELECT g, 0 FROM generate_series(1, 100) AS g;
    """)
    remote = Remote("t", "*k", "v")
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.update(1, 1), remote.delete(2, None))
        await feed.apply(*(remote.update(number, 1) for number in range(3, 20)))
        assert len(sent) == 1
    target_db.wait("SELECT n_tup_upd + n_tup_del FROM pg_stat_user_tables WHERE relname = 't'", 19)
    assert target_db.value("SELECT idx_tup_fetch + seq_tup_read FROM pg_stat_user_tables WHERE relname = 't'") < 30
    # afterwards: it reads rows, too
    assert target_db.fetch("SELECT count(*), sum(v) FROM t") == [(99, 18)]


async def test_changes_of_several_tables_become_one_set_per_table_and_kind(target_db: Database, sent: Sent) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    tables = [Remote(name, "*id", "v", types={"id": 23}, relation_id=number) for number, name in enumerate("tu")]
    async with opened(target_db) as feed:
        changes: list[Message] = [remote.relation for remote in tables]
        for number in range(40):
            for remote in tables:
                changes.append(remote.insert(number, "new"))
                # the rows of the other kinds are those before
                changes += [remote.update(number - 1, "updated")] if number % 4 == 1 else []
                changes += [remote.delete(number - 2, None)] if number % 4 == 3 else []
        await feed.apply(*changes)
        assert sorted((str(one.table), one.message_type) for one in sent) == [
            (f"public.{name}", kind) for name in "tu" for kind in ("DELETE", "INSERT", "UPDATE")
        ]
        assert target_db.fetch("SELECT v, count(*) FROM t GROUP BY 1 ORDER BY 1") == [("new", 20), ("updated", 10)]
        statistics = feed.sink.statistics
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (80, 20, 20)
