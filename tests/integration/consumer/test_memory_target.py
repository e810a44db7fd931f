"""A subscription into memory, as in the test of a user's program: rows as Python values."""

from __future__ import annotations

import asyncio
import datetime
from decimal import Decimal

import pytest

from subscriber import Settings, Subscription, SubscriptionInUse, SubscriptionOptions, TargetUnavailable, Until
from subscriber.interfaces import TwoPhaseState
from subscriber.sinks.memory import MemorySink, MemoryTarget
from tests.support.database import Database
from tests.support.replica import at_work


def _subscription(publisher: Database, target: MemoryTarget) -> Subscription:
    return Subscription(
        f"mem_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=MemorySink(target),
        options=SubscriptionOptions(two_phase=True),
        settings=Settings(wal_retrieve_retry_interval=0.2),
    )


@pytest.mark.publisher(min=15, lacks="two_phase")
async def test_copy_follow_and_prepared_transactions(publisher_db: Database) -> None:
    publisher_db.execute("""
        CREATE TYPE mood AS ENUM ('sad', 'ok');
        CREATE TABLE t (id int PRIMARY KEY, amount numeric(10, 2), at timestamptz, words text[], mood mood, flag boolean);
        CREATE TABLE log (line text); ALTER TABLE log REPLICA IDENTITY FULL;
        INSERT INTO t VALUES (1, 12.50, '2024-02-29 12:00+02', '{a,NULL}', 'ok', true), (2, NULL, 'infinity', NULL, NULL, NULL);
        CREATE PUBLICATION pub FOR TABLE t, log
    """)
    target = MemoryTarget()
    await _subscription(publisher_db, target).run(Until())
    at = datetime.datetime(2024, 2, 29, 10, tzinfo=datetime.UTC)
    assert target.rows("public.t") == [
        {"id": 1, "amount": Decimal("12.50"), "at": at, "words": ["a", None], "mood": "ok", "flag": True},
        {"id": 2, "amount": None, "at": "infinity", "words": None, "mood": None, "flag": None},
    ]

    subscription = _subscription(publisher_db, target)
    async with at_work(subscription):
        publisher_db.execute("INSERT INTO t (id, mood) VALUES (3, 'sad'); DELETE FROM t WHERE id = 2; INSERT INTO log VALUES ('x'), ('x')")
        await subscription.wait_for(publisher_db.current_lsn(), 30)
        assert [row["id"] for row in target.rows("public.t")] == [1, 3]
        assert target.rows("public.log") == [{"line": "x"}, {"line": "x"}]
        record = target.subscriptions[f"mem_{publisher_db.name}"]
        while record.two_phase is not TwoPhaseState.ENABLED:
            await asyncio.sleep(0.02)
        gid = f"gid {publisher_db.name}"
        publisher_db.execute(f"BEGIN; UPDATE t SET amount = 1 WHERE id = 1; DELETE FROM log; PREPARE TRANSACTION '{gid}'")
        await subscription.wait_for(publisher_db.current_lsn(), 30)
        assert [gid for _, gid in record.prepared] == [gid]
        assert len(target.rows("public.log")) == 2
        publisher_db.execute(f"COMMIT PREPARED '{gid}'")
        await subscription.wait_for(publisher_db.current_lsn(), 30)
        assert target.rows("public.log") == []
        assert target.rows("public.t")[0]["amount"] == Decimal("1.00")
        assert record.prepared == {}


async def test_a_cut_connection_is_made_again(publisher18_db: Database) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    target = MemoryTarget()
    subscription = _subscription(publisher18_db, target)
    async with at_work(subscription):
        for number in range(5):
            publisher18_db.execute(f"INSERT INTO t VALUES ({number})")
            await subscription.wait_for(publisher18_db.current_lsn(), 30)
            target.sever()
        publisher18_db.execute("INSERT INTO t VALUES (5)")
        await subscription.wait_for(publisher18_db.current_lsn(), 30)
        assert [row["id"] for row in target.rows("public.t")] == list(range(6))


async def test_a_severed_sink_writes_nothing() -> None:
    target = MemoryTarget()
    old = await MemorySink(target).open("sub", lambda _: None)
    with pytest.raises(SubscriptionInUse):
        await MemorySink(target).open("sub", lambda _: None)
    target.sever()
    new = await MemorySink(target).open("sub", lambda _: None)
    with pytest.raises(TargetUnavailable, match="the sink is not open, or was cut off"):
        await old.set_two_phase(TwoPhaseState.ENABLED)
    assert target.subscriptions["sub"].two_phase is TwoPhaseState.DISABLED
    await old.close()
    await new.set_two_phase(TwoPhaseState.ENABLED)


def test_second_run_in_another_event_loop(publisher18_db: Database) -> None:
    """The second run ended at once, without the changes."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    target = MemoryTarget()
    subscription = Subscription(
        f"mem_{publisher18_db.name}", connection=publisher18_db.conninfo(), publications=["pub"], target=MemorySink(target)
    )
    asyncio.run(subscription.run(Until()))
    publisher18_db.execute("INSERT INTO t VALUES (1)")
    asyncio.run(subscription.run(Until()))
    assert target.rows("public.t") == [{"id": 1}]
