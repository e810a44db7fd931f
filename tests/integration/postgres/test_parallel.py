"""The PostgreSQL sink: a streamed transaction applied before its end, and who may commit it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from subscriber.errors import SubscriptionInUse, TargetError, TargetUnavailable
from subscriber.interfaces import ParallelTransaction, TableName
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Insert
from subscriber.sinks.postgres.parallel.transaction import MOST_SAVEPOINTS, PostgresParallelTransaction
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.locks import parallel_key
from subscriber.sinks.postgres.tables import relation_map, table_reader
from subscriber.sinks.postgres.tables.relation_mapping import TargetTable
from subscriber.sinks.postgres.tables.table_reader import read_table
from subscriber.transaction.model import Transaction
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import eventually, lock_refused
from tests.support.sink_postgres import NAME, Feed, Remote, opened, row

TABLE = "CREATE TABLE t (id int PRIMARY KEY)"
REMOTE = Remote("t", "*id")
TOP = 900
NAMED = "FROM pg_stat_activity WHERE datname = current_database() AND application_name"


def records(first: int, count: int, xid: int = TOP) -> list[bytes]:
    inserts = [encode(Insert(REMOTE.relation_id, row(number), xid)) for number in range(first, first + count)]
    return [encode(replace(REMOTE.relation, xid=xid)), *inserts]


def streamed(feed: Feed, given: list[bytes]) -> Transaction:
    found = feed.transaction()
    found.xid, found.prefixed, found.records = TOP, True, given
    return found


@pytest.fixture
def read_tables(monkeypatch: pytest.MonkeyPatch) -> list[TableName]:
    """The tables of the target whose definitions were read."""
    found: list[TableName] = []

    async def observed(reader: CatalogReader, name: TableName, **more: Any) -> TargetTable:
        found.append(name)
        return await read_table(reader, name, **more)

    async def observed_ahead(reader: CatalogReader, names: Collection[TableName], **more: Any) -> Mapping[TableName, TargetTable]:
        found.extend(names)
        return await table_reader.read_tables(reader, names, **more)

    monkeypatch.setattr(relation_map, "read_table", observed)
    monkeypatch.setattr(relation_map, "read_tables", observed_ahead)
    return found


async def begin(feed: Feed) -> ParallelTransaction:
    feed.subscribe("public", "t")
    return await feed.opened.open_parallel(TOP, lambda _: True)


@pytest.mark.parametrize("xid", [TOP, None], ids=["streamed", "not streamed"])
async def test_relations_that_did_not_change_keep_their_targets(target_db: Database, read_tables: list[TableName], xid: int | None) -> None:
    target_db.execute(TABLE)
    target_db.execute("CREATE TABLE other (id int PRIMARY KEY)")
    other = Remote("other", "*id", relation_id=4712)
    async with opened(target_db) as feed:
        await feed.apply(REMOTE.relation, REMOTE.insert(1), other.relation, other.insert(1))
        parallel = await feed.opened.open_parallel(TOP, lambda _: True, streamed=xid is not None)
        transaction = feed.transaction(replace(REMOTE.relation, xid=xid), Insert(REMOTE.relation_id, row(2), xid))
        transaction.prefixed = xid is not None
        await parallel.apply(transaction.records)
        assert await parallel.commit(transaction)
        await parallel.roll_back()
        read = len(read_tables)
        await feed.apply(REMOTE.insert(3), other.insert(3))
        assert read_tables[read:] == []
        # a change of the publisher's table is adopted
        wider = Remote("t", "*id", "v")
        target_db.execute("ALTER TABLE t ADD v int")
        parallel = await feed.opened.open_parallel(TOP, lambda _: True, streamed=xid is not None)
        transaction = feed.transaction(replace(wider.relation, xid=xid), Insert(wider.relation_id, row(4, 4), xid))
        transaction.prefixed = xid is not None
        await parallel.apply(transaction.records)
        assert await parallel.commit(transaction)
        await parallel.roll_back()
        await feed.apply(wider.insert(5, 5), other.insert(5))
        assert target_db.fetch("SELECT id, v FROM t ORDER BY id") == [(1, None), (2, None), (3, None), (4, 4), (5, 5)]


async def test_moves_the_position_with_the_rows(any_target_db: Database) -> None:
    any_target_db.execute(TABLE)
    async with opened(any_target_db) as feed:
        parallel = await begin(feed)
        await parallel.apply(records(1, 10))
        await parallel.apply(records(11, 5, xid=901))
        await parallel.apply(records(20, 5, xid=902))
        await parallel.cut(11)
        await parallel.apply(records(11, 1, xid=903))
        given = [*records(1, 10), *records(11, 1, xid=903)]
        assert any_target_db.value("SELECT count(*) FROM t") == 0
        transaction = streamed(feed, given)
        assert await parallel.commit(transaction)
        await parallel.roll_back()
        assert any_target_db.fetch("SELECT id FROM t ORDER BY id") == [(number,) for number in range(1, 12)]
        assert feed.position() == transaction.end_lsn
        assert feed.durable[-1] == transaction.end_lsn
        assert (feed.sink.statistics.inserts, feed.sink.statistics.parallel_transactions) == (11, 1)
        # what was described there is known
        await feed.apply(REMOTE.insert(99))
        # once more, as after a crash: it is passed over
        again = await feed.opened.open_parallel(TOP, lambda _: True)
        await again.apply([records(50, 1)[0]])
        await again.apply([])
        assert not await again.commit(streamed_again(transaction))
        await again.roll_back()
        assert any_target_db.value("SELECT count(*) FROM t") == 12
    await eventually(any_target_db, f"SELECT count(*) {NAMED} LIKE '{NAME}%'", 0)


async def test_prepared_transaction_is_not_applied_in_parallel_again(target_db: Database) -> None:
    """A publisher may stream it once more; what that locked would stay so until its COMMIT PREPARED."""
    target_db.execute(TABLE)
    async with opened(target_db) as feed:
        feed.xid = TOP - 1
        prepared = await feed.prepare(REMOTE.relation, REMOTE.insert(1))

        async def is_refused() -> None:
            for _ in range(3):
                with pytest.raises(TargetError, match="transaction 900 is prepared in the target already"):
                    await begin(feed)
            # each session was given back
            await eventually(target_db, f"SELECT count(*) {NAMED} LIKE '%parallel apply'", 1)

        await is_refused()
        # as after a crash behind COMMIT PREPARED: the position has not moved
        ((gid,),) = target_db.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")
        target_db.execute(f"COMMIT PREPARED '{gid}'")
        await is_refused()
        await feed.opened.commit_prepared(feed.commit_prepared(prepared))
        await (await begin(feed)).roll_back()


def streamed_again(transaction: Transaction) -> Transaction:
    transaction.records = transaction.records[:1]
    return transaction


async def test_not_all_records(target_db: Database) -> None:
    target_db.execute(TABLE)
    async with opened(target_db) as feed:
        parallel = await begin(feed)
        await parallel.apply(records(1, 10))
        with pytest.raises(TargetError, match="has no savepoint"):
            await parallel.cut(5)
        assert not await parallel.commit(streamed(feed, records(1, 11)))
        await parallel.roll_back()
        assert target_db.value("SELECT count(*) FROM t") == 0


@pytest.mark.endurance
async def test_too_many_savepoints(target_db: Database) -> None:
    target_db.execute(TABLE)
    async with opened(target_db) as feed:
        parallel = await begin(feed)
        many = [record for number in range(MOST_SAVEPOINTS) for record in records(number, 1, xid=TOP + 1 + number)]
        await parallel.apply(many)
        with pytest.raises(TargetError, match="too many subtransactions"):
            await parallel.apply(records(-1, 1, xid=TOP - 1))
        await parallel.roll_back()
        await eventually(target_db, f"SELECT count(*) {NAMED} LIKE '%parallel apply' AND state <> 'idle'", 0)


async def test_savepoints_that_were_cut_off_do_not_pile_up(target_db: Database) -> None:
    target_db.execute(TABLE)
    nested = "SELECT count(*) FROM pg_backend_memory_contexts WHERE name = 'CurTransactionContext'"
    async with opened(target_db) as feed:
        parallel = await begin(feed)
        assert isinstance(parallel, PostgresParallelTransaction)
        await parallel.apply(records(1, 1))
        for number in range(20):
            await parallel.apply(records(100 + number, 1, xid=TOP + 1 + number))
            await parallel.cut(2)
        assert await parallel._session.fetch(nested) == [(0,)]
        await parallel.apply(records(200, 1, xid=TOP + 50))
        assert await parallel.commit(streamed(feed, [*records(1, 1), *records(200, 1, xid=TOP + 50)]))
        await parallel.roll_back()
        assert target_db.fetch("SELECT id FROM t ORDER BY id") == [(1,), (200,)]


async def test_nothing_is_rolled_back_after_a_commit(target_db: Database) -> None:
    """The server would warn in its log, once for each transaction."""
    target_db.execute(TABLE)
    async with opened(target_db) as feed:
        parallel = await begin(feed)
        assert isinstance(parallel, PostgresParallelTransaction)
        warnings: list[str | None] = []
        parallel._session.connection.add_notice_handler(lambda notice: warnings.append(notice.message_primary))
        await parallel.apply(records(1, 1))
        assert await parallel.commit(streamed(feed, records(1, 1)))
        await parallel.roll_back()
        assert warnings == []


async def test_cannot_commit_without_the_apply_session(target_db: Database) -> None:
    """Its process lives, but another one may have taken over: the writer's lock was the apply session's."""
    target_db.execute(TABLE)
    feed = Feed(target_db)
    await feed.open()
    before = feed.position()
    parallel = await begin(feed)
    await parallel.apply(records(1, 10))
    assert target_db.value(f"SELECT pg_terminate_backend(pid) {NAMED} = '{NAME}' AND backend_type = 'client backend'") is not None
    target_db.execute(f"SELECT pg_terminate_backend(pid) {NAMED} = '{NAME}'")
    await eventually(target_db, f"SELECT count(*) {NAMED} = '{NAME}'", 0)
    assert not await parallel.commit(streamed(feed, records(1, 10)))
    await parallel.roll_back()
    assert target_db.value("SELECT count(*) FROM t") == 0
    assert feed.position() == before
    with contextlib.suppress(TargetUnavailable):
        await feed.opened.close()


async def test_the_next_process_waits_for_commits_under_way(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subscriber.sinks.postgres.session.locks._WAIT", WAIT_SECONDS)
    monkeypatch.setattr("subscriber.sinks.postgres.session.locks._COMMIT_SECONDS", WAIT_SECONDS)
    async with opened(target_db) as feed:
        key = parallel_key(feed.oid)
    with contextlib.closing(target_db.connect()) as left:
        left.execute("SELECT pg_advisory_lock_shared(%s)", (key,))
        opening = asyncio.create_task(feed.sink.open(NAME, feed.durable.append))
        # it has the writer's lock, and goes no further
        writer = (
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock' "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        await eventually(target_db, writer, 1)
        await lock_refused(target_db)
        assert not opening.done()
        left.execute("SELECT pg_advisory_unlock_shared(%s)", (key,))
        feed.opened = await asyncio.wait_for(opening, WAIT_SECONDS)
    await feed.opened.close()


async def test_the_next_process_ends_what_does_not_end(target_db: Database) -> None:
    """Behind a proxy, a session that waits for a lock may never learn that its client is dead."""
    async with opened(target_db) as feed:
        key = parallel_key(feed.oid)
    with contextlib.closing(target_db.connect()) as left:
        left.execute("SELECT pg_advisory_lock_shared(%s)", (key,))
        feed.opened = await asyncio.wait_for(feed.sink.open(NAME, feed.durable.append), WAIT_SECONDS)
        assert feed.opened.state.position is not None
        with pytest.raises(psycopg.errors.AdminShutdown):
            left.execute("SELECT 1")
    await feed.opened.close()


async def test_a_session_of_another_user_is_not_ours_to_end(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subscriber.sinks.postgres.session.locks._WAIT", 1.0)
    monkeypatch.setattr("subscriber.sinks.postgres.session.locks._COMMIT_SECONDS", 0.2)
    role = f"somebody_{target_db.name}"
    async with opened(target_db) as feed:
        key = parallel_key(feed.oid)
    target_db.execute(f"CREATE ROLE {role} LOGIN SUPERUSER PASSWORD 'x'")
    try:
        with contextlib.closing(target_db.connect(user=role, password="x")) as other:
            other.execute("SELECT pg_advisory_lock_shared(%s)", (key,))
            with pytest.raises(SubscriptionInUse, match=f"is active for PID {other.info.backend_pid}"):
                await feed.sink.open(NAME, feed.durable.append)
            other.execute("SELECT 1")
    finally:
        target_db.execute(f"DROP ROLE {role}")


async def test_sessions_end_together(target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query ends all of them. The bug was that each had one of its own, and all of these together had five seconds."""
    fetch, queries = CatalogReader.fetch, list[str]()

    async def observed(self: CatalogReader, query: str, *parameters: object) -> list[dict[str, Any]]:
        queries.append(query)
        return await fetch(self, query, *parameters)

    monkeypatch.setattr(CatalogReader, "fetch", observed)
    target_db.execute(TABLE)
    async with opened(target_db) as feed:
        feed.subscribe("public", "t")
        for number in range(3):
            await feed.opened.open_parallel(TOP + number, lambda _: True)
        assert target_db.value(f"SELECT count(*) {NAMED} LIKE '%parallel apply'") == 3
    assert len([query for query in queries if "pg_terminate_backend" in query]) == 1
    await eventually(target_db, f"SELECT count(*) {NAMED} LIKE '%parallel apply'", 0)
