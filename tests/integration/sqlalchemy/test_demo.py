"""``subscriber demo`` with targets other than PostgreSQL: the same demonstration, the same proof, and nothing left."""

from __future__ import annotations

import re
import signal
import sqlite3
from pathlib import Path

import pytest

from tests.support.demo_program import SMALL, WAIT_SECONDS, demo, running_demo
from tests.support.sqlalchemy_targets import OtherTarget

TABLES = ("accounts", "branches", "tellers", "history", "documents", "measurements", "specimens", "tags", "scratch", "scratch_items")


def left(scratch: Path) -> list[Path]:
    """All files except the directory of spools, which stays for the next process."""
    return [path for path in scratch.iterdir() if not re.fullmatch(r"subscriber-\d+", path.name)]


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("mariadb", marks=pytest.mark.endurance)])
def test_into_a_temporary_one(request: pytest.FixtureRequest, scratch: Path, kind: str) -> None:
    if kind == "mariadb":
        request.getfixturevalue("mariadb")  # installs it, or says that it cannot be had
    done = demo(scratch, f"--target={kind}", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Both databases hold the same rows." in done.stdout
    assert f"target:    {'SQLite' if kind == 'sqlite' else 'MariaDB'} " in done.stdout
    assert "DIFFERENT" not in done.stdout
    assert "NOT THE SAME" not in done.stdout
    for table in TABLES:
        assert f"\n   {table} " in done.stdout
    assert "transactions on the publisher" in done.stdout
    assert " 0 of them were streamed" not in done.stdout
    assert left(scratch) == []


@pytest.mark.endurance
@pytest.mark.parametrize("other_target", ["sqlite", "mariadb"], indirect=True)
def test_into_a_target_of_ones_own_which_is_left_as_it_was(scratch: Path, other_target: OtherTarget) -> None:
    if other_target.kind == "sqlite":
        other_target.execute("CREATE TABLE mine (id int); INSERT INTO mine VALUES (1)")
    done = demo(scratch, f"--target={other_target.url}", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Both databases hold the same rows." in done.stdout
    assert not other_target.has_catalog()
    for table in TABLES:
        assert not other_target.has_table(f"subscriber_demo__{table}")
    if other_target.kind == "sqlite":
        assert other_target.fetch("SELECT name FROM sqlite_schema") == [("mine",)]
        assert other_target.fetch("SELECT id FROM mine") == [(1,)]
    assert left(scratch) == []


@pytest.mark.endurance
def test_a_file_that_was_not_there_is_gone(scratch: Path, sqlite_file: OtherTarget) -> None:
    done = demo(scratch, f"--target={sqlite_file.url}", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert sqlite_file.path is not None
    assert list(sqlite_file.path.parent.iterdir()) == []


@pytest.mark.endurance
def test_a_value_that_is_not_the_same_is_found(scratch: Path, sqlite_file: OtherTarget) -> None:
    sqlite_file.execute("CREATE TABLE mine (id int)")
    with running_demo(scratch, f"--target={sqlite_file.url}", *SMALL) as process:
        sqlite_file.wait("SELECT count(*) > 0 FROM subscriber_demo__documents", [(1,)], WAIT_SECONDS)
        assert sqlite_file.path is not None
        while True:
            with sqlite3.connect(sqlite_file.path, timeout=WAIT_SECONDS) as connection:
                # one that the load does not touch: nothing deletes a document's title
                changed = connection.execute("INSERT OR IGNORE INTO subscriber_demo__tellers VALUES (999999999, 1, 1, NULL)").rowcount
            connection.close()
            if changed:
                break
        output, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert "DIFFERENT: tellers." in output
    assert "DIFFERENT: 1 extra\n" in output
    assert errors == ""
    assert sqlite_file.fetch("SELECT name FROM sqlite_schema") == [("mine",)]


@pytest.mark.endurance
def test_interrupted_while_the_load_runs(scratch: Path, sqlite_file: OtherTarget) -> None:
    with running_demo(scratch, f"--target={sqlite_file.url}", "--rows", "2000", "--seconds", "60") as process:
        sqlite_file.wait("SELECT count(*) > 0 FROM subscriber_demo__accounts WHERE aid >= 1000000000", [(1,)], WAIT_SECONDS)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, errors) == (143, "")
    assert sqlite_file.path is not None
    assert list(sqlite_file.path.parent.iterdir()) == []
    assert left(scratch) == []


def test_refuses_a_target_with_tables_of_these_names(scratch: Path, sqlite_file: OtherTarget) -> None:
    sqlite_file.execute("CREATE TABLE subscriber_demo__accounts (precious int); INSERT INTO subscriber_demo__accounts VALUES (1)")
    done = demo(scratch, f"--target={sqlite_file.url}", *SMALL)
    assert done.returncode == 1
    assert done.stderr.startswith('subscriber: table "subscriber_demo__accounts" exists already in the target (hint: ')
    assert done.stderr.count("\n") == 1
    assert sqlite_file.fetch("SELECT * FROM subscriber_demo__accounts") == [(1,)]
    assert not sqlite_file.has_catalog()
