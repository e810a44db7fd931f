"""Which way to apply batches is faster here: by one session, or in groups by several.

Groups take more processor time: they are smaller than a batch, so that fewer changes can be made together, and this program reads their
keys. So they are tried only while this program waits for the target most of the time, and used while they save a fifth of the time. A wait
for a processor is none for the target.

A *try* applies a part of one batch in the other way, and compares it with the part before. The faster way is used from then on. The next
try follows after 32 times as long. If groups have become slower than one session was last, it follows at once.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Final

__all__ = ["Pace", "working_time"]

_SCHEDULED: Final = Path("/proc/thread-self/schedstat")

_BUSY: Final = 0.5
"""Groups are not tried if this program works for a larger share of the time: it would become the limit."""
_GAIN: Final = 0.8
"""Groups are used if they take less than this share of the time: they take processor time that others may need."""
_TRIED: Final = 1 / 8
"""The share of a batch that is applied in the other way; of a small batch, all of it."""
_BETWEEN: Final = 32
"""So many times as long as a try took is the time until the next one: tries take at most 3 % of the time."""
_KEPT: Final = 0.5
"""The weight of the time before a batch, in the share of work."""


def working_time() -> float:
    """Seconds in which this thread has used a processor or, on Linux, waited for one."""
    try:
        used, waited, _ = map(int, _SCHEDULED.read_text().split())
    except (OSError, ValueError):
        used = waited = 0
    # a kernel that does not count this shows zeros
    return (used + waited) / 1e9 if used else time.thread_time()


class Pace:
    """The way that is used, and how long a change takes in each."""

    def __init__(self) -> None:
        self._in_groups = False
        self._until_try = 0.0
        # seconds for each change, when the way was used last
        self._each = {False: math.inf, True: math.inf}
        # of what one session applied
        self._parts = 0
        self._seconds = self._working = 0.0

    def next_part(self, least: float) -> tuple[bool, float]:
        """Whether to apply what comes next in groups, and how much of it at most, as a share of a batch.

        Args:
            least: the smallest share that can be applied in groups.
        """
        tried = _TRIED if least <= _TRIED else 1.0
        if self._parts < 2:
            # the first one is slow, because much is read for the first time: the first try is compared with the second one
            return False, tried if self._parts else 1.0
        if self._in_groups and self._each[True] > self._each[False]:
            self._until_try = 0.0
        if self._until_try > 0 or (not self._in_groups and self._working > _BUSY * self._seconds):
            return self._in_groups, 1.0
        return not self._in_groups, tried

    def note(self, seconds: float, working: float, changes: int, *, in_groups: bool) -> None:
        """Note how long changes took, and :func:`working_time` meanwhile."""
        self._each[in_groups] = seconds / changes
        if not in_groups:
            self._parts += 1
            self._seconds, self._working = _KEPT * self._seconds + seconds, _KEPT * self._working + working
        if in_groups is self._in_groups:
            self._until_try -= seconds
        else:
            self._until_try = _BETWEEN * seconds
            self._in_groups = self._each[True] < _GAIN * self._each[False]
