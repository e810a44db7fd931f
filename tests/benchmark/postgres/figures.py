"""What is measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields

__all__ = ["Sample", "Timing", "median"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One run, or the median of several.

    Attributes:
        startup: seconds from the command until the stream starts; of a copy, until its first session on the publisher.
        wall: seconds from then until the last row is visible in the target.
        walsender, subscriber, target: seconds of processor time meanwhile. A native subscription has no target apart from the subscriber.
        memory: peak of the subscriber's resident memory, in bytes.
    """

    startup: float
    wall: float
    walsender: float
    subscriber: float
    target: float
    memory: float


def median(samples: Sequence[Sample]) -> Sample:
    """The median of each figure."""
    return Sample(**{field.name: statistics.median(getattr(sample, field.name) for sample in samples) for field in fields(Sample)})


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of something short."""

    title: str
    who: str
    median: float
    p95: float

    @classmethod
    def of(cls, title: str, who: str, seconds: Sequence[float]) -> Timing:
        """From all that were measured."""
        ordered = sorted(seconds)
        return cls(title, who, statistics.median(ordered) * 1e3, ordered[int(len(ordered) * 0.95)] * 1e3)
