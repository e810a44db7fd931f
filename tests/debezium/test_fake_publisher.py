"""Debezium takes a snapshot of the fake publisher, follows it, and continues after a kill where it stopped."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from subscriber.testing.fake_publisher import FakePublisher

SECONDS = 60.0
FOLLOW = Path(__file__).with_name("follow.py")
Row = tuple[Any, ...]


class Debezium:
    """The program while it runs."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def events(self, enough: Callable[[list[Row]], bool]) -> list[Row]:
        """Read its events until they are enough: the operation, and the row before and after it."""
        found: list[Row] = []
        assert self._process.stderr is not None
        async with asyncio.timeout(SECONDS):
            while not enough(found):
                line = (await self._process.stderr.readline()).decode()
                assert line, self._log.read_text()[-8000:]
                if line.startswith("event "):
                    event = json.loads(line.removeprefix("event "))
                    found.append((event["op"], event["before"], event["after"]))
        return found


@asynccontextmanager
async def debezium(publisher: FakePublisher, offsets: Path) -> AsyncIterator[Debezium]:
    host, port = re.findall(r"(?:host|port)=(\S+)", publisher.dsn())
    with offsets.with_suffix(".log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, FOLLOW, host, port, offsets, stdout=log, stderr=subprocess.PIPE, limit=2**20
        )
        try:
            yield Debezium(process, offsets.with_suffix(".log"))
        finally:
            process.kill()
            await process.communicate()


@pytest.mark.parametrize("version", [13, 18])
async def test_debezium(version: int, tmp_path: Path) -> None:
    async with FakePublisher(version, password="secret") as publisher:
        publisher.create_table("items", {"id": "int", "name": "text", "price": "numeric(8,2)", "tags": "text[]"}, key=["id"])
        publisher.create_table("notes", {"id": "int"}, replica_identity="f")
        publisher.create_publication("app", "items", "notes")
        async with publisher.transaction() as t:
            t.insert("items", [{"id": 1, "name": "a", "tags": ["x", "y"]}, {"id": 2}])
        async with debezium(publisher, tmp_path / "offsets") as program:
            found = await program.events(lambda rows: len(rows) == 2)
            assert [(op, after["id"], after["name"], after["tags"]) for op, _, after in found] == [
                ("r", 1, "a", ["x", "y"]),
                ("r", 2, None, None),
            ]
            await publisher.until_active("debezium", SECONDS)
            async with publisher.transaction() as t:
                t.insert("items", id=3, name="c")
                t.update("items", {"id": 1}, name="changed")
                t.delete("items", {"id": 2})
            found = await program.events(lambda rows: len(rows) == 3)
            assert [(op, (after or before)["id"], after and after["name"]) for op, before, after in found] == [
                ("c", 3, "c"),
                ("u", 1, "changed"),
                ("d", 2, None),
            ]
        await publisher.until(lambda: publisher.slots["debezium"].active_pid is None, SECONDS)
        async with publisher.transaction() as t:
            t.insert("notes", id=5)
            t.insert("items", id=4)
        async with debezium(publisher, tmp_path / "offsets") as program:
            # at least once: what was not confirmed may come again
            found = await program.events(lambda rows: any(after and after["id"] == 4 for _, _, after in rows))
            assert "r" not in {op for op, _, _ in found}
            assert ("c", None, {"id": 5}) in found
        # the JDBC driver reports the LSN of the latest message as write, also of one that comes again after a restart
        assert [text for text in publisher.feedback.violations if "moved write backwards" not in text] == []
        publisher.feedback.violations.clear()
