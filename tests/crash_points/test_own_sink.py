"""The crash points over the sink in docs/howto/own-sink.md, exactly as the page shows it, in a project of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.code_blocks import blocks

_LINES = 5
_SAMPLE = "setup.slot_created-exit or copy.finished-error or apply.applied-disk_full or spool.written-cut or acknowledge.sent-exit"


def _test_crash_points() -> str:
    (found,) = [block.text for block in blocks() if block.page == "docs/howto/own-sink.md" and "crash_cases(" in block.text]
    return found


def _run(directory: Path, *arguments: str) -> str:
    page = [block.text for block in blocks() if block.page == "docs/howto/own-sink.md" and block.language == "python"]
    (directory / "test_json_sink.py").write_text("\n".join(page))
    (directory / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", *arguments]
    run = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.crash
@pytest.mark.timeout(300)
def test_some_points(tmp_path: Path) -> None:
    assert "5 passed" in _run(tmp_path, "-k", f"test_crash_points and ({_SAMPLE})")


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(600)
def test_all_points(tmp_path: Path) -> None:
    output = _run(tmp_path, "-k", "test_crash_points")
    assert " passed" in output
    assert "skipped" not in output


def test_it_is_short() -> None:
    assert sum(bool(line.strip()) for line in _test_crash_points().splitlines()) <= _LINES
