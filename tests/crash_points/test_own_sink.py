"""The crash points over the sink in docs/howto/own-sink.md, exactly as the page shows it, in a project of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.code_blocks import blocks

_LINES: Final = 5
_SAMPLE: Final = "apply.applied-exit or spool.written-cut or sink.line-exit-changes"

_TWO_STEPS: Final = """
class TwoSteps(JsonSink):
    async def store(self, name, state, changes):
        document = self.read(name)
        before = document["state"] if document else None
        await super().store(name, before or state, changes)
        await super().store(name, state, ())


JsonSink = TwoSteps
"""
"""The position is stored in another step than the data, within one call."""
_LATER_STEP: Final = """
class LaterStep(JsonSink):
    async def store(self, name, state, changes):
        document = self.read(name)
        first = document is None or not changes
        await super().store(name, state if first else document["state"], changes)


JsonSink = LaterStep
"""
"""With data no position is stored: the next call that has none stores it."""
_FOUND: Final = r'table "history": \d+ rows of the target .* too often|was advanced to \S+, past position \S+ of the target'


def _test_crash_points() -> str:
    (found,) = [block.text for block in blocks() if block.page == "docs/howto/own-sink.md" and "crash_cases(" in block.text]
    return found


def _run(directory: Path, *arguments: str, mistake: str = "") -> subprocess.CompletedProcess[str]:
    sink, *page = [block.text for block in blocks() if block.page == "docs/howto/own-sink.md" and block.language == "python"]
    (directory / "test_json_sink.py").write_text("\n".join([sink, mistake, *page]))
    (directory / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--timeout", "300", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_some_points(tmp_path: Path) -> None:
    run = _run(tmp_path, "-k", f"test_crash_points and ({_SAMPLE})")
    assert "3 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.crash_points
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("mistake", "case"),
    [(_TWO_STEPS, "sink.line-exit-changes"), (_LATER_STEP, "apply.applied-exit")],
    ids=["two steps", "a later step"],
)
def test_position_stored_in_another_step_is_found(mistake: str, case: str, tmp_path: Path) -> None:
    run = _run(tmp_path, "-k", f"test_crash_points and {case}", mistake=mistake)
    assert re.search(_FOUND, run.stdout), run.stdout


@pytest.mark.crash_points
@pytest.mark.timeout(900)
def test_all_points(tmp_path: Path) -> None:
    run = _run(tmp_path, "-k", "test_crash_points and exit")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


@pytest.mark.endurance
@pytest.mark.timeout(900)
def test_all_failures(tmp_path: Path) -> None:
    run = _run(tmp_path, "-k", "test_crash_points and not exit")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "skipped" not in run.stdout


def test_it_is_short() -> None:
    assert sum(bool(line.strip()) for line in _test_crash_points().splitlines()) <= _LINES
