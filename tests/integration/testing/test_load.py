"""The mixed load does everything that it says, by its seed, and survives restarts; native replication carries it to equality."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from subscriber.errors import ConfigurationError
from subscriber.testing.comparison import compare, compare_prepared
from subscriber.testing.load.mixed_load import Kind, MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables, drop_tables, table_names
from subscriber.testing.server import EmbeddedServer
from tests.support.database import Database, ServerAddress, fresh_database

ROWS = 4000


def left_prepared(database: Database) -> int:
    found: int = database.value("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()")
    return found


async def differing_tables(left: Database, right: Database) -> list[str]:
    return [comparison.table.name for comparison in await compare(left.dsn, right.dsn, table_names("load")) if not comparison.equal]


async def test_every_kind_comes_even_in_a_short_load(publisher18_db: Database) -> None:
    await create_tables(publisher18_db.dsn, rows=ROWS)
    load = MixedLoad(publisher18_db.dsn, seed=1, huge_rows=3000)
    report = await load.run(transactions=len(Kind))
    assert report.kinds == dict.fromkeys(Kind, 1)
    assert report.transactions == len(Kind)
    assert report.rolled_back == {Kind.ROLLBACK: 1, Kind.HUGE_ROLLBACK: 1}
    assert report.prepared == {Kind.PREPARED: 1, Kind.HUGE_PREPARED: 1}
    assert report.retried == 0


@pytest.mark.endurance
async def test_stays_free_of_deadlocks_and_finishes_what_is_prepared(publisher18_db: Database) -> None:
    await create_tables(publisher18_db.dsn, rows=ROWS)
    load = MixedLoad(publisher18_db.dsn, seed=2, huge_rows=2000, sessions=6)
    report = await load.run(transactions=300)
    assert (report.retried, report.lost, report.reconnected) == (0, 0, 0)
    assert report.transactions == 300
    waiting = left_prepared(publisher18_db)
    assert report.prepared.total() == report.committed_prepared + report.rolled_back_prepared + waiting
    await load.finish()
    assert left_prepared(publisher18_db) == 0
    assert report.prepared.total() == report.committed_prepared + report.rolled_back_prepared
    assert min(report.committed_prepared, report.rolled_back_prepared) > 0


async def test_finish_leaves_what_is_not_the_loads(publisher18_db: Database) -> None:
    await create_tables(publisher18_db.dsn, rows=ROWS)
    publisher18_db.execute("CREATE TABLE other (id int); BEGIN; INSERT INTO other VALUES (1); PREPARE TRANSACTION 'not the load''s'")
    load = MixedLoad(publisher18_db.dsn, seed=3, weights={Kind.PREPARED: 1}, sessions=2)
    await load.run(transactions=8)
    assert left_prepared(publisher18_db) > 1
    await load.finish()
    assert left_prepared(publisher18_db) == 1


@pytest.mark.endurance
async def test_the_same_seed_gives_the_same_rows(publisher18: ServerAddress, publisher18_db: Database) -> None:
    with fresh_database(publisher18, "pub") as again, fresh_database(publisher18, "pub") as other:
        for database, seed in ((publisher18_db, 4), (again, 4), (other, 5)):
            await create_tables(database.dsn, rows=ROWS)
            load = MixedLoad(database.dsn, seed=seed, huge_rows=2000, sessions=1)
            await load.run(transactions=150)
            await load.finish()
        assert await differing_tables(publisher18_db, again) == []
        assert {"accounts", "documents", "measurements", "specimens"} <= set(await differing_tables(publisher18_db, other))


@pytest.mark.endurance
async def test_second_run_uses_keys_of_its_own(publisher18_db: Database) -> None:
    await create_tables(publisher18_db.dsn, rows=ROWS)
    first, load = (MixedLoad(publisher18_db.dsn, seed=6, huge_rows=2000) for _ in range(2))
    await first.run(transactions=100)
    await load.run(transactions=100)
    report = await load.run(transactions=100)
    assert report.transactions == 200
    await load.finish()


async def test_ends_by_time_by_event_and_needs_an_end(publisher18_db: Database) -> None:
    await create_tables(publisher18_db.dsn, rows=ROWS)
    load = MixedLoad(publisher18_db.dsn, seed=7, rate=50, huge_rows=1000)
    with pytest.raises(ValueError, match="needs an end"):
        await load.run()
    report = await load.run(seconds=1.5)
    assert 1 <= report.transactions <= 75 + 4  # the rate, and one begun in each session
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load.run(enough))
        before = report.transactions
        while report.transactions < before + 20:
            assert not running.done()
            await asyncio.sleep(0.01)
        enough.set()
    await load.finish()


async def test_an_error_of_the_publisher_ends_it(publisher18_db: Database) -> None:
    await create_tables(publisher18_db.dsn, rows=ROWS)
    publisher18_db.execute("DROP TABLE load.documents")
    with pytest.raises(Exception, match='relation "documents" does not exist'):
        await MixedLoad(publisher18_db.dsn, seed=8).run(transactions=200)


@pytest.mark.endurance
async def test_continues_after_the_publisher_was_killed(make_server: Callable[..., EmbeddedServer]) -> None:
    server = make_server(18)
    await create_tables(server.dsn(), rows=ROWS)
    load = MixedLoad(server.dsn(), seed=9, huge_rows=2000, reconnect=True)
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        running = group.create_task(load.run(enough))
        for stop in (server.kill, server.stop):
            before = load.report.transactions
            while load.report.transactions < before + 50:
                assert not running.done()
                await asyncio.sleep(0.01)
            await asyncio.to_thread(stop)
            await asyncio.to_thread(server.start)
        before = load.report.transactions
        while load.report.transactions < before + 50:
            assert not running.done()
            await asyncio.sleep(0.01)
        enough.set()
    assert load.report.lost >= 2
    assert load.report.reconnected >= 2
    await load.finish()
    database = Database(ServerAddress(server.dsn(), 18), "postgres")
    assert left_prepared(database) == 0
    database.close()


async def test_create_refuses_a_schema_that_exists(target_db: Database) -> None:
    target_db.execute("CREATE SCHEMA load; CREATE TABLE load.precious (id int)")
    with pytest.raises(ConfigurationError, match=f'schema "load" exists already in database "{target_db.name}"'):
        await create_tables(target_db.dsn)
    assert target_db.value("SELECT count(*) FROM pg_class WHERE relnamespace = 'load'::regnamespace") == 1


async def test_create_and_drop_leave_nothing(target_db: Database) -> None:
    await create_tables(target_db.dsn, schema='my "load"', rows=500)
    for table in TABLES:
        assert target_db.value(f'SELECT count(*) FROM "my ""load""".{table}') > 0
    await drop_tables(target_db.dsn, schema='my "load"')
    assert target_db.value("SELECT count(*) FROM pg_namespace WHERE nspname LIKE '%load%'") == 0
    await drop_tables(target_db.dsn, schema='my "load"')


