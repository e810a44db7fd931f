"""PostgreSQL's own subscription follows the fake publisher and ends with the right rows: copy, changes, streams, two-phase, restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from subscriber.testing.fake_publisher import FakePublisher
from tests.conftest import Servers
from tests.native.conftest import target_server_of
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.examples import some_and_others
from tests.support.observation import eventually

# the version of the subscriber and that of the fake publisher
PREPARED = "SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()"
TABLE = "CREATE TABLE items (id int PRIMARY KEY, name text, big text)"


class Native:
    """A native subscription in a database of its own."""

    def __init__(self, database: Database, publisher: FakePublisher) -> None:
        self.database = database
        self.publisher = publisher

    async def run(self, query: str) -> None:
        # in a thread: the publisher runs in this loop
        await asyncio.to_thread(self.database.execute, query)

    async def reaches(self, query: str, expected: Any) -> None:
        await eventually(self.database, query, expected)

    async def synchronized(self) -> None:
        """All tables are ready."""
        await self.reaches("SELECT count(*) FROM pg_subscription_rel WHERE srsubstate <> 'r'", 0)

    async def same(self) -> None:
        """Everything is confirmed, and the rows are those of the publisher."""
        await self.publisher.until_confirmed("sub", timeout=30)
        rows = await asyncio.to_thread(self.database.fetch, "SELECT id::text, name, big FROM items")
        assert sorted(rows) == sorted((row["id"], row["name"], row["big"]) for row in self.publisher.rows("items"))


@asynccontextmanager
async def native(servers: Servers, version: int, publisher: FakePublisher) -> AsyncIterator[Native]:
    server = await asyncio.to_thread(target_server_of, servers, version)
    with fresh_database(ServerAddress(server.dsn(), version), "native") as database:
        database.execute(TABLE)
        found = Native(database, publisher)
        try:
            yield found
        finally:
            if database.value("SELECT count(*) FROM pg_subscription WHERE subname = 'sub'"):
                await found.run("ALTER SUBSCRIPTION sub DISABLE")
                await found.run("ALTER SUBSCRIPTION sub SET (slot_name = NONE)")
                await found.run("DROP SUBSCRIPTION sub")


def items(version: int, **settings: Any) -> FakePublisher:
    publisher = FakePublisher(version, **settings)
    publisher.create_table("items", {"id": "int", "name": "text", "big": "text"}, key=["id"])
    publisher.create_publication("app", "items")
    return publisher


@some_and_others(["subscriber", "version"], [(15, 13), (18, 16), (18, 18)], [(15, 15), (15, 18), (18, 14)])
async def test_native_subscription_copies_follows_and_restarts(servers: Servers, subscriber: int, version: int) -> None:
    async with items(version) as publisher:
        async with publisher.transaction() as t:
            for id in range(100):
                t.insert("items", id=id, name=f"name\t{id}\\", big="x" * 3000 if id % 10 == 0 else None)
        async with native(servers, subscriber, publisher) as target:
            await target.run(f"CREATE SUBSCRIPTION sub CONNECTION '{publisher.dsn()}' PUBLICATION app")
            await target.synchronized()
            await target.same()
            async with publisher.transaction() as t:
                t.update("items", {"id": 10}, name="renamed, with its large value unchanged")
                t.update("items", {"id": 11}, id=1011)
                t.delete("items", {"id": 12})
                with t.savepoint():
                    t.insert("items", id=2000, name="in a savepoint")
                with t.savepoint():
                    t.insert("items", id=2001, name="rolled back")
                    t.rollback_savepoint()
            await target.same()
            # a cut connection, and a restart of the publisher
            publisher.faults.add("cut")
            async with publisher.transaction() as t:
                t.insert("items", id=3000)
            await target.same()
            await publisher.shutdown()
            await publisher.start()
            async with publisher.transaction() as t:
                t.insert("items", id=3001)
            await target.same()
            async with publisher.transaction() as t:
                t.truncate("items")
                t.insert("items", id=1, name="after")
            await target.same()


@pytest.mark.parametrize(("subscriber", "version"), [(15, 15), (18, 15), (18, 18)])
async def test_native_subscription_takes_streams_and_prepared_transactions(servers: Servers, subscriber: int, version: int) -> None:
    async with items(version, logical_decoding_work_mem=10_000) as publisher, native(servers, subscriber, publisher) as target:
        streaming = "parallel" if subscriber >= 16 else "on"
        await target.run(
            f"CREATE SUBSCRIPTION sub CONNECTION '{publisher.dsn()}' PUBLICATION app WITH (streaming = {streaming}, two_phase, binary)"
        )
        await target.synchronized()
        await target.same()
        async with publisher.transaction() as t:
            for id in range(300):
                t.insert("items", id=id, name="streamed")
            with t.savepoint():
                for id in range(300, 600):
                    t.insert("items", id=id, name="streamed and rolled back")
                t.rollback_savepoint()
        large = publisher.transaction()
        for id in range(1000, 1200):
            large.insert("items", id=id)
        # 18 does not stream a transaction that is known to be rolled back
        await publisher.until(lambda: publisher.slots["sub"].statistics.stream_txns >= 2)
        large.rollback()
        await target.same()
        await target.reaches("SELECT subtwophasestate = 'e' FROM pg_subscription", True)
        prepared = publisher.transaction()
        for id in range(2000, 2003):
            prepared.insert("items", id=id)
        end = prepared.prepare("first")
        await publisher.until_confirmed("sub", end)
        await target.reaches(PREPARED, 1)
        prepared.commit_prepared()
        rolled_back = publisher.transaction()
        for id in range(3000, 3300):
            rolled_back.insert("items", id=id)
        rolled_back.prepare("second")
        rolled_back.rollback_prepared()
        await target.same()
        await target.reaches(PREPARED, 0)
