"""Every verb with standard streams that are closed, full, or take ASCII only: no traceback, the right status, and the same work done."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from subscriber.cli.parser import VERBS
from tests.support.database import WAIT_SECONDS, Database
from tests.support.program import LOUD, Ended, environment, has_catalog, slots
from tests.support.program import subscriber as with_pipes

GOLDEN = Path(__file__).parents[2] / "golden" / "pg18-proto1.rec"
UNWRITABLE = "could not write to standard output: "
NAME = "kopie_ä"


@dataclass(frozen=True)
class Streams:
    """What a shell makes of the standard streams, and whether standard output and standard error can be written."""

    redirection: str
    writable: bool
    heard: bool


FULL = Streams("1>/dev/full", writable=False, heard=True)
CLOSED = Streams("0<&- 1>&- 2>&-", writable=False, heard=False)
DEAF = Streams("2>/dev/full", writable=True, heard=False)
EACH = pytest.mark.parametrize(
    "streams",
    [pytest.param(FULL, id="full"), pytest.param(CLOSED, id="closed"), pytest.param(DEAF, id="stderr full", marks=pytest.mark.endurance)],
)
_KINDS = {"both full": Streams("1>/dev/full 2>/dev/full", writable=False, heard=False), "closed": CLOSED, "full": FULL, "stderr full": DEAF}


def with_servers(kind: str) -> pytest.MarkDecorator:
    """This one on each change: verbs without servers have full and closed ones."""
    rest = [pytest.param(streams, id=name, marks=pytest.mark.endurance) for name, streams in _KINDS.items() if name != kind]
    return pytest.mark.parametrize("streams", [pytest.param(_KINDS[kind], id=kind), *rest])


def run(streams: Streams, *arguments: str) -> Ended:
    # buffered, as a service runs: then errors come late. The locale has ASCII only
    env = {**environment(), "PYTHONIOENCODING": "ascii"}
    env.pop("PYTHONUNBUFFERED", None)
    command = ["bash", "-c", f'exec "$@" {streams.redirection}', "bash", *LOUD, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, encoding="utf-8", timeout=WAIT_SECONDS, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    assert "Exception ignored" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr, 0)


def works(streams: Streams, *arguments: str, prints: bool) -> Ended:
    """Run a verb that succeeds where it can say so."""
    done = run(streams, *arguments)
    if streams.writable:
        assert (done.status, done.errors) == (0, "")
        assert done.output or not prints
    elif prints:
        assert done.status == 1
    if streams.heard and not streams.writable:
        # it reports what could not be printed
        assert (done.status == 1) == (UNWRITABLE in done.errors), done.errors
    return done


@with_servers("both full")
def test_verbs_of_a_subscription(streams: Streams, publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute('CREATE TABLE "tä" (id int PRIMARY KEY)')
    publisher18_db.execute('CREATE PUBLICATION "pä" FOR ALL TABLES')
    source, target = [f"--connection={publisher18_db.dsn}", "--publication=pä"], f"--target={target_db.dsn}"
    works(streams, "check", *source, target, f"--name={NAME}", "-o", "slot_name=s", prints=True)
    assert not has_catalog(target_db)
    works(streams, "create", NAME, *source, target, "-o", "slot_name=s", prints=False)
    assert slots(publisher18_db) == ["s"]
    works(streams, "alter", NAME, target, "--disable", prints=False)
    works(streams, "status", target, prints=True)
    works(streams, "schema", "diff", NAME, target, prints=False)
    target_db.execute('CREATE INDEX i ON "tä" (id)')
    assert run(streams, "schema", "diff", NAME, target).status == 1
    assert run(streams, "status", "--check", target).status == (2 if streams.writable else 3)
    status = works(streams, "status", "--json", target, prints=True)
    if streams.writable:
        (found,) = json.loads(status.output)["subscriptions"]
        assert (found["name"], found["enabled"], found["tables"][0]["name"]) == (NAME, False, "tä")
    # nothing runs it
    assert run(streams, "verify", NAME, target).status == 1
    assert run(streams, "cutover", NAME, target, "--dry-run").status == 1
    assert run(streams, "cutover", NAME, target).status == 1
    works(streams, "drop", NAME, target, prints=False)
    assert (slots(publisher18_db), target_db.value("SELECT count(*) FROM subscriber.pg_subscription")) == ([], 0)


@with_servers("closed")
def test_verbs_that_follow(streams: Streams, publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR ALL TABLES")
    source = [f"--connection={publisher18_db.dsn}", "--publication=p"]
    works(streams, "run", *source, f"--target=spark://{tmp_path}/lake", "--until-caught-up", prints=False)
    works(streams, "spark-apply", str(tmp_path / "lake"), "--engine=local", "--once", prints=False)
    assert list((tmp_path / "lake").rglob("*.parquet"))
    tail = ["tail", *source, "--slot=s", "--until-caught-up"]
    assert with_pipes(*tail).status == 0
    publisher18_db.execute("INSERT INTO t VALUES (2, 'ä')")
    done = works(streams, *tail, prints=True)
    # what was not printed is sent again
    output = done.output if streams.writable else with_pipes(*tail).output
    assert "insert public.t new=(id='2' v='ä')\n" in output
    assert with_pipes(*tail).output == ""
    publisher18_db.execute("INSERT INTO t VALUES (3, 'ä')")
    assert with_pipes(*tail, "--record", str(tmp_path / "recording")).status == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "copy.db")) as copy:
        copy.execute("CREATE TABLE t (id integer PRIMARY KEY, v text)")
    works(streams, "replay", str(tmp_path / "recording"), f"--target=sqlite:///{tmp_path}/copy.db", prints=False)


@EACH
def test_verbs_without_servers(streams: Streams) -> None:
    works(streams, "decode", str(GOLDEN), prints=True)
    works(streams, "run", "--help", prints=True)
    works(streams, "man", prints=True)
    if streams is FULL:
        # printed as the help of `run` is
        for words in (("schema", "copy"), ("migrate",), ("sequences",), ("recover",), ("doctor",)):
            works(streams, *words, "--help", prints=True)
        works(streams, "completion", "bash", prints=True)
        works(streams, "config", "schema", prints=True)
    assert run(streams, "status", "--target=sqlite:///no/such/fileä.db").status == 1
    # what a monitoring program would take for WARNING or CRITICAL
    assert run(streams, "status", "--check", "--target=sqlite:///no/such/fileä.db").status == 3
    assert run(streams, "status", "--check").status == 3
    if streams is CLOSED:
        assert run(streams, "decode", "-").status == 1
    if streams is FULL:
        # it ends before it has started a server
        works(streams, "demo", prints=True)


def test_no_verb_is_forgotten() -> None:
    driven = set(Path(__file__).read_text().split('"'))
    assert set(VERBS) <= driven
