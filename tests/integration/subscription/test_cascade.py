"""A target that is itself a publisher: of all its tables, ours among them."""

from __future__ import annotations

from subscriber import TableName
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.replica import replica


async def test_all_tables_of_a_replica(publisher18_db: Database, target_db: Database, target_server: ServerAddress) -> None:
    with fresh_database(target_server, "end") as end:
        for database in (publisher18_db, target_db, end):
            database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        publisher18_db.execute("INSERT INTO t SELECT i, 'copied' FROM generate_series(1, 100) AS i; CREATE PUBLICATION pub FOR ALL TABLES")
        # before our catalog is there
        target_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        async with replica(publisher18_db, target_db) as first, replica(target_db, end) as second:
            publisher18_db.execute("UPDATE t SET v = 'followed' WHERE id <= 10; DELETE FROM t WHERE id = 100")
            await first.same("SELECT id, v FROM t ORDER BY id")
            assert len(await second.same("SELECT id, v FROM t ORDER BY id")) == 99
            assert list(second.subscription.status.tables) == [TableName("public", "t")]
            # each catalog knows its own subscription only
            assert target_db.fetch("SELECT subname::text FROM subscriber.pg_subscription") == [(first.subscription.name,)]
            assert end.fetch("SELECT subname::text FROM subscriber.pg_subscription") == [(second.subscription.name,)]
            assert second.subscription.status.last_error is None
