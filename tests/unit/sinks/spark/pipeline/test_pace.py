"""The pace of rounds, by simulation: a target is met with few bytes, whatever a round costs, and the write rate is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from subscriber.sinks.spark.pipeline.pace import Pace, Waiting

LANDING_SECONDS = 0.3
BYTES_PER_SECOND = 100_000


@dataclass
class Simulated:
    """Changes arrive without end, and are landed every 0.3 s. ``cost`` gives the seconds of a round of so many landed bytes."""

    pace: Pace
    cost: Callable[[int], float]
    written: Callable[[int], int] = lambda _: 1_000_000
    ages: list[float] = field(default_factory=list)
    bytes: int = 0
    rounds: int = 0
    largest: int = 0

    def run(self, seconds: float, backlog: float = 0.0, limit: int = 10**12) -> None:
        now, applied = backlog, 0.0
        while now < backlog + seconds:
            landed = now - now % LANDING_SECONDS
            if landed <= applied:
                now = landed + LANDING_SECONDS + 1e-6
                continue
            size = int((landed - applied) * BYTES_PER_SECOND)
            begin = self.pace.begin_at(Waiting(applied, size))
            if begin > now:
                now = min(begin, now + max((begin - now) / 2, 0.05))
                continue
            size = min(size, limit)
            end, written = now + self.cost(size), self.written(size)
            self.pace.ended(now, end, size=size, written=written)
            self.ages.append(end - applied)
            self.bytes += written
            self.rounds += 1
            self.largest = max(self.largest, size)
            applied += size / BYTES_PER_SECOND
            now = end


@pytest.mark.parametrize("target", [2.0, 10.0, 60.0])
def test_target_is_met_with_few_rounds(target: float) -> None:
    dice = random.Random(1)
    simulated = Simulated(Pace(target), lambda size: 0.1 + size / 5e6 + dice.random() * 0.1)
    simulated.run(seconds=target * 200)
    later = simulated.ages[5:]
    assert sum(age <= target for age in later) >= 0.95 * len(later)
    # it waits as long as it may, but for a margin, a round and a landing
    assert simulated.rounds <= target * 200 / (target - min(0.5 + target * 0.05, target * 0.3) - 0.2 - LANDING_SECONDS) + 5


def test_longer_target_writes_fewer_bytes() -> None:
    written = []
    for target in (0.5, 2.0, 10.0):
        simulated = Simulated(Pace(target), lambda _: 0.1)
        simulated.run(seconds=600)
        written.append(simulated.bytes)
    assert written[0] > 3 * written[1] > 12 * written[2]


def test_target_that_cannot_be_met_makes_rounds_follow_each_other() -> None:
    simulated = Simulated(Pace(1.0), lambda _: 3.0)
    simulated.run(seconds=300)
    assert simulated.rounds >= 98


def test_backlog_is_applied_at_once_in_rounds_as_large_as_allowed() -> None:
    limit = 50 * BYTES_PER_SECOND
    simulated = Simulated(Pace(10.0), lambda size: size / BYTES_PER_SECOND / 10)
    simulated.run(seconds=120, backlog=1000.0, limit=limit)
    assert simulated.largest == limit
    # ten times as fast as changes arrive: 1,000 s of changes need about 111 s. Then the target holds again
    assert max(simulated.ages[:20]) > 900
    assert simulated.ages[-1] <= 10.0


def test_slow_start_and_single_slow_rounds_are_forgotten() -> None:
    costs = iter([8.0, 4.0] + [0.2] * 30 + [3.0] + [0.2] * 1000)
    simulated = Simulated(Pace(5.0), lambda _: next(costs))
    simulated.run(seconds=600)
    assert sum(age > 5.0 for age in simulated.ages) <= 5
    assert simulated.rounds <= 600 / 5 * 1.5 + 10


def test_write_rate_is_kept_and_freshness_suffers() -> None:
    pace = Pace(1.0, write_rate=100_000)
    simulated = Simulated(pace, lambda _: 0.1)
    simulated.run(seconds=600)
    assert simulated.bytes <= 600 * 100_000 * 1.02
    assert simulated.bytes >= 600 * 100_000 * 0.9
    assert min(simulated.ages[3:]) > 5.0
    assert not pace.is_held(Waiting(600.0), 600.5)
    pace.wrote(601.0, 1_000_000)  # the change log counts too
    assert pace.begin_at(Waiting(600.0)) >= 611.0
    assert pace.is_held(Waiting(600.0), 605.0)


def test_round_without_experience_begins_late_enough_to_gather_only_a_little() -> None:
    pace = Pace(2.0)
    assert pace.begin_at(Waiting(100.0)) == pytest.approx(101.4)
    pace.ended(100.0, 101.0, size=1000, written=1)
    assert pace.begin_at(Waiting(200.0, 1000)) == pytest.approx(200.4)
    # a much larger round says at most that a small one takes no longer
    pace.ended(110.0, 110.5, size=10, written=1)
    assert pace.begin_at(Waiting(200.0, 10)) == pytest.approx(200.9)
