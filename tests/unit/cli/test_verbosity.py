"""What the program says of itself on standard error, and what of its drivers."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import subprocess
from pathlib import Path

import pytest

from subscriber.cli.main import main
from subscriber.cli.service.logs import NOTICE
from tests.support.program import PROGRAM, environment


@pytest.mark.slow
def test_drivers_do_not_show_their_parameters(tmp_path: Path) -> None:
    """The bug was that -vv made aiosqlite write every call with its parameters: rows, and the publisher's password."""
    file = tmp_path / "replica.db"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE mine (id int)")
    command = [*PROGRAM, "-vv", "status", f"--target=sqlite:///{file}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("flags", "level"), [([], NOTICE), (["-v"], logging.INFO), (["-vv"], logging.DEBUG)])
def test_verbosity_sets_the_log_level(flags: list[str], level: int, tmp_path: Path) -> None:
    assert main([*flags, "status", f"--target=sqlite:///{tmp_path}/none.db"]) == 1
    assert logging.getLogger("subscriber.apply.worker").getEffectiveLevel() == level
    assert not logging.getLogger("aiosqlite").isEnabledFor(logging.INFO)
