"""Many tables: what is asked of either server does not grow with their number."""

from __future__ import annotations

import asyncpg
import pytest

from subscriber import check
from subscriber.interfaces import TableName
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.tables.table_reader import read_table
from subscriber.waits import Watch
from subscriber.walreceiver.session import Session
from tests.support.database import Database
from tests.support.replica import replica

FEW, MANY = 2, 40


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every query that either server is asked, by whichever of our sessions."""
    queries: list[str] = []
    execute, fetch, apply = Session.execute, CatalogReader.fetch, ApplySession.fetch

    async def of_publisher(self: Session, query: str) -> object:
        queries.append(query)
        return await execute(self, query)

    async def of_reader(self: CatalogReader, query: str, *parameters: object) -> object:
        queries.append(query)
        return await fetch(self, query, *parameters)

    async def of_session(self: ApplySession, query: str, /, *parameters: object) -> object:
        queries.append(query)
        return await apply(self, query, *parameters)

    monkeypatch.setattr(Session, "execute", of_publisher)
    monkeypatch.setattr(CatalogReader, "fetch", of_reader)
    monkeypatch.setattr(ApplySession, "fetch", of_session)
    return queries


def make(publisher: Database, target: Database, count: int) -> None:
    made = ";".join(f"CREATE TABLE t{number} (id int PRIMARY KEY, a text)" for number in range(count))
    for database in (publisher, target):
        database.execute(f"DROP SCHEMA public CASCADE; CREATE SCHEMA public; {made}")
    publisher.execute("DROP PUBLICATION IF EXISTS pub; CREATE PUBLICATION pub FOR ALL TABLES")


async def test_check_asks_no_more_for_many_tables(publisher18_db: Database, target_db: Database, queries: list[str]) -> None:
    """It asked the target eight queries a table: 34 s for 3,000 tables."""
    counts = []
    for count in (FEW, MANY):
        make(publisher18_db, target_db, count)
        queries.clear()
        assert await check("many", connection=publisher18_db.dsn, publications=["pub"], target=target_db.dsn) == []
        counts.append(len(queries))
    assert counts[0] == counts[1]


async def test_the_first_and_later_starts_ask_no_more_for_many_tables(
    publisher18_db: Database, target_db: Database, queries: list[str]
) -> None:
    """Every table was added by four queries, and the report of each second asked one query a table."""
    counts = []
    for count in (FEW, MANY):
        make(publisher18_db, target_db, count)
        for start in ("first", "later"):
            queries.clear()
            async with replica(publisher18_db, target_db, name=f"r{count}", copy_data=False) as running:
                await running.caught_up()
                assert len(running.subscription.status.tables) == count
                await running.stop()
            counts.append((start, len([query for query in queries if "pg_subscription_rel" in query or "unnest" in query])))
    few, many = dict(counts[:2]), dict(counts[2:])
    # reports come with time, too
    assert many["first"] <= few["first"] + 10
    assert many["later"] <= few["later"] + 10


async def test_a_tree_is_read_once_for_all_its_partitions(publisher18_db: Database, target_db: Database, queries: list[str]) -> None:
    """The publisher describes the root for each partition that has a change. Each time, the target's whole tree was read again."""
    tree = "CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);" + ";".join(
        f"CREATE TABLE leaf{number} PARTITION OF root FOR VALUES FROM ({number}) TO ({number + 1})" for number in range(MANY)
    )
    for database in (publisher18_db, target_db):
        database.execute(tree)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE root WITH (publish_via_partition_root)")
    async with replica(publisher18_db, target_db) as running:
        await running.caught_up()
        queries.clear()
        # one transaction that is streamed, and one for each partition
        publisher18_db.execute(f"INSERT INTO root SELECT g, repeat('x', 4000) FROM generate_series(0, {MANY} - 1) AS g")
        for number in range(MANY):
            publisher18_db.execute(f"UPDATE root SET v = '{number}' WHERE id = {number}")
        await running.same("SELECT id, v FROM root ORDER BY id")
    # by the apply worker, and by the session of a streamed transaction
    assert len([query for query in queries if "relispartition" in query and "AS fingerprint" in query]) <= 2


async def test_reading_a_table_is_progress_for_the_watchdog(target_db: Database) -> None:
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY)")
    reader = CatalogReader(await asyncpg.connect(target_db.dsn))
    watch = Watch()
    watch.moved_at = 0.0
    with watch.current():
        # the durability of commits is polled without an end
        await reader.fetch("SELECT 1")
        assert watch.moved_at == 0.0
        await read_table(reader, TableName("public", "t"), as_owner=False)
        assert watch.moved_at > 0.0
    await reader.close()
