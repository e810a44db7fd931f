"""The calls of an output plugin run in a thread, one after another."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

import pytest

from subscriber.config import SubscriptionOptions
from subscriber.consumer.plugin_stream import PluginStream
from subscriber.plugins.context import LogicalDecodingContext
from subscriber.protocol.lsn import Lsn
from tests.support.database import Database


class Slow:
    """A target that stores a position slowly."""

    began, go_on = threading.Event(), threading.Event()
    calls: ClassVar[list[str]] = []

    def begin(self, ctx: LogicalDecodingContext, txn: object) -> None: ...

    def change(self, ctx: LogicalDecodingContext, txn: object, relation: object, change: object) -> None: ...

    def commit(self, ctx: LogicalDecodingContext, txn: object, commit_lsn: Lsn) -> None: ...

    def position(self, ctx: LogicalDecodingContext) -> None: ...

    def advance(self, ctx: LogicalDecodingContext, lsn: Lsn) -> None:
        self.began.set()
        self.go_on.wait(30)
        self.calls.append("advanced")

    def shutdown(self, ctx: LogicalDecodingContext) -> None:
        self.calls.append("shut down")


async def test_shutdown_comes_after_a_cancelled_call(publisher18_db: Database) -> None:
    """The bug was that a plugin was shut down while it still worked in its thread."""
    async with await PluginStream.open(publisher18_db.dsn, f"{__name__}:Slow", {}, SubscriptionOptions(), target=True) as plugin:
        advancing = asyncio.create_task(plugin.advance(Lsn(1)))
        try:
            await asyncio.to_thread(Slow.began.wait, 30)
            advancing.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not advancing.done()
        finally:
            Slow.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await advancing
    assert Slow.calls == ["advanced", "shut down"]
