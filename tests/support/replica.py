"""A subscription that runs between two databases of a test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from subscriber import Launcher, Settings, Subscription, SubscriptionOptions
from tests.support.database import WAIT_SECONDS, Database

_Runs = TypeVar("_Runs", Subscription, Launcher)

# what a test need not wait for
QUICK = Settings(wal_retrieve_retry_interval=0.2, wal_receiver_status_interval=1.0)


@dataclass
class Replica:
    """A running subscription, its publisher and its target."""

    subscription: Subscription
    publisher: Database
    target: Database
    running: asyncio.Task[None]

    async def caught_up(self, timeout: float = WAIT_SECONDS) -> None:
        """Wait until everything that is committed on the publisher now is durable in the target."""
        await self.subscription.wait_for(self.publisher.current_lsn(), timeout)

    async def same(self, query: str) -> list[tuple[Any, ...]]:
        """Catch up; the query gives the same rows on both sides; return them."""
        await self.caught_up()
        rows = self.publisher.fetch(query)
        assert self.target.fetch(query) == rows
        return rows

    async def stop(self) -> None:
        """End it cleanly; raises what the run raises."""
        self.subscription.stop()
        await asyncio.wait_for(self.running, WAIT_SECONDS)


def subscription_of(
    publisher: Database,
    target: Database,
    *,
    name: str = "replica",
    publications: Sequence[str] = ("pub",),
    settings: Settings = QUICK,
    conninfo: str | None = None,
    target_url: str | None = None,
    **options: Any,
) -> Subscription:
    """A subscription with a slot name that no other database of the server has."""
    unique = f"{name}_{publisher.name}"
    return Subscription(
        unique,
        connection=conninfo or publisher.conninfo(),
        publications=list(publications),
        target=target_url or target.dsn,
        options=replace(SubscriptionOptions(), **options),
        settings=settings,
    )


@contextlib.asynccontextmanager
async def at_work(runs: _Runs) -> AsyncIterator[_Runs]:
    """Run it while the block lasts, and end it cleanly; its failure is the test's."""
    task = asyncio.create_task(runs.run())
    try:
        yield runs
        runs.stop()
        await asyncio.wait_for(task, WAIT_SECONDS)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def replica(publisher: Database, target: Database, **arguments: Any) -> AsyncIterator[Replica]:
    """Run a subscription (arguments of :func:`subscription_of`) while the block lasts; its failure is the test's."""
    subscription = subscription_of(publisher, target, **arguments)
    found = Replica(subscription, publisher, target, asyncio.create_task(subscription.run()))
    try:
        yield found
        await found.stop()
    finally:
        found.running.cancel()
        await asyncio.gather(found.running, return_exceptions=True)
