"""The steps that the benchmark of the path finds among the marks of the program."""

from __future__ import annotations

import pytest

from tests.benchmark.postgres.path import STEPS, chart, medians


def test_each_row_gets_the_marks_between_its_commit_and_its_visibility() -> None:
    moments = [(1.0, 1.004), (2.0, 2.006)]
    marks = [("received", 1.0005), ("received", 1.001), ("queued", 1.002), ("received", 1.5), ("received", 2.002), ("queued", 2.003)]
    found = medians(moments, marks)
    assert found == pytest.approx({"committed": 0.0, "received": 1.5, "queued": 2.5, "visible": 5.0})
    lines = chart(found).splitlines()
    assert [line.split("  ")[-1] for line in lines] == [STEPS[step] for step in found]
    assert lines[-1].count("#") == 40
