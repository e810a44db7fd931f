"""When the next round begins: as late as the freshness target allows, because a round that takes more changes writes fewer bytes.

A round rewrites files. The bytes that it writes depend on how many files hold a changed key, and hardly on how many changes there are. So
ten rounds of 1,000 changes write much more than one round of 10,000. The target says how old the oldest change may be when it can be read.
The next round begins when the time since the oldest waiting commit was received, and the time that the round will probably take, together
reach the target.

* The time that a round takes is learned from the last rounds. It is that of the slower ones among those that took at most four times the
  bytes that are waiting now: a large round says little about a small one. Nothing is learned from rounds that failed.
* If the target is already missed, or more is waiting than a round may take, the round begins at once.
* With a maximum write rate, a round begins only when the bytes of the rounds before it, divided by the time since, are at most that rate.
  Then the target may be missed.

Commit times are not used, because the publisher's clock may differ from this one.

This module is pure: times are arguments, in seconds of one clock that is never set (``time.monotonic``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

__all__ = ["Pace", "Waiting"]

_REMEMBERED: Final = 20
"""How many rounds are remembered. A round that is slow by accident is forgotten after so many others."""
_SIMILAR: Final = 4
"""A round is similar if it took at most so many times the bytes that are waiting."""
_QUANTILE: Final = 0.8
"""Of similar rounds, the share that took no longer than what is expected."""
_MARGIN: Final = (0.5, 0.05, 0.3)
"""Kept for what cannot be foreseen: seconds, and a part of the target; together at most another part of it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What waits for the next round: when its oldest commit was received, and the size of its landed files in bytes.

    The time is that of the monotonic clock, and may be a little too early. It is minus infinity if a round is due for another reason.
    """

    since: float
    size: int = 0


@dataclass(frozen=True, slots=True)
class _Round:
    size: int
    seconds: float


@dataclass(slots=True)
class Pace:
    """Decides when rounds begin: for a freshness target, and at most so many written bytes per second on average. See the module."""

    freshness: float
    write_rate: float | None = None
    _rounds: deque[_Round] = field(default_factory=lambda: deque(maxlen=_REMEMBERED), init=False)
    _paid_at: float | None = field(default=None, init=False)

    def begin_at(self, waiting: Waiting) -> float:
        """When the next round should begin. It may be in the past: then begin now."""
        due = self._due(waiting)
        return due if self._paid_at is None else max(due, self._paid_at)

    def is_held(self, waiting: Waiting, now: float) -> bool:
        """Whether the write rate alone makes the next round wait."""
        return self._paid_at is not None and self._due(waiting) <= now < self._paid_at

    def _due(self, waiting: Waiting) -> float:
        seconds, part, most = _MARGIN
        margin = min(seconds + self.freshness * part, self.freshness * most)
        return waiting.since + self.freshness - margin - self.expected(waiting.size)

    def expected(self, size: int) -> float:
        """How long a round of so many landed bytes will take. 0 if there was no round yet."""
        similar = sorted(one.seconds for one in self._rounds if one.size <= size * _SIMILAR)
        if similar:
            return similar[min(int(len(similar) * _QUANTILE), len(similar) - 1)]
        return min((one.seconds for one in self._rounds), default=0.0)

    def ended(self, began: float, end: float, *, size: int, written: int) -> None:
        """Learn from a round that took landed bytes (``size``), from its begin until its changes could be read."""
        self._rounds.append(_Round(size, end - began))
        self.wrote(began, written)

    def wrote(self, began: float, written: int) -> None:
        """Count bytes that a round wrote, or the change log, from ``began`` on."""
        if self.write_rate is not None and written:
            self._paid_at = max(began, self._paid_at or began) + written / self.write_rate
