"""Subscriptions in a catalog, and the launcher that runs them."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import UTC, datetime, timedelta

from subscriber import Launcher, Settings, SubscriptionOptions, create_subscription
from tests.support.database import Database
from tests.support.replica import QUICK, at_work


def closed_window() -> str:
    """A ``copy_window`` that opens in two hours."""
    later = datetime.now(UTC) + timedelta(hours=2)
    return f"{later:%H:%M}-{later + timedelta(hours=1):%H:%M} UTC"


def catch_up(publisher: Database, target: Database, name: str) -> None:
    """Wait until the subscription's tables are synchronized and everything committed on the publisher now is in the target."""
    oid = f"(SELECT oid FROM subscriber.pg_subscription WHERE subname = '{name}')"
    target.wait(
        "SELECT count(*) = 0 AND (SELECT count(*) > 0 FROM subscriber.pg_subscription_rel)"
        f" FROM subscriber.pg_subscription_rel WHERE srsubid = {oid} AND srsubstate NOT IN ('s', 'r')",
        True,
    )
    lsn = publisher.current_lsn()
    target.wait(f"SELECT remote_lsn >= '{lsn}' FROM subscriber.\"position\" WHERE srsubid = {oid} AND srrelid = 0", True)


async def same(publisher: Database, target: Database, name: str, query: str) -> list[tuple[object, ...]]:
    """Catch up; the query gives the same rows on both sides; return them."""
    await asyncio.to_thread(catch_up, publisher, target, name)
    rows = publisher.fetch(query)
    assert target.fetch(query) == rows
    return rows


async def create(
    publisher: Database,
    target: Database,
    name: str | None = None,
    *publications: str,
    options: SubscriptionOptions | None = None,
) -> str:
    """Create one whose name no other database of the publisher's server has; return the name."""
    unique = name or f"sub_{publisher.name}"
    await create_subscription(
        unique,
        connection=publisher.conninfo(),
        publications=publications or ("pub",),
        target=target.dsn,
        options=options,
        settings=QUICK,
    )
    return unique


def launched(target: Database, *names: str, settings: Settings = QUICK) -> contextlib.AbstractAsyncContextManager[Launcher]:
    """A launcher of that database that runs while the block lasts."""
    return at_work(Launcher(target.dsn, names, settings=settings))
