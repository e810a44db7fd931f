"""The PostgreSQL sink: prepared transactions, in all orders, and a crash of the subscriber between any two steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from subscriber.errors import ApplyError, DataLossError, TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.testing.server import EmbeddedServer
from subscriber.transaction.model import PreparedTransaction
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.sink_postgres import START, Feed, Remote, opened


def gids(database: Database) -> list[str]:
    return [gid for (gid,) in database.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database() ORDER BY gid")]


def create(database: Database) -> Remote:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    return Remote("t", "*id")


def ids(database: Database) -> list[int]:
    return [number for (number,) in database.fetch("SELECT id FROM t ORDER BY id")]


def move_back(database: Database, lsn: Lsn) -> None:
    """As if the crash had come before the position moved."""
    database.execute(f"""UPDATE subscriber."position" SET remote_lsn = '{lsn}'""")


@pytest.mark.matrix
async def test_prepare_and_commit(any_target_db: Database) -> None:
    remote = create(any_target_db)
    async with opened(any_target_db) as feed:
        prepared = await feed.prepare(remote.relation, remote.insert(1))
        assert gids(any_target_db) == [f"pg_gid_{feed.oid}_{prepared.xid}"]
        assert feed.position() == prepared.end_lsn == feed.durable[-1]
        assert ids(any_target_db) == []
        # the position is free for transactions in between
        between = await feed.apply(remote.insert(2))
        assert feed.position() == between.end_lsn
        message = feed.commit_prepared(prepared)
        await feed.opened.commit_prepared(message)
        assert gids(any_target_db) == []
        assert ids(any_target_db) == [1, 2]
        assert feed.position() == message.end_lsn == feed.durable[-1]
        assert any_target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0
        assert (feed.sink.statistics.inserts, feed.sink.statistics.transactions) == (2, 2)


async def test_prepare_and_rollback(any_target_db: Database) -> None:
    remote = create(any_target_db)
    async with opened(any_target_db) as feed:
        prepared = await feed.prepare(remote.relation, remote.insert(1))
        message = feed.rollback_prepared(prepared)
        await feed.opened.rollback_prepared(message)
        assert (gids(any_target_db), ids(any_target_db)) == ([], [])
        assert feed.position() == message.rollback_end_lsn == feed.durable[-1]
        await feed.opened.rollback_prepared(message)
        await feed.apply(remote.insert(1))
        assert ids(any_target_db) == [1]


async def test_lone_rollback(target_db: Database) -> None:
    async with opened(target_db) as feed:
        message = feed.rollback_prepared(feed.transaction())
        await feed.opened.rollback_prepared(message)
        assert feed.position() == message.rollback_end_lsn


async def test_prepared_late_right_before_its_commit(target_db: Database) -> None:
    """A PREPARE older than the slot's two-phase start comes whole, immediately before its COMMIT PREPARED, with its old LSN."""
    remote = create(target_db)
    async with opened(target_db) as feed:
        late = feed.transaction(remote.relation, remote.insert(1))
        other = await feed.apply(remote.relation, remote.insert(2))
        assert late.end_lsn < other.end_lsn
        await feed.opened.prepare(PreparedTransaction(late, "g"), feed.gate)
        assert feed.position() == other.end_lsn
        assert len(gids(target_db)) == 1
        message = feed.commit_prepared(late)
        # crash after the PREPARE: both are sent again
        await feed.reopen()
        await feed.opened.prepare(PreparedTransaction(late, "g"), feed.gate)
        target_db.execute(f"COMMIT PREPARED 'pg_gid_{feed.oid}_{late.xid}'")
        # crash after COMMIT PREPARED: both are sent again
        await feed.reopen()
        await feed.opened.prepare(PreparedTransaction(late, "g"), feed.gate)
        await feed.opened.commit_prepared(message)
        assert (gids(target_db), ids(target_db)) == ([], [1, 2])
        assert feed.position() == message.end_lsn
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0


async def test_several_at_once_and_an_empty_one(target_db: Database) -> None:
    remote = create(target_db)
    async with opened(target_db) as feed:
        first = await feed.prepare(remote.relation, remote.insert(1))
        empty = await feed.prepare()
        third = await feed.prepare(remote.insert(3))
        hidden = feed.transaction(remote.insert(4))
        feed.closed = {"public.t"}
        target_db.execute("UPDATE subscriber.pg_subscription_rel SET srsubstate = 'f'")
        await feed.opened.prepare(PreparedTransaction(hidden, "g"), feed.gate)
        feed.closed = set()
        assert len(gids(target_db)) == 4
        for transaction in (third, empty, hidden):
            await feed.opened.commit_prepared(feed.commit_prepared(transaction))
        await feed.opened.rollback_prepared(feed.rollback_prepared(first))
        assert (gids(target_db), ids(target_db)) == ([], [3])
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0


