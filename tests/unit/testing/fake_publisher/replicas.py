"""Our own subscription from a fake publisher into memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from subscriber import Settings, Subscription, SubscriptionOptions
from subscriber.sinks.memory import MemorySink, MemoryTarget
from subscriber.testing.fake_publisher import FakePublisher

QUICK = Settings(wal_retrieve_retry_interval=0.02)


class FakeReplica:
    """A subscription that runs."""

    def __init__(self, subscription: Subscription, publisher: FakePublisher, target: MemoryTarget, running: asyncio.Task[None]) -> None:
        self.running = running
        self.subscription = subscription
        self.publisher = publisher
        self.target = target

    async def same(self, *tables: str) -> list[dict[str, str | None]]:
        """Catch up; the tables have the same rows on both sides; return those of the last one."""
        await self.subscription.wait_for(self.publisher.wal.end, timeout=10)
        found: list[dict[str, str | None]] = []
        for table in tables or ("items",):
            found = [
                {name: None if value is None else str(value) for name, value in row.items()} for row in self.target.rows(f"public.{table}")
            ]
            assert ordered(found) == ordered(self.publisher.rows(table))
        return found


def ordered(rows: list[dict[str, str | None]]) -> list[list[tuple[str, str | None]]]:
    return sorted((sorted(row.items()) for row in rows), key=repr)


def items(version: int | str = 18, **settings: Any) -> FakePublisher:
    """A publisher with one table."""
    publisher = FakePublisher(version, **settings)
    publisher.create_table("items", {"id": "int", "name": "text", "big": "text"}, key=["id"])
    publisher.create_publication("app", "items")
    return publisher


def subscription_of(publisher: FakePublisher, target: MemoryTarget, conninfo: str | None = None, **options: Any) -> Subscription:
    return Subscription(
        "sub",
        connection=conninfo or publisher.dsn(),
        publications=["app"],
        target=MemorySink(target),
        options=SubscriptionOptions(**options),
        settings=QUICK,
    )


@asynccontextmanager
async def replica(
    publisher: FakePublisher, target: MemoryTarget | None = None, conninfo: str | None = None, **options: Any
) -> AsyncIterator[FakeReplica]:
    target = target or MemoryTarget()
    subscription = subscription_of(publisher, target, conninfo, **options)
    running = asyncio.create_task(subscription.run())
    try:
        yield FakeReplica(subscription, publisher, target, running)
    finally:
        subscription.stop()
        await asyncio.wait_for(running, 10)
