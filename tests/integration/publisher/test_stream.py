"""COPY BOTH with a live walsender: receiving, sending at the same time, cancelling, and every way it can end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psycopg
import pytest

from subscriber.config import SubscriptionOptions
from subscriber.errors import PublisherError, PublisherUnavailable, SlotInUse
from subscriber.protocol.capabilities import negotiate
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Commit, Insert
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.connection import WalReceiverConnection
from tests.support.database import Database, ServerAddress
from tests.support.streams import DEADLINE, collect, keepalive, start, status, streaming, transactions

MakeServer = Callable[..., EmbeddedServer]
ACTIVE = "SELECT active FROM pg_replication_slots WHERE slot_name = '{}'"


def slot_of(database: Database) -> str:
    """A publication of one table, and a slot."""
    slot = f"s_{database.name}"
    database.execute("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t")
    database.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    return slot


async def test_changes_are_sent_again_until_confirmed(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    publisher_db.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 3) g")
    publisher_db.execute("INSERT INTO t VALUES (4, 'y')")
    async with streaming(publisher_db, slot) as stream:
        first = await transactions(stream, 2)
    assert [message.new.values[0] for message in first if isinstance(message, Insert)] == [b"1", b"2", b"3", b"4"]
    commits = [message for message in first if isinstance(message, Commit)]
    async with streaming(publisher_db, slot) as stream:
        await stream.send(status(commits[0].end_lsn))
        confirmed = f"SELECT confirmed_flush_lsn = '{commits[0].end_lsn}' FROM pg_replication_slots WHERE slot_name = '{slot}'"
        await asyncio.to_thread(publisher_db.wait, confirmed, True)
    async with streaming(publisher_db, slot) as stream:
        again = await transactions(stream, 1)
    assert [message.new.values[0] for message in again if isinstance(message, Insert)] == [b"4"]


async def test_large_rows_and_many_rows(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    publisher_db.execute(
        "INSERT INTO t VALUES (0, repeat('0123456789', 2000000));"
        " INSERT INTO t SELECT g, repeat('z', g % 50) FROM generate_series(1, 20000) g"
    )
    async with streaming(publisher_db, slot) as stream:
        inserts = [message for message in await transactions(stream, 1) if isinstance(message, Insert)]
    assert inserts[0].new.values[1] == b"0123456789" * 2000000
    assert [int(message.new.values[0] or b"-1") for message in inserts] == list(range(20001))


async def test_cancelled_receive_loses_nothing(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    async with streaming(publisher_db, slot) as stream:
        received: list[bytes | None] = []
        writer = asyncio.create_task(asyncio.to_thread(_insert_one_by_one, publisher_db, 200))
        async with asyncio.timeout(DEADLINE):
            while len(received) < 200:
                receiving = asyncio.create_task(collect(stream, bool))
                for _ in range(len(received) % 4):
                    await asyncio.sleep(0)
                receiving.cancel()
                try:
                    messages = await receiving
                except asyncio.CancelledError:
                    messages = await collect(stream, bool)
                received += [message.new.values[0] for message in messages if isinstance(message, Insert)]
        await writer
    assert received == [b"%d" % number for number in range(200)]


def _insert_one_by_one(database: Database, count: int) -> None:
    with database.connect() as connection:
        for number in range(count):
            connection.execute("INSERT INTO t VALUES (%s)", (number,))


async def test_send_while_receive_waits(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    lsn = Lsn.parse(publisher_db.value(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{slot}'"))
    async with streaming(publisher_db, slot) as stream:
        await keepalive(stream)
        waiting = asyncio.create_task(keepalive(stream))
        await asyncio.gather(*(stream.send(status(lsn)) for _ in range(50)))
        await stream.send(status(lsn, reply=True))
        assert (await waiting).end_lsn >= lsn


async def test_other_tasks_run_while_the_publisher_is_busy(publisher18_db: Database) -> None:
    slot = slot_of(publisher18_db)
    publisher18_db.execute("INSERT INTO t SELECT g, repeat('z', 100) FROM generate_series(1, 30000) g")
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with streaming(publisher18_db, slot) as stream:
        task = asyncio.create_task(other())
        await transactions(stream, 1)
        task.cancel()
    assert turns > 3


async def test_close_ends_the_stream_and_releases_the_slot(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    stream = await start(publisher_db, slot)
    assert publisher_db.value(ACTIVE.format(slot)) is True
    await stream.close()
    await stream.close()
    publisher_db.wait(ACTIVE.format(slot), False)
    publisher_db.fetch(f"SELECT pg_drop_replication_slot('{slot}')")


@pytest.mark.matrix
async def test_close_in_the_middle_of_a_large_transaction(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    publisher_db.execute("INSERT INTO t SELECT g, repeat('z', 500) FROM generate_series(1, 100000) g")
    stream = await start(publisher_db, slot)
    await collect(stream, bool)
    async with asyncio.timeout(DEADLINE):
        await stream.close()
    await asyncio.to_thread(publisher_db.wait, ACTIVE.format(slot), False)


@pytest.mark.matrix
async def test_slot_in_use(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    async with streaming(publisher_db, slot):
        with pytest.raises(SlotInUse, match="is active for PID") as caught:
            await start(publisher_db, slot)
    assert caught.value.sqlstate == "55006"


async def test_slot_that_does_not_exist(publisher_db: Database) -> None:
    slot_of(publisher_db)
    with pytest.raises(PublisherError, match='replication slot "nothing" does not exist') as caught:
        await start(publisher_db, "nothing")
    assert caught.value.sqlstate == "42704"


@pytest.mark.matrix
async def test_unknown_publication_ends_the_stream(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    stream = await start(publisher_db, slot, "absent")
    publisher_db.execute("INSERT INTO t VALUES (1)")
    if publisher_db.version >= 18:
        # it skips it, with a warning in its own log
        end = publisher_db.current_lsn()
        while (await keepalive(stream)).end_lsn < end:
            pass
    else:
        with pytest.raises(PublisherError, match='publication "absent" does not exist'):
            await transactions(stream, 1)
    await stream.close()


async def test_terminated_walsender(publisher_db: Database) -> None:
    slot = slot_of(publisher_db)
    async with streaming(publisher_db, slot) as stream:
        publisher_db.fetch(f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot}'")
        with pytest.raises(PublisherUnavailable, match="terminating connection"):
            await collect(stream, lambda _: False)
        with pytest.raises(PublisherUnavailable):
            await stream.receive()
        with pytest.raises(PublisherUnavailable):
            await stream.send(status(Lsn(1)))


@pytest.mark.publisher(min=15, lacks="row filters")
@pytest.mark.matrix
async def test_row_values_stay_out_of_errors(publisher_db: Database) -> None:
    slot = f"s_{publisher_db.name}"
    publisher_db.execute("CREATE TABLE t (a int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t WHERE (make_date(a, 13, 1) IS NULL)")
    publisher_db.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    publisher_db.execute("INSERT INTO t VALUES (4711)")
    async with streaming(publisher_db, slot) as stream:
        with pytest.raises(PublisherError) as caught:
            await transactions(stream, 1)
    assert caught.value.sqlstate == "22008"
    assert "4711" not in caught.value.one_line()


async def test_fast_shutdown_of_the_publisher(make_server: MakeServer, publisher_version: int) -> None:
    server = make_server(publisher_version)
    database, slot = _prepare(server)
    async with streaming(database, slot) as stream:
        # a walsender that is still about to stream is ended like any other session
        await asyncio.to_thread(database.wait, "SELECT state FROM pg_stat_replication", "streaming")
        database.close()
        stopping = asyncio.create_task(asyncio.to_thread(server.stop, "fast"))
        last = Lsn(0)
        lost = None
        async with asyncio.timeout(DEADLINE):
            while lost is None:
                try:
                    last = (await keepalive(stream)).end_lsn
                    await stream.send(status(last))
                except PublisherUnavailable as error:
                    lost = error
        await stopping
        assert last > Lsn(0), lost


async def test_killed_publisher(make_server: MakeServer, publisher_version: int) -> None:
    server = make_server(publisher_version)
    database, slot = _prepare(server)
    async with streaming(database, slot) as stream:
        await asyncio.to_thread(server.kill)
        with pytest.raises(PublisherUnavailable):
            await collect(stream, lambda _: False)
        database.close()


def _prepare(server: EmbeddedServer) -> tuple[Database, str]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE pub")
    database = Database(ServerAddress(server.dsn(), server.version), "pub")
    return database, slot_of(database)


async def test_stream_over_tls_does_not_stall(tls_server: EmbeddedServer) -> None:
    """The bug would be: bytes that TLS holds back are not seen by a wait on the socket, and the stream stops until the next keepalive."""
    database, slot = _prepare(tls_server)
    async with streaming(database, slot, conninfo=tls_server.dsn("pub", sslmode="require")) as stream:
        for size in (1, 8000, 8191, 8192, 16000, 16384, 17000, 100000, 1000003):
            database.execute(f"INSERT INTO t VALUES ({size}, repeat('abcdefghij', {size}))")
            inserts = [message for message in await transactions(stream, 1) if isinstance(message, Insert)]
            assert inserts[0].new.values[1] == b"abcdefghij" * size
    database.close()


async def test_refused_start_leaves_the_connection_usable(publisher18_db: Database) -> None:
    slot = slot_of(publisher18_db)
    connection = await WalReceiverConnection.connect(publisher18_db.dsn, application_name="x")
    options = negotiate(connection.capabilities, SubscriptionOptions(), publications=["p"], two_phase=False)
    with pytest.raises(PublisherError, match="does not exist"):
        await connection.start_replication("absent", Lsn(0), options)
    assert (await connection.slot(slot)) is not None
    await connection.close()
