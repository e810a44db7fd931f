"""Errors that are repeated are logged less and less often, with a count."""

from __future__ import annotations

import logging
import time

import pytest

from subscriber.repeated_errors import RepeatedErrors

LOG = logging.getLogger("subscriber.test")


def test_with_a_count(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    errors = RepeatedErrors(LOG)
    caplog.set_level("INFO", "subscriber")
    for second in range(600):
        now = float(second)
        # a port and an LSN are not what makes an error new
        errors.tell(logging.WARNING, f"port {second}: refused at 0/{second:X}", f"line {second}")
    lines = [record.getMessage() for record in caplog.records]
    again = "(and {} times since the last such line)".format
    assert lines[:5] == ["line 0", "line 1", "line 2", f"line 5 {again(2)}", f"line 10 {again(4)}"]
    assert len(lines) < 15
    caplog.clear()
    for name in ("t1", "t2", "t3", "t4"):
        errors.tell(logging.ERROR, f'table "{name}"', name)
    now += 1000
    errors.tell(logging.WARNING, "port 1: refused at 0/1", "after a while")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        *(("ERROR", name) for name in ("t1", "t2", "t3", "t4")),
        ("WARNING", "after a while"),
    ]
    caplog.set_level("DEBUG", "subscriber")
    for _ in range(5):
        errors.tell(logging.WARNING, "port 1: refused at 0/1", "each")
    assert [record.levelname for record in caplog.records[-5:]] == ["WARNING", "WARNING", "DEBUG", "DEBUG", "DEBUG"]
