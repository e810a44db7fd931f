"""How long a test with the pytest fixtures takes: ``make bench SINK=pytest``.

A test makes a table and a publication, starts a subscription into memory, changes a row, waits, and compares. The time is that of setup,
call and teardown, once the server is up: the first test of each publisher is left out. With the fake publisher it must be below 50 ms, with
a real one below 400 ms.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from importlib.metadata import entry_points
from pathlib import Path
from statistics import median

import pytest

TESTS = 30
LIMITS = {"fake": 0.050, "real": 0.400}
SOURCE = """
import pytest

@pytest.mark.parametrize("number", range({tests}))
async def test_fake(number, fake_publisher, subscription, memory_target):
    fake_publisher.create_table("accounts", {{"id": "int", "balance": "numeric"}}, key=["id"])
    fake_publisher.create_publication("app", "accounts")
    replica = await subscription(fake_publisher, "app")
    async with fake_publisher.transaction() as transaction:
        transaction.insert("accounts", id=number, balance="12.50")
    await replica.assert_equal()
    assert [row["id"] for row in memory_target.rows("accounts")] == [number]

@pytest.mark.parametrize("number", range({tests}))
async def test_real(number, postgres_publisher, subscription, memory_target):
    replica = await subscription(postgres_publisher, "app")
    postgres_publisher.execute(f"INSERT INTO accounts VALUES ({{number}}, 12.50)")
    await replica.assert_equal()
    assert [row["id"] for row in memory_target.rows("accounts")] == [number]
"""
CONFTEST = """
import pytest

@pytest.fixture(scope="session")
def postgres_publisher_schema():
    return "CREATE TABLE accounts (id int PRIMARY KEY, balance numeric); CREATE PUBLICATION app FOR ALL TABLES"
"""
CONFIGURATION = "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"


class Durations:
    """A pytest plugin: the seconds of each test."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[2]] += report.duration


def measure(tests: int = TESTS) -> tuple[int, dict[str, float]]:
    """Return pytest's status, and the median seconds of a test by kind of publisher."""
    durations = Durations()
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "test_fixtures.py").write_text(SOURCE.format(tests=tests))
        (Path(directory) / "conftest.py").write_text(CONFTEST)
        (Path(directory) / "pytest.ini").write_text(CONFIGURATION)
        arguments = [directory, "-q", "--rootdir", directory, "-p", "no:cacheprovider", "-p", "no:randomly"]
        status = pytest.main([*arguments, *plugin_arguments()], plugins=[durations])
    found: dict[str, list[float]] = defaultdict(list)
    for name, seconds in durations.seconds.items():
        found[name.removeprefix("test_").partition("[")[0]].append(seconds)
    return int(status), {kind: median(seconds[1:]) for kind, seconds in found.items() if len(seconds) > 1}


def plugin_arguments() -> list[str]:
    """Load the plugin by name if this checkout was installed before it had an entry point."""
    known = any(entry.value == "subscriber.testing.pytest_plugin" for entry in entry_points(group="pytest11"))
    return [] if known else ["-p", "subscriber.testing.pytest_plugin"]


def main() -> int:
    """Print the medians. The status is 1 if a test failed or a limit is exceeded."""
    status, medians = measure()
    for kind, limit in LIMITS.items():
        seconds = medians.get(kind)
        if seconds is None:
            return 1
        verdict = "ok" if seconds < limit else "too slow"
        print(f"{kind} publisher: {seconds * 1000:.0f} ms a test (median of {TESTS - 1}), limit {limit * 1000:.0f} ms: {verdict}")
        status = status or int(seconds >= limit)
    return status


if __name__ == "__main__":
    sys.exit(main())
