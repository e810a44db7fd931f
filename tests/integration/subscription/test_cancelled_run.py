"""A run that is cancelled leaves no session with the publisher."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from subscriber.stream_session import StreamSession
from tests.integration.subscription.test_run import TABLE
from tests.support.database import Database
from tests.support.replica import subscription_of


async def test_when_its_stream_has_just_begun(publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that the stream went on for ever, and kept the slot in use."""
    for database in (publisher18_db, target_db):
        database.execute(TABLE)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    open_stream, sessions = StreamSession.open, []

    async def opened(*arguments: Any, **more: Any) -> StreamSession:
        sessions.append(await open_stream(*arguments, **more))
        # called before the task that waits for the session is told that it is there
        asyncio.get_running_loop().call_soon(running.cancel)
        return sessions[-1]

    monkeypatch.setattr(StreamSession, "open", opened)
    running = asyncio.create_task(subscription_of(publisher18_db, target_db).run())
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(sessions) == 1
    slots = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND active"
    await asyncio.to_thread(publisher18_db.wait, slots, 0)
