"""A table's copy that is cancelled leaves no unfinished file."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from subscriber.interfaces import CopyFormat, TableEntry, TableState
from subscriber.sinks.spark.files.storage import TEMPORARY
from tests.support.cancellation import cancelled_at
from tests.unit.sinks.spark.stream import begun, make
from tests.unit.sinks.spark.test_confirm_applied import COPIED, OTHER


@pytest.mark.parametrize("late", [False, True])
async def test_cancelled_copy_leaves_no_unfinished_file(tmp_path: Path, late: bool) -> None:
    """The bug was that the file stayed, and stayed open, if it was just being made."""
    sink = await begun(make(tmp_path))
    await sink.add_tables([OTHER], TableEntry(TableState.INIT))
    copying = sink.open_table(OTHER)
    await copying.begin()
    await copying.start_copy()
    await copying.describe(COPIED)

    async def lines() -> AsyncIterator[bytes]:
        yield b"1\tcopied\n"

    for step in itertools.count():
        if not await cancelled_at(copying.copy(["id", "note"], CopyFormat.TEXT, lines()), step, late=late):
            break
        assert [file.name for file in (tmp_path / "copy").rglob(f"{TEMPORARY}*")] == []
    await copying.close()
    await sink.close()
