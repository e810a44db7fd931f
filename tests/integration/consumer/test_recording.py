"""``tail --record``, ``replay``, and ``decode`` of a recording, on real servers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import program
from tests.support.database import Database

SCHEMA = "CREATE TABLE t (id int PRIMARY KEY, note text); CREATE TABLE log (label text);"


def load(publisher: Database) -> None:
    """Streamed, rolled back and prepared transactions, key changes, and a TRUNCATE."""
    publisher.execute("INSERT INTO t SELECT g, repeat('n', 100) || g FROM generate_series(1, 2000) g")
    with publisher.connect() as connection, connection.transaction():
        connection.execute("UPDATE t SET note = 'changed' || id")
        connection.execute("SAVEPOINT s")
        connection.execute("INSERT INTO log SELECT 'no' || g || repeat('x', 100) FROM generate_series(1, 2000) g")
        connection.execute("ROLLBACK TO s")
        connection.execute("INSERT INTO log SELECT 'yes' || g || repeat('x', 100) FROM generate_series(1, 2000) g")
    publisher.execute("UPDATE t SET id = -id WHERE id % 7 = 0; DELETE FROM t WHERE id % 5 = 0")
    publisher.execute("BEGIN; INSERT INTO log VALUES ('prepared'); PREPARE TRANSACTION 'one'")
    publisher.execute("INSERT INTO log VALUES ('between')")
    publisher.execute("COMMIT PREPARED 'one'")
    publisher.execute("BEGIN; INSERT INTO log VALUES ('never'); PREPARE TRANSACTION 'two'")
    publisher.execute("ROLLBACK PREPARED 'two'")


def record(publisher: Database, path: Path, *more: str, slot: str = "recorded") -> list[str]:
    """Record up to now, and return what tail printed."""
    arguments = ["tail", "--connection", publisher.conninfo(), "--publication", "p", "--slot", slot, "--record", str(path)]
    ended = program.subscriber(*arguments, "--until-caught-up", "--format", "json", *more)
    assert ended.status == 0, ended.errors
    return ended.output.splitlines()


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    publisher18_db.execute(SCHEMA)
    publisher18_db.execute(f"ALTER DATABASE \"{publisher18_db.name}\" SET logical_decoding_work_mem = '64kB'")
    publisher18_db.execute("CREATE PUBLICATION p FOR ALL TABLES")
    publisher18_db.execute("SELECT pg_create_logical_replication_slot('recorded', 'pgoutput', false, true)")
    return publisher18_db


def replay(path: Path, target: str, *more: str) -> program.Ended:
    return program.subscriber("replay", str(path), "--target", target, *more, loud=True)


def rows(database: Database) -> list[Sequence[object]]:
    return [*database.fetch("SELECT id, note FROM t ORDER BY 1"), *database.fetch("SELECT label FROM log ORDER BY 1")]


OPTIONS = ("-o", "streaming=on", "-o", "two_phase=true")


def test_a_recording_is_applied_exactly_once(source: Database, target_db: Database, tmp_path: Path) -> None:
    target_db.execute(SCHEMA)
    load(source)
    path = tmp_path / "one.rec"
    printed = record(source, path, *OPTIONS)
    assert path.stat().st_mode & 0o777 == 0o600
    target = target_db.dsn
    ended = replay(path, target)
    assert ended.status == 0, ended.errors
    assert rows(target_db) == rows(source)
    applied = re.fullmatch(r"subscriber: replayed: (\d+ transactions), up to ([0-9A-F/]+)\n", ended.errors)
    assert applied is not None, ended.errors
    again = replay(path, target, "--speed", "1000")
    assert again.status == 0, again.errors
    assert again.errors == f"subscriber: replayed: 0 transactions, up to {applied[2]}; the target already had {applied[1]}\n"
    assert rows(target_db) == rows(source)
    # a second recording continues the first one
    source.execute("INSERT INTO log VALUES ('later'); TRUNCATE t")
    more = tmp_path / "two.rec"
    record(source, more, *OPTIONS)
    assert replay(more, target).status == 0
    assert rows(target_db) == rows(source)
    assert target_db.fetch("SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()") == [(0,)]
    decoded = program.subscriber("decode", str(path), "--format", "json")
    assert decoded.status == 0, decoded.errors
    lines = [json.loads(line) for line in decoded.output.splitlines()]
    assert lines[0]["kind"] == "session"
    commits = [line for line in printed if json.loads(line)["kind"] in {"commit", "commit prepared", "prepare", "rollback prepared"}]
    kinds = {"commit", "stream commit", "prepare", "commit prepared", "rollback prepared", "stream prepare"}
    assert len([line for line in lines if line["kind"] in kinds]) >= len(commits) > 4


def test_a_truncated_recording_is_applied_up_to_its_end(source: Database, target_db: Database, tmp_path: Path) -> None:
    target_db.execute(SCHEMA)
    for number in range(20):
        source.execute(f"INSERT INTO t VALUES ({number}, 'x')")
    path, cut = tmp_path / "whole.rec", tmp_path / "cut.rec"
    record(source, path)
    data = path.read_bytes()
    ends = [match.end() for match in re.finditer(rb"<.{16}w.{24}C", data, re.DOTALL)]
    cut.write_bytes(data[: ends[10] + 3])
    ended = replay(cut, target_db.dsn)
    assert ended.status == 1
    assert "the recording ends within record" in ended.errors
    assert target_db.fetch("SELECT count(*) FROM t") == [(10,)]
    ended = replay(path, target_db.dsn)
    assert ended.status == 0
    assert ended.errors.startswith("subscriber: replayed: 10 transactions, up to ")
    assert ended.errors.endswith("; the target already had 10 transactions\n")
    assert target_db.fetch("SELECT count(*) FROM t") == [(20,)]
    target_db.execute("TRUNCATE t")
    damaged = bytearray(data)
    damaged[ends[5] - 1] ^= 1
    cut.write_bytes(damaged)
    ended = replay(cut, target_db.dsn, "--name", "other")
    assert (ended.status, "is damaged: its checksum does not match" in ended.errors) == (1, True), ended.errors


def test_what_cannot_be_replayed(source: Database, target_db: Database, tmp_path: Path) -> None:
    source.execute("INSERT INTO t VALUES (1, 'x')")
    first, second, text = tmp_path / "first.rec", tmp_path / "second.rec", tmp_path / "text"
    record(source, first)
    source.execute("INSERT INTO t VALUES (2, 'x')")
    record(source, second)
    text.write_text("no recording")
    target = target_db.dsn
    assert "could not read" in replay(tmp_path / "none", target).errors
    assert "the file is not a recording" in replay(text, target).errors
    assert 'relation "public.t" does not exist' in replay(first, target).errors
    target_db.execute(SCHEMA)
    assert replay(first, target).status == 0
    source.execute("SELECT pg_create_logical_replication_slot('other', 'pgoutput')")
    record(source, tmp_path / "other.rec", slot="other")
    assert "of another recording or publisher" in replay(tmp_path / "other.rec", target).errors
    source.execute("INSERT INTO t VALUES (3, 'x')")
    record(source, tmp_path / "third.rec")
    ended = replay(tmp_path / "third.rec", target)
    assert (ended.status, "the recording continues at" in ended.errors) == (1, True), ended.errors
    assert (
        "could not create"
        in program.subscriber("tail", "--connection", source.conninfo(), "--publication", "p", "--record", str(first)).errors
    )
