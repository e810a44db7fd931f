"""Which way to apply batches is faster here: by one session, or in groups by several.

It depends on the servers, the tables and the load: groups are smaller than a batch, so that fewer changes can be made together, and this
program does more work for them. So both are measured, and the faster one is used. The other one is tried now and then.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

_TRIES: Final = 16
"""One of so many batches is applied in the slower way."""
_WEIGHT: Final = 0.3
"""Of the latest batch, in the average."""


class Pace:
    """The time that a change takes in each way, on average."""

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        self._count = 0

    def prefers_groups(self) -> bool:
        """Whether to apply the next batch in groups."""
        for in_groups in (True, False):
            if in_groups not in self._seconds:
                return in_groups
        self._count += 1
        return (self._seconds[True] < self._seconds[False]) is (self._count % _TRIES != 0)

    def note(self, seconds: float, changes: int, *, in_groups: bool) -> None:
        """Note how long a batch took."""
        each = seconds / changes
        before = self._seconds.get(in_groups, each)
        self._seconds[in_groups] = before + _WEIGHT * (each - before)
