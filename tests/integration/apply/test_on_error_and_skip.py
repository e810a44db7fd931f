"""disable_on_error, and SKIP of the transaction that cannot be applied, as natively (029_on_error)."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from subscriber import Lsn, SubscriptionOptions, alter_subscription, drop_subscription
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.observation import until
from tests.support.replica import QUICK

ROWS = "SELECT id, v FROM t ORDER BY id"
ENABLED = "SELECT subenabled FROM subscriber.pg_subscription"
LARGE = "INSERT INTO t SELECT i, repeat('x', 400) FROM generate_series(1000, 1999) AS i"
SMALL_MEMORY = "ALTER DATABASE {} SET logical_decoding_work_mem = '64kB'"


def finished_at(text: str) -> Lsn:
    """The LSN of the error's context."""
    found = re.findall(r"finished at ([0-9A-F]+/[0-9A-F]+)", text)
    assert found, text
    return Lsn.parse(found[-1])


async def skip(publisher: Database, target: Database, name: str, conflicting: str) -> Lsn:
    """A transaction conflicts with a row of the target: the subscription is disabled; after the skip it continues."""
    for statement in conflicting.split(";"):
        publisher.execute(statement)
    await asyncio.to_thread(target.wait, ENABLED, False)
    error = target.value("SELECT last_error FROM subscriber.subscription_stats")
    assert 'conflict detected on relation "public.t": conflict=insert_exists' in error
    lsn = finished_at(error)
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        await subscription.skip(lsn)
        assert target.value("SELECT subskiplsn::text FROM subscriber.pg_subscription") == str(lsn)
        await subscription.enable()
    await asyncio.to_thread(target.wait, "SELECT subskiplsn::text FROM subscriber.pg_subscription", "0/0")
    return lsn


