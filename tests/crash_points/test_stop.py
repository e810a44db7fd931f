"""A stop right after a failure."""

from __future__ import annotations

import asyncio

from subscriber import Settings, Subscription, crash_points
from subscriber.errors import ApplyError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.memory import MemorySink, MemoryTarget
from subscriber.testing.fake_publisher import FakePublisher


async def test_stop_drops_slot_of_synchronized_table_whose_attempt_failed() -> None:
    def fail(point: str) -> None:
        if point == "copy.synchronized" and not failed.is_set():
            failed.set()
            raise ApplyError("failed at its end")

    failed = asyncio.Event()
    async with FakePublisher(18) as publisher:
        publisher.create_table("items", {"id": "int4"}, key=["id"])
        publisher.create_publication("items", "items")
        settings = Settings(wal_retrieve_retry_interval=3600)
        subscription = Subscription(
            "s", connection=publisher.dsn(), publications=["items"], target=MemorySink(MemoryTarget()), settings=settings
        )
        with crash_points.watched(fail):
            run = asyncio.create_task(subscription.run())
            await asyncio.wait_for(failed.wait(), 60)
            await subscription.wait_for(Lsn(1))
            assert len(publisher.slots) == 2, "it would be dropped in an hour"
            subscription.stop()
            await run
        assert list(publisher.slots) == ["s"]
