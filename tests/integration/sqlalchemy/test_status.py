"""``subscriber status`` of targets of SQLAlchemy's: what is shown is what is so."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from tests.support.database import WAIT_SECONDS
from tests.support.program import running, subscriber
from tests.support.sqlalchemy_targets import ALL, IN_BOTH_ALIKE, OtherTarget, Replica


def status(target: OtherTarget, *arguments: str, expect: int = 0) -> dict[str, Any]:
    ended = subscriber("status", f"--target={target.url}", "--json", *arguments)
    assert ended.status == expect, ended.errors
    found: dict[str, Any] = json.loads(ended.output)
    return found


def one(target: OtherTarget, state: str) -> dict[str, Any]:
    """The only subscription, once it is in that state."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        # each call is a process; workers report once a second
        time.sleep(0.2)
        (found,) = status(target)["subscriptions"]
        if found["state"] == state:
            return dict(found)
        assert time.monotonic() < deadline, found


@IN_BOTH_ALIKE
def test_of_one_that_is_run_and_killed(other_replica: Replica) -> None:
    pair = other_replica
    with running(*pair.arguments()) as program:
        pair.target.follows()
        pair.target.execute("DELETE FROM t WHERE id = 5")
        pair.publisher.execute("UPDATE t SET v = 'x' WHERE id = 5")
        lsn = pair.publisher.current_lsn()
        pair.target.reaches(pair.name, lsn)
        deadline = time.monotonic() + WAIT_SECONDS
        found = one(pair.target, "running")
        while not found["counters"]["confl_update_missing"]:
            assert time.monotonic() < deadline
            found = one(pair.target, "running")
        assert found["name"] == pair.name
        assert found["pid"] == program.process.pid
        assert found["tables_by_state"] == {"r": 1}
        assert [table["table"] if "table" in table else table["name"] for table in found["tables"]]
        # its command line defines it: the publisher is not known here
        assert found["publisher"] is None
        # the worker knows it
        assert found["lag_bytes"] is not None
        text = subscriber("status", f"--target={pair.target.url}")
        assert text.output.startswith(f"{pair.name}: running, PID {program.process.pid}\n")
        assert "tables        1 ready" in text.output
        assert "confl_update_missing 1" in text.output
        program.send(signal.SIGKILL)
        program.ended()
    found = one(pair.target, "defined_by_command_line")
    assert (found["pid"], found["received_lsn"]) == (None, None)
    assert found["position"] == pair.target.position(pair.name)
    assert found["counters"]["confl_update_missing"] == 1


def test_of_one_that_was_created(sqlite_replica: Replica) -> None:
    pair = sqlite_replica
    target = f"--target={pair.target.url}"
    done = subscriber("create", pair.name, f"--connection={pair.publisher.dsn}", "--publication=pub", target, "-o", "enabled=false")
    assert (done.status, done.errors) == (0, "")
    found = one(pair.target, "disabled")
    assert found["publisher"]["slot_active"] is False
    assert found["tables_by_state"] == {"i": 1}
    done = subscriber("alter", pair.name, target, "--enable")
    assert (done.status, done.errors) == (0, "")
    one(pair.target, "not_running")
    with running("run", target, "-c", "wal_retrieve_retry_interval=200ms") as program:
        pair.target.follows()
        found = one(pair.target, "running")
        assert found["publisher"]["slot_active"] is True
        assert found["publisher_error"] is None
        pair.publisher.execute("INSERT INTO t VALUES (2000, 'new')")
        pair.target.wait(ALL, pair.publisher.fetch(ALL))
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    done = subscriber("drop", pair.name, target)
    assert (done.status, done.errors) == (0, "")
    assert status(pair.target) == {"error": None, "subscriptions": []}
    # no password anywhere, and the file that holds one is its owner's
    assert pair.target.path is not None
    assert os.stat(pair.target.path).st_mode & 0o077 == 0


def test_missing_file_and_missing_subscription(sqlite_file: OtherTarget) -> None:
    assert sqlite_file.path is not None
    found = status(sqlite_file, expect=1)
    assert found["error"]["message"] == f'file "{sqlite_file.path}" does not exist'
    assert not sqlite_file.path.exists()
    sqlite_file.execute("CREATE TABLE mine (id int)")
    assert status(sqlite_file) == {"error": None, "subscriptions": []}
    done = subscriber("status", f"--target={sqlite_file.url}", "gone")
    assert (done.status, done.errors.split(" (hint")[0]) == (1, 'subscriber: subscription "gone" does not exist')
