"""Cancel a call where it waits: what it opens must be closed, wherever that is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

__all__ = ["cancelled_at"]


async def cancelled_at(work: Coroutine[Any, Any, Any], step: int, *, late: bool = False) -> bool:
    """Do the work in a task, and cancel that where the work waits for the time number ``step``. False: it has ended before.

    Args:
        work: to do.
        step: from 0 on.
        late: cancel when what it waits for has just come, so that the task gets the cancellation in place of the result.
    """
    watched = _Watched(work, step, late=late)

    async def run() -> None:
        await watched

    task = asyncio.create_task(run())
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return watched.reached


class _Watched(Awaitable[None]):
    def __init__(self, work: Coroutine[Any, Any, Any], step: int, *, late: bool) -> None:
        self._work = work
        self._step = step
        self._late = late
        self.reached = False

    def __await__(self) -> Generator[Any, Any, None]:
        task = asyncio.current_task()
        assert task is not None
        resume: Callable[[Any], Any] = self._work.send
        given: list[Any] = [None]
        count = 0
        while True:
            try:
                # not kept in a local variable: the traceback of an exception refers to this frame
                awaited = resume(given.pop())
            except StopIteration:
                return
            if count == self._step:
                self.reached = True
                if self._late and awaited is not None:
                    # this is called before the task is told
                    awaited.add_done_callback(lambda _: task.cancel())
                else:
                    task.cancel()
            count += 1
            try:
                given.append((yield awaited))
                resume = self._work.send
            except BaseException as error:  # noqa: BLE001 (given to the work)
                given.append(error)
                resume = self._work.throw
