"""The hook of a crash point, without a subscription."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber import crash_points
from subscriber.testing.crash_points.failures import Failure, FailureAt, failed_at, fill_disk, free_disk, set_phase


def test_a_disk_may_still_be_full_in_the_next_phase(tmp_path: Path) -> None:
    """Nothing was to be written meanwhile, so the program did not report it."""
    set_phase(tmp_path, "copy")
    (tmp_path / "phase").rename(tmp_path / "next")
    set_phase(tmp_path, "setup")
    point = "acknowledge.sent"
    hook = FailureAt(point, Failure.DISK_FULL, ["setup", "copy"], tmp_path, cut=lambda: None, fill_disk=fill_disk, code="/none")
    try:
        with hook.watching():
            crash_points.reached(point)
            (tmp_path / "next").rename(tmp_path / "phase")
            crash_points.reached(point)
        with pytest.raises(OSError, match="too large"):
            (tmp_path / "file").write_text("full")
    finally:
        free_disk()
    assert failed_at(tmp_path) == ["setup", "copy"]
