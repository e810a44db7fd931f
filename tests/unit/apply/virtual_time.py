"""An event loop whose clock jumps to the next timer: hours pass in no time, always in the same way, and a deadlock is seen at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Stuck", "run"]

T = TypeVar("T")


class Stuck(Exception):
    """Every task waits for another one."""


class _Selector(selectors.SelectSelector):
    """Instead of waiting for sockets, of which there are none, lets the time pass."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Stuck
        self.now += timeout
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it in such a loop. It uses no sockets and no threads.

    Raises:
        Stuck: nothing is left that could ever happen.
    """
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
