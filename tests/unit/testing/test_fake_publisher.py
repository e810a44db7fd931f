"""The fake publisher, followed by our own subscriber into memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import subscriber
from subscriber.sinks.memory import MemorySink, MemoryTarget
from subscriber.testing.fake_publisher import FakePublisher


@asynccontextmanager
async def following(publisher: FakePublisher, target: MemoryTarget, **options: object) -> AsyncIterator[subscriber.Subscription]:
    subscription = subscriber.Subscription(
        "s",
        connection=publisher.dsn(),
        publications=["app"],
        target=MemorySink(target),
        options=subscriber.SubscriptionOptions(**options),  # type: ignore[arg-type]
    )
    running = asyncio.create_task(subscription.run())
    try:
        yield subscription
    finally:
        subscription.stop()
        await running


async def test_rows_are_copied_and_followed() -> None:
    target = MemoryTarget()
    async with FakePublisher() as publisher:
        publisher.create_table("accounts", {"id": "int", "balance": "numeric"}, key=["id"])
        publisher.create_publication("app", "accounts")
        async with publisher.transaction() as t:
            t.insert("accounts", id=1, balance="12.50")
        async with following(publisher, target) as subscription:
            async with publisher.transaction() as t:
                t.insert("accounts", id=2, balance=7)
                t.update("accounts", {"id": 1}, balance="0.5")
            await subscription.wait_for(t.end_lsn, timeout=10)
        rows = target.rows("public.accounts")
    assert sorted((row["id"], str(row["balance"])) for row in rows) == [(1, "0.5"), (2, "7")]
