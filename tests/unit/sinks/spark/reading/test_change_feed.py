"""Changes by LSN, wherever they are stored: each once, in order, while landed files become change log during the read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from subscriber.errors import TargetError
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.maintenance import append_planner as planner_module
from subscriber.sinks.spark.reading.change_feed import Changes
from tests.support.examples import seeds
from tests.unit.sinks.spark.model import NAMES, Publisher
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, relation
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

pytestmark = pytest.mark.slow

Place = tuple[int, int, str]


def places(rows: list[dict[str, Any]]) -> list[Place]:
    return [(row["_lsn"], row["_seq"], row["_op"]) for row in rows]


def read(changes: Changes, start: Lsn, end: Lsn, between: Callable[[], None] = lambda: None) -> list[Place]:
    """As a job of Spark does: planned first, then piece after piece."""
    schema = changes.schema()
    found: list[Place] = []
    for piece in changes.pieces(start, end):
        between()
        for rows in changes.read(piece, schema):
            assert rows.schema.names == schema.names
            found += places(rows.to_pylist())
    return found


@seeds(1, 2)
async def test_each_change_is_read_once_and_in_order_while_the_log_grows(tmp_path: Path, seed: int) -> None:
    dice, publisher = random.Random(seed), Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    readers = {name: Changes(storage(tmp_path), name) for name in NAMES}
    expected: dict[TableName, list[Place]] = {name: [] for name in NAMES}
    found: dict[TableName, list[Place]] = {name: [] for name in NAMES}
    offsets = dict.fromkeys(NAMES, Lsn(0))
    work = applier(tmp_path)

    def become_log() -> None:
        if dice.random() < 0.4:
            all_rounds(work)
            work.tidy(now=True)

    for _ in range(12):
        for _ in range(dice.randint(1, 4)):
            await sink.apply(batch(publisher.transaction(dice.choice([3, 20]))))
            await sink.advance(Lsn(publisher.end))
        for number, name in enumerate(NAMES, 1):
            last = expected[name][-1][0] if expected[name] else 0
            expected[name] += [place for place in places(landed_of(tmp_path, number)) if place[0] > last]
        become_log()
        for name, changes in readers.items():
            latest = changes.latest()
            assert latest >= offsets[name]
            if expected[name] and dice.random() < 0.7:
                found[name] += read(changes, offsets[name], latest, become_log)
                offsets[name] = latest
    await sink.close()
    for name, changes in readers.items():
        found[name] += read(changes, offsets[name], changes.latest())
        assert found[name] == expected[name]
        assert sorted(found[name], key=lambda place: place[:2]) == found[name]
        # all over again, from the middle
        middle = Lsn(found[name][len(found[name]) // 2][0])
        assert read(changes, middle, changes.latest()) == [place for place in expected[name] if place[0] > middle]


def landed_of(path: Path, table_id: int) -> list[dict[str, Any]]:
    """A table's rows that manifests name now, in order."""
    rows: list[dict[str, Any]] = []
    for name in sorted((path / "landing").glob("*.json")):
        for file in json.loads(name.read_text())["document"]["files"]:
            if file["id"] == table_id:
                rows += pq.read_table(path / file["path"]).to_pylist()
    return rows


async def test_a_table_that_is_not_copied_yet_holds_its_readers(tmp_path: Path) -> None:
    publisher = Publisher(1)
    sink = await begun(make(tmp_path), tables=NAMES[:1])
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    waiting = Changes(storage(tmp_path), TABLE)
    assert waiting.latest() == 100
    await sink.apply(batch(publisher.transaction(5)))
    await sink.close()
    assert Changes(storage(tmp_path), NAMES[0]).latest() == publisher.end
    assert waiting.latest() == 100
    assert waiting.pieces(Lsn(100), Lsn(100)) == []
    with pytest.raises(TargetError, match=r'table "public\.t" has no change log yet'):
        waiting.schema()
    with pytest.raises(TargetError, match=r'has no table "public\.nothing"'):
        Changes(storage(tmp_path), TableName("public", "nothing")).latest()
    with pytest.raises(TargetError, match="there is no lake"):
        Changes(storage(tmp_path / "elsewhere"), TABLE).latest()


class Follower:
    """Reads a table's changes as a stream does: from where it was, up to what there is."""

    def __init__(self, path: Path, table: TableName) -> None:
        self.changes = Changes(storage(path), table)
        self.found: list[Place] = []
        self._offset = Lsn(0)

    def look(self) -> None:
        latest = self.changes.latest()
        assert latest >= self._offset
        if latest > self._offset:
            self.found += read(self.changes, self._offset, latest)
            self._offset = latest

    def assert_read_all(self, *expected: Place) -> None:
        self.look()
        assert self.found == read(self.changes, Lsn(0), self.changes.latest()) == list(expected)


