"""A limit for the bytes per second that all copies of a subscription read together. It can be changed while they run."""

from __future__ import annotations

import asyncio
from typing import Final

from subscriber.waits import moved

__all__ = ["CopyRate"]

_LOOK_SECONDS: Final = 1.0
"""A new limit takes effect within so much time."""


class CopyRate:
    """Waits for as long as the bytes that were read are worth.

    Attributes:
        limit: bytes per second; 0: no limit.
    """

    def __init__(self, limit: float = 0.0) -> None:
        self.limit = limit
        self._owed = 0.0
        self._at = 0.0

    async def spend(self, count: int) -> None:
        """So many bytes were read. Wait until further ones may be read."""
        if not self.limit:
            self._owed = 0.0
            return
        self._pay()
        self._owed += count
        # what others read meanwhile is theirs to wait for
        mine = self._owed
        while self.limit and mine > 0:
            pause = min(mine / self.limit, _LOOK_SECONDS)
            mine -= pause * self.limit
            await asyncio.sleep(pause)
            moved()

    def _pay(self) -> None:
        now = asyncio.get_running_loop().time()
        self._owed = max(self._owed - (now - self._at) * self.limit, 0.0)
        self._at = now
