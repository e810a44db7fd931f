"""Names and messages of servers with terminal control characters are escaped in every output."""

from __future__ import annotations

import os
import pty
import subprocess
import unicodedata
import urllib.request
from pathlib import Path

import pytest

from tests.integration.cli.test_metrics import told_port
from tests.support.database import Database
from tests.support.program import PROGRAM, environment, running, subscriber

EVIL = "x\x1b]0;owned\x07\x1b[31m\x7f\u009b\u202e\u2066\u200f\u061c\u2028y"
QUOTED = f'"{EVIL}"'
ESCAPED = "x\\u001b]0;owned"


def harmless(text: str) -> str:
    """Nothing in it commands a terminal; returns it."""
    found = {character for character in text if unicodedata.category(character) in {"Cc", "Cf", "Zl", "Zp"}} - {"\n"}
    assert not found, text
    return text


@pytest.fixture
def source(publisher18_db: Database) -> Database:
    publisher18_db.execute(f"CREATE TABLE {QUOTED} ({QUOTED} int PRIMARY KEY); CREATE PUBLICATION {QUOTED} FOR ALL TABLES")
    publisher18_db.execute(f"INSERT INTO {QUOTED} VALUES (1)")
    return publisher18_db


def test_names(source: Database, target_db: Database) -> None:
    arguments = [f"--connection={source.dsn}", f"--publication={EVIL}", f"--target={target_db.dsn}", f"--name={EVIL}", "-o", "slot_name=s"]
    assert ESCAPED in harmless(subscriber("check", *arguments).output)  # the table is missing
    assert ESCAPED in harmless(subscriber("run", *arguments, "-o", f"bad{EVIL}=1").errors)
    assert ESCAPED in harmless(subscriber("status", f"--bad={EVIL}", f"--target={target_db.dsn}").errors)
    target_db.execute(f"CREATE TABLE {QUOTED} ({QUOTED} int PRIMARY KEY, v text)")
    with running("-vv", "run", *arguments, "--http=127.0.0.1:0") as program:
        port = told_port(program)
        target_db.wait("SELECT to_regclass('subscriber.pg_subscription_rel') IS NOT NULL", True)
        target_db.wait("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate = 'r'", 1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert ESCAPED.replace("\\", r"\\") in harmless(answer.read().decode())
        for form in ([], ["--json"]):
            assert ESCAPED in harmless(subscriber("status", f"--target={target_db.dsn}", *form).output)
        program.send(15)
        assert ESCAPED in harmless(program.ended().errors)


def test_messages_of_a_server(source: Database, target_db: Database) -> None:
    target_db.execute(f"""
        CREATE TABLE {QUOTED} ({QUOTED} int PRIMARY KEY);
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN RAISE EXCEPTION '{EVIL}' USING HINT = '{EVIL}', DETAIL = '{EVIL}'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON {QUOTED} FOR EACH ROW EXECUTE FUNCTION refuse();
        ALTER TABLE {QUOTED} ENABLE ALWAYS TRIGGER refuse
    """)
    arguments = [f"--connection={source.dsn}", f"--publication={EVIL}", f"--target={target_db.dsn}"]
    done = subscriber("run", *arguments)
    assert done.status == 1
    assert "\\u001b" in harmless(done.errors)
    assert "\\u001b" in harmless(subscriber("status", f"--target={target_db.dsn}").output)


@pytest.mark.parametrize("form", ["text", "json"])
def test_data_on_a_terminal(source: Database, form: str, tmp_path: Path) -> None:
    arguments = ["tail", f"--connection={source.dsn}", f"--publication={EVIL}", "--slot=s", "--until-caught-up", f"--format={form}"]
    assert subscriber(*arguments).status == 0
    source.execute(f"ALTER TABLE {QUOTED} ADD v text; INSERT INTO {QUOTED} VALUES (2, '{EVIL}')")
    ours, theirs = pty.openpty()
    with (tmp_path / "shown").open("wb") as shown, subprocess.Popen([*PROGRAM, *arguments], stdout=theirs, env=environment()) as program:
        os.close(theirs)
        try:
            while data := os.read(ours, 65536):
                shown.write(data)
        except OSError:
            pass  # the other end is closed
        assert program.wait() == 0
    os.close(ours)
    text = (tmp_path / "shown").read_bytes().decode().replace("\r\n", "\n")
    assert text.count(ESCAPED) == 3
    harmless(text)


def test_data_in_a_file_is_exact(source: Database) -> None:
    arguments = ["tail", f"--connection={source.dsn}", f"--publication={EVIL}", "--slot=s", "--until-caught-up", "--format=json"]
    assert subscriber(*arguments).status == 0
    source.execute(f"INSERT INTO {QUOTED} VALUES (2)")
    assert "\x7f\u009b\u202e\u2066\u200f\u061c\u2028y" in subscriber(*arguments).output
