"""The faster way to apply batches is used, and the other one is tried."""

from __future__ import annotations

from subscriber.sinks.postgres.parallel.pace import Pace


def batches(pace: Pace, count: int, *, groups: float, alone: float) -> list[bool]:
    """Apply batches, which take so long in each way. Returns which of them were applied in groups."""
    found = []
    for _ in range(count):
        in_groups = pace.prefers_groups()
        pace.note(groups if in_groups else alone, 1000, in_groups=in_groups)
        found.append(in_groups)
    return found


def test_both_are_tried_first() -> None:
    assert batches(Pace(), 2, groups=1, alone=2) == [True, False]


def test_the_faster_one_is_used() -> None:
    assert sum(batches(Pace(), 162, groups=1, alone=2)) == 151
    assert sum(batches(Pace(), 162, groups=2, alone=1)) == 11


def test_the_load_changes() -> None:
    pace = Pace()
    batches(pace, 100, groups=1, alone=2)
    # one change of the load, noticed by the batches in groups at once
    assert sum(batches(pace, 160, groups=4, alone=2)) < 30
    assert sum(batches(pace, 400, groups=0.1, alone=2)[200:]) > 180
