"""Work that a cancellation does not leave half-done."""

from __future__ import annotations

import asyncio
import threading

import pytest

from subscriber.threads import run_in_thread


async def test_however_often_the_caller_is_cancelled_the_thread_ends_first() -> None:
    began, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go_on.wait(30)
        done.set()

    caller = asyncio.ensure_future(run_in_thread(work))
    try:
        await asyncio.to_thread(began.wait, 30)
        for _ in range(3):
            caller.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert not caller.done()
    finally:
        go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()
