"""The ways to leave out or change a column in docs/howto/columns.md, exactly as the page shows them."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
import types
from pathlib import Path

import pytest

from subscriber import Sink, Subscription, Until
from tests.sinks.test_own_sink import own_sink
from tests.support.code_blocks import Block, blocks
from tests.support.database import Database

LARGE = "x" * 3000
"""Stored outside of its row, so an UPDATE of another column does not send it."""


def _block(part: str) -> Block:
    (found,) = [block for block in blocks() if block.page == "docs/howto/columns.md" and part in block.text]
    return found


def _hash(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


async def _caught_up(publisher: Database, name: str, publication: str, target: str | Sink) -> None:
    await Subscription(name, connection=publisher.conninfo(), publications=[publication], target=target).run(Until())


async def test_a_hash_takes_the_place_of_a_column(
    publisher18_db: Database, target_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher18_db.execute(_block("CREATE PUBLICATION").text)
    publisher18_db.execute(
        "ALTER TABLE people ALTER email SET STORAGE EXTERNAL; CREATE PUBLICATION everything FOR TABLE people (id, name, email);"
        rf"INSERT INTO people VALUES (1, 'a', 'a@example.org'), (2, 'b', NULL), (3, 'c', 'back\slash\x41'), (4, 'd', '{LARGE}')"
    )
    target_db.execute("CREATE TABLE people (id int PRIMARY KEY, name text, email text)")
    target_db.execute(_block("CREATE TRIGGER").text)
    # the page's module
    module = types.ModuleType("json_sink")
    vars(module).update(own_sink())
    monkeypatch.setitem(sys.modules, "json_sink", module)
    names: dict[str, type] = {}
    exec(_block("class HashingSink").text, names)
    sqlite = tmp_path / "copy.db"

    async def compare() -> None:
        await _caught_up(publisher18_db, "published", "hashed", f"sqlite:///{sqlite}")
        await _caught_up(publisher18_db, "trigger", "everything", target_db.dsn)
        await _caught_up(publisher18_db, "own", "everything", names["HashingSink"](tmp_path))
        rows = publisher18_db.fetch("SELECT id, name, email FROM people ORDER BY id")
        expected = [(id_, name, _hash(email)) for id_, name, email in rows]
        with sqlite3.connect(sqlite) as copy:
            assert [column[1] for column in copy.execute("PRAGMA table_info(people)")] == ["id", "name", "email_hash"]
            assert copy.execute("SELECT id, name, email_hash FROM people ORDER BY id").fetchall() == expected
        assert target_db.fetch("SELECT id, name, email FROM people ORDER BY id") == expected
        stored = json.loads((tmp_path / "own.json").read_text())["tables"]["public.people"]
        assert sorted((int(row["id"]), row["name"], row["email"]) for row in stored) == expected

    await compare()
    publisher18_db.execute(
        "UPDATE people SET email = 'new@example.org' WHERE id < 3; UPDATE people SET name = 'other' WHERE id > 2;"
        "DELETE FROM people WHERE id = 1; INSERT INTO people VALUES (5, 'e', 'e@example.org')"
    )
    await compare()
