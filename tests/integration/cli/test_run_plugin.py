"""``subscriber run --target plugin:…`` as a program, with the plugins of the guide."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from subscriber.protocol.lsn import Lsn
from tests.support.code_blocks import blocks
from tests.support.database import Database
from tests.support.program import subscriber

FAKE_KAFKA = """
import json, os

class Producer:
    def __init__(self, config):
        self.config, self.queue = config, []
    def produce(self, topic, value, on_delivery):
        if len(self.queue) == 2:
            raise BufferError
        self.queue.append((topic, value, on_delivery))
    def poll(self, timeout):
        with open(os.environ["BROKER"], "a") as broker:
            for topic, value, on_delivery in self.queue:
                failed = os.path.exists(os.environ["BROKER"] + ".down")
                if not failed:
                    broker.write(json.dumps([self.config["bootstrap.servers"], topic, json.loads(value)]) + "\\n")
                on_delivery("no broker" if failed else None, None)
        self.queue.clear()
    flush = lambda self: self.poll(0)
"""

STORED = """
import sqlite3, sys

class Stored:
    def startup(self, ctx, options, is_init):
        self.db = sqlite3.connect(ctx.output_plugin_options["file"], check_same_thread=False)
        self.db.execute("CREATE TABLE IF NOT EXISTS t (id)")
        self.db.execute("CREATE TABLE IF NOT EXISTS p (lsn)")
        self.lose = "lose" in ctx.output_plugin_options
    def position(self, ctx):
        found = self.db.execute("SELECT lsn FROM p ORDER BY rowid DESC").fetchone()
        return found and found[0]
    def advance(self, ctx, lsn):
        self.db.execute("INSERT INTO p VALUES (?)", (str(lsn),))
        self.db.commit()
    def begin(self, ctx, txn):
        pass
    def change(self, ctx, txn, relation, change):
        self.db.execute("INSERT INTO t VALUES (?)", (change.new["id"],))
    def commit(self, ctx, txn, commit_lsn):
        self.advance(ctx, txn.end_lsn)
        if self.lose:
            raise OSError
"""

BLOCKS = """
import collections, json

class Blocks:
    def startup(self, ctx, options, is_init):
        self.file = open(ctx.output_plugin_options["file"], "a", buffering=1)
        self.fail = ctx.output_plugin_options.get("fail")
        self.rows = collections.Counter()
    def note(self, *what):
        print(json.dumps(what), file=self.file)
    def begin(self, ctx, txn): pass
    def change(self, ctx, txn, relation, change): self.note("change", change.new["id"])
    def commit(self, ctx, txn, commit_lsn): pass
    def stream_start(self, ctx, txn): pass
    def stream_stop(self, ctx, txn): self.note("block", txn.xid)
    def stream_abort(self, ctx, txn, abort_lsn): self.note("abort", txn.xid, self.rows.pop(txn.xid, 0))
    def stream_change(self, ctx, txn, relation, change): self.rows[ctx.change_xid] += 1
    def stream_commit(self, ctx, txn, commit_lsn):
        if self.fail:
            raise OSError
        self.note("commit", txn.xid, self.rows.total(), txn.end_lsn > txn.final_lsn)
    def send(self, ctx, record): pass
"""


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    """A table, a publication and a slot."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, note text); CREATE PUBLICATION p FOR ALL TABLES")
    return publisher18_db


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A directory of modules, with the plugins of the guide."""
    for block in blocks():
        if block.page == "docs/howto/plugins.md" and (found := re.search(r"class (\w+)", block.text)):
            (tmp_path / f"{found[1].lower()}s.py").write_text(block.text)
    (tmp_path / "confluent_kafka.py").write_text(FAKE_KAFKA)
    (tmp_path / "stored.py").write_text(STORED)
    (tmp_path / "blocks.py").write_text(BLOCKS)
    return tmp_path


class Server:
    """An HTTP server that keeps what is posted, and can refuse it."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, Any]] = []
        self.status = 200
        keeper = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                keeper.posts.append((self.headers["Idempotency-Key"], json.loads(body)))
                self.send_response(keeper.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.http.serve_forever)
    thread.start()
    yield made
    made.http.shutdown()
    thread.join()
    made.http.server_close()


def run(source: Database, modules: Path, target: str, *args: str) -> tuple[int, str]:
    program = ("run", "--connection", source.conninfo(), "--publication", "p", "--name", "hook", "--target", target, "--until-caught-up")
    # the working directory is where modules are searched first
    done = subscriber(*program, *args, env={"BROKER": str(modules / "broker")}, timeout=60, loud=True, directory=modules)
    assert done.output == ""
    return done.status, done.errors


def confirmed(source: Database) -> Lsn:
    return Lsn.parse(str(source.value("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'hook'")))


def test_the_webhook_of_the_guide(source: Database, modules: Path, server: Server) -> None:
    target = f"plugin:webhooks:Webhook?url={server.url}"
    status, err = run(source, modules, target)
    assert (status, err.startswith("subscriber: caught up at ")) == (0, True)
    source.execute("INSERT INTO t VALUES (1, 'a'); UPDATE t SET note = 'b'; DELETE FROM t")
    server.status = 500
    status, err = run(source, modules, target)
    assert (status, len(server.posts)) == (1, 1)
    assert "raised HTTPError in its commit callback" in err
    end_lsn = Lsn.parse(server.posts[0][0])
    assert confirmed(source) < end_lsn
    server.status = 200
    assert run(source, modules, target)[0] == 0
    assert confirmed(source) >= end_lsn
    assert run(source, modules, target)[0] == 0
    assert len(server.posts) == 2
    assert server.posts[0] == server.posts[1]
    kinds = [(change["table"], change["kind"], change["row"]) for change in server.posts[1][1]["changes"]]
    assert kinds == [
        ("public.t", "insert", {"id": "1", "note": "a"}),
        ("public.t", "update", {"id": "1", "note": "b"}),
        ("public.t", "delete", {"id": "1"}),
    ]


