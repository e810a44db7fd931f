"""How engine ``spark`` divides the units of a round into tasks."""

from __future__ import annotations

import pytest

from subscriber.sinks.spark.pipeline.engines.spark_engine import packed, task_count


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([], 3, []),
        ([5], 3, [[0]]),
        ([1, 1, 9, 1], 2, [[2], [0, 1, 3]]),
        ([4, 3, 2, 1], 2, [[0, 3], [1, 2]]),
    ],
)
def test_units_are_packed_by_their_weight(weights: list[int], parts: int, expected: list[list[int]]) -> None:
    assert packed(weights, parts) == expected


@pytest.mark.parametrize(("rows", "cores", "expected"), [(0, 2, 2), (500_000, 2, 2), (2_000_000, 2, 5), (10**8, 2, 6), (500_000, 100, 100)])
def test_small_work_has_a_task_for_each_core(rows: int, cores: int, expected: int) -> None:
    assert task_count(rows, cores) == expected
