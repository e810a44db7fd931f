"""A limit for the bytes per second that several tasks of a subscription read or apply together. It can be changed while they run."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from typing import Final

from subscriber.waits import moved

__all__ = ["RateLimit"]

_LOOK_SECONDS: Final = 1.0
"""A new limit takes effect within so much time."""
_RECENT_SECONDS: Final = 2.0
"""Between two pauses a batch is read or applied: the limit still holds up what follows."""


class RateLimit:
    """Waits for as long as the bytes that were read are worth.

    Attributes:
        limit: bytes per second; 0: no limit.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self.limit = limit
        self._owed = 0.0
        self._at = 0.0
        self._held = -math.inf

    def hold(self, pause: float) -> None:
        """Note that something waits for so many seconds because of the limit."""
        self._held = time.monotonic() + pause

    @property
    def holds(self) -> bool:
        """Whether something waits because of the limit, or did so a moment ago. Any thread may ask."""
        return self.limit > 0 and time.monotonic() < self._held + _RECENT_SECONDS

    async def spend(self, count: int) -> None:
        """So many bytes were read. Wait until further ones may be read."""
        self.owe(count)
        # what others read meanwhile is theirs to wait for
        mine = self._owed
        while self.limit and mine > 0:
            pause = min(mine / self.limit, _LOOK_SECONDS)
            mine -= pause * self.limit
            self.hold(pause)
            await asyncio.sleep(pause)
            moved()

    @property
    def at_once(self) -> int:
        """How many bytes may be put together, so that the pause after them is short."""
        return max(int(self.limit * _LOOK_SECONDS), 1) if self.limit else sys.maxsize

    def owe(self, count: int) -> None:
        """So many bytes were read, by a task that waits for :attr:`pause` itself."""
        self._pay()
        self._owed = self._owed + count if self.limit else 0.0

    @property
    def pause(self) -> float:
        """Seconds until further bytes may be read; 0: now. At most so many that a new limit takes effect soon."""
        self._pay()
        return min(self._owed / self.limit, _LOOK_SECONDS) if self.limit else 0.0

    def _pay(self) -> None:
        now = asyncio.get_running_loop().time()
        self._owed = max(self._owed - (now - self._at) * self.limit, 0.0)
        self._at = now
