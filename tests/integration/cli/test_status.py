"""status and pg_stat_subscription: what is shown is what is so."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import psycopg
import pytest

from subscriber import Lsn, SubscriptionOptions, alter_subscription, drop_subscription
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import create, launched, same
from tests.support.program import subscriber
from tests.support.replica import QUICK
from tests.support.row_gates import closed_gates, make_row_gate, wait_for_state, waiting_at_gate

ROWS = "SELECT id, v FROM t ORDER BY id"


def status(target: Database, *arguments: str, expect: int = 0) -> dict[str, Any]:
    ended = subscriber("status", "--target", target.dsn, "--json", *arguments)
    assert ended.status == expect, ended.errors
    found: dict[str, Any] = json.loads(ended.output)
    return found


async def one(target: Database, state: str) -> dict[str, Any]:
    """The only subscription, once it is in that state."""
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            # each call is a process; workers report once a second
            await asyncio.sleep(0.2)
            (found,) = (await asyncio.to_thread(status, target))["subscriptions"]
            if found["state"] == state:
                return dict(found)


async def test_states_of_a_subscription(publisher18_db: Database, target_db: Database) -> None:
    publisher, target = publisher18_db, target_db
    assert status(target) == {"error": None, "subscriptions": []}
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t SELECT i, 'x' FROM generate_series(1, 1000) AS i; ANALYZE t")
    make_row_gate(target, "t", "NEW.id = 700", 7)
    name = await create(publisher, target, options=SubscriptionOptions(enabled=False))
    found = await one(target, "disabled")
    assert (found["name"], found["slot_name"], found["publications"], found["pid"]) == (name, name, ["pub"], None)
    assert found["publisher"]["slot_active"] is False
    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
        await subscription.enable()
    assert (await one(target, "not_running"))["tables_by_state"] == {"i": 1}
    with closed_gates(target, 7):
        async with launched(target):
            await asyncio.to_thread(target.wait, waiting_at_gate(7), 1)
            found = await one(target, "copying")
            assert found["tables_by_state"] == {"d": 1}
            assert found["tables"][0]["copied_rows"] in {0, 1000}
            async with asyncio.timeout(WAIT_SECONDS):
                while found["tables"][0]["estimated_rows"] is None:  # reported once a second
                    found = await one(target, "copying")
            assert found["tables"][0]["estimated_rows"] == 1000
            rows = target.fetch(
                "SELECT worker_type, relid::regclass::text, pid IS NOT NULL FROM subscriber.pg_stat_subscription ORDER BY relid NULLS FIRST"
            )
            assert rows == [("apply", None, True), ("table synchronization", "t", True)]
    async with launched(target):
        await same(publisher, target, name, ROWS)
        await asyncio.to_thread(wait_for_state, target, "t", "r")
        found = await one(target, "running")
        pid = target.value("SELECT pid FROM subscriber.pg_stat_subscription")
        assert found["pid"] == pid
        assert target.value(f"SELECT application_name FROM pg_stat_activity WHERE pid = {pid}") == name
        assert (found["publisher_error"], found["publisher"]["slot_active"]) == (None, True)
        assert found["publisher"]["wal_status"] == "reserved"
        # an apply that waits lags behind
        with contextlib.closing(target.connect()) as holder:
            holder.execute("BEGIN; LOCK TABLE t")
            publisher.execute("INSERT INTO t VALUES (2000, 'waits')")
            lsn = publisher.current_lsn()
            async with asyncio.timeout(WAIT_SECONDS):
                while found["received_lsn"] is None or Lsn.parse(found["received_lsn"]) < lsn:
                    found = await one(target, "running")
            assert Lsn.parse(found["flushed_lsn"]) < lsn
            assert found["lag_bytes"] > 0
            holder.execute("COMMIT")
        await same(publisher, target, name, ROWS)
        async with asyncio.timeout(WAIT_SECONDS):
            while found["transactions"] == 0 or found["lag_bytes"] > 0:
                found = await one(target, "running")
        assert found["latest_end_lsn"] is not None
        target.execute("DELETE FROM t WHERE id = 1")
        publisher.execute("UPDATE t SET v = 'gone' WHERE id = 1")
        await same(publisher, target, name, "SELECT id, v FROM t WHERE id > 1 ORDER BY id")
        counted = "SELECT confl_update_missing::int FROM subscriber.pg_stat_subscription_stats"
        await asyncio.to_thread(target.wait, counted, 1)
        text = subscriber("status", "--target", target.dsn, name).output
        for part in (f"{name}: running, PID {pid}", "1 ready", "confl_update_missing 1", "retains"):
            assert part in text
        with contextlib.closing(target.connect()) as ends:
            ends.execute(f"SELECT pg_terminate_backend({pid})")
        await asyncio.to_thread(target.wait, f"SELECT count(*) FROM subscriber.pg_stat_subscription WHERE pid <> {pid}", 1)
    assert (await one(target, "not_running"))["last_error"] is not None
    await drop_subscription(name, target=target.dsn, settings=QUICK)


async def test_json_is_valid_also_after_errors(publisher18_db: Database, target_db: Database) -> None:
    found = status(target_db, "absent", expect=1)
    assert found["error"]["message"] == 'subscription "absent" does not exist'
    for target in ("postgresql://127.0.0.1:1/none", "nonsense=1", "mysql://host/db"):
        ended = subscriber("status", "--target", target, "--json")
        assert ended.status == 1
        assert json.loads(ended.output)["error"]["message"]
    for database in (publisher18_db, target_db):
        database.execute('CREATE TABLE "q""\n{}" (id int PRIMARY KEY, v text)')
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    name = await create(
        publisher18_db, target_db, f'a "quoted" \\ näme {publisher18_db.name}', options=SubscriptionOptions(slot_name=publisher18_db.name)
    )
    async with alter_subscription(name, target=target_db.dsn) as subscription:
        await subscription.set_connection(publisher18_db.conninfo(port="1", password="S3CRET"))
    (one,) = status(target_db)["subscriptions"]
    assert one["name"] == name
    assert one["tables"][0]["name"] == 'q"\n{}'
    assert "refused" in one["publisher_error"]
    assert "S3CRET" not in json.dumps(one)
    async with alter_subscription(name, target=target_db.dsn) as subscription:
        await subscription.set_connection(publisher18_db.conninfo())
    await drop_subscription(name, target=target_db.dsn)


async def test_any_role_may_read_the_status_but_not_the_password(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(enabled=False))
    role = f"watcher_{target_db.name}"
    target_db.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'w'")
    try:
        with psycopg.connect(target_db.conninfo(user=role, password="w"), autocommit=True) as session:
            for view in ("pg_stat_subscription", "pg_stat_subscription_stats", "pg_subscription_rel"):
                session.execute(f"SELECT * FROM subscriber.{view}")
            assert session.execute("SELECT subname FROM subscriber.pg_subscription").fetchall() == [(name,)]
            for forbidden in (
                "SELECT subconninfo FROM subscriber.pg_subscription",
                "SELECT * FROM subscriber.pg_subscription",
                "SELECT subscriber.pg_stat_reset_subscription_stats(NULL)",
                "UPDATE subscriber.pg_subscription SET subenabled = true",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    session.execute(forbidden)
        ended = subscriber("status", "--target", target_db.conninfo(user=role, password="w"), "--json")
        (found,) = json.loads(ended.output)["subscriptions"]
        assert (found["name"], found["state"], found["publisher"]) == (name, "disabled", None)
    finally:
        target_db.execute(f"DROP ROLE {role}")
    await drop_subscription(name, target=target_db.dsn)
