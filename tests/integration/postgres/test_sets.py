"""Runs of changes that are applied as sets: the results are those of applying them one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from subscriber.errors import TargetError
from subscriber.protocol.messages import Message
from subscriber.sinks.postgres.apply import runs
from subscriber.sinks.postgres.session.pipeline import Pipeline
from subscriber.sinks.postgres.session.statement import Statement
from tests.conftest import Servers
from tests.support.change_histories import TABLES, ChangeHistory
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.sink_postgres import Feed, Remote, opened

_NEVER = 10**9
BATCHES = 25
TABLE_NAMES = (
    *("plain", "typed", "arrays", "bin", "gen_rows", "more_rows", "part_low", "part_rest", "loose", "full_key", "uniq", "numeric_key"),
    *("bare", "seen", "each", "whole", "choosy", "few", "numbered"),
)


class Sent(list[Statement]):
    """The statements that were sent for sets."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Observes the pipeline."""
    found = Sent()
    send = Pipeline.send

    def observed(pipeline: Pipeline, statement: Statement, *arguments: Any, **more: Any) -> None:
        if statement.together:
            found.append(statement)
        send(pipeline, statement, *arguments, **more)

    monkeypatch.setattr(Pipeline, "send", observed)
    return found


@pytest.fixture
def other_target_db(servers: Servers, target_version: int) -> Iterator[Database]:
    """A second target."""
    with fresh_database(ServerAddress(servers.get("target", target_version).dsn(), target_version), "tgt") as database:
        yield database


@contextmanager
def shortest(rows: int) -> Iterator[None]:
    """The number of changes from which on a run is sent as a set."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_LEAST", rows)
        yield


def _rows(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    return {
        name: database.fetch(f'SELECT x FROM (SELECT t::text COLLATE "C" AS x FROM {name} AS t) AS r ORDER BY x') for name in TABLE_NAMES
    }


async def _apply(feed: Feed, batch: list[list[Message]], least: int) -> list[str]:
    """Apply a batch. Returns the error, without numbers that differ between the two targets."""
    with shortest(least):
        try:
            await feed.opened.apply(feed.batch(*(feed.transaction(*messages) for messages in batch)))
        except TargetError as error:
            texts = [type(error).__name__, str(error), str(error.sqlstate), *getattr(error, "__notes__", ())]
            return [re.sub(r"(pg_|transaction |in )\d+", r"\1#", text) for text in texts]
    return []


@pytest.mark.parametrize("seed", range(3))
async def test_random_histories_have_the_same_result(any_target_db: Database, other_target_db: Database, sent: Sent, seed: int) -> None:
    history = ChangeHistory(seed)
    for database in (any_target_db, other_target_db):
        database.execute(TABLES)
    failed = 0
    async with opened(any_target_db) as together, opened(other_target_db) as apart:
        for number in range(BATCHES):
            batch = history.batch()
            errors = await _apply(together, batch, 2)
            assert errors == await _apply(apart, batch, _NEVER), f"batch {number}"
            if errors:
                failed += 1
                history.failed()
            assert _rows(any_target_db) == _rows(other_target_db), f"batch {number}"
            assert together.sink.statistics == apart.sink.statistics, f"batch {number}"
    assert failed < BATCHES / 2
    assert {statement.message_type for statement in sent} == {"INSERT", "UPDATE", "DELETE"}
    assert len(sent) > BATCHES


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