@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_every_message_may_come_again_after_a_crash(target_db: Database, end: str) -> None:
    remote = create(target_db)
    async with opened(target_db) as feed:
        prepared = await feed.prepare(remote.relation, remote.insert(1))

        # PREPARE again, with the position moved and not
        for crashed_before_the_position in (False, True):
            if crashed_before_the_position:
                move_back(target_db, START)
            await feed.reopen()
            await feed.opened.prepare(PreparedTransaction(prepared, "g"), feed.gate)
            assert len(gids(target_db)) == 1
            assert feed.position() == prepared.end_lsn

        # what was passed over described the relation: the publisher does not do it again
        await feed.apply(remote.insert(2))

        if end == "commit":
            message = feed.commit_prepared(prepared)
            # between COMMIT PREPARED and the position
            await feed.reopen()
            target_db.execute(f"COMMIT PREPARED 'pg_gid_{feed.oid}_{prepared.xid}'")
            await feed.reopen()
            await feed.opened.commit_prepared(message)
            end_lsn = message.end_lsn
            # everything done, and once more
            await feed.reopen()
            await feed.opened.commit_prepared(message)
        else:
            gone = feed.rollback_prepared(prepared)
            target_db.execute(f"ROLLBACK PREPARED 'pg_gid_{feed.oid}_{prepared.xid}'")
            await feed.reopen()
            await feed.opened.rollback_prepared(gone)
            end_lsn = gone.rollback_end_lsn
            await feed.reopen()
            await feed.opened.rollback_prepared(gone)
        assert gids(target_db) == []
        assert ids(target_db) == ([1, 2] if end == "commit" else [2])
        assert feed.position() == end_lsn
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0


async def test_prepared_transaction_rolled_back_in_the_target(target_db: Database) -> None:
    remote = create(target_db)
    async with opened(target_db) as feed:
        prepared = await feed.prepare(remote.relation, remote.insert(1))
        target_db.execute(f"ROLLBACK PREPARED 'pg_gid_{feed.oid}_{prepared.xid}'")
        with pytest.raises(
            DataLossError, match=f'prepared transaction with identifier "pg_gid_{feed.oid}_{prepared.xid}" does not exist'
        ) as caught:
            await feed.opened.commit_prepared(feed.commit_prepared(prepared))
        assert caught.value.hint
        assert feed.position() == prepared.end_lsn


async def test_refused_rows_leave_nothing_prepared(target_db: Database) -> None:
    remote = create(target_db)
    async with opened(target_db) as feed:
        await feed.apply(remote.relation, remote.insert(1))
        before = feed.position()
        with pytest.raises(ApplyError, match="duplicate key"):
            await feed.prepare(remote.insert(2), remote.insert(1))
        assert gids(target_db) == []
        assert feed.position() == before
        prepared = await feed.prepare(remote.insert(2))
        assert gids(target_db) == [f"pg_gid_{feed.oid}_{prepared.xid}"]


async def test_position_moves_while_a_transaction_is_prepared_after_a_reopen(target_db: Database) -> None:
    remote = create(target_db)
    async with opened(target_db) as feed:
        prepared = await feed.prepare(remote.relation, remote.insert(1))
        await feed.reopen()
        await feed.opened.advance(Lsn(feed.lsn + 0x1000))
        feed.lsn += 0x1000
        await feed.opened.commit_prepared(feed.commit_prepared(prepared))
        assert ids(target_db) == [1]


async def test_target_without_prepared_transactions(make_server: Callable[..., EmbeddedServer]) -> None:
    server = make_server(18, max_prepared_transactions="0")
    with fresh_database(ServerAddress(server.dsn(), 18), "tgt") as database:
        remote = create(database)
        feed = Feed(database)
        await feed.open()
        with pytest.raises(TargetError, match="prepared transactions are disabled in the target") as caught:
            await feed.prepare(remote.relation, remote.insert(1))
        assert caught.value.sqlstate == "55000"
        assert "max_prepared_transactions" in (caught.value.hint or "")
        assert feed.position() == START
        findings = await feed.sink.check([], two_phase=True)
        assert ["prepared transactions are disabled" in finding.message for finding in findings] == [True]
        assert await feed.sink.check([], two_phase=False) == []
        await feed.opened.close()
