"""From the fake publisher into PostgreSQL: copy, changes, streams in parallel, two-phase, faults and a restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from subscriber import Subscription, SubscriptionOptions
from subscriber.testing.fake_publisher import FakePublisher
from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import QUICK


async def test_into_postgresql(target_db: Database) -> None:
    target_db.execute("CREATE TABLE items (id int PRIMARY KEY, name text, big text)")

    def same(publisher: FakePublisher) -> int:
        found = target_db.fetch("SELECT id::text, name, big FROM items")
        assert sorted(found) == sorted((row["id"], row["name"], row["big"]) for row in publisher.rows("items"))
        return len(found)

    async with FakePublisher(logical_decoding_work_mem=10_000) as publisher:
        publisher.create_table("items", {"id": "int", "name": "text", "big": "text"}, key=["id"])
        publisher.create_publication("app", "items")
        async with publisher.transaction() as t:
            t.insert("items", [{"id": id, "name": f"tab\t{id}", "big": "x" * 3000} for id in range(50)])

        def subscription() -> Subscription:
            options = SubscriptionOptions(streaming="parallel", two_phase=True, binary=True)
            settings = replace(QUICK, copy_range_size=64 * 1024)
            return Subscription(
                "sub", connection=publisher.dsn(), publications=["app"], target=target_db.dsn, options=options, settings=settings
            )

        first = subscription()
        running = asyncio.create_task(first.run())
        await first.wait_for(publisher.wal.end, WAIT_SECONDS)
        assert same(publisher) == 50
        await publisher.until_active("sub")
        publisher.faults.add("cut", before="E", after=20)
        publisher.faults.add("stray_abort", before="S")
        async with publisher.transaction() as t:
            t.update("items", {"id": 1}, name="the large value is not sent")
            with t.savepoint():
                t.insert("items", [{"id": id} for id in range(1000, 1300)])
                t.rollback_savepoint()
            t.insert("items", [{"id": id, "name": "streamed"} for id in range(2000, 2300)])
        prepared = publisher.transaction()
        prepared.insert("items", id=5000)
        prepared.prepare("gid")
        await first.wait_for(publisher.wal.end, WAIT_SECONDS)
        assert same(publisher) == 350
        first.stop()
        await running
        second = subscription()
        running = asyncio.create_task(second.run())
        prepared.commit_prepared()
        await second.wait_for(publisher.wal.end, WAIT_SECONDS)
        assert same(publisher) == 351
        await publisher.shutdown()
        await publisher.start()
        async with publisher.transaction() as t:
            t.truncate("items")
        await second.wait_for(t.end_lsn, WAIT_SECONDS)
        assert same(publisher) == 0
        second.stop()
        await running