@pytest.mark.parametrize("others", [True, False])
async def test_a_stream_has_the_copy_though_it_is_later_than_all_that_was_landed(tmp_path: Path, others: bool) -> None:
    other = TableName("public", "other")
    sink, work = await begun(make(tmp_path), tables=[other] if others else []), applier(tmp_path)
    elsewhere = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="other")
    if others:
        await land(sink, 200, elsewhere, Insert(6, row("1", "a")))
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n", 300)
    await sink.advance(Lsn(310))
    all_rounds(work)
    work.tidy(now=True)
    stream = Follower(tmp_path, TABLE)
    stream.assert_read_all((300, -1, "t"), (300, 0, "c"), (300, 0, "c"))
    if others:
        await land(sink, 400, Insert(6, row("2", "b")))
        stream.look()
        all_rounds(work)
        work.tidy(now=True)
        stream.look()
    await land(sink, 500, KEYED, Insert(5, row("3", "c")))
    stream.look()
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    stream.assert_read_all((300, -1, "t"), (300, 0, "c"), (300, 0, "c"), (500, 0, "i"))


async def test_a_stream_waits_for_the_copy_of_a_table_that_went(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n", 300)
    await land(sink, 350, KEYED, Insert(5, row("3", "c")))
    stream = Follower(tmp_path, TABLE)
    stream.look()
    await sink.remove_table(TABLE)
    stream.look()
    await sink.advance(Lsn(400))
    await sink.close()
    all_rounds(work)
    stream.look()
    work.tidy(now=True)
    stream.assert_read_all((300, -1, "t"), (300, 0, "c"), (300, 0, "c"), (350, 0, "i"))


async def test_a_range_may_begin_and_end_amid_a_landed_batch(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.apply(batch(*(transaction(end, RELATION, Insert(5, row(str(end), None, None))) for end in (200, 300, 400, 500))))
    await sink.advance(Lsn(500))
    await sink.apply(batch(transaction(600, Insert(5, row("600", None, None)))))
    await sink.close()
    changes, ends = Changes(storage(tmp_path), TABLE), (0, 200, 250, 300, 400, 450, 500, 600)
    work = applier(tmp_path)
    for compacted in (False, True):
        if compacted:
            all_rounds(work)
            work.tidy(now=True)
            assert len(list((tmp_path / "landing").glob("*.json"))) == 1
        for start in ends:
            for end in ends:
                expected = [lsn for lsn in (200, 300, 400, 500, 600) if start < lsn <= end]
                assert [lsn for lsn, _, _ in read(changes, Lsn(start), Lsn(end))] == expected, (start, end)


async def test_small_files_that_become_one_keep_their_place_among_the_large_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "_SMALL_FILES", 8)
    sink, work, expected, counts = await begun(make(tmp_path)), applier(tmp_path), [], []
    # of eight rows, as the applier makes them, one row is small
    for number, rows in enumerate([1, 1, 5, 1, 1, 20, 1, 1, 1, 1, 1, 5, 1, 1, 1, 1, 1, 1, 1, 1, 1]):
        end = 200 + 10 * number
        inserts = [Insert(5, row(str(100 * number + n), "x", None)) for n in range(rows)]
        await sink.apply(batch(transaction(end, RELATION, *inserts)))
        await sink.advance(Lsn(end))
        all_rounds(work)
        work.tidy(now=True)
        expected += [(end, n, "i") for n in range(rows)]
        changes = Changes(storage(tmp_path), TABLE)
        assert read(changes, Lsn(0), changes.latest()) == expected
        counts.append(len(DeltaTable(str(tmp_path / "log/public/t")).file_uris()))
    await sink.close()
    assert any(fewer < more for more, fewer in pairwise(counts))


async def test_a_landed_file_that_is_gone_for_good_is_told(tmp_path: Path) -> None:
    publisher = Publisher(2)
    sink = await begun(make(tmp_path), tables=NAMES)
    await sink.apply(batch(publisher.transaction(40)))
    await sink.close()
    changes = Changes(storage(tmp_path), NAMES[0])
    schema, pieces = changes.schema(), changes.pieces(Lsn(0), changes.latest())
    for file in (tmp_path / "landing").glob("*.parquet"):
        file.unlink()
    with pytest.raises(TargetError, match=r"landing/\d+-\d-\d\.parquet"):
        [rows for piece in pieces for rows in changes.read(piece, schema)]
