"""Looks at the running subscriptions every fifteen seconds: their slots, and their history over the last hours.

It has connections of its own to the publishers, in the server's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from subscriber.errors import SubscriberError
from subscriber.interfaces import TableName, TableState
from subscriber.printable import printable
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.subscription.run_status import Status
from subscriber.subscription.subscription import Subscription
from subscriber.walreceiver.slot_status import SlotObservation

__all__ = ["LARGEST", "Point", "Sampler", "Subscriptions", "Watched", "answer_of", "to_copy"]

Subscriptions = Callable[[], Mapping[str, Subscription]]

LARGEST: Final = 20
"""So many tables have metrics of their own."""
_INTERVAL: Final = 15.0
_POINTS: Final = 1440
"""Six hours."""
_RATE_SECONDS: Final = 600.0
"""The rate at which a slot loses WAL is that of so many seconds."""
_LEAST_SECONDS: Final = 30.0
_PUBLISHER_SECONDS: Final = 5.0
_REMEMBERED: Final = 200
"""Subscriptions that do not run are forgotten if there are more than so many."""


@dataclass(frozen=True, slots=True)
class Point:
    """One moment of the history."""

    time: float
    lag_bytes: int | None
    lag_seconds: float | None
    transactions: int
    changes: int
    retained: int | None
    copied: int
    to_copy: int


def to_copy(status: Status) -> int:
    """How many tables are not copied yet."""
    return sum(entry.state in {TableState.INIT, TableState.DATASYNC} for entry in status.tables.values())


@dataclass(slots=True)
class Largest:
    """The largest counts by table, and the rest."""

    _other: int = 0
    _counted: dict[TableName, int] = field(default_factory=dict)

    def of(self, tables: Mapping[TableName, int]) -> dict[str, int]:
        """The largest ones. What the others gained since the last call is added to ``other``, which never shrinks."""
        largest = dict(sorted(tables.items(), key=lambda each: -each[1])[:LARGEST])
        self._other += sum(max(count - self._counted.get(table, 0), 0) for table, count in tables.items() if table not in largest)
        self._counted = dict(tables)
        return {**{printable(str(table)): count for table, count in largest.items()}, "other": self._other}


@dataclass(slots=True)
class Watched:
    """What is known about one subscription.

    Attributes:
        slot: its slot; None: not known yet, or the publisher does not answer.
        slot_error: why it does not.
        points: the history, oldest first.
        changes, table_bytes, copied_bytes: the tables that have metrics of their own.
    """

    slot: SlotObservation | None = None
    slot_error: SubscriberError | None = None
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=_POINTS))
    changes: Largest = field(default_factory=Largest)
    table_bytes: Largest = field(default_factory=Largest)
    copied_bytes: Largest = field(default_factory=Largest)
    _retained: deque[tuple[float, int]] = field(default_factory=deque)

    def note_slot(self, slot: SlotObservation, now: float) -> None:
        """Note what the publisher says."""
        self.slot, self.slot_error = slot, None
        self._retained.append((now, slot.retained_bytes))
        while now - self._retained[0][0] > _RATE_SECONDS:
            self._retained.popleft()

    @property
    def seconds_until_lost(self) -> float | None:
        """When the slot is lost if it retains more and more WAL as in the last ten minutes. None: not known, or not in danger."""
        if self.slot is None or self.slot.safe_wal_size is None or not self._retained:
            return None
        (began, before), (now, retained) = self._retained[0], self._retained[-1]
        if now - began < _LEAST_SECONDS or retained <= before:
            return None
        return max(self.slot.safe_wal_size, 0) * (now - began) / (retained - before)

    def publisher_lsn(self, status: Status) -> Lsn:
        """The end of the publisher's WAL, as far as known."""
        return max(status.publisher_lsn, INVALID_LSN if self.slot is None else self.slot.publisher_lsn)

    def lag_bytes(self, status: Status) -> int | None:
        """WAL that is not durable in the target, also while nothing is received. None: not known."""
        confirmed = None if self.slot is None else self.slot.confirmed_flush_lsn
        durable = max(status.flushed, confirmed or INVALID_LSN)
        return max(int(self.publisher_lsn(status)) - int(durable), 0) if durable else None


class Sampler:
    """Samples the subscriptions that run.

    Attributes:
        watched: by name.
    """

    def __init__(self, subscriptions: Subscriptions) -> None:
        self.subscriptions = subscriptions
        self.watched: dict[str, Watched] = {}

    def of(self, name: str) -> Watched:
        """What is known about a subscription."""
        return self.watched.setdefault(name, Watched())

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            running = self.subscriptions()
            known = running.keys() <= self.watched.keys()
            await self.sample(running)
            # one that has just started is looked at soon
            await asyncio.sleep(_INTERVAL if running and known else 1.0)

    async def sample(self, running: Mapping[str, Subscription]) -> None:
        """Sample once."""
        # a subscription that is being altered does not run for a moment, and keeps its history
        if len(self.watched) > _REMEMBERED:
            for gone in self.watched.keys() - running.keys():
                del self.watched[gone]
        await asyncio.gather(*(self._look_at_slot(name, each) for name, each in running.items()))
        for name, subscription in running.items():
            status, watched = subscription.status, self.of(name)
            watched.points.append(
                Point(
                    time.time(),
                    watched.lag_bytes(status),
                    status.lag_seconds,
                    status.statistics.transactions,
                    status.statistics.changes,
                    None if watched.slot is None or watched.slot.wal_status == "lost" else watched.slot.retained_bytes,
                    sum(copy.rows for copy in status.copies.values()),
                    to_copy(status),
                )
            )

    async def _look_at_slot(self, name: str, subscription: Subscription) -> None:
        watched = self.of(name)
        try:
            async with asyncio.timeout(_PUBLISHER_SECONDS):
                watched.note_slot(await subscription.observe_slot(), time.monotonic())
        except (SubscriberError, OSError) as error:
            watched.slot, watched.slot_error = None, answer_of("the publisher", error, _PUBLISHER_SECONDS)


def answer_of(server: str, error: SubscriberError | OSError, seconds: float) -> SubscriberError:
    """What is shown for an error of a server that was asked."""
    if isinstance(error, SubscriberError):
        return error
    if isinstance(error, TimeoutError):
        return SubscriberError(f"{server} did not answer within {seconds:g} s")
    return SubscriberError(f"{server} could not be asked: {error.strerror or type(error).__name__}")