@pytest.mark.parametrize("streaming", ["parallel", "on", pytest.param("off", marks=pytest.mark.endurance)])
async def test_disabled_then_skipped(
    publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture, streaming: str
) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    publisher.execute(SMALL_MEMORY.format(publisher.name))
    options = SubscriptionOptions.parse(["disable_on_error=true", "two_phase=true", f"streaming={streaming}"])
    name = await create(publisher, target, options=options)
    async with launched(target):
        publisher.execute("INSERT INTO t VALUES (0, 'first')")
        await same(publisher, target, name, ROWS)
        await asyncio.to_thread(target.wait, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")
        target.execute("INSERT INTO t VALUES (1, 'of the target'), (6, 'of the target'), (1500, 'of the target')")
        lsn = await skip(publisher, target, name, "INSERT INTO t VALUES (1, 'skipped'), (2, 'skipped')")
        await asyncio.to_thread(publisher.execute, "INSERT INTO t VALUES (3, 'after')")
        await asyncio.to_thread(target.wait, "SELECT v FROM t WHERE id = 3", "after")
        # a large one, streamed where it may be
        await skip(publisher, target, name, LARGE)
        streamed = f"SELECT stream_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = '{name}'"
        await asyncio.to_thread(publisher.wait, streamed, streaming != "off")
        # a prepared one: skipped at its PREPARE, and its COMMIT PREPARED does nothing
        await skip(
            publisher,
            target,
            name,
            "BEGIN;INSERT INTO t VALUES (4, 'skipped'), (6, 'skipped');PREPARE TRANSACTION 'g'",
        )
        publisher.execute("COMMIT PREPARED 'g'")
        publisher.execute("INSERT INTO t VALUES (5, 'last')")
        await asyncio.to_thread(target.wait, "SELECT v FROM t WHERE id = 5", "last")
        assert target.fetch(ROWS) == [
            (0, "first"),
            (1, "of the target"),
            (3, "after"),
            (5, "last"),
            (6, "of the target"),
            (1500, "of the target"),
        ]
        assert target.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []
        counted = target.fetch("SELECT apply_error_count::int, sync_error_count::int FROM subscriber.pg_stat_subscription_stats")
        assert counted == [(3, 0)]
        for kind in ("starts", "completed"):
            assert f"logical replication {kind} skipping transaction at LSN {lsn}" in caplog.text
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_skipped_though_it_was_applied_in_parallel(
    publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture
) -> None:
    """Most of it is applied before its end; then it conflicts, is sent again, and is skipped whole."""
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    publisher.execute(SMALL_MEMORY.format(publisher.name))
    caplog.set_level("INFO", logger="subscriber")
    name = await create(publisher, target, options=SubscriptionOptions.parse(["disable_on_error=true", "streaming=parallel"]))
    target.execute("INSERT INTO t VALUES (1, 'of the target')")
    applied = (
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name LIKE '%parallel apply' AND state = 'idle in transaction' AND backend_xid IS NOT NULL"
    )
    async with launched(target):
        publisher.execute("INSERT INTO t VALUES (0, 'first')")
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        with contextlib.closing(publisher.connect()) as session:
            session.execute("BEGIN")
            session.execute(LARGE)
            await asyncio.to_thread(target.wait, applied, True)
            session.execute("INSERT INTO t VALUES (1, 'skipped')")
            session.execute("COMMIT")
        await asyncio.to_thread(target.wait, ENABLED, False)
        lsn = finished_at(target.value("SELECT last_error FROM subscriber.subscription_stats"))
        assert target.value("SELECT count(*) FROM t") == 2
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.skip(lsn)
            await subscription.enable()
        await asyncio.to_thread(target.wait, "SELECT subskiplsn::text FROM subscriber.pg_subscription", "0/0")
        # and parallel apply continues after it
        with contextlib.closing(publisher.connect()) as session:
            session.execute("BEGIN")
            session.execute("INSERT INTO t SELECT i, repeat('y', 400) FROM generate_series(3000, 3999) AS i")
            await asyncio.to_thread(target.wait, applied, True)
            session.execute("COMMIT")
        await asyncio.to_thread(target.wait, "SELECT count(*) FROM t WHERE id >= 3000", 1000)
        assert target.fetch("SELECT id, v FROM t WHERE id < 3000 ORDER BY id") == [(0, "first"), (1, "of the target")]
        assert publisher.value(f"SELECT stream_txns > 1 FROM pg_stat_replication_slots WHERE slot_name = '{name}'")
        for kind in ("starts", "completed"):
            assert caplog.text.count(f"logical replication {kind} skipping transaction at LSN {lsn}") == 1
        # it is said a moment after the rows are there
        await until(lambda: "was applied in parallel" in caplog.text, "the log")
        assert target.value("SELECT apply_error_count::int FROM subscriber.pg_stat_subscription_stats") == 1
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_wrong_lsn_is_cleared(publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher, target)
    async with launched(target):
        publisher.execute("INSERT INTO t VALUES (1, 'a')")
        await same(publisher, target, name, ROWS)
        wrong = Lsn(publisher.current_lsn() + 2**30)
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.skip(wrong)
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        assert len(await same(publisher, target, name, ROWS)) == 2
        await asyncio.to_thread(target.wait, "SELECT subskiplsn::text FROM subscriber.pg_subscription", "0/0")
        # said behind the commit that clears it
        await until(lambda: f'skip-LSN of subscription "{name}" cleared' in caplog.text, "the warning")
        assert f"did not match skip-LSN {wrong}" in caplog.text
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.skip(wrong)
            await subscription.skip(None)
        assert target.value("SELECT subskiplsn::text FROM subscriber.pg_subscription") == "0/0"
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_copy_that_fails_disables(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    target.execute("INSERT INTO t VALUES (1, 'of the target')")
    name = await create(publisher, target, options=SubscriptionOptions(disable_on_error=True))
    async with launched(target):
        await asyncio.to_thread(target.wait, ENABLED, False)
        assert target.fetch("SELECT apply_error_count::int, sync_error_count::int FROM subscriber.pg_stat_subscription_stats") == [(0, 1)]
        target.execute("TRUNCATE t")
        async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
            await subscription.enable()
        assert await same(publisher, target, name, ROWS) == [(1, "a")]
        target.execute(f"SELECT subscriber.pg_stat_reset_subscription_stats(oid) FROM subscriber.pg_subscription WHERE subname = '{name}'")
        assert target.fetch(
            "SELECT apply_error_count::int, sync_error_count::int, stats_reset IS NOT NULL FROM subscriber.pg_stat_subscription_stats"
        ) == [(0, 0, True)]
    await drop_subscription(name, target=target.dsn, settings=QUICK)
