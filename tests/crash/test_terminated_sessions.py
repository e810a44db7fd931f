"""The subscriber's sessions are terminated at random, on both sides, while tables are copied: each copy is retried."""

from __future__ import annotations

import asyncio
import random
import secrets

import pytest

from subscriber import Settings, TableState
from tests.support.database import Database
from tests.support.observation import eventually, until
from tests.support.replica import replica

TABLES = range(8)
SETTINGS = Settings(
    wal_retrieve_retry_interval=0.2, max_sync_workers_per_subscription=4, copy_range_size=256 * 1024, max_copy_workers_per_table=2
)


@pytest.mark.crash
async def test_sessions_of_both_sides(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for number in TABLES:
        for database in (publisher, target):
            database.execute(f"CREATE TABLE t{number} (id int, v text)")
        publisher.execute(f"INSERT INTO t{number} SELECT i, repeat(md5(i::text), 8) FROM generate_series(1, 5000) AS i")
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    end = (
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name <> ''"
    )
    terminated = 0
    async with replica(publisher, target, settings=SETTINGS) as found:
        # what fails before that ends the run, as it should
        await until(lambda: found.subscription.status.streaming, "the first stream")
        for _ in range(25):
            # chance, not synchronisation
            await asyncio.sleep(rng.uniform(0, 0.3))
            side = rng.choice([publisher, target])
            terminated += await asyncio.to_thread(side.value, end)
            publisher.execute(f"INSERT INTO t{rng.choice(TABLES)} VALUES (-1, 'meanwhile')")
        await found.caught_up(60)
        for number in TABLES:
            await found.same(f"SELECT id, v FROM t{number} ORDER BY id, v")
        assert {entry.state for entry in found.subscription.status.tables.values()} <= {TableState.SYNCDONE, TableState.READY}
        # a slot whose DROP was what we terminated goes at the next attempt
        await eventually(publisher, "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 1)
    assert terminated > 20
