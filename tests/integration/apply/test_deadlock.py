"""A deadlock between the apply worker and a session of the target, where the server takes the worker's transaction for the victim."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from subscriber import SubscriptionOptions, alter_subscription, drop_subscription
from tests.support.database import Database
from tests.support.managed import create, launched, same
from tests.support.observation import eventually
from tests.support.replica import QUICK
from tests.support.row_gates import closed_gates, waiting_at_gate

ROWS = "SELECT id, v FROM t ORDER BY id"
GATE = """
CREATE FUNCTION gate_7() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_catalog.pg_advisory_xact_lock_shared(7); RETURN NULL; END';
CREATE TRIGGER gate_7 AFTER UPDATE ON t FOR EACH ROW WHEN (NEW.id = 1) EXECUTE FUNCTION gate_7();
ALTER TABLE t ENABLE ALWAYS TRIGGER gate_7;
"""


@pytest.mark.parametrize("disable_on_error", [False, True])
async def test_the_workers_transaction_is_done_again(
    publisher18_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture, disable_on_error: bool
) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a'), (2, 'a')")
    # the session that waits for less than an hour is the victim
    target.execute(f"{GATE}; ALTER DATABASE {target.name} SET deadlock_timeout = '50ms'")
    name = await create(publisher, target, options=SubscriptionOptions(disable_on_error=disable_on_error))
    async with launched(target):
        await same(publisher, target, name, ROWS)
        with contextlib.closing(target.connect(options="-c deadlock_timeout=1h")) as other:
            other.execute("BEGIN")
            other.execute("UPDATE t SET v = 'of the target' WHERE id = 2")
            with closed_gates(target, 7) as release:
                publisher.execute("UPDATE t SET v = 'b' WHERE id = 1; UPDATE t SET v = 'b' WHERE id = 2; INSERT INTO t VALUES (3, 'b')")
                # it has row 1, and goes no further
                await eventually(target, waiting_at_gate(7), 1)
                pid = other.info.backend_pid
                crossing = asyncio.create_task(asyncio.to_thread(other.execute, "UPDATE t SET v = 'of the target' WHERE id = 1"))
                await eventually(target, f"SELECT wait_event_type FROM pg_stat_activity WHERE pid = {pid}", "Lock")
                release(7)
            await asyncio.wait_for(crossing, 30)
            error = "SELECT last_error FROM subscriber.subscription_stats"
            await eventually(target, f"SELECT position('deadlock detected' IN coalesce(({error}), '')) > 0", True)
            other.execute("COMMIT")
        enabled = "SELECT subenabled FROM subscriber.pg_subscription"
        if disable_on_error:
            # natively any error of the worker counts
            await eventually(target, enabled, False)
            async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
                await subscription.enable()
        publisher.execute("INSERT INTO t VALUES (4, 'c')")
        assert await same(publisher, target, name, ROWS) == [(1, "b"), (2, "b"), (3, "b"), (4, "c")]
        assert target.value(enabled)
        assert 'processing remote data for replication origin "pg_' in target.value(error)
        # otherwise it is temporary: there is nothing to fix
        assert ("ERROR" in {record.levelname for record in caplog.records}) == disable_on_error
        counted = "SELECT apply_error_count::int, confl_insert_exists::int FROM subscriber.pg_stat_subscription_stats"
        await eventually(target, counted, [(1, 0)])
    await drop_subscription(name, target=target.dsn)
