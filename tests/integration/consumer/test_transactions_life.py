"""``subscriber.transactions``: how a stream begins and ends, what it outlives, and what it refuses, on live servers."""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from subscriber.config import Settings, SubscriptionOptions
from subscriber.consumer.received import ReceivedTransaction
from subscriber.consumer.transactions import transactions
from subscriber.errors import ConfigurationError, DataLossError, PublisherError, PublisherUnavailable, SlotInUse
from subscriber.protocol.frames import PrimaryKeepalive, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.stream_session import StreamSession
from subscriber.transaction.changes import InsertChange
from tests.support.cancellation import cancelled_at
from tests.support.database import Database
from tests.support.framing import PostgresFraming
from tests.support.proxy import Fault, Proxy, Strike
from tests.support.received import SMALL, SOON, TIMEOUT, changes, cut_connection, eventually, first, simple, slots
from tests.support.stream_state import StreamState, payload_tag


def made(publisher: Database) -> Database:
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, note text)")
    publisher.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return publisher


@pytest.fixture
def any_source(publisher_db: Database) -> Database:
    """Of the version that the run is for: for what has to do with slots and positions."""
    return made(publisher_db)


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    """On 18 alone."""
    return made(publisher18_db)


class TestLife:
    async def test_temporary_slot_is_gone_with_the_block(self, any_source: Database) -> None:
        async with transactions(any_source.conninfo(), publications=["p"]) as stream:
            assert any_source.fetch("SELECT temporary, slot_name FROM pg_replication_slots WHERE database = current_database()") == [
                (True, stream.slot_name)
            ]
        await eventually(any_source, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)

    async def test_abandoned_loop_leaves_nothing(self, source: Database) -> None:
        before = asyncio.all_tasks()

        async def insert_when_there_is_a_slot() -> None:
            await eventually(source, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND active", 1)
            source.execute("INSERT INTO t VALUES (1)")

        inserting = asyncio.create_task(insert_when_there_is_a_slot())
        async with asyncio.timeout(TIMEOUT):
            async for transaction in transactions(source.conninfo(), publications=["p"]):
                assert await changes(transaction) == [("insert", "t", {"id": "1", "note": None})]
                break
        await inserting
        gc.collect()
        await eventually(source, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)
        async with asyncio.timeout(TIMEOUT):
            while asyncio.all_tasks() - before:
                await asyncio.sleep(0)

    async def test_lost_connection_with_a_temporary_slot_is_an_error(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            cut_connection(source)
            with pytest.raises(PublisherUnavailable) as raised:
                await first(stream)
        assert "temporary replication slot was lost" in raised.value.one_line()
        assert "name a slot" in raised.value.one_line()

    async def test_cancelled_wait_loses_nothing(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:
            waiting = asyncio.create_task(first(stream))
            await eventually(source, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND active", 1)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            source.execute("INSERT INTO t VALUES (1)")
            assert (await first(stream))[1] == [("insert", "t", {"id": "1", "note": None})]

    async def test_cancelled_when_it_has_just_connected(self, source: Database) -> None:
        """The bug was that the stream went on for ever, and kept its slot in use."""
        stream = transactions(source.conninfo(), publications=["p"])
        assert await cancelled_at(stream.__aenter__(), 0, late=True)
        await eventually(source, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)

    async def test_cancelled_end_disconnects(self, source: Database, tmp_path: Path) -> None:
        stream = transactions(
            source.conninfo(), publications=["p"], settings=Settings(logical_decoding_work_mem=SMALL, spool_directory=str(tmp_path))
        )
        await stream.__aenter__()
        source.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 1000) g")
        await first(stream)
        # it removes the file of the transaction
        assert await cancelled_at(stream.__aexit__(None, None, None), 0)
        await eventually(source, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)

    async def test_stop_ends_a_waiting_loop(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"]) as stream:

            async def drain() -> int:
                return len([transaction async for transaction in stream])

            waiting = asyncio.create_task(drain())
            await eventually(
                source,
                "SELECT count(*) FROM pg_stat_replication WHERE application_name = 'subscriber' AND state = 'streaming'"
                " AND pid IN (SELECT active_pid FROM pg_replication_slots WHERE database = current_database())",
                1,
            )
            stream.stop()
            async with asyncio.timeout(TIMEOUT):
                assert await waiting == 0

    async def test_until_caught_up_and_until_lsn(self, any_source: Database) -> None:
        async with transactions(any_source.conninfo(), publications=["p"], slot_name="s"):
            pass
        any_source.execute("INSERT INTO t VALUES (1)")
        any_source.execute("INSERT INTO t VALUES (2)")
        middle = any_source.current_lsn()
        any_source.execute("INSERT INTO t VALUES (3)")
        async with asyncio.timeout(TIMEOUT):
            up_to = [
                simple(change)
                async for transaction in transactions(any_source.conninfo(), publications=["p"], slot_name="s", until_lsn=middle)
                async for change in transaction
            ]
            everything = [
                simple(change)
                async for transaction in transactions(any_source.conninfo(), publications=["p"], slot_name="s", until_caught_up=True)
                async for change in transaction
            ]
        assert [change[2]["id"] for change in up_to] == ["1", "2"]
        assert [change[2]["id"] for change in everything] == ["1", "2", "3"]

    async def test_slow_caller_who_never_acknowledges_needs_little_memory(self, source: Database, tmp_path: Path) -> None:
        settings = Settings(logical_decoding_work_mem=1024 * 1024, spool_directory=str(tmp_path))
        async with transactions(source.conninfo(), publications=["p"], settings=settings) as stream:
            source.execute("INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 20000) g")
            for number in range(20):
                start = 100_000 + 1000 * number
                source.execute(f"INSERT INTO t SELECT g, repeat('y', 1000) FROM generate_series({start}, {start + 499}) g")
            count = size = 0
            tracemalloc.start()
            try:
                async with asyncio.timeout(90):
                    async for transaction in stream:
                        async for change in transaction:
                            assert isinstance(change, InsertChange)
                            count += 1
                            size += len(str(change.new["note"]))
                        if count == 30_000:
                            break
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert size == 30_000_000
        assert peak < 10_000_000


class TestRefusals:
    async def test_no_publication(self, source: Database) -> None:
        with pytest.raises(ConfigurationError, match="no publication"):
            transactions(source.conninfo(), publications=[])
        with pytest.raises(ConfigurationError, match="no publication"):
            transactions(source.conninfo(), publications="p")

    async def test_unknown_publication(self, source: Database) -> None:
        with pytest.raises(PublisherError, match='publication "nope" does not exist'):
            await transactions(source.conninfo(), publications=["p", "nope"], slot_name="s").__aenter__()
        assert slots(source) == 0

    async def test_missing_slot_without_create_slot(self, source: Database) -> None:
        options = SubscriptionOptions(create_slot=False)
        with pytest.raises(PublisherError, match='replication slot "s" does not exist'):
            await transactions(source.conninfo(), publications=["p"], slot_name="s", options=options).__aenter__()
        assert slots(source) == 0

    async def test_slot_in_use(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], slot_name="s"):
            with pytest.raises(SlotInUse):
                await transactions(source.conninfo(), publications=["p"], slot_name="s").__aenter__()

    async def test_slot_of_another_database(self, source: Database) -> None:
        name = f"other_{source.name}"
        with psycopg.connect(source.server.dsn(), autocommit=True) as elsewhere:
            elsewhere.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
            try:
                with pytest.raises(PublisherError, match=f'replication slot "{name}" is of .* database "postgres"'):
                    await transactions(source.conninfo(), publications=["p"], slot_name=name).__aenter__()
            finally:
                elsewhere.execute("SELECT pg_drop_replication_slot(%s)", (name,))

    async def test_start_before_the_slot(self, any_source: Database) -> None:
        async with transactions(any_source.conninfo(), publications=["p"], slot_name="s") as stream:
            any_source.execute("INSERT INTO t VALUES (1)")
            one, _ = await first(stream)
            await one.acknowledge()
        with pytest.raises(DataLossError, match=r"past position .* of the target"):
            await transactions(any_source.conninfo(), publications=["p"], slot_name="s", start_lsn=one.commit_lsn).__aenter__()

    async def test_start_behind_the_slot(self, source: Database) -> None:
        async with transactions(source.conninfo(), publications=["p"], slot_name="s"):
            pass
        source.execute("INSERT INTO t VALUES (1)")
        start = source.current_lsn()
        source.execute("INSERT INTO t VALUES (2)")
        async with transactions(source.conninfo(), publications=["p"], slot_name="s", start_lsn=start) as stream:
            assert (await first(stream))[1] == [("insert", "t", {"id": "2", "note": None})]

    async def test_slot_that_another_session_advanced(self, any_source: Database) -> None:
        async with transactions(any_source.conninfo(), publications=["p"], slot_name="s", settings=SOON) as stream:
            any_source.execute("INSERT INTO t VALUES (1)")
            await first(stream)
            cut_connection(any_source)
            await eventually(any_source, "SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
            any_source.execute("SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())")
            with pytest.raises(DataLossError, match=r"past position .* of the target"):
                await first(stream)


async def test_stop_while_the_publisher_is_away(source: Database) -> None:
    stream = transactions("host=127.0.0.1 port=1 dbname=none", publications=["p"], slot_name="s")
    with pytest.raises(PublisherUnavailable):
        await stream.__aenter__()
    stream.stop()
    found: AsyncIterator[ReceivedTransaction] = aiter(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(found)


async def test_a_position_that_cannot_be_stored_leaves_no_connection(source: Database) -> None:
    async with transactions(source.conninfo(), publications=["p"], slot_name="s"):
        pass

    async def refuse(lsn: Lsn) -> None:
        raise ConfigurationError(f"cannot store {lsn}", hint="none")

    stream = transactions(source.conninfo(), publications=["p"], slot_name="s", start_lsn=source.current_lsn(), advance=refuse)
    source.execute("CREATE TABLE other (id int)")
    sessions: list[object] = []  # kept, because a connection without a reference is closed by Python

    async def read() -> None:
        async with asyncio.timeout(TIMEOUT), stream:
            sessions.append(stream._session)
            await first(stream)

    with pytest.raises(ConfigurationError, match="cannot store"):
        await read()
    await eventually(source, "SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)


async def test_a_stream_that_could_not_begin_acknowledges_nothing(source: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that it stored and sent a position, although its caller never got it."""
    async with transactions(source.conninfo(), publications=["p"], slot_name="s"):
        pass
    begin, caller, stored = StreamSession.open, asyncio.current_task(), list[Lsn]()

    async def store(lsn: Lsn) -> None:
        stored.append(lsn)

    async def begin_and_be_cancelled(*arguments: Any) -> StreamSession:
        session = await begin(*arguments)
        # until there is a position that it could store
        while session.tracker.idle_lsn() is None:
            await asyncio.sleep(0.01)
        assert caller is not None
        caller.cancel()
        return session

    monkeypatch.setattr(StreamSession, "open", begin_and_be_cancelled)
    start = source.current_lsn()
    source.execute("CREATE TABLE other (id int)")
    stream = transactions(source.conninfo(), publications=["p"], slot_name="s", start_lsn=start, advance=store)
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(TIMEOUT):
            await stream.__aenter__()
    assert caller is not None
    caller.uncancel()
    assert not stored
    await eventually(source, "SELECT active FROM pg_replication_slots WHERE slot_name = 's'", False)
    assert source.value(f"SELECT confirmed_flush_lsn <= '{start}' FROM pg_replication_slots WHERE slot_name = 's'")


async def test_until_caught_up_includes_what_arrives_while_a_position_is_stored(source: Database) -> None:
    async with transactions(source.conninfo(), publications=["p"], slot_name="s"):
        pass
    start = source.current_lsn()
    source.execute("INSERT INTO t VALUES (1, 'x')")
    end, before = source.current_lsn(), Lsn(start + 1)
    stored: list[Lsn] = []

    def behind_a_keepalive(state: StreamState, message: bytes, _: random.Random) -> Strike | None:
        if payload_tag(message) == 0:
            return None
        frame = encode_frame(PrimaryKeepalive(before, 0, False))
        proxy.inject(b"d" + (len(frame) + 4).to_bytes(4) + frame)
        return Strike(message, pause=TIMEOUT)

    async def store_while_all_is_received(lsn: Lsn) -> None:
        stored.append(lsn)
        proxy.calm.set()
        await eventually(
            source,
            f"SELECT write_lsn >= '{end}' FROM pg_stat_replication JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = 's'",
            True,
        )

    address = conninfo_to_dict(source.conninfo())
    async with Proxy(str(address["host"]), int(str(address["port"])), PostgresFraming) as proxy:
        proxy.arm(Fault("held", behind_a_keepalive))
        stream = transactions(
            make_conninfo(source.conninfo(), port=proxy.port, sslmode="disable", gssencmode="disable"),
            publications=["p"],
            slot_name="s",
            start_lsn=start,
            advance=store_while_all_is_received,
            until_caught_up=True,
        )
        async with asyncio.timeout(TIMEOUT), stream:
            assert [transaction.end_lsn <= end async for transaction in stream] == [True]
    assert stored[0] == before
