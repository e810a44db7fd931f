"""Connections to the fake publisher: authentication, commands and their errors, snapshots, and what feedback must never say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from subscriber import SubscriberError
from subscriber.errors import ConfigurationError
from subscriber.protocol.capabilities import StreamOptions
from subscriber.protocol.frames import StandbyStatusUpdate, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.testing.fake_publisher import FakePublisher, FeedbackViolation
from subscriber.testing.fake_publisher.backend.certificates import server_context
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.stream import WalSenderStream
from tests.unit.testing.fake_publisher.replicas import items, replica


@asynccontextmanager
async def walsender(publisher: FakePublisher, **params: str) -> AsyncIterator[WalReceiverConnection]:
    connection = await WalReceiverConnection.connect(publisher.dsn(**params), application_name="test")
    try:
        yield connection
    finally:
        await connection.close()


@pytest.mark.parametrize("socket", ["tcp", "unix"])
async def test_scram_and_both_kinds_of_sockets(socket: str) -> None:
    async with items(password="it's secret", socket=socket) as publisher:
        async with replica(publisher, conninfo=publisher.dsn(password=r"'it\'s secret'")) as copy:
            await copy.same()
        with pytest.raises(SubscriberError, match="password authentication failed"):
            async with walsender(publisher, password="wrong"):
                pass


async def test_tls(tmp_path: Path) -> None:
    async with items(tls=server_context(tmp_path), require_tls=True, password="secret") as publisher:
        async with replica(publisher, conninfo=publisher.dsn(sslmode="verify-full", sslrootcert=f"{tmp_path}/server.crt")) as copy:
            async with publisher.transaction() as t:
                for id in range(100):
                    t.insert("items", id=id, big="x" * 1000)
            await copy.same()
        with pytest.raises(SubscriberError, match="no encryption"):
            async with walsender(publisher, sslmode="disable"):
                pass


@pytest.mark.parametrize(
    ("version", "command", "expected"),
    [
        (14, "CREATE_REPLICATION_SLOT s LOGICAL pgoutput (SNAPSHOT 'nothing')", "syntax error"),
        (14, "READ_REPLICATION_SLOT s", "syntax error"),
        (13, "CREATE_REPLICATION_SLOT s LOGICAL pgoutput TWO_PHASE", "syntax error"),
        (16, "CREATE_REPLICATION_SLOT s LOGICAL pgoutput (FAILOVER)", "unrecognized option: failover"),
        (16, "ALTER_REPLICATION_SLOT one (FAILOVER true)", "syntax error"),
        (17, "ALTER_REPLICATION_SLOT one (TWO_PHASE true)", "unrecognized option: two_phase"),
        (18, "CREATE_REPLICATION_SLOT one LOGICAL pgoutput", 'replication slot "one" already exists'),
        (18, 'CREATE_REPLICATION_SLOT "S" LOGICAL pgoutput', "contains invalid character"),
        (18, "CREATE_REPLICATION_SLOT s LOGICAL unknown", "could not access file"),
        (18, "CREATE_REPLICATION_SLOT s LOGICAL pgoutput (SNAPSHOT 'use')", "must be called inside a transaction"),
        (18, "DROP_REPLICATION_SLOT s", 'replication slot "s" does not exist'),
        (18, "TIMELINE_HISTORY 2", "could not open file"),
        (18, "START_REPLICATION SLOT s LOGICAL 0/0", 'replication slot "s" does not exist'),
        (18, "START_REPLICATION SLOT one LOGICAL 0/0", 'option "proto_version" missing'),
        (13, "START_REPLICATION SLOT one LOGICAL 0/0 (proto_version '2', publication_names 'app')", "we only support protocol 1"),
        (13, "START_REPLICATION SLOT one LOGICAL 0/0 (proto_version '1', publication_names 'app', binary)", "unrecognized pgoutput option"),
        (14, "START_REPLICATION SLOT one LOGICAL 0/0 (proto_version '1', publication_names 'app', streaming 'on')", "need 2 or higher"),
        (16, "START_REPLICATION SLOT one LOGICAL 0/0 (proto_version '2', publication_names 'app', two_phase)", "need 3 or higher"),
        (18, "SHOW nothing", "unrecognized configuration parameter"),
        (18, "SELECT what FROM nowhere", "does not know this query: SELECT what FROM nowhere"),
        (18, "BASE_BACKUP", "has no BASE_BACKUP"),
    ],
)
async def test_commands_that_fail(version: int, command: str, expected: str) -> None:
    async with items(version) as publisher:
        await publisher.create_slot("one")
        async with walsender(publisher) as connection:
            with pytest.raises(SubscriberError) as raised:
                await connection.query(command)
            assert expected in str(raised.value)
            assert (await connection.identify_system()).xlogpos == publisher.wal.end


async def test_slots_by_command() -> None:
    async with items() as publisher, walsender(publisher) as connection:
        created = await connection.create_slot("one", snapshot="export", failover=True)
        assert (created.consistent_point, created.snapshot_name) == (publisher.wal.end, "00000003-00000001-1")
        await connection.query("ALTER_REPLICATION_SLOT one (FAILOVER false, TWO_PHASE)")
        slot = await connection.slot("one")
        assert slot is not None
        assert (slot.failover, slot.two_phase, slot.active) == (False, True, False)
        assert await connection.execute("READ_REPLICATION_SLOT missing") == [(None, None, None)]
        assert await connection.show("wal_level") == "logical"
        await connection.create_slot("brief", temporary=True)
        await connection.drop_slot("one", wait=True)
        assert list(publisher.slots) == ["brief"]
    await publisher.until(lambda: not publisher.slots)


async def test_a_new_slot_waits_for_running_transactions_and_its_snapshot_fits() -> None:
    async with items() as publisher, walsender(publisher) as connection:
        running, prepared = publisher.transaction(), publisher.transaction()
        running.insert("items", id=1)
        prepared.insert("items", id=2)
        prepared.prepare("gid")
        creating = asyncio.create_task(connection.create_slot("one", snapshot="export"))
        await publisher.until(lambda: any("CREATE_" in session.query for session in publisher.sessions.values()))
        later = publisher.transaction()
        later.insert("items", id=3)
        running.commit()
        assert not creating.done()
        prepared.commit_prepared()
        created = await creating
        later.commit()
        async with await psycopg.AsyncConnection.connect(publisher.dsn(), autocommit=True) as reader:
            await reader.execute("BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            await reader.execute(f"SET TRANSACTION SNAPSHOT '{created.snapshot_name}'")
            async with reader.cursor().copy("COPY public.items (id) TO STDOUT") as copy:
                assert b"".join([bytes(data) async for data in copy]) == b"1\n2\n"
        await connection.show("wal_level")
        async with await psycopg.AsyncConnection.connect(publisher.dsn(), autocommit=True) as reader:
            await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            with pytest.raises(psycopg.Error, match="does not exist"):
                await reader.execute(f"SET TRANSACTION SNAPSHOT '{created.snapshot_name}'")


async def test_the_creation_of_a_slot_can_be_cancelled() -> None:
    async with items() as publisher, walsender(publisher) as connection:
        running = publisher.transaction()
        running.insert("items", id=1)
        creating = asyncio.create_task(connection.create_slot("one"))
        await publisher.until(lambda: any("CREATE_" in session.query for session in publisher.sessions.values()))
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        running.commit()
        # what would still create it has had its turn after these
        async with walsender(publisher) as other:
            await other.create_slot("two")
        assert list(publisher.slots) == ["two"]


async def following(publisher: FakePublisher, connection: WalReceiverConnection) -> WalSenderStream:
    await publisher.create_slot("one")
    options = StreamOptions(
        protocol_version=4, streaming="off", two_phase=False, origin=None, publications=("app",), binary=False, messages=False
    )
    return await connection.start_replication("one", Lsn(0), options)


def update(write: int, flush: int, apply: int = 0) -> bytes:
    return encode_frame(StandbyStatusUpdate(Lsn(write), Lsn(flush), Lsn(apply), 0, reply_requested=False))


@pytest.mark.parametrize(
    ("updates", "expected"),
    [
        ([(0, 0), (-8, -8)], "moved write backwards"),
        ([(0, 8)], "but only"),
        ([(-8, 0)], "beyond write"),
    ],
)
async def test_feedback_that_a_subscriber_must_not_give(updates: list[tuple[int, int]], expected: str) -> None:
    async with items() as publisher, walsender(publisher) as connection:
        stream = await following(publisher, connection)
        async with publisher.transaction() as t:
            t.insert("items", id=1)
        while publisher.wal.end not in {sender.positions.sent for sender in publisher.streaming}:
            await stream.receive()
        end = publisher.wal.end
        for write, flush in updates:
            await stream.send(update(end + write, end + flush))
        await publisher.until(lambda: len(publisher.feedback) == len(updates))
        await stream.close()
        with pytest.raises(FeedbackViolation, match=expected):
            publisher.feedback.check()
        publisher.feedback.violations.clear()


async def test_a_test_that_makes_no_sense_ends_in_a_clear_error() -> None:
    with pytest.raises(ConfigurationError, match="cannot be PostgreSQL 12"):
        FakePublisher(12)
    async with items(14) as publisher:
        with pytest.raises(ConfigurationError, match="PostgreSQL 14 has no row filters"):
            publisher.create_publication("p", "items", where={"items": "id > 1"})
    async with items() as publisher:
        publisher.create_table("keyless", {"a": "int"})
        publisher.create_publication("all", all_tables=True)
        t = publisher.transaction()
        t.insert("items", id=1)
        other = publisher.transaction()
        cases: list[tuple[str, Any]] = [
            ('duplicate key value violates unique constraint "items_pkey"', lambda: t.insert("items", id=1)),
            ("another open transaction has changed this row", lambda: other.insert("items", id=1)),
            ('null value in column "id"', lambda: t.insert("items", name="x")),
            ('column "what" of relation "public.items" does not exist', lambda: t.insert("items", id=2, what=1)),
            ('relation "public.nothing" does not exist', lambda: t.insert("nothing", id=2)),
            ("does not have a replica identity and publishes updates", lambda: t.update("keyless", {"a": 1}, a=2)),
            ("the transaction is open, not prepared", t.commit_prepared),
            ("can only be used in a savepoint", t.rollback_savepoint),
            ('type "strange" does not exist', lambda: publisher.create_table("x", {"a": "strange"})),
        ]
        for expected, call in cases:
            with pytest.raises(ConfigurationError, match=expected):
                call()
        t.rollback()
        other.insert("items", id=1)
        other.commit()
        assert [row["id"] for row in publisher.rows("items")] == ["1"]


async def test_savepoints() -> None:
    async with items() as publisher, await psycopg.AsyncConnection.connect(publisher.dsn()) as session:
        await session.execute("SAVEPOINT outer_one")
        await session.execute("SAVEPOINT inner_one")
        with pytest.raises(psycopg.Error, match="does not know this query"):
            await session.execute("SELECT nothing()")
        with pytest.raises(psycopg.errors.InFailedSqlTransaction):
            await session.execute("SELECT 1")
        await session.execute("ROLLBACK TO SAVEPOINT outer_one")
        assert await (await session.execute("SELECT 1")).fetchone() == (1,)
        with pytest.raises(psycopg.errors.InvalidSavepointSpecification, match='savepoint "inner_one" does not exist'):
            await session.execute("RELEASE SAVEPOINT inner_one")
        await session.execute("ROLLBACK TO SAVEPOINT outer_one")
        await session.execute("RELEASE SAVEPOINT outer_one")
