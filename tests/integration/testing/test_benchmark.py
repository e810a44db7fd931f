"""``make bench SINK=postgres``, small: every workload runs, the rows are equal, and the report is complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmark.postgres.__main__ import main
from tests.benchmark.postgres.report import LIMIT, Report
from tests.benchmark.postgres.workloads import COPIES, STREAMS

STREAM = "mixed"
COPY = "copy"


@pytest.mark.endurance
@pytest.mark.timeout(300)
def test_report_of_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, chart = tmp_path / "figures.json", tmp_path / "chart.svg"
    names = [STREAM, COPY, "start", "latency"]
    main(["--workload", ",".join(names), "--rows", "500", "--rounds", "1", "--json", str(figures), "--svg", str(chart)])
    loaded = Report.load(figures)
    stream, copy = loaded.results
    assert set(stream.samples) == {LIMIT, "native", "subscriber"}
    assert set(copy.samples) == {"native", "subscriber"}
    assert all(sample.wall > 0 for result in loaded.results for runs in result.samples.values() for sample in runs)
    assert stream.medians()["subscriber"].memory > 1e6
    assert {timing.who for timing in loaded.timings} == {"native", "subscriber"}
    assert json.loads(figures.read_text())["results"][0]["ours / native"] > 0
    assert STREAMS[STREAM].title in chart.read_text()
    assert COPIES[COPY].title in loaded.markdown()
    assert "commit to visible" in capsys.readouterr().out


def test_unknown_workload_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--workload", "inserts,typo"])
    assert "unknown workload: typo" in capsys.readouterr().err


@pytest.mark.endurance
@pytest.mark.timeout(300)
def test_report_of_apply_workers(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    main(["--workload", "parallel-indexes,parallel-buffers", "--rows", "20000", "--rounds", "1", "--json", str(figures)])
    loaded = Report.load(figures)
    assert [set(result.calculated()) for result in loaded.results] == [{1, 2, 4, 8}, set()]
    for result in loaded.results:
        assert result.title in loaded.workers_markdown()
