"""What ``check`` finds of an SQLite file and its directory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from subscriber.sinks.sqlalchemy.checks import renames_columns

pytestmark = pytest.mark.slow

_SCRIPT = """
import asyncio, sys
from subscriber.config import Settings, SubscriptionOptions
from subscriber.sinks.sqlalchemy.checks import check_target
from subscriber.sinks.sqlalchemy.session.database import Database

async def look():
    database = Database(sys.argv[1], create=False)
    for finding in await check_target(database, [], SubscriptionOptions(), Settings(), creating=True, log=None):
        print(finding.severity, finding.message)
    await database.close()

asyncio.run(look())
"""


def _as_others() -> None:
    """Root writes read-only files too, unless it has lost the right to."""
    if os.geteuid() == 0:
        drop_from_bounding_set, dac_override = 24, 1
        assert ctypes.CDLL(None).prctl(drop_from_bounding_set, dac_override, 0, 0, 0) == 0


def found(file: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, f"sqlite:///{file}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        preexec_fn=_as_others,
    )
    return done.stdout


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "place"
    made.mkdir()
    yield made
    made.chmod(0o700)


def test_a_file_that_is_read_only(directory: Path) -> None:
    """The bug was that a switch of the connection was asked, which is off."""
    file = directory / "replica.db"
    file.touch()
    assert found(file) == ""
    file.chmod(0o400)
    assert found(file) == f'error the SQLite file "{file}" is read-only\n'


def test_a_directory_that_is_read_only(directory: Path) -> None:
    file = directory / "replica.db"
    assert found(file) == ""
    directory.chmod(0o500)
    assert found(file) == f'error no file can be created in directory "{directory}"\n'
    directory.chmod(0o700)
    file.touch()
    directory.chmod(0o500)
    assert found(file) == f'error no file can be created in directory "{directory}"\n'


@pytest.mark.parametrize(
    ("version", "renames"),
    [
        ("10.11.6-MariaDB-0+deb12u1", True),
        ("10.5.2-MariaDB", True),
        ("10.5.1-MariaDB", False),
        ("5.5.5-10.4.34-MariaDB", False),
        ("8.0.36", True),
        ("5.7.44-log", False),
    ],
)
def test_versions_that_rename_columns(version: str, renames: bool) -> None:
    assert renames_columns(version) is renames
