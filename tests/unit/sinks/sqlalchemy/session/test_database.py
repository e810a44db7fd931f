"""Sessions with an SQLite file."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import TargetUnavailable
from subscriber.sinks.sqlalchemy.session import database
from subscriber.sinks.sqlalchemy.session.database import Database


def _is_open(path: Path) -> bool:
    return any(each.is_symlink() and each.readlink() == path for each in Path("/proc/self/fd").iterdir())


@pytest.mark.timeout(10)
async def test_a_file_that_does_not_open_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that there was no time limit. The driver cannot be interrupted: what it opens later is closed."""
    path, connect = tmp_path / "target.db", sqlite3.connect
    answers, opened = threading.Event(), threading.Event()

    def connect_later(*arguments: Any, **options: Any) -> sqlite3.Connection:
        # as on a file system of a server that does not answer
        answers.wait()
        found: sqlite3.Connection = connect(*arguments, **options)
        opened.set()
        return found

    monkeypatch.setattr(sqlite3, "connect", connect_later)
    monkeypatch.setattr(database, "_CONNECT_SECONDS", 0.05)
    target = Database(f"sqlite:///{path}")
    try:
        with pytest.raises(TargetUnavailable, match="the target does not answer"):
            await target.connect()
    finally:
        answers.set()
    await asyncio.to_thread(opened.wait)
    while _is_open(path):
        await asyncio.sleep(0.01)
    await target.close()
