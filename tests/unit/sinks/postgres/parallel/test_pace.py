"""The faster way to apply batches is used, and the other one is tried."""

from __future__ import annotations

from subscriber.sinks.postgres.parallel.pace import Pace


def seconds(pace: Pace, batches: int, *, groups: float, alone: float, least: float = 0.02) -> float:
    """Apply batches, which take so long in each way. Returns how long all took."""
    taken = 0.0
    for _ in range(batches):
        share = pace.share_in_groups(least)
        for in_groups, part, whole in ((True, share, groups), (False, 1 - share, alone)):
            if part:
                pace.note(part * whole, round(part * 1000), in_groups=in_groups)
                taken += part * whole
    return taken


def test_both_are_tried_in_the_first_batch() -> None:
    pace = Pace()
    assert pace.share_in_groups(0.02) == 0.25
    pace.note(1, 250, in_groups=True)
    pace.note(6, 750, in_groups=False)
    # one session takes twice as long for a quarter of each sixteenth batch
    assert [pace.share_in_groups(0.02) for _ in range(17)] == [*[1.0] * 15, 0.75, 1.0]


def test_what_is_nearly_as_fast_is_tried_soon() -> None:
    pace = Pace()
    seconds(pace, 1, groups=1.1, alone=1)
    assert [pace.share_in_groups(0.02) for _ in range(5)] == [0.0, 0.0, 0.0, 0.25, 0.0]


def test_a_batch_of_one_large_transaction_is_not_divided() -> None:
    pace = Pace()
    pace.note(1, 1000, in_groups=True)
    assert pace.share_in_groups(0.02) == 0.0


def test_little_is_lost_if_one_way_is_much_slower() -> None:
    assert seconds(Pace(), 1000, groups=1, alone=3) < 1000 * 1.04
    assert seconds(Pace(), 1000, groups=3, alone=1) < 1000 * 1.04
    # small batches, which are tried as a whole
    assert seconds(Pace(), 1000, groups=3, alone=1, least=1.0) < 1000 * 1.04


def test_the_load_changes() -> None:
    pace = Pace()
    seconds(pace, 100, groups=1, alone=2)
    # one change of the load, noticed by the batches in groups at once
    assert seconds(pace, 200, groups=4, alone=2) < 200 * 2.2
    assert seconds(pace, 200, groups=4, alone=2) < 200 * 2.05
    seconds(pace, 200, groups=0.1, alone=2)
    assert seconds(pace, 200, groups=0.1, alone=2) < 200 * 0.2


def test_groups_must_be_clearly_faster() -> None:
    pace = Pace()
    seconds(pace, 2, groups=0.97, alone=1)
    assert pace.share_in_groups(0.02) == 0.0
