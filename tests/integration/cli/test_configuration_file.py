"""Several subscriptions of one configuration file in one process, which reads it again at SIGHUP, and logs JSON."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import Program, running, subscriber

SECRET = "not-in-any-log"


def test_run_reload_and_stop(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    for name in ("one", "two"):
        publisher18_db.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1); CREATE PUBLICATION {name} FOR TABLE {name}"
        )
        target_db.execute(f"CREATE TABLE {name} (id int PRIMARY KEY)")
    file, log = tmp_path / "subscriber.toml", tmp_path / "log"
    env = {"TARGET": target_db.dsn, "PUBLISHER": publisher18_db.dsn, "SUBSCRIBER_CONFIG": str(file)}

    def write(*names: str, more: str = "", head: str = "") -> None:
        entries = [f'[subscriptions.{name}]\nconnection = "env:PUBLISHER"\npublications = ["{name}"]\ntarget = "copy"' for name in names]
        file.write_text("\n".join([head, '[log]\nformat = "json"', '[targets.copy]\nurl = "env:TARGET"', *entries, more]))

    def rows(table: str) -> str:
        return f"SELECT count(*) FROM {table}"

    write("one", "two", "absent", more=f"password = 'file:{tmp_path}/none'")
    assert "No such file or directory" in subscriber("run", env=env).errors
    # "absent" has no publication: its error is its own
    write("one", "two", "absent")
    with running("run", env=env, loud=True) as program:
        for name in ("one", "two"):
            target_db.wait(rows(name), 1)
        program.says("streaming from", 2)
        says(program, "streaming from", subscription="two")
        failed = says(program, "does not exist on the publisher", subscription="absent")
        assert (failed["level"], failed["attempt"]) == ("error", 1)
        assert SECRET not in program.errors

        file.write_text(f'password = "{SECRET}')
        program.send(signal.SIGHUP)
        says(program, "the configuration was not reloaded, and the previous one stays in effect: ")
        assert SECRET not in program.errors

        # one stays as it is, two goes, the log moves to a file
        pid = publisher18_db.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'one'")
        write("one", head="http = '127.0.0.1:1'", more='options.max_copy_rate = "10MB/s"')
        file.write_text(file.read_text().replace('format = "json"', f'format = "json"\nfile = "{log}"'))
        program.send(signal.SIGHUP)
        publisher18_db.wait("SELECT count(*) FROM pg_replication_slots WHERE active", 1)
        wait_for_line(program, log, "http changed: restart this program to use it")
        changed = [each["message"] for each in lines(log.read_text()) if " changed: " in each["message"]]
        assert any("subscriptions.one.options.max_copy_rate changed: it takes effect at once" in each for each in changed)
        publisher18_db.execute("INSERT INTO one VALUES (2); INSERT INTO two VALUES (2)")
        target_db.wait(rows("one"), 2)
        assert publisher18_db.value("SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'one'") == pid

        # two comes back, and one gets other settings
        log.rename(tmp_path / "old")
        write("one", "two", more="settings.batch_rows = 7\n[subscriptions.one.settings]\nbatch_rows = 8")
        file.write_text(file.read_text().replace('format = "json"', f'format = "json"\nfile = "{log}"'))
        program.send(signal.SIGHUP)
        target_db.wait(rows("two"), 2)
        publisher18_db.wait(f"SELECT active AND active_pid <> {pid} FROM pg_replication_slots WHERE slot_name = 'one'", True)
        wait_for_line(program, log, '"subscription": "two"')

        shown = subscriber("status", "--json", "two", env=env)
        (status,) = json.loads(shown.output)["subscriptions"]
        assert (shown.status, status["name"]) == (0, "two")
        assert subscriber("status", "three", env=env).status == 1
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    once = subscriber("run", "--until-caught-up", env=env, loud=True)
    assert once.status == 0, once.errors
    checked = subscriber("check", "two", env=env, loud=True)
    assert (checked.status, "one" in checked.output) == (0, False), checked


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def says(program: Program, text: str, subscription: str | None = None) -> dict[str, Any]:
    """Wait for a record, and return it. All lines are JSON."""
    program.says(text)
    return next(each for each in lines(program.errors) if text in each["message"] and each.get("subscription") == subscription)


def wait_for_line(program: Program, log: Path, text: str) -> None:
    """Wait until the log file has the text."""
    deadline = time.monotonic() + 30
    while not log.exists() or text not in log.read_text():
        assert time.monotonic() < deadline, (log.exists() and log.read_text(), program.errors)
        time.sleep(0.02)


def test_lost_slot_is_shown_and_repaired_by_name(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    # the bug was that status said "not running", and nothing of the slot; recover needed the strings of the file, passwords too
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO t VALUES (1); CREATE PUBLICATION pub FOR TABLE t")
    name, file = f"own_{publisher18_db.name}", tmp_path / "subscriber.toml"
    file.write_text(
        f'[targets.copy]\nurl = "env:TARGET"\n[subscriptions.{name}]\nconnection = "env:PUBLISHER"\npublications = ["pub"]\ntarget = "copy"'
    )
    env = {"TARGET": target_db.dsn, "PUBLISHER": publisher18_db.dsn, "SUBSCRIBER_CONFIG": str(file)}

    def status(wanted: str) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            found = json.loads(subscriber("status", "--json", env=env).output)["subscriptions"]
            if found and found[0]["state"] == wanted:
                return dict(found[0])
            assert time.monotonic() < deadline, found

    quick = ("-c", "wal_retrieve_retry_interval=2s")
    with running("run", *quick, env=env) as program:
        assert status("running")["publisher"]["wal_status"] == "reserved"
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    publisher18_db.execute(f"SELECT pg_drop_replication_slot('{name}'); INSERT INTO t VALUES (2)")
    wrong = subscriber("recover", "other", env=env)
    assert (wrong.status, 'has no subscription "other"' in wrong.errors) == (1, True)
    with running("run", *quick, env=env):
        assert "`subscriber recover NAME`" in status("retrying")["retry"]["error"]
        done = subscriber("recover", name, env=env)
        assert done.status == 0, done
        target_db.wait("SELECT count(*) FROM t", 2)
        status("running")
        assert subscriber("verify", name, env=env).status == 0
    assert subscriber("alter", name, "--resync", "public.t", env=env).status == 0
    assert subscriber("drop", name, env=env).status == 0
    assert publisher18_db.value(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'") == 0
