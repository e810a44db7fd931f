"""Replication slots: made, seen, dropped, in use, exhausted, invalidated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import psycopg
import pytest

from subscriber.errors import ConfigurationError, DataLossError, PublisherError, SlotInUse
from subscriber.testing.server import EmbeddedServer
from subscriber.walreceiver.connection import WalReceiverConnection
from tests.support.database import Database, ServerAddress
from tests.support.streams import start, streaming

MakeServer = Callable[..., EmbeddedServer]


@pytest.fixture
async def connection(publisher_db: Database) -> AsyncIterator[WalReceiverConnection]:
    made = await WalReceiverConnection.connect(publisher_db.dsn, application_name="test")
    yield made
    await made.close()


@pytest.mark.matrix
async def test_permanent_slot(publisher_db: Database, connection: WalReceiverConnection) -> None:
    name = f"s_{publisher_db.name}"
    assert await connection.slot(name) is None
    before = publisher_db.current_lsn()
    created = await connection.create_slot(name)
    assert created.slot_name == name
    assert created.snapshot_name is None
    assert before <= created.consistent_point <= publisher_db.current_lsn()
    slot = await connection.slot(name)
    assert slot is not None
    assert (slot.plugin, slot.database) == ("pgoutput", publisher_db.name)
    assert slot.confirmed_flush_lsn == created.consistent_point
    assert slot.restart_lsn is not None
    assert slot.restart_lsn <= created.consistent_point
    assert (slot.temporary, slot.active, slot.active_pid, slot.two_phase, slot.failover, slot.lost) == (
        False,
        False,
        None,
        False,
        False,
        False,
    )
    assert slot.wal_status in {"reserved", "extended"}
    with pytest.raises(PublisherError, match="already exists") as caught:
        await connection.create_slot(name)
    assert caught.value.sqlstate == "42710"
    await connection.drop_slot(name)
    assert await connection.slot(name) is None


async def test_temporary_slot_goes_with_its_session(publisher_db: Database, connection: WalReceiverConnection) -> None:
    name = f"s_{publisher_db.name}"
    await connection.create_slot(name, temporary=True)
    slot = await connection.slot(name)
    assert slot is not None
    assert slot.temporary
    assert slot.active_pid == connection.pgconn.backend_pid
    await connection.close()
    await asyncio.to_thread(publisher_db.wait, f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'", 0)


@pytest.mark.matrix
async def test_two_phase_and_failover(publisher_db: Database, connection: WalReceiverConnection) -> None:
    name = f"s_{publisher_db.name}"
    if connection.capabilities.two_phase:
        await connection.create_slot(name, two_phase=True)
        slot = await connection.slot(name)
        assert slot is not None
        assert slot.two_phase
        await connection.drop_slot(name)
    else:
        with pytest.raises(PublisherError, match="two-phase"):
            await connection.create_slot(name, two_phase=True)
    if connection.capabilities.failover_slots:
        await connection.create_slot(name, failover=True)
        slot = await connection.slot(name)
        assert slot is not None
        assert slot.failover
    else:
        with pytest.raises(PublisherError, match="failover"):
            await connection.create_slot(name, failover=True)


async def test_slots_by_prefix(publisher_db: Database, connection: WalReceiverConnection) -> None:
    base = publisher_db.name
    for name in (f"{base}_b", f"{base}_a", f"{base}xc"):
        await connection.create_slot(name)
    # an underscore is itself, not a wildcard
    assert [slot.slot_name for slot in await connection.slots(f"{base}_")] == [f"{base}_a", f"{base}_b"]


async def test_drop(publisher_db: Database, connection: WalReceiverConnection) -> None:
    name = f"s_{publisher_db.name}"
    with pytest.raises(PublisherError, match="does not exist") as caught:
        await connection.drop_slot(name)
    assert caught.value.sqlstate == "42704"
    await connection.drop_slot(name, missing_ok=True)
    publisher_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    await connection.create_slot(name)
    async with streaming(publisher_db, name):
        with pytest.raises(SlotInUse):
            await connection.drop_slot(name, missing_ok=True)
        waiting = asyncio.create_task(connection.drop_slot(name, wait=True))
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ReplicationSlotDrop'"
        await asyncio.to_thread(publisher_db.wait, waits, 1)
        assert not waiting.done()
    await waiting


@pytest.mark.matrix
async def test_name_that_cannot_be(connection: WalReceiverConnection) -> None:
    for name in ("Upper", "", "a-b", "x" * 64, 'a"; SELECT 1; --'):
        with pytest.raises(ConfigurationError, match="replication slot name"):
            await connection.create_slot(name)


async def test_all_slots_in_use(make_server: MakeServer) -> None:
    server = make_server(18, max_replication_slots="1")
    connection = await WalReceiverConnection.connect(server.dsn(), application_name="test")
    await connection.create_slot("one")
    with pytest.raises(PublisherError, match="all replication slots are in use") as caught:
        await connection.create_slot("two")
    assert caught.value.sqlstate == "53400"
    assert "max_replication_slots" in str(caught.value.hint)
    await connection.close()


async def test_wal_level_too_low(make_server: MakeServer) -> None:
    server = make_server(16, wal_level="replica")
    connection = await WalReceiverConnection.connect(server.dsn(), application_name="test")
    with pytest.raises(PublisherError, match="wal_level"):
        await connection.create_slot("one")
    await connection.close()


@pytest.mark.matrix
async def test_slot_that_was_invalidated(publisher_version: int) -> None:
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "2MB", "min_wal_size": "2MB"}
    with EmbeddedServer.create(publisher_version, settings=settings, initdb_args=["--wal-segsize=1"]) as server:
        database = Database(ServerAddress(server.dsn(), publisher_version), "postgres")
        connection = await WalReceiverConnection.connect(server.dsn(), application_name="test")
        database.execute("CREATE PUBLICATION p FOR ALL TABLES; CREATE TABLE t (a text)")
        await connection.create_slot("slow")
        for _ in range(4):
            database.execute("INSERT INTO t SELECT repeat('x', 1000) FROM generate_series(1, 2000)")
            database.execute("SELECT pg_switch_wal()")
        database.execute("CHECKPOINT")
        database.wait("SELECT wal_status FROM pg_replication_slots", "lost")
        slot = await connection.slot("slow")
        assert slot is not None
        assert slot.lost
        assert slot.invalidation_reason == ("wal_removed" if publisher_version >= 17 else None)
        with pytest.raises(DataLossError) as caught:
            await start(database, "slow")
        assert "slow" in str(caught.value)
        assert caught.value.hint
        await connection.close()
        database.close()


async def test_cancelled_creation_leaves_no_slot(publisher_db: Database, connection: WalReceiverConnection) -> None:
    """The bug would be: the walsender keeps waiting for a transaction's end after the client has gone, and then creates the slot."""
    name = f"s_{publisher_db.name}"
    blocker = psycopg.connect(publisher_db.conninfo())
    blocker.execute("CREATE TABLE blocker ()")  # a transaction with an xid: the slot's snapshot has to wait for it
    creating = asyncio.create_task(connection.create_slot(name))
    waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
    await asyncio.to_thread(publisher_db.wait, waiting, 1)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    await connection.close()
    await asyncio.to_thread(publisher_db.wait, waiting, 0)
    blocker.rollback()
    blocker.close()
    await asyncio.to_thread(publisher_db.wait, f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'", 0)
