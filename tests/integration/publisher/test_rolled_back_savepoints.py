"""Rows of a savepoint that the publisher streams, rolls back, and sends no STREAM ABORT for: no target stores them. Native does.

A savepoint that was spilled to disk with more than 4,096 changes (each piece of a long value is one) and is then streamed counts as not
streamed on the publisher, so its abort is not sent. See docs/reference/publishers.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

import subscriber
from subscriber import Settings, Subscription, SubscriptionOptions, TableName
from subscriber.interfaces import TableState
from tests.conftest import Servers
from tests.support.database import WAIT_SECONDS, Database, ServerAddress, fresh_database
from tests.support.lakes import applied, lake_rows
from tests.support.observation import until
from tests.support.replica import QUICK
from tests.support.sqlalchemy_targets import sqlite_target

TABLE = "CREATE TABLE t (id int PRIMARY KEY, part text, v text)"
LONG = "repeat('y', 8400000)"
IDS = "SELECT id FROM t ORDER BY id"
Connection = psycopg.Connection[tuple[Any, ...]]
RECEIVED = """
SELECT count(*) FROM pg_stat_replication AS r JOIN pg_replication_slots AS s ON s.active_pid = r.pid
WHERE s.database = current_database() AND r.sent_lsn >= '{}'
"""


CONFIRMED = "SELECT bool_and(confirmed_flush_lsn >= '{}') FROM pg_replication_slots WHERE database = current_database()"


@pytest.fixture
def target_dbs(target_server: ServerAddress) -> Iterator[list[Database]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(fresh_database(target_server, "tgt")) for _ in range(3)]


async def all_follow(publisher: Database, subscriptions: Sequence[Subscription]) -> None:
    """Every table is synchronized, and prepared transactions come where they are wanted."""

    def ready() -> bool:
        states = [[entry.state for entry in each.status.tables.values()] for each in subscriptions]
        return all(found == [TableState.READY] for found in states)

    await until(ready, "all tables ready")
    following = (
        "SELECT count(*), count(*) FILTER (WHERE two_phase) FROM pg_replication_slots WHERE database = current_database() AND active"
    )
    await until(lambda: publisher.fetch(following) == [(len(subscriptions) + 2, len(subscriptions))], "all slots followed")


@contextlib.asynccontextmanager
async def running(*subscriptions: Subscription) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each.run()) for each in subscriptions]
    try:
        yield
        for each in subscriptions:
            each.stop()
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_SECONDS)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def roll_back_a_savepoint(publisher: Database, writer: Connection, first: int, *, followers: int) -> None:
    """In an open transaction: two long rows that all followers have received are rolled back, and two short ones are kept."""
    writer.execute(f"BEGIN; INSERT INTO t VALUES ({first}, 'main', 'x'); SAVEPOINT s")
    writer.execute(f"INSERT INTO t SELECT {first + 10} + g, 'rolled back', {LONG} FROM generate_series(1, 2) AS g".encode())
    # its commit flushes the WAL
    publisher.execute("SELECT pg_logical_emit_message(true, '', '')")
    publisher.wait(RECEIVED.format(publisher.current_lsn()), followers)
    writer.execute(f"ROLLBACK TO s; INSERT INTO t VALUES ({first + 2}, 'kept', 'z')")


async def consumed(publisher: Database, taken: set[int]) -> None:
    """``subscriber.transactions()``, whose object ``tail`` prints as well."""
    options = SubscriptionOptions(streaming="on", two_phase=True)
    async with subscriber.transactions(
        publisher.conninfo(), publications=["pub"], slot_name=f"c_{publisher.name}", options=options
    ) as stream:
        async for transaction in stream:
            async for change in transaction:
                taken.add(int(change.new["id"]))  # type: ignore[union-attr, arg-type]
            await transaction.acknowledge()


@pytest.mark.parametrize("version", [*(pytest.param(version, marks=pytest.mark.endurance) for version in (15, 16)), 18])
async def test_no_target_has_the_rows(
    servers: Servers, version: int, target_dbs: list[Database], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    address = ServerAddress(servers.get("publisher", version).dsn(), version)
    on, parallel, native = target_dbs
    sqlite, lake = sqlite_target(tmp_path / "sqlite.db"), tmp_path / "lake"
    with fresh_database(address, "pub") as publisher, publisher.connect() as writer:
        for database in (publisher, *target_dbs):
            database.execute(TABLE)
        publisher.execute("ALTER TABLE t ALTER v SET STORAGE EXTERNAL; CREATE PUBLICATION pub FOR TABLE t")
        options = f"slot_name = 'n_{publisher.name}', copy_data = false, streaming = on"
        native.execute(f"CREATE SUBSCRIPTION n_{publisher.name} CONNECTION '{publisher.conninfo()}' PUBLICATION pub WITH ({options})")

        def into(target: str, settings: Settings = QUICK, **options: object) -> Subscription:
            return Subscription(
                f"{target.partition(':')[0]}_{len(found)}_{publisher.name}",
                connection=publisher.conninfo(),
                publications=["pub"],
                target=target,
                options=replace(SubscriptionOptions(), **options),  # type: ignore[arg-type]
                settings=settings,
            )

        found: list[Subscription] = []
        small = replace(QUICK, logical_decoding_work_mem=64 * 1024, spool_directory=str(tmp_path / "spool"))
        found.append(into(on.dsn, small, streaming="on"))
        found.append(into(parallel.dsn, streaming="parallel", two_phase=True))
        found.append(into(sqlite.url, small, streaming="on", two_phase=True))
        found.append(into(f"spark://{lake}", streaming="on", two_phase=True))
        taken: set[int] = set()
        async with running(*found):
            following = asyncio.create_task(consumed(publisher, taken))
            try:
                await all_follow(publisher, found)
                for first in (1, 101):
                    await asyncio.to_thread(roll_back_a_savepoint, publisher, writer, first, followers=len(found) + 2)
                    writer.execute("COMMIT" if first == 1 else f"PREPARE TRANSACTION '{publisher.name}'")
                writer.execute(f"COMMIT PREPARED '{publisher.name}'")
                lsn = publisher.current_lsn()
                await asyncio.gather(*(each.wait_for(lsn, WAIT_SECONDS) for each in found))
                await asyncio.to_thread(publisher.wait, CONFIRMED.format(lsn), True)
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        kept = [1, 3, 101, 103]
        assert [id for (id,) in publisher.fetch(IDS)] == kept
        assert sorted(taken) == kept
        assert [[id for (id,) in fetch(IDS)] for fetch in (on.fetch, parallel.fetch, sqlite.fetch)] == [kept] * 3
        assert sorted(int(id or 0) for (id,) in lake_rows(lake, await applied(lake), TableName("public", "t"), ["id"])) == kept
        # the publisher did send them
        assert [id for (id,) in native.fetch(IDS)] == [1, 3, 12, 13, 101, 103, 112, 113]
        assert min(each.status.statistics.rolled_back_changes for each in found) >= 4
        assert caplog.text.count("rolled back 1 of its subtransactions without telling; their changes (2) are left out") >= 10
        assert "asking the publisher to send only complete transactions" not in caplog.text
