"""The PostgreSQL sink: a killed process's last COMMIT that comes after its successor's start."""

from __future__ import annotations

import asyncio

import psycopg

from subscriber.interfaces import Position, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from tests.support.database import Database
from tests.support.observation import lock_refused
from tests.support.sink_postgres import opened

T = TableName("public", "t")


async def test_a_synchronization_that_is_being_stored_is_waited_for(target_db: Database) -> None:
    # read as FINISHEDCOPY, the apply worker would skip changes after the handover, and no worker would apply them
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    async with opened(target_db) as feed:
        await feed.opened.add_tables([T], TableEntry(TableState.INIT))
        dying = feed.opened.open_table(T)
        await dying.begin()
        await dying.start_copy()
        await dying.finish_copy(Position("slot", "7000000000000000001", 1, Lsn(0x1100)))
        with psycopg.connect(target_db.dsn) as blocker:
            blocker.execute("SELECT FROM subscriber.pg_subscription_rel FOR UPDATE")
            storing = asyncio.create_task(dying.finish_sync(Lsn(0x5000)))
            await asyncio.to_thread(
                target_db.wait,
                "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()",
                1,
            )
            reading = asyncio.create_task(feed.opened.tables())
            await lock_refused(target_db)
            assert not reading.done(), "the state was read while it may still change"
            assert not storing.done()
            blocker.rollback()
        await storing
        await dying.close()
        assert await reading == {T: TableEntry(TableState.SYNCDONE, Lsn(0x5000))}
