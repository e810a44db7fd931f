"""Blocking work of asynchronous code: it runs in a thread, and is never abandoned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

__all__ = ["run_in_thread"]


T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Do the work in a thread. If the caller is cancelled, wait until the work ends, so that nothing is still being written."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
        raise
