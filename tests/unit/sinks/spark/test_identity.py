"""A replica identity that was altered: rows are found by it, or the applier stops and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from subscriber.errors import TargetError
from subscriber.protocol.messages import Delete, Insert, Message, Truncate, TruncateOption, Update
from subscriber.sinks.spark.applied import read_cut
from subscriber.sinks.spark.missing import Missing
from tests.unit.sinks.spark.stream import row
from tests.unit.sinks.spark.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.test_rounds import KEYED, land, relation, rows, start

UNKEYED = relation("n", ("note", 25, False))
NUMBERED = relation("d", ("note", 25, False), ("id", 20, True))
RENAMED = relation("d", ("pk", 23, True), ("note", 25, False))
CAME_LATER = r'column "{}" of table "public.t", by which its rows are known, came later'


@pytest.mark.parametrize("change", [Update(5, None, None, row("a2", "1")), Delete(5, row(None, "2"), None)])
@pytest.mark.parametrize("rounds", [1, 2])
async def test_a_new_key_that_rows_from_before_lack_is_told(tmp_path: Path, change: Message, rounds: int) -> None:
    sink, work = await start(tmp_path, UNKEYED, Insert(5, row("a")), Insert(5, row("b")))
    if rounds == 2:
        # rows that only come do no harm
        await land(sink, 300, NUMBERED, Insert(5, row("c", "3")))
        all_rounds(work)
        work = applier(tmp_path)
    cut = read_cut(storage(tmp_path))
    await land(sink, 400, NUMBERED, change)
    await sink.close()
    with pytest.raises(TargetError, match=CAME_LATER.format("id")) as told:
        all_rounds(work)
    assert "copies it anew" in (told.value.hint or "")
    assert read_cut(storage(tmp_path)) == cut


async def test_a_renamed_key_is_told(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, RENAMED, Update(5, None, None, row("1", "b")))
    await sink.close()
    with pytest.raises(TargetError, match=CAME_LATER.format("pk")):
        all_rounds(work)


async def test_a_key_that_comes_amid_a_round_is_told(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, UNKEYED, Truncate(TruncateOption(0), (5,)))
    await land(sink, 300, UNKEYED, Insert(5, row("a")), NUMBERED, Delete(5, row(None, "1"), None))
    await sink.close()
    with pytest.raises(TargetError, match=CAME_LATER.format("id")):
        all_rounds(work)


@pytest.mark.parametrize("emptied", ["before", "with it", "after"])
async def test_a_new_key_of_a_table_whose_rows_went_is_a_key(tmp_path: Path, emptied: str) -> None:
    sink, work = await start(tmp_path, UNKEYED, Insert(5, row("a")))
    truncate = Truncate(TruncateOption(0), (5,))
    if emptied == "after":
        await land(sink, 300, NUMBERED, Insert(5, row("b", "1")), Delete(5, row(None, "1"), None), truncate)
    else:
        await land(sink, 300, UNKEYED, truncate)
        if emptied == "before":
            all_rounds(work)
    for end in (400, 500):
        first = str(end)
        await land(sink, end, NUMBERED, Insert(5, row("x", first)), Update(5, None, None, row("y", first)), Insert(5, row("z", "1")))
        all_rounds(work)
        work = applier(tmp_path)
    await sink.close()
    assert rows(tmp_path, ("id", "note")) == [(1, "z"), (400, "y"), (500, "y")]
    assert work.missing == Missing()


async def test_a_new_key_that_all_rows_have_by_now_is_a_key(tmp_path: Path) -> None:
    """The lake is told of the values: nullable at first, and filled before it becomes the key."""
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")), Insert(5, row("2", "b")))
    filled = relation("d", ("id", 23, True), ("note", 25, False), ("at", 1114, False))
    noon = "2024-01-02 12:00:00"
    await land(sink, 300, filled, Update(5, None, None, row("1", "a", "infinity")), Update(5, None, None, row("2", "b", noon)))
    all_rounds(work)
    indexed = relation("i", ("id", 23, False), ("note", 25, False), ("at", 1114, True))
    await land(sink, 400, indexed, Update(5, None, None, row("1", "c", "infinity")), Delete(5, row(None, None, noon), None))
    await sink.close()
    all_rounds(applier(tmp_path))
    assert rows(tmp_path) == [(1, "c")]
