"""Feedback to the publisher: positions while idle, answers while busy, and timeouts on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import PublisherUnavailable, SubscriberError
from subscriber.protocol.lsn import Lsn
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.observation import acknowledged, all_ready, confirmed, eventually, slot_of, until
from tests.support.replica import QUICK, Replica, replica

MakeServer = Callable[..., EmbeddedServer]

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "SELECT id, md5(v) FROM t ORDER BY id"
POSITION = 'SELECT remote_lsn::text FROM subscriber."position" WHERE srrelid = 0'

SHUTDOWN_SECONDS = 25.0
"""A fast shutdown takes a fraction of a second here; who is not answered waits for wal_sender_timeout, a minute."""


def make_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")


def walsender(publisher: Database) -> int | None:
    found = publisher.value(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher)}'")
    return None if found is None else int(found)


def errors(found: Replica) -> list[SubscriberError]:
    """The last one, if any."""
    error = found.subscription.status.last_error
    return [] if error is None else [error]


async def heard_for(publisher: Database, seconds: float) -> None:
    """Wait until replies have been sent for so long: while they are, the publisher regards the subscriber as alive."""
    reply = f"FROM pg_stat_replication WHERE application_name = '{slot_of(publisher)}' AND state = 'streaming'"
    start = publisher.value(f"SELECT greatest(max(reply_time), now())::text {reply}")
    await eventually(publisher, f"SELECT max(reply_time) >= '{start}'::timestamptz + interval '{seconds} s' {reply}", True)


@pytest.mark.parametrize("synchronous_commit", ["off", pytest.param("on", marks=pytest.mark.endurance)])
async def test_idle_database_of_a_busy_cluster(publisher18_db: Database, target_db: Database, synchronous_commit: Any) -> None:
    make_tables(publisher18_db, target_db)
    with fresh_database(publisher18_db.server, "busy") as busy:
        busy.execute("CREATE TABLE b (id int, v text)")
        publisher18_db.execute("CREATE TABLE unpublished (id int, v text)")
        async with replica(publisher18_db, target_db, synchronous_commit=synchronous_commit) as found:
            await all_ready(found)
            publisher18_db.execute("INSERT INTO t VALUES (1, 'a')")
            await found.same(ROWS)
            inserts = found.subscription.status.statistics.inserts
            for database, table in ((busy, "b"), (publisher18_db, "unpublished"), (busy, "b")):
                database.execute(f"INSERT INTO {table} SELECT g, repeat('x', 200) FROM generate_series(1, 5000) AS g")
                # without a wait for an LSN: the feedback has to be sent unasked
                await acknowledged(publisher18_db, busy.current_lsn())
            # never more acknowledged than the target knows
            assert confirmed(publisher18_db) <= Lsn.parse(target_db.value(POSITION))
            assert found.subscription.status.statistics.inserts == inserts
            publisher18_db.execute("INSERT INTO t VALUES (2, 'b')")
            await found.same(ROWS)


async def test_shutdown_and_crash_of_the_publisher(make_server: MakeServer, target_db: Database) -> None:
    server = make_server(18)
    server.createdb("pub")
    address = ServerAddress(server.dsn(), 18)

    async def stop(mode: Any) -> float:
        began = time.monotonic()
        await asyncio.to_thread(server.stop, mode)
        return time.monotonic() - began

    with contextlib.closing(Database(address, "pub")) as publisher:
        make_tables(publisher, target_db)
        async with replica(publisher, target_db) as found:
            await all_ready(found)
            await found.caught_up()

            async def down() -> None:
                await until(lambda: not found.subscription.status.streaming, "the stream ended")

            async def up_again(number: int) -> None:
                await asyncio.to_thread(server.start)
                with contextlib.closing(Database(address, "pub")) as again:
                    again.execute(f"INSERT INTO t VALUES ({number}, 'after')")
                    await found.subscription.wait_for(again.current_lsn(), 30)
                    assert target_db.fetch(ROWS) == again.fetch(ROWS)

            # idle
            assert await stop("fast") < SHUTDOWN_SECONDS
            await down()
            await up_again(1)
            # right after writes, with a large transaction in progress, and with another one just committed
            with (
                contextlib.closing(Database(address, "pub")) as busy,
                contextlib.closing(busy.connect()) as session,
            ):
                session.execute("BEGIN")
                session.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(100000, 100500) AS g")
                busy.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1000, 6000) AS g")
                for number in range(100, 200):
                    busy.execute(f"INSERT INTO t VALUES ({number}, 'right before')")
                assert await stop("fast") < SHUTDOWN_SECONDS
            await down()
            # everything was sent, confirmed and is there
            await until(lambda: target_db.value("SELECT count(*) FROM t") == 1 + 5001 + 100, "the rows of before the shutdown")
            await up_again(2)
            # a crash
            with contextlib.closing(Database(address, "pub")) as busy:
                busy.execute("INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(10000, 15000) AS g")
                await stop("immediate")
            await down()
            await up_again(3)
            assert isinstance(found.subscription.status.last_error, PublisherUnavailable)


async def test_silent_publisher(publisher18_db: Database, target_db: Database) -> None:
    make_tables(publisher18_db, target_db)
    settings = replace(QUICK, wal_receiver_timeout=3.0, wal_receiver_status_interval=20.0)
    async with replica(publisher18_db, target_db, settings=settings) as found:
        await all_ready(found)
        await found.caught_up()
        # idle for longer than the timeout: the publisher is asked at half of it, and answers
        pid = walsender(publisher18_db)
        assert pid is not None
        await heard_for(publisher18_db, 6)
        assert errors(found) == []
        assert walsender(publisher18_db) == pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await until(lambda: bool(errors(found)), "an error")
            (error,) = errors(found)
            assert isinstance(error, PublisherUnavailable)
            assert "terminating logical replication worker due to timeout" in error.one_line()
            publisher18_db.execute("INSERT INTO t VALUES (1, 'while silent')")
            assert not found.subscription.status.streaming
        finally:
            os.kill(pid, signal.SIGCONT)
        assert len(await found.same(ROWS)) == 1
        assert walsender(publisher18_db) not in {None, pid}


async def test_slow_apply_does_not_lose_the_connection(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher18_db, target_db)
    publisher18_db.execute(f"ALTER DATABASE {publisher18_db.name} SET wal_sender_timeout = '4s'")
    settings = replace(QUICK, wal_receiver_status_interval=10.0, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path))
    async with replica(publisher18_db, target_db, settings=settings) as found:
        await all_ready(found)
        await found.caught_up()
        pid = walsender(publisher18_db)
        with target_db.connect() as blocker:
            blocker.execute("BEGIN; LOCK TABLE t")
            publisher18_db.execute("INSERT INTO t VALUES (1, 'waits')")
            waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 't'::regclass"
            await eventually(target_db, waiting, True)
            await acknowledged(publisher18_db, found.subscription.status.flushed)
            before = confirmed(publisher18_db)
            # little is waiting: the socket is read, and requests for a reply are seen
            await heard_for(publisher18_db, 6)
            # much is waiting: the socket is not read any more
            for first in range(1000, 41000, 1000):
                # in a thread: the loop has to run to answer the publisher
                await asyncio.to_thread(
                    publisher18_db.execute, f"INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series({first}, {first + 99}) AS g"
                )
            await heard_for(publisher18_db, 6)
            assert walsender(publisher18_db) == pid
            # nothing of it is acknowledged
            assert confirmed(publisher18_db) == before
            assert found.subscription.status.flushed <= before
            blocker.execute("COMMIT")
        assert len(await found.same(ROWS)) == 1 + 40 * 100
        assert walsender(publisher18_db) == pid
        assert found.subscription.status.last_error is None


async def test_synchronous_standby(make_server: MakeServer, target_db: Database) -> None:
    server = make_server()
    server.createdb("pub")
    with contextlib.closing(Database(ServerAddress(server.dsn(), 18), "pub")) as publisher:
        make_tables(publisher, target_db)
        async with replica(publisher, target_db, synchronous_commit="on") as found:
            await all_ready(found)
            await found.caught_up()
            publisher.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{slot_of(publisher)}'")
            publisher.execute("SELECT pg_reload_conf()")
            state = f"SELECT sync_state FROM pg_stat_replication WHERE application_name = '{slot_of(publisher)}'"
            await eventually(publisher, state, "sync")
            # commits wait once the checkpointer has read the setting, which it does before a checkpoint
            publisher.execute("CHECKPOINT")
            for number, level in enumerate(("on", "remote_apply", "remote_write")):
                with publisher.connect() as session, target_db.connect() as blocker:
                    session.execute(f"SET synchronous_commit = {level}".encode())
                    blocker.execute("BEGIN; LOCK TABLE t")
                    committing = asyncio.create_task(
                        asyncio.to_thread(session.execute, f"INSERT INTO t VALUES ({number}, 'sync')".encode())
                    )
                    await eventually(target_db, "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = 't'::regclass", True)
                    if level != "remote_write":
                        await eventually(publisher, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'", 1)
                        assert not committing.done()
                        blocker.execute("COMMIT")
                    await asyncio.wait_for(committing, 30)
                    if level != "remote_write":
                        # no waiting here: the commit's return is the promise
                        assert target_db.value(f"SELECT v FROM t WHERE id = {number}") == "sync"
            assert len(await found.same(ROWS)) == 3
            publisher.execute("ALTER SYSTEM RESET synchronous_standby_names")
            publisher.execute("SELECT pg_reload_conf()")
