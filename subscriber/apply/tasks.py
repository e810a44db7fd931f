"""Run tasks together and raise the first failure itself; and await work until an event is set."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

__all__ = ["Stopped", "task_group", "unless_set"]

_CANCEL_SECONDS: Final = 1.0
"""How long cancelled work may take before it is aborted."""

T = TypeVar("T")


class Stopped(Exception):
    """The work was cancelled because it is to stop."""


@contextlib.asynccontextmanager
async def task_group() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup whose first failure cancels the others, and is raised directly, not in an exception group."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        first: BaseException = failures
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from first.__cause__


async def unless_set(
    stop: asyncio.Event, work: Coroutine[Any, Any, T], *, grace: float = 0.0, abort: Callable[[], None] | None = None
) -> T:
    """Await work that can be cancelled at any moment.

    Args:
        stop: the work is cancelled when it is set.
        work: returns the result.
        grace: seconds that the work may take to finish after that.
        abort: called if cancelled work has not ended after a second.

    Raises:
        Stopped: the work was cancelled.
    """
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if grace and not task.done():
            await asyncio.wait({task}, timeout=grace)
        if not task.done():
            task.cancel()
            if abort is not None and not (await asyncio.wait({task}, timeout=_CANCEL_SECONDS))[0]:
                abort()
            await asyncio.wait({task})
            if task.cancelled() or task.exception() is not None:
                raise Stopped
            # the cancellation came too late, or was swallowed (as by wait_for of Python 3.11): the result must not be lost
        return task.result()
    finally:
        task.cancel()
        stopped.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
