"""Lines in the log about waits that last: after some seconds one with what is waited for, and then ever more rarely."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

from subscriber.errors import SubscriberError

__all__ = ["FIRST_SECONDS", "WaitLog", "logged_wait"]

FIRST_SECONDS: Final = 3.0
"""After so long a wait is logged for the first time, and then each time it has lasted twice as long as at the line before, or
``_LONGEST`` longer."""
_LONGEST: Final = 300.0
_LOOK_SECONDS: Final = 5.0


class WaitLog:
    """Which waits there are, and when each is logged next.

    Args:
        log: where to.
        name: of what waits, at the beginning of each line.
    """

    def __init__(self, log: logging.Logger, name: str) -> None:
        self._log = log
        self._name = name
        self._waits: dict[str, tuple[float, float]] = {}

    def note(self, waits: Iterable[str], now: float) -> None:
        """These waits there are now; what is not among them is over.

        Args:
            waits: a sentence for each; the same wait has the same sentence each time.
            now: in seconds.
        """
        before, self._waits = self._waits, {}
        for wait in waits:
            since, due = before.get(wait, (now, now + FIRST_SECONDS))
            if now >= due:
                self._log.warning("%s: %s; this has lasted for %.0f s", self._name, wait, now - since)
                due = now + min(max(now - since, FIRST_SECONDS), _LONGEST)
            self._waits[wait] = since, due


@contextlib.asynccontextmanager
async def logged_wait(log: logging.Logger, name: str, describe: Callable[[], Awaitable[str]]) -> AsyncIterator[None]:
    """Log what the block waits for, if it lasts.

    Args:
        log: where to.
        name: of what waits.
        describe: finds out what is waited for, and who is in the way. An error of its own is no error of the block.
    """
    task = asyncio.create_task(_log_it(log, name, describe), name=f"log of a wait: {name}")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _log_it(log: logging.Logger, name: str, describe: Callable[[], Awaitable[str]]) -> None:
    clock = asyncio.get_running_loop().time
    since = clock()
    while True:
        await asyncio.sleep(min(max(clock() - since, FIRST_SECONDS), _LONGEST))
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                text = await describe()
        except (SubscriberError, TimeoutError) as error:
            text = f"waiting; what for cannot be found out: {error.one_line() if isinstance(error, SubscriberError) else 'no answer'}"
        log.warning("%s: %s; this has lasted for %.0f s", name, text, clock() - since)
