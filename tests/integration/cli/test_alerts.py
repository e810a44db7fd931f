"""Real failures: each lets its alert fire, the page or the alert names the remedy, and the remedy ends it."""

from __future__ import annotations

import asyncio
import contextlib
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from subscriber import SubscriptionOptions, drop_subscription
from subscriber.testing.server import EmbeddedServer
from tests.integration.cli.test_metrics import scrape_until, told_port
from tests.integration.cli.test_page import until
from tests.support.database import Database, ServerAddress
from tests.support.disk import Disk
from tests.support.managed import catch_up, create
from tests.support.program import running, subscriber
from tests.support.promtool import MONITORING, RULES, fires, none_fires, promtool
from tests.support.sqlalchemy_targets import replica_of, sqlite_target

MakeServer = Callable[..., EmbeddedServer]
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
QUICK = ("-v", "--http", "127.0.0.1:0", "-c", "wal_retrieve_retry_interval=200ms")


def test_rules_and_their_own_tests() -> None:
    for arguments in (("check", "rules", MONITORING / "alerts.yaml"), ("test", "rules", MONITORING / "alerts_test.yaml")):
        done = promtool(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def failing(port: int, alert: str) -> dict[str, Any]:
    """Wait until the alert would fire, and return what the page shows of the subscription."""
    wait_until(lambda: fires(metrics(port), alert), alert)
    (found,) = until(port, lambda found: bool(found["subscriptions"]))["subscriptions"]
    return dict(found)


def healthy(port: int) -> None:
    scrape_until(port, lambda found: found.get(("subscriber_streaming", ())) == found.get(("subscriber_publisher_up", ())) == 1)
    wait_until(lambda: none_fires(metrics(port)), "no alert")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.2)


async def made(publisher: Database, target: Database) -> str:
    for database in (publisher, target):
        database.execute(TABLE)
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    return await create(publisher, target, options=SubscriptionOptions(synchronous_commit="on"))


async def test_refused_row(publisher18_db: Database, target_db: Database) -> None:
    name = await made(publisher18_db, target_db)
    with running("run", "--target", target_db.dsn, *QUICK) as program:
        port = told_port(program)
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        healthy(port)
        target_db.execute("ALTER TABLE t ADD CONSTRAINT small CHECK (id < 100)")
        publisher18_db.execute("INSERT INTO t VALUES (100, 'b')")
        found = failing(port, "SubscriberRetrying")
        # each look finds it, also during an attempt
        for _ in range(30):
            assert scrape_until(port, lambda found: True)["subscriber_retry_attempt", ("ApplyError", "23514")] >= 1
        assert "correct the row or the constraint" in RULES["SubscriberRetrying"]["annotations"]["remedy"]
        assert "constraint" in found["error"]["remedy"]
        target_db.execute("ALTER TABLE t DROP CONSTRAINT small")
        await asyncio.to_thread(catch_up, publisher18_db, target_db, name)
        healthy(port)
    await drop_subscription(name, target=target_db.dsn)


async def test_dead_target(publisher18_db: Database, make_server: MakeServer) -> None:
    server = make_server()
    server.createdb("copy")
    with contextlib.closing(Database(ServerAddress(server.dsn(), 18), "copy")) as target:
        name = await made(publisher18_db, target)
        with running("run", "--target", target.dsn, *QUICK) as program:
            port = told_port(program)
            await asyncio.to_thread(catch_up, publisher18_db, target, name)
            await asyncio.to_thread(server.stop)
            found = failing(port, "SubscriberTargetDown")
            assert "Start the target" in RULES["SubscriberTargetDown"]["annotations"]["remedy"]
            assert (found["running"], found["retry"] is not None, found["error"]["kind"]) == (True, True, "TargetUnavailable")
            await asyncio.to_thread(server.start)
            target.reconnect()
            publisher18_db.execute("INSERT INTO t VALUES (2, 'b')")
            await asyncio.to_thread(catch_up, publisher18_db, target, name)
            healthy(port)
        await drop_subscription(name, target=target.dsn)


async def test_slot_that_grows_and_is_lost(make_server: MakeServer, target_db: Database) -> None:
    server = make_server(max_slot_wal_keep_size="1MB", max_wal_size="1GB", min_wal_size="32MB")
    server.createdb("app")
    with contextlib.closing(Database(ServerAddress(server.dsn(), 18), "app")) as publisher:
        name = await made(publisher, target_db)
        arguments = ("run", "--target", target_db.dsn, *QUICK)
        with running(*arguments) as program:
            await asyncio.to_thread(catch_up, publisher, target_db, name)
        wal_status = f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{name}'"
        publisher.execute("CREATE TABLE other (v text)")
        for _ in range(4):
            publisher.execute("INSERT INTO other VALUES ('x')")
            publisher.execute("SELECT pg_switch_wal()")
        with target_db.connect() as session, session.transaction(), running(*arguments) as program:
            session.execute("LOCK TABLE t")
            publisher.execute("INSERT INTO t VALUES (2, 'b')")
            port = told_port(program)
            found = failing(port, "SubscriberSlotWillBeLost")
            assert "Raise max_slot_wal_keep_size" in RULES["SubscriberSlotWillBeLost"]["annotations"]["remedy"]
            assert "raise max_slot_wal_keep_size" in found["slot"]["danger"]
            publisher.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'")
            publisher.execute("SELECT pg_reload_conf()")
            wait_until(lambda: none_fires(metrics(port)), "no alert")
        publisher.execute("ALTER SYSTEM RESET max_slot_wal_keep_size")
        publisher.execute("SELECT pg_reload_conf()")
        while publisher.value(wal_status) != "lost":
            publisher.execute("INSERT INTO t SELECT max(id) + 1, 'lost' FROM t")
            publisher.execute("SELECT pg_switch_wal()")
            publisher.execute("CHECKPOINT")
        with running(*arguments) as program:
            port = told_port(program)
            found = failing(port, "SubscriberSlotLost")
            remedy = RULES["SubscriberSlotLost"]["annotations"]["remedy"]
            assert "`subscriber recover NAME`" in remedy
            assert "`subscriber recover NAME`" in found["slot"]["danger"]
            done = await asyncio.to_thread(subscriber, "recover", name, "--target", target_db.dsn)
            assert done.status == 0, done.errors
            await asyncio.to_thread(catch_up, publisher, target_db, name)
            healthy(port)
        assert target_db.fetch("SELECT * FROM t ORDER BY id") == publisher.fetch("SELECT * FROM t ORDER BY id")
        await drop_subscription(name, target=target_db.dsn)


def test_full_disk(publisher18_db: Database, make_disk: Callable[[int], Disk]) -> None:
    disk = make_disk(16)
    pair = replica_of(publisher18_db, sqlite_target(disk.path / "replica.db"))
    with running("-v", *pair.arguments("--http", "127.0.0.1:0")) as program:
        port = told_port(program)
        pair.target.follows()
        healthy(port)
        disk.fill(1_000_000)
        pair.publisher.execute("INSERT INTO t SELECT i, repeat('x', 1000) FROM generate_series(10000, 16000) AS i")
        found = failing(port, "SubscriberDiskFull")
        assert "Make room" in RULES["SubscriberDiskFull"]["annotations"]["remedy"]
        assert "make room" in found["error"]["remedy"]
        disk.make_room()
        pair.target.wait("SELECT count(*) FROM t", [(7001,)])
        healthy(port)
