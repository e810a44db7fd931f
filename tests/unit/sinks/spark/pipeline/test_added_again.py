"""Tables that are taken out of the subscription and come back, with a copy or without one."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert
from subscriber.sinks.spark.reading.change_feed import Changes
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, rows
from tests.unit.sinks.spark.reading.test_change_feed import read
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("copied", [True, False])
async def test_table_added_again_without_a_copy_after_an_unfinished_one_continues(tmp_path: Path, between: bool, copied: bool) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)

    def apply() -> None:
        if between:
            all_rounds(work)
            work.tidy(now=True)

    if copied:
        await sink.add_tables([TABLE], TableEntry(TableState.INIT))
        await copy(sink, TABLE, b"1\ta\n", 150)
    else:
        await sink.add_tables([TABLE], TableEntry(TableState.READY))
        await land(sink, 150, KEYED, Insert(5, row("1", "a")))
    all_rounds(work)
    work.tidy(now=True)
    await land(sink, 200, KEYED, Insert(5, row("2", "b")))
    for _ in range(2):
        await sink.remove_table(TABLE)
        apply()
        await sink.add_tables([TABLE], TableEntry(TableState.INIT))
        copying = sink.open_table(TABLE)
        await copying.begin()
        await copying.start_copy()
        await copying.close()
        apply()
    await sink.remove_table(TABLE)
    apply()
    await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await land(sink, 300, KEYED, Insert(5, row("3", "c")), Delete(5, row("1", None), None))
    all_rounds(work)
    work.tidy(now=True)
    assert rows(tmp_path) == [(2, "b"), (3, "c")]
    logged = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table().to_pylist()
    begun_with = {("t", None), ("c", 1)} if copied else {("i", 1)}
    assert {(item["_op"], item["id"]) for item in logged} == {*begun_with, ("d", 1), ("i", 2), ("i", 3)}
    assert len(logged) == 4 + copied
    # a copy is none of those that were begun
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"9\tz\n", 400)
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    assert rows(tmp_path) == [(9, "z")]


@pytest.mark.parametrize("logged", [True, False])
@pytest.mark.parametrize("again", [True, False])
async def test_what_is_landed_is_logged_once_however_often_its_table_goes(tmp_path: Path, again: bool, logged: bool) -> None:
    sink, work = await begun(make(tmp_path)), applier(tmp_path)
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    if logged:
        all_rounds(work)
        work.tidy(now=True)
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n", 300)
    await sink.remove_table(TABLE)
    if again:
        await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await sink.advance(Lsn(400))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    changes = Changes(storage(tmp_path), TABLE)
    assert read(changes, Lsn(0), changes.latest()) == [(200, 0, "i"), (300, -1, "t"), (300, 0, "c"), (300, 0, "c")]
    assert list((tmp_path / "copy").iterdir()) == []


async def test_a_copy_of_a_table_that_went_becomes_log_and_goes(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n", 300)
    await sink.remove_table(TABLE)
    await sink.advance(Lsn(400))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    assert rows(tmp_path) == [(1, "a"), (2, "b")]
    changes = Changes(storage(tmp_path), TABLE)
    assert read(changes, Lsn(0), changes.latest()) == [(300, -1, "t"), (300, 0, "c"), (300, 0, "c")]
    assert list((tmp_path / "copy").iterdir()) == []


async def test_a_copy_that_a_later_one_took_the_place_of_becomes_log_and_goes(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    for lsn in (200, 300):
        await sink.add_tables([TABLE], TableEntry(TableState.INIT))
        await copy(sink, TABLE, b"1\ta\n", lsn)
        if lsn == 200:
            await sink.remove_table(TABLE)
    await sink.advance(Lsn(400))
    await sink.close()
    assert len(list((tmp_path / "copy").iterdir())) == 2
    all_rounds(work)
    work.tidy(now=True)
    assert rows(tmp_path) == [(1, "a")]
    changes = Changes(storage(tmp_path), TABLE)
    assert read(changes, Lsn(0), changes.latest()) == [(200, -1, "t"), (200, 0, "c"), (300, -1, "t"), (300, 0, "c")]
    assert list((tmp_path / "copy").iterdir()) == []


async def test_copy_of_a_table_that_stops_before_it_is_applied_stays(tmp_path: Path) -> None:
    """The bug was that the stop names the last version of the table, which is of the time before the copy, as if it had the copy."""
    sink, work = await begun(make(tmp_path)), applier(tmp_path)
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    all_rounds(work)
    work.tidy(now=True)
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n", 300)
    await sink.advance(Lsn(400))
    await sink.close()
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    table.alter.add_constraint({"small": "id < 2"})
    work = applier(tmp_path)
    assert TABLE in all_rounds(work).stopped
    work.tidy(now=True)
    table.update_incremental()
    table.alter.drop_constraint("small")
    assert TABLE in all_rounds(applier(tmp_path)).tables
    assert rows(tmp_path) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("away", ["removed", "renamed"])
async def test_stop_of_a_change_log_is_of_its_directory(tmp_path: Path, away: str) -> None:
    """The publisher drops a table, or renames it, and makes another of its name. The name has the same log, so the stop remains."""
    sink = await begun(make(tmp_path))
    work = applier(tmp_path)
    work.open()
    await land(sink, 200, KEYED, Insert(5, row("1", "old")))
    all_rounds(work)
    work.tidy(now=True)
    DeltaTable(str(tmp_path / "log/public/t")).delete()
    await land(sink, 300, Insert(5, row("2", "old")))
    all_rounds(work)
    work.tidy(now=True)
    assert set(work.progress.stopped_logs) == {TABLE}
    await sink.remove_table(TABLE)
    other = TableName("public", "u")
    if away == "renamed":
        await sink.add_tables([other], TableEntry(TableState.INIT))
        await copy(sink, other, b"1\told\n2\told\n", 400)
    await sink.advance(Lsn(410))
    all_rounds(work)
    work.tidy(now=True)
    assert set(work.progress.stopped_logs) == {TABLE}
    assert (tmp_path / "log/public/u").exists() == (away == "renamed")
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"7\tnew\n", 500)
    await land(sink, 600, replace(KEYED, relation_id=55), Insert(55, row("8", "new")))
    await sink.close()
    for _ in range(2):
        assert all_rounds(work).lsn == 600
        work.tidy(now=True)
        assert set(work.progress.stopped_logs) == {TABLE}
        work.close()
        work = applier(tmp_path)
        work.open()
    shutil.rmtree(tmp_path / "log/public/t")
    work.tidy(now=True)
    work.close()
    assert not work.progress.stopped_logs
    log = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table().to_pylist()
    found = sorted((item["_lsn"], item["_op"], item["id"]) for item in log)
    assert found == [(200, "i", 1), (300, "i", 2), (500, "c", 7), (500, "t", None), (600, "i", 8)]


@pytest.mark.parametrize("noticed", [True, False])
async def test_log_of_a_removed_table_does_not_begin_again_without_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """The bug was that it began with what was landed last, and that the table could be added again without a copy after that."""
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)

    def apply() -> set[TableName]:
        all_rounds(work)
        work.tidy(now=True)
        return set(work.progress.stopped_logs)

    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 150)
    await sink.advance(Lsn(160))
    assert apply() == set()
    shutil.rmtree(tmp_path / "log/public/t")
    if not noticed:
        await sink.remove_table(TABLE)
        assert apply() == set()  # it has all
        await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await land(sink, 200, KEYED, Insert(5, row("2", "b")))
    if noticed:
        assert apply() == {TABLE}
    await sink.remove_table(TABLE)
    for _ in range(2):
        work = applier(tmp_path)
        assert apply() == {TABLE}
        assert not (tmp_path / "log/public/t/_delta_log").exists()
    await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await land(sink, 300, KEYED, Insert(5, row("3", "c")))
    assert apply() == {TABLE}
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"9\tz\n", 400)
    await land(sink, 500, KEYED, Insert(5, row("10", "z")))
    await sink.close()
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    assert apply() == set()
    assert apply() == set()
    log = DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table().to_pylist()
    assert sorted((item["_lsn"], item["_op"], item["id"]) for item in log)[-2:] == [(400, "t", None), (500, "i", 10)]
