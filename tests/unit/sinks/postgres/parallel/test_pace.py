"""The faster way to apply batches is used, and the other one is tried."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from subscriber.sinks.postgres.parallel import pace as pace_module
from subscriber.sinks.postgres.parallel.pace import Pace, working_time


def apply(pace: Pace, batches: int, *, groups: float, alone: float, busy: float = 0.1, least: float = 0.02) -> list[tuple[bool, float]]:
    """Apply batches.

    Args:
        pace: decides.
        batches: how many.
        groups, alone: the seconds of a batch in each way.
        busy: the share of the time in which this program works.
        least: the smallest share that can be applied in groups.

    Returns:
        The parts: whether they were applied in groups, and how many batches they are.
    """
    parts = []
    for _ in range(batches):
        left = 1.0
        while left:
            in_groups, share = pace.next_part(least)
            part = min(share, left)
            taken = part * (groups if in_groups else alone)
            pace.note(taken, busy * taken, round(part * 8000), in_groups=in_groups)
            parts.append((in_groups, part))
            left -= part
    return parts


def seconds(pace: Pace, batches: int, *, groups: float, alone: float, busy: float = 0.1, least: float = 0.02) -> float:
    parts = apply(pace, batches, groups=groups, alone=alone, busy=busy, least=least)
    return sum(part * (groups if in_groups else alone) for in_groups, part in parts)


def test_groups_are_tried_in_the_second_batch_and_used_if_faster() -> None:
    parts = apply(Pace(), 3, groups=0.25, alone=0.5)
    assert parts == [(False, 1.0), (False, 0.125), (True, 0.125), (True, 0.75), (True, 1.0)]


def test_the_next_try_follows_after_32_times_as_long() -> None:
    # one session takes a second for the eighth of a batch
    pace = Pace()
    apply(pace, 10, groups=4, alone=8)
    parts = apply(pace, 32, groups=4, alone=8)
    assert 3 <= parts.count((False, 0.125)) <= 4
    assert {in_groups for in_groups, part in parts if part != 0.125} == {True}


def test_the_first_batch_is_slow() -> None:
    pace = Pace()
    pace.note(10, 1, 1000, in_groups=False)
    assert (True, 1.0) not in apply(pace, 10, groups=3, alone=1)


def test_groups_are_not_tried_while_this_program_is_busy() -> None:
    pace = Pace()
    assert seconds(pace, 1000, groups=3, alone=1, busy=0.6) == 1000
    # another load: the target is the limit
    assert seconds(pace, 100, groups=1, alone=3) < 100 * 1.2


def test_small_batches_are_tried_as_a_whole() -> None:
    assert apply(Pace(), 4, groups=0.5, alone=1, least=1.0) == [(False, 1.0), (False, 1.0), (True, 1.0), (True, 1.0)]


def test_little_is_lost_if_one_way_is_much_slower() -> None:
    for least in (0.02, 1.0):
        assert seconds(Pace(), 1000, groups=1, alone=3, least=least) < 1000 * 1.03 + 3
        assert seconds(Pace(), 1000, groups=3, alone=1, least=least) < 1000 * 1.03


def test_the_load_changes() -> None:
    pace = Pace()
    seconds(pace, 100, groups=1, alone=2)
    # noticed after one batch
    assert seconds(pace, 200, groups=4, alone=2) < 200 * 2.1
    seconds(pace, 200, groups=0.1, alone=2)
    assert seconds(pace, 200, groups=0.1, alone=2) < 200 * 0.2


def test_groups_must_be_clearly_faster() -> None:
    pace = Pace()
    assert (True, 1.0) not in apply(pace, 100, groups=0.9, alone=1)


@pytest.mark.parametrize("scheduled", ["/proc/thread-self/schedstat", "/nonexistent", "not_counted"])
def test_working_time_is_without_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheduled: str) -> None:
    (tmp_path / "not_counted").write_text("0 0 0\n")
    monkeypatch.setattr(pace_module, "_SCHEDULED", tmp_path / scheduled)
    working, used = working_time(), time.thread_time()
    while time.thread_time() < used + 0.05:
        pass
    assert working_time() - working > 0.03
    working = working_time()
    time.sleep(0.5)
    assert working_time() - working < 0.25
