"""The PostgreSQL sink: a call that is cancelled, or is late, leaves no session, wherever it waits."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from subscriber.errors import SubscriptionChanged, TargetUnavailable
from subscriber.sinks.postgres.session.target import Target
from subscriber.sinks.postgres.sink import PostgresSink
from tests.support.cancellation import cancelled_at
from tests.support.database import Database
from tests.support.sink_postgres import NAME, Feed

pytestmark = pytest.mark.slow


async def _require_no_session(target: Database) -> None:
    # a session has no database until the user has logged in
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        " AND coalesce(datname, current_database()) = current_database()"
    )
    await asyncio.to_thread(target.wait, query, 0)


async def test_open_that_fails(target_db: Database) -> None:
    """The bug was that the session that applies stayed open if the close of the other one was cancelled."""
    feed = Feed(target_db)
    sink = PostgresSink(target_db.dsn, options=feed.options, settings=feed.settings, defined=True)

    async def refused() -> None:
        with pytest.raises(SubscriptionChanged):
            await sink.open(NAME, feed.durable.append)

    await refused()
    for step in itertools.count():
        cancelled = await cancelled_at(refused(), step)
        await _require_no_session(target_db)
        if not cancelled:
            break


async def test_connect(target_db: Database) -> None:
    """The bug was that the server waited a minute for a password, and DROP DATABASE for that session."""
    target = Target(target_db.dsn)
    errors: list[asyncio.CancelledError] = []

    async def attempt() -> None:
        try:
            await (await target.connect("cancelled")).close()
        except asyncio.CancelledError as error:
            # its traceback must not keep the connection
            errors.append(error)
            raise

    for step in itertools.count():
        cancelled = await cancelled_at(attempt(), step)
        await _require_no_session(target_db)
        if not cancelled:
            break
    assert errors


async def test_close(target_db: Database) -> None:
    """The bug was that the sessions of parallel apply stayed open, with their locks and origins."""
    feed = Feed(target_db, workers=3, synchronous_commit="off")
    for step in itertools.count():
        await feed.open()
        await feed.sink.activity()
        session = await feed.opened._parallel.take()
        await session.fetch("BEGIN")
        await feed.opened._parallel.open_idle()
        await feed.opened._parallel.open_idle()
        cancelled = await cancelled_at(feed.opened.close(), step)
        await _require_no_session(target_db)
        if not cancelled:
            break


async def test_close_while_a_session_is_opened(target_db: Database) -> None:
    """A transaction that is applied before its end begins in a task of its own."""
    feed = Feed(target_db)
    await feed.open()
    taking = asyncio.create_task(feed.opened._parallel.take())
    await asyncio.sleep(0)
    await feed.opened.close()
    await asyncio.wait({taking})
    await _require_no_session(target_db)
    with pytest.raises(TargetUnavailable):
        await taking
