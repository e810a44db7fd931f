"""The main job in small: copy, follow, stop, go on."""

from __future__ import annotations

import pytest

from subscriber import TableName, TableState, Until
from tests.database import Database
from tests.integration.replica import replica, subscription_of

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"


async def test_copies_follows_and_goes_on_after_a_stop(publisher_db: Database, target_db: Database) -> None:
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
async def test_ends_when_caught_up(publisher_db: Database, target_db: Database, explicit: bool) -> None:
    for database in (publisher_db, target_db):
        database.execute(TABLE)
    publisher_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR TABLE t")
    subscription = subscription_of(publisher_db, target_db)
    await subscription.run(Until(publisher_db.current_lsn()) if explicit else Until())
    assert target_db.value("SELECT count(*) FROM t") == 100
    publisher_db.execute("INSERT INTO t VALUES (101, 'later')")
    await subscription.run(Until(publisher_db.current_lsn()) if explicit else Until())
    assert target_db.value("SELECT count(*) FROM t") == 101
