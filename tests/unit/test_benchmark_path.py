"""The steps that the benchmark of the path finds among the marks of the program."""

from __future__ import annotations

import pytest

from tests.benchmark.postgres.path import STEPS, chart, medians


def test_each_row_gets_the_marks_between_its_commit_and_its_visibility() -> None:
    moments = [(1.0, 1.004), (2.0, 2.006)]
    marks = [
        *(("received", 1.0005, 0.1), ("received", 1.001, 0.2), ("queued", 1.002, 0.2001), ("received", 1.5, 0.3)),
        *(("received", 2.002, 0.5), ("queued", 2.003, 0.5003)),
    ]
    found = medians(moments, marks)
    assert {step: after for step, (after, _) in found.items()} == pytest.approx(
        {"committed": 0.0, "received": 1.5, "queued": 2.5, "visible": 5.0}
    )
    assert {step: used for step, (_, used) in found.items() if used is not None} == {"queued": pytest.approx(200)}
    lines = chart(found).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == [STEPS[step] for step in found]
    assert lines[-1].count("#") == 40
