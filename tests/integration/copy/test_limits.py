"""Limits that a running subscription follows: the hours for copies, and the rate of changes."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from subscriber import SubscriptionOptions, Until, drop_subscription
from subscriber.cli.http.overview import describe
from subscriber.cli.http.sampler import Watched
from subscriber.interfaces import TableState
from tests.support.database import Database
from tests.support.managed import closed_window, create, launched, same
from tests.support.observation import acknowledged, all_ready, eventually, until
from tests.support.program import subscriber
from tests.support.replica import QUICK, replica, subscription_of


async def test_limits_are_followed_without_a_restart(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE late (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO t VALUES (1, 'a'); CREATE PUBLICATION pub FOR ALL TABLES")
    window = closed_window()
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(copy_window=window, synchronous_commit="on"))

    async def alter(*options: str) -> None:
        given = [word for option in options for word in ("-o", option)]
        done = await asyncio.to_thread(subscriber, "alter", name, "--target", target_db.dsn, *given)
        assert done.status == 0, done.errors

    async with launched(target_db) as launcher:
        await until(lambda: name in launcher.subscriptions and launcher.subscriptions[name].status.copies_begin is not None, "it waits")
        running = launcher.subscriptions[name]
        opens = running.status.copies_begin
        assert opens is not None
        assert 0 < opens - datetime.now(UTC).timestamp() <= 7200
        assert {entry.state for entry in running.status.tables.values()} == {TableState.INIT}
        assert describe(name, running.status, Watched())["copies"]["begin"] == opens
        line = f"copies wait for copy_window ({window}), which opens at "
        await until(lambda: line in subscriber("status", "--target", target_db.dsn).output, "status says why", in_thread=True)
        (status,) = json.loads((await asyncio.to_thread(subscriber, "status", "--json", "--target", target_db.dsn)).output)["subscriptions"]
        assert datetime.fromisoformat(status["copies_begin"]).timestamp() == opens
        await alter("copy_window=none", "max_copy_rate=10MB/s", "max_apply_rate=1kB/s")
        await same(publisher18_db, target_db, name, "SELECT * FROM t")
        # a transaction is applied at once, and its size holds up the next one
        publisher18_db.execute("INSERT INTO t VALUES (2, repeat('x', 500000))")
        await eventually(target_db, "SELECT count(*) FROM t", 2)
        publisher18_db.execute("INSERT INTO t VALUES (3, 'c')")
        await until(lambda: running.status.times.phases["limit"] > 0 and running.status.received > running.status.applied, "it is held up")
        assert target_db.fetch("SELECT count(*) FROM t") == [(2,)]
        assert describe(name, running.status, Watched())["limited"]
        told = ("status", "--target", target_db.dsn)
        await until(lambda: "changes/s, limited by max_apply_rate\n" in subscriber(*told).output, "status says why", in_thread=True)
        (status,) = json.loads((await asyncio.to_thread(subscriber, *told, "--json")).output)["subscriptions"]
        assert status["limited"] is True
        await alter("max_apply_rate=0")
        await same(publisher18_db, target_db, name, "SELECT * FROM t")
        assert not running.status.limited
        assert launcher.subscriptions[name] is running
    await drop_subscription(name, target=target_db.dsn)


async def test_relay_log_takes_what_the_limits_hold_up(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    settings = replace(QUICK, relay_log=str(tmp_path))
    async with replica(publisher18_db, target_db, settings=settings, max_apply_rate=1000.0, synchronous_commit="on") as found:
        await all_ready(found)
        publisher18_db.execute("INSERT INTO t VALUES (1, repeat('x', 500000))")
        await eventually(target_db, "SELECT count(*) FROM t", 1)
        publisher18_db.execute("INSERT INTO t VALUES (2, 'b')")
        # the publisher keeps no WAL for it, and a lost stream is no reason to apply it
        await acknowledged(publisher18_db, publisher18_db.current_lsn())
        name = found.subscription.name
        publisher18_db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE application_name = '{name}'")
        publisher18_db.execute("INSERT INTO t VALUES (3, 'c')")
        await acknowledged(publisher18_db, publisher18_db.current_lsn())
        status = found.subscription.status
        assert (status.limited, status.streaming, status.retry) == (True, True, None)
        assert status.relay_log is not None
        assert status.applied < status.relay_log.flushed
        assert target_db.fetch("SELECT id FROM t") == [(1,)]
        found.subscription.set_limits(SubscriptionOptions())
        await found.same("SELECT * FROM t ORDER BY id")


async def test_reconciling_is_limited_too(publisher18_db: Database, target_db: Database) -> None:
    rows = "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 5000) AS i"
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        database.execute(rows)
    publisher18_db.execute("ANALYZE t; CREATE PUBLICATION pub FOR TABLE t")
    target_db.execute("UPDATE t SET v = 'changed' WHERE id = 7")
    size = publisher18_db.value("SELECT pg_relation_size('t')")
    began = time.monotonic()
    await subscription_of(publisher18_db, target_db, copy_data="reconcile", max_copy_rate=size / 2).run(Until())
    # equal ranges are only compared, and count as well
    assert time.monotonic() - began >= 2
    assert target_db.fetch("SELECT v FROM t WHERE id = 7") == publisher18_db.fetch("SELECT v FROM t WHERE id = 7")
