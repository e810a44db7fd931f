"""Which way to apply batches is faster here: by one session, or in groups by several.

It depends on the servers, the tables and the load: groups are smaller than a batch, so that fewer changes can be made together, and this
program does more work for them. So both are measured, and the faster one is used. Now and then a part of a batch is applied in the other
way.
"""

from __future__ import annotations

from typing import Final

__all__ = ["Pace"]

_TRIED: Final = 0.25
"""The share of a batch that is applied in the slower way, to measure it; of a small batch, all of it."""
_COST: Final = 1 / 64
"""The share of the time that tries may take."""
_LEAST: Final = 4
_MOST: Final = 64
"""Batches between two tries."""
_WEIGHT: Final = 0.3
"""Of the latest batch, in the average."""
_GAIN: Final = 0.8
"""Groups are used if they take less than this share of the time: they take processor time that others may need."""


class Pace:
    """The time that a change takes in each way, on average."""

    def __init__(self) -> None:
        self._seconds: dict[bool, float] = {}
        self._since_try = 0

    def share_in_groups(self, least: float) -> float:
        """Which share of the next batch to apply in groups, from its beginning.

        Args:
            least: the smallest share that can be applied in groups.
        """
        tried = _TRIED if least <= _TRIED else 1.0
        if True not in self._seconds:
            return tried
        if False not in self._seconds:
            return 0.0
        groups, alone = self._seconds[True], self._seconds[False]
        groups_first = groups < _GAIN * alone
        longer = max(groups, alone) / min(groups, alone) - 1
        self._since_try += 1
        if self._since_try < min(max(tried * longer / _COST, _LEAST), _MOST):
            return float(groups_first)
        self._since_try = 0
        return 1 - tried if groups_first else tried

    def note(self, seconds: float, changes: int, *, in_groups: bool) -> None:
        """Note how long changes took."""
        each = seconds / changes
        before = self._seconds.get(in_groups, each)
        self._seconds[in_groups] = before + _WEIGHT * (each - before)
