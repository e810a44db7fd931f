"""The two sides of a comparison: sessions that share one snapshot, and a limit for the rows that they read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from subscriber.interfaces import Query

__all__ = ["Rate", "Rows", "Side", "together"]

T = TypeVar("T")
Rows = Sequence[Sequence[str | None]]


class Side:
    """The sessions of one side. Each runs one query at a time.

    Args:
        queries: the sessions.

    Attributes:
        sessions: their number.
    """

    def __init__(self, queries: Sequence[Query]) -> None:
        self.sessions = len(queries)
        self._free = list(queries)
        self._turns = asyncio.Semaphore(len(queries))

    async def run(self, sql: str, *values: str) -> Rows:
        """Run a query in a free session. ``values`` are its parameters.

        Raises:
            SubscriberError: the server rejected it, or the session was lost.
        """
        async with self._turns:
            query = self._free.pop()
            try:
                return await query(sql, *values)
            finally:
                self._free.append(query)


class Rate:
    """Limits the rows per second, over all tables.

    Args:
        most: rows per second; None: no limit.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._next = 0.0

    async def spend(self, rows: int) -> None:
        """Wait until so many rows may have been read."""
        if self._most is None:
            return
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now) + rows / self._most
        await asyncio.sleep(self._next - now)


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once. If one fails, cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
