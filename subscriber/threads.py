"""Work that a cancellation must not leave half-done: the caller is cancelled only after the work has ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["run_in_thread", "to_its_end"]

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T], stop: Callable[[], None] | None = None) -> T:
    """Do the work. If the caller is cancelled, call ``stop`` and wait until the work ends; its own error is then dropped."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        while not task.done():
            # the caller may be cancelled again
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        raise


async def run_in_thread(work: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Do blocking work in a thread, see :func:`to_its_end`: a thread cannot be stopped, and must not write after its caller has ended."""
    return await to_its_end(asyncio.to_thread(work), stop)
