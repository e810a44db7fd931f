"""What readers get of tables that are removed, added and copied again, at any time: no row is lost, and none comes twice."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.reading.change_feed import Changes
from tests.support.examples import seeds
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, relation
from tests.unit.sinks.spark.reading.test_change_feed import Follower, Place, read
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

OTHER = TableName("public", "other")
ELSEWHERE = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="other")


def told(path: Path) -> int:
    """By a reader that remembers nothing."""
    return Changes(storage(path), TABLE).latest()


@pytest.mark.parametrize("gone", [True, False])
async def test_reader_waits_for_the_copy_from_before_the_table_was_added_again(tmp_path: Path, gone: bool) -> None:
    sink, work = await begun(make(tmp_path), tables=[OTHER]), applier(tmp_path)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n", 300)
    await land(sink, 310, ELSEWHERE, Insert(6, row("1", "a")))
    all_rounds(work)
    await sink.remove_table(TABLE)
    await sink.advance(Lsn(350))
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    assert told(tmp_path) < 300
    if gone:
        # never to become log: the reader is not held up by it
        shutil.rmtree(tmp_path / "copy")
        assert told(tmp_path) == 350
        return
    stream = Follower(tmp_path, TABLE)
    assert stream.changes.latest() < 300
    all_rounds(work)
    work.tidy(now=True)
    stream.look()
    assert told(tmp_path) == 350
    await copy(sink, TABLE, b"3\tc\n", 400)
    stream.look()
    await sink.advance(Lsn(410))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    stream.assert_read_all((300, -1, "t"), (300, 0, "c"), (300, 0, "c"), (400, -1, "t"), (400, 0, "c"))


async def test_what_was_landed_of_a_table_that_came_again_is_told_at_once(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await sink.close()
    stream = Follower(tmp_path, TABLE)
    stream.assert_read_all((200, 0, "i"))
    assert told(tmp_path) == 200


@pytest.mark.parametrize("copied", [True, False])
async def test_a_table_that_comes_again_holds_its_readers_until_it_is_copied(tmp_path: Path, copied: bool) -> None:
    sink, work = await begun(make(tmp_path), tables=[OTHER]), applier(tmp_path)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT if copied else TableState.READY))
    if copied:
        await copy(sink, TABLE, b"1\ta\n", 300)
    await land(sink, 310, KEYED, Insert(5, row("2", "b")), ELSEWHERE, Insert(6, row("1", "a")))
    all_rounds(work)
    work.tidy(now=True)
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await land(sink, 400, Insert(6, row("2", "b")))
    assert told(tmp_path) == 310
    copying = sink.open_table(TABLE)
    await copying.begin()
    await copying.start_copy()
    await copying.close()
    await sink.close()
    assert told(tmp_path) == 310


@pytest.mark.slow
@seeds(4, 12)
async def test_each_row_is_read_once_while_its_table_is_removed_and_copied_again(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    sink, work = await begun(make(tmp_path), tables=[OTHER]), applier(tmp_path)
    changes = Changes(storage(tmp_path), TABLE)
    state, offset, end = "none", Lsn(0), 200
    found: Counter[Place] = Counter()
    await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await land(sink, end, KEYED, Insert(5, row("0", "a")))
    await sink.remove_table(TABLE)

    def look() -> None:
        nonlocal offset
        latest = changes.latest()
        assert latest >= offset
        found.update(read(changes, offset, latest))
        offset = latest

    for step in range(40):
        end += 10
        what = dice.choice(
            ["land", "land", "other", "add", "add", "ready", "remove", "copy", "copy", "apply", "tidy", "look", "look", "advance"]
        )
        if what == "land" and state == "ready":
            await land(sink, end, KEYED, Insert(5, row(str(step), "a")))
        elif what == "other":
            await land(sink, end, ELSEWHERE, Insert(6, row(str(step), "a")))
        elif what == "add" and state == "none":
            await sink.add_tables([TABLE], TableEntry(TableState.INIT))
            state = "init"
        elif what == "ready" and state == "none":
            await sink.add_tables([TABLE], TableEntry(TableState.READY))
            state = "ready"
        elif what == "copy" and state == "init":
            await copy(sink, TABLE, f"{step}\ta\n{step + 1000}\tb\n".encode(), end)
            await sink.advance(Lsn(end + dice.choice([0, 5])))
            state = "ready"
        elif what == "remove" and state != "none":
            await sink.remove_table(TABLE)
            state = "none"
        elif what == "advance":
            await sink.advance(Lsn(end))
        elif what in {"apply", "tidy"}:
            all_rounds(work)
            if what == "tidy":
                work.tidy(now=True)
        elif what == "look":
            look()
    await sink.close()
    for _ in range(2):
        all_rounds(work)
        work.tidy(now=True)
    look()
    assert found == Counter(read(changes, Lsn(0), changes.latest()))
