"""Events that were received and wait to be applied, with their memory and the times of their arrival."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from subscriber.batch_times import Arrival
from subscriber.transaction.model import Event, Transaction
from subscriber.transaction.reassembly import RECORD_OVERHEAD

__all__ = ["EventQueue", "memory_of"]


def memory_of(transaction: Transaction) -> int:
    """The memory of a transaction without spilled records."""
    return transaction.size + RECORD_OVERHEAD * (len(transaction.records) + 1)


class EventQueue:
    """The events, in order. Their memory is held until :meth:`release`.

    Args:
        budget: bytes. :class:`~subscriber.apply.receiving.receiver.Receiver` stops reading while more are held.

    Attributes:
        popped: number of events taken.
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._queue: deque[tuple[Event, int]] = deque()
        self._held = 0
        self._room = asyncio.Event()
        self._room.set()
        self._arrivals: deque[Arrival] = deque()
        self.popped = 0

    def peek(self) -> Event | None:
        """Return the next event without taking it; None if there is none yet."""
        return self._queue[0][0] if self._queue else None

    @property
    def arrival(self) -> Arrival | None:
        """When the next event arrived; None if it is not known."""
        arrivals = self._arrivals
        while arrivals and arrivals[0].last <= self.popped:
            arrivals.popleft()
        return arrivals[0] if arrivals else None

    def waiting(self) -> Sequence[Event]:
        """Return all events that were not taken yet."""
        return [event for event, _ in self._queue]

    def pop(self) -> tuple[Event, int]:
        """Take the next event. Return it and its memory, to be passed to :meth:`release` when it is done."""
        self.popped += 1
        return self._queue.popleft()

    def pop_batch(self, rows: int, size: int, alone: Callable[[Transaction], bool] | None) -> tuple[list[Transaction], int]:
        """Take the transactions that come next, up to about so many rows and bytes. Return them and their memory.

        Args:
            rows: how many rows more are wanted.
            size: how many bytes more are wanted.
            alone: whether a transaction must not follow others; None: no one.
        """
        found: list[Transaction] = []
        held, queue = 0, self._queue
        while queue and rows > 0 and size > 0:
            event, memory = queue[0]
            if not isinstance(event, Transaction) or (alone is not None and alone(event)):
                break
            queue.popleft()
            found.append(event)
            held += memory
            rows -= event.spilled + len(event.records)
            size -= event.size
        self.popped += len(found)
        return found, held

    def pop_transactions(self, size: int) -> tuple[list[Transaction], int]:
        """Take the small transactions that come next and are not streamed, up to about ``size`` bytes. Return them and their memory."""
        found: list[Transaction] = []
        held, queue = 0, self._queue
        while queue and held < size:
            event, memory = queue[0]
            if type(event) is not Transaction or event.prefixed or event.spilled or memory >= size:
                break
            queue.popleft()
            found.append(event)
            held += memory
        self.popped += len(found)
        return found, held

    def release(self, held: int) -> None:
        """Free the memory of events that were taken."""
        self._held -= held
        if self._held < self._budget:
            self._room.set()

    def _note_arrival(self, read: float, decoded: float) -> None:
        """Note when the events arrived that were queued since the last call."""
        last, known = self.popped + len(self._queue), self.arrival
        if last > (self._arrivals[-1].last if known is not None else self.popped):
            self._arrivals.append(Arrival(last, read, decoded))
