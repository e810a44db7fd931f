"""The main job in small: copy, follow, stop, resume."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from subscriber import PublisherError, TableName, TableState, Until
from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import replica, subscription_of
from tests.support.row_gates import open_transaction

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


async def test_copies_follows_and_resumes_after_a_stop(publisher_db: Database, target_db: Database) -> None:
    for database in (publisher_db, target_db):
        database.execute(TABLE)
    publisher_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 1000) AS i; CREATE PUBLICATION pub FOR TABLE t")
    async with replica(publisher_db, target_db) as first:
        await first.same("SELECT count(*), sum(id) FROM t")
        publisher_db.execute("UPDATE t SET v = 'followed' WHERE id <= 10; DELETE FROM t WHERE id > 990; INSERT INTO t VALUES (2000, 'new')")
        rows = await first.same("SELECT id, v FROM t ORDER BY id")
        assert len(rows) == 991
        assert first.subscription.status.statistics.inserts == 1
        assert first.subscription.status.statistics.updates == 10
        assert first.subscription.status.statistics.deletes == 10
        assert first.subscription.status.tables[TableName("public", "t")].state in {TableState.SYNCDONE, TableState.READY}
    publisher_db.execute("INSERT INTO t VALUES (3000, 'while away')")
    async with replica(publisher_db, target_db) as second:
        await second.same("SELECT id, v FROM t ORDER BY id")
        # nothing came a second time
        assert second.subscription.status.statistics.inserts == 1
        assert second.subscription.status.statistics.updates == 0
    assert publisher_db.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()") == [
        (f"replica_{publisher_db.name}",)
    ]


@pytest.mark.parametrize("explicit", [False, True])
async def test_ends_when_caught_up(publisher18_db: Database, target_db: Database, explicit: bool) -> None:
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")
    subscription = subscription_of(publisher18_db, target_db)
    await subscription.run(Until(publisher18_db.current_lsn()) if explicit else Until())
    assert target_db.value("SELECT count(*) FROM t") == 100
    publisher18_db.execute("INSERT INTO t VALUES (101, 'later')")
    await subscription.run(Until(publisher18_db.current_lsn()) if explicit else Until())
    assert target_db.value("SELECT count(*) FROM t") == 101


async def test_stopped_while_its_slot_is_created(publisher18_db: Database, target_db: Database) -> None:
    """Nothing is left that lets the next start take another subscription's slot for its own."""
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    slot = f"replica_{publisher18_db.name}"
    creating = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CREATE_REPLICATION_SLOT%' AND state = 'active'"
    with open_transaction(publisher18_db, "INSERT INTO t VALUES (1)"):
        async with replica(publisher18_db, target_db) as found:
            await asyncio.to_thread(publisher18_db.wait, creating, 1)
            await found.stop()
        publisher18_db.wait("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()", 0)
    publisher18_db.fetch(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    theirs = publisher18_db.fetch("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE database = current_database()")
    publisher18_db.execute("INSERT INTO t VALUES (2)")
    with pytest.raises(PublisherError, match=f'replication slot "{slot}" already exists'):
        await subscription_of(publisher18_db, target_db).run(Until())
    assert publisher18_db.fetch("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE database = current_database()") == theirs
    publisher18_db.fetch(f"SELECT pg_drop_replication_slot('{slot}')")
    await subscription_of(publisher18_db, target_db).run(Until())
    assert target_db.fetch("SELECT id FROM t") == [(2,)]


@pytest.mark.slow
async def test_stop_does_not_wait_for_a_target_that_does_not_answer(publisher18_db: Database, target_db: Database) -> None:
    """For example a machine that has vanished: the bug was that the end of the run tried for ever to store the last error there."""
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'copied')")
    async with replica(publisher18_db, target_db) as found:
        await found.caught_up()
        name = found.subscription.name
        named = f"FROM pg_stat_activity WHERE application_name LIKE '{name}%'"
        # the table's session has ended: one applies, one reads
        await asyncio.to_thread(target_db.wait, f"SELECT count(*) {named}", 2)
        frozen = [pid for (pid,) in target_db.fetch(f"SELECT pid {named}")]
        try:
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            found.subscription.stop()
            done, _ = await asyncio.wait({found.running}, timeout=2 * WAIT_SECONDS)
            assert done
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
