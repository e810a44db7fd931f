"""What differential tests have compared, at the end of a run: a pytest plugin.

A test says it by ``record_property("compared", "1,000 changes of 60 tables")``. Printing would be lost in the processes of pytest-xdist.
"""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        f"{report.nodeid.rpartition('/')[2]}: {text}"
        for report in terminalreporter.stats.get("passed", ())
        for name, text in report.user_properties
        if name == "compared"
    ]
    if lines:
        terminalreporter.section("compared")
        for line in sorted(lines):
            terminalreporter.line(line)