def test_the_kafka_plugin_of_the_guide(source: Database, modules: Path) -> None:
    target = "plugin:kafkas:Kafka?topic=changes&bootstrap.servers=broker1"
    assert run(source, modules, target)[0] == 0
    source.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    down = modules / "broker.down"
    down.touch()
    status, err = run(source, modules, target)
    assert (status, "Kafka did not store a record: no broker" in err) == (1, True)
    down.unlink()
    assert run(source, modules, target)[0] == 0
    records = [json.loads(line) for line in (modules / "broker").read_text().splitlines()]
    assert {tuple(record[:2]) for record in records} == {("broker1", "changes")}
    assert [record[2]["kind"] for record in records] == ["begin", "insert", "insert", "commit"]


def test_exactly_once_with_a_position_of_the_plugin(source: Database, modules: Path) -> None:
    file = modules / "target.db"
    target = f"plugin:stored:Stored?file={file}"
    assert run(source, modules, target)[0] == 0
    source.execute("INSERT INTO t VALUES (1)")
    # stored, but not acknowledged
    status, err = run(source, modules, target + "&lose=1")
    assert (status, "raised OSError" in err) == (1, True)
    source.execute("INSERT INTO t VALUES (2)")
    for _ in range(3):
        # the slot also advances while nothing is published, and the plugin's position with it
        source.execute("CREATE TEMP TABLE x AS SELECT generate_series(1, 1000); DROP TABLE x; SELECT pg_log_standby_snapshot()")
        before = confirmed(source)
        assert run(source, modules, target)[0] == 0
        with sqlite3.connect(file) as stored:
            assert stored.execute("SELECT id FROM t").fetchall() == [("1",), ("2",)]
        stored.close()
        assert confirmed(source) > before
    # the target's position was lost: the slot is beyond it
    source.execute("INSERT INTO t VALUES (3)")
    assert run(source, modules, target)[0] == 0
    with sqlite3.connect(file) as stored:
        stored.execute("DELETE FROM t WHERE id = '3'")
        stored.execute("DELETE FROM p WHERE rowid > 1")
    stored.close()
    status, err = run(source, modules, target)
    assert status == 1
    assert "hook" in err


def test_transactions_in_progress(source: Database, modules: Path) -> None:
    file = modules / "blocks.jsonl"
    target = f"plugin:blocks:Blocks?file={file}"
    assert run(source, modules, target)[0] == 0
    with source.connect() as session:
        session.execute("BEGIN; INSERT INTO t SELECT g, 'kept' FROM generate_series(1, 2000) AS g")
        session.execute("SAVEPOINT s; INSERT INTO t SELECT g, 'undone' FROM generate_series(2001, 4000) AS g; ROLLBACK TO s")
        source.execute("INSERT INTO t VALUES (10000)")
        session.execute("INSERT INTO t SELECT g, 'kept' FROM generate_series(4001, 6000) AS g; COMMIT")
    before = confirmed(source)
    status, err = run(source, modules, target + "&fail=1")
    assert (status, "raised OSError in its stream_commit callback" in err) == (1, True)
    assert confirmed(source) != before
    first = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("")
    (undone,) = [each[2] for each in first if each[0] == "abort"]
    assert 0 < undone <= 2000
    # the small transaction was acknowledged; the streamed one was not, and comes again from its first row on
    assert run(source, modules, target)[0] == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert ["change", "10000"] in first
    assert not [each for each in found if each[0] == "change"]
    assert (found[-1][0], found[-1][2:]) == ("commit", [4000, True])
    # blocks begin where the slot's position is, which a keepalive may have moved: the second time can be a single one
    assert sum(each[0] == "block" for each in first) > 2
    assert any(each[0] == "block" for each in found)
    # a table that was described in the stream is known afterwards
    source.execute("INSERT INTO t VALUES (10001)")
    assert run(source, modules, target)[0] == 0
    file.write_text("")
    # without streaming it comes whole
    source.execute("INSERT INTO t SELECT g FROM generate_series(20001, 22000) AS g")
    assert run(source, modules, target, "-o", "streaming=off")[0] == 0
    assert len(file.read_text().splitlines()) == 2000


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        ("plugin:jsonl", ("--http", "127.0.0.1:0"), "not available for a target plugin"),
        ("plugin:jsonl", ("-o", "copy_data=true"), "gets changes only"),
        ("plugin:stored:Stored?file=:memory:", ("-o", "two_phase=true"), "no callbacks for two-phase commit"),
        ("plugin:nowhere:X", (), "cannot import nowhere"),
    ],
)
def test_wrong_arguments(source: Database, modules: Path, target: str, args: tuple[str, ...], message: str) -> None:
    status, err = run(source, modules, target, *args)
    assert status != 0
    assert message in err
    assert source.value("SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'hook'") == 0


def test_a_plugin_without_send_that_writes(source: Database, modules: Path) -> None:
    assert run(source, modules, "plugin:jsonl")[0] == 0
    source.execute("INSERT INTO t VALUES (1)")
    before = confirmed(source)
    status, err = run(source, modules, "plugin:jsonl")
    assert (status, "writes records, but has no method send" in err) == (1, True)
    assert confirmed(source) == before


def test_other_verbs_refuse_a_plugin() -> None:
    for verb in (("run",), ("status",), ("create", "s", "--connection", "host=nowhere", "--publication", "p")):
        done = subscriber(*verb, "--target", "plugin:jsonl", loud=True)
        assert done.status != 0
        assert "an output plugin stores no subscription" in done.errors
