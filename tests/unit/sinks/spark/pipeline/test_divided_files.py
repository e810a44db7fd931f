"""Where engine ``merge`` lets a unit divide files, and where that would change nothing."""

from __future__ import annotations

import pytest

from subscriber.sinks.spark.merge.keys import rank
from subscriber.sinks.spark.pipeline.merge_engine import _divided
from subscriber.sinks.spark.pipeline.plan import BaseFile

MOST = 15


def file(rows: int, low: object, high: object) -> BaseFile:
    return BaseFile("", rows, (rank(low), rank(high)))


@pytest.mark.parametrize(
    ("base", "growth", "rows"),
    [
        ([file(10, 1, 9)], 5, 0),
        ([file(10, 1, 9)], 6, 16),
        ([file(20, 1, 9)], -5, 0),
        ([file(20, 7, 7)], 100, 0),
        ([file(20, None, 7)], 0, 20),
        ([file(8, 1, 9), file(8, 1, 9)], 0, 16),
        ([file(8, 1, 9), file(7, 5, 20)], 0, 0),
        ([file(8, 1, 30), file(4, 2, 3), file(4, 4, 5)], 0, 16),
        ([file(8, "a", "g"), file(8, "f", "k")], 0, 16),
        # one key has more rows than a file: the files around it end and begin with it
        ([file(10, 1, 7), file(10, 7, 7), file(10, 7, 9)], 100, 0),
        ([file(10, 7, 7), file(10, 7, 7)], 100, 0),
        # and two of them were merged since
        ([file(10, 1, 9), file(10, 1, 9), file(10, 9, 20), file(10, 20, 30)], 0, 20),
        ([file(20, 1, 9), BaseFile("", 20, None)], 0, 0),
        ([], 0, 0),
    ],
)
def test_rows_that_a_unit_divides(base: list[BaseFile], growth: int, rows: int) -> None:
    assert _divided(base, growth, MOST) == rows
    assert _divided(base[::-1], growth, MOST) == rows