@pytest.mark.endurance
@pytest.mark.parametrize("streaming", ["on", "parallel"])
async def test_native_replication_of_the_load_gives_equal_rows(publisher16_db: Database, target_db: Database, streaming: str) -> None:
    """Publisher 16: the native apply worker of 18 dies of the stray STREAM ABORT that an 18 sends (see SEMANTICS, fact 2)."""
    await create_tables(publisher16_db.dsn, rows=ROWS)
    await create_tables(target_db.dsn)
    name = publisher16_db.name  # slots are the server's, not the database's
    publisher16_db.execute("CREATE PUBLICATION all_of_it FOR TABLES IN SCHEMA load")
    target_db.execute(
        f"CREATE SUBSCRIPTION {name} CONNECTION '{publisher16_db.conninfo()}' PUBLICATION all_of_it"
        f" WITH (two_phase, streaming = {streaming})"
    )
    target_db.wait("SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel", True)
    target_db.wait(f"SELECT subtwophasestate FROM pg_subscription WHERE subname = '{name}'", "e")
    load = MixedLoad(publisher16_db.dsn, seed=10, huge_rows=6000)
    await load.run(transactions=200)

    def caught_up() -> None:
        lsn = publisher16_db.current_lsn()
        publisher16_db.wait(f"SELECT count(*) FROM pg_stat_replication WHERE application_name = '{name}' AND replay_lsn >= '{lsn}'", 1)

    await asyncio.to_thread(caught_up)
    assert left_prepared(publisher16_db) > 0
    assert (await compare_prepared(publisher16_db.dsn, target_db.dsn)).equal
    assert await differing_tables(publisher16_db, target_db) == []
    await load.finish()
    await asyncio.to_thread(caught_up)
    assert (await compare_prepared(publisher16_db.dsn, target_db.dsn)).publisher == frozenset()
    assert await differing_tables(publisher16_db, target_db) == []
    streamed = publisher16_db.value(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{name}'")
    assert streamed > 0
    target_db.execute("UPDATE load.tellers SET tbalance = tbalance + 1 WHERE tid = 3")
    assert await differing_tables(publisher16_db, target_db) == ["tellers"]
