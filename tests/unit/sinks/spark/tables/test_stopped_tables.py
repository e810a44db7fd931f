"""Tables that cannot be continued: they leave the snapshot until the reason is gone, or until they are copied again."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from deltalake import DeltaTable

from subscriber.cli import main
from subscriber.errors import TargetError
from subscriber.interfaces import TableEntry, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.catalog.snapshots import Snapshot, SnapshotTable
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.reading.snapshot import snapshot as spark_snapshot
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import seeds
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import SMALL, Killed, all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, rows
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import OTHER, OTHER_NAME, Maintained

pytestmark = pytest.mark.slow


def append_only(path: Path, value: str) -> None:
    """Set or remove what prevents the applier from writing a table."""
    DeltaTable(str(path)).alter.set_table_properties({"delta.appendOnly": value})


async def two_tables(path: Path) -> OpenedSparkSink:
    """Two tables, with a row each at 200. Another writer deletes that of one of them, and both get a row at 300."""
    sink = await begun(make(path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(path))
    DeltaTable(str(path / "tables/public/t")).delete()
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    return sink


async def test_table_whose_rows_others_changed_leaves_the_snapshot_alone(tmp_path: Path) -> None:
    sink = await two_tables(tmp_path)
    work = applier(tmp_path)
    assert "copy it again" in stop_of(work, "was changed by another writer, in version 2 ")
    await land(sink, 400, Insert(5, row("3", "c")), Insert(6, row("3", "c")))
    await sink.close()
    snapshot = all_rounds(work)
    work.tidy(now=True)
    assert (snapshot.lsn, snapshot.stopped[TABLE].lsn, snapshot.stopped[TABLE].last) == (
        400,
        200,
        SnapshotTable("tables/public/t", 1, Lsn(200)),
    )
    assert sorted(DeltaTable(str(tmp_path / snapshot.tables[OTHER_NAME].path)).to_pyarrow_table()["id"].to_pylist()) == [1, 2, 3]
    assert DeltaTable(str(tmp_path / "tables/public/t")).version() == 2
    # the log has all changes; the landed ones are kept for the table
    assert sorted(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()["_lsn"].to_pylist()) == [200, 300, 400]
    assert {file.name for file in (tmp_path / "landing").glob("*.json")} == {f"{300:020d}.json", f"{400:020d}.json"}
    no_session: Any = None
    with pytest.raises(TargetError, match=r"not in the snapshot at 0/190: .* was changed by another writer"):
        spark_snapshot(no_session, str(tmp_path)).table("public.t")
    # a table that was restored by hand may have any rows: only a copy continues it
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    sink = await begun(make(tmp_path), tables=())
    await land(sink, 450, OTHER, Insert(6, row("4", "d")))
    stop_of(applier(tmp_path), "was changed by another writer, in version 2 ")
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n2\tb\n3\tc\n", 460)
    await land(sink, 470, KEYED, Insert(5, row("5", "e")))
    await sink.close()
    work = applier(tmp_path)
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (3, "c"), (5, "e")]
    work.tidy(now=True)
    assert {file.name for file in (tmp_path / "landing").glob("*.json")} == {f"{470:020d}.json"}


async def test_changes_of_a_stopped_table_are_not_kept_without_end(tmp_path: Path) -> None:
    sink = await two_tables(tmp_path)
    hasty = ApplierSettings(retain_hours=0)
    work = applier(tmp_path, hasty)
    for end in (400, 500):
        all_rounds(work)
        work.tidy(now=True)
        await land(sink, end, Insert(5, row(str(end), "c")), Insert(6, row(str(end), "c")))
    assert "changes of more than 0 hours are not kept: copy it again" in stop_of(applier(tmp_path, hasty), "another writer")
    work.tidy(now=True)
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    stop_of(applier(tmp_path), "are not kept: copy it again")
    # a new copy ends the stop
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"7\tseven\n", 600)
    await land(sink, 700, Insert(5, row("8", "eight")))
    await sink.close()
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(7, "seven"), (8, "eight")]


@seeds(1, 2)
async def test_tables_stop_and_continue_under_kills(tmp_path: Path, seed: int) -> None:
    dice, publisher = random.Random(seed), Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    broken: set[str] = set()
    snapshot: Snapshot | None = None
    history: dict[int, dict[str, Any]] = {}

    def between() -> None:
        if dice.random() < 0.15:
            raise Killed

    for _ in range(12):
        await sink.apply(batch(publisher.transaction(dice.randrange(5, 40))))
        await sink.advance(Lsn(publisher.end))
        history[publisher.end] = publisher.rows()
        name = dice.choice(NAMES).name
        uri = str(tmp_path / "tables/public" / name)
        if name in broken and dice.random() < 0.7:
            broken.remove(name)
            append_only(Path(uri), "false")
        elif name not in broken and DeltaTable.is_deltatable(uri) and DeltaTable(uri).count() and dice.random() < 0.7:
            broken.add(name)
            append_only(Path(uri), "true")
        while True:
            work = Applier(storage(tmp_path), Maintained(tmp_path, between), SMALL)
            try:
                snapshot = all_rounds(work)
                work.tidy(now=dice.random() < 0.5)
                break
            except Killed:
                continue
        assert snapshot is not None
        stopped = {name.name for name in snapshot.stopped}
        assert stopped <= broken
        expected = history[int(snapshot.lsn)]
        assert read(tmp_path, snapshot) == {name: rows for name, rows in expected.items() if name not in stopped}
    for name in broken:
        append_only(tmp_path / "tables/public" / name, "false")
    await sink.close()
    work = applier(tmp_path)
    snapshot = all_rounds(work)
    assert read(tmp_path, snapshot) == publisher.rows()
    work.tidy(now=True)
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


@pytest.mark.parametrize("seen", [False, True], ids=["removed first", "stopped first"])
@pytest.mark.parametrize("hours", [24, 0])
async def test_landed_changes_of_a_stopped_table_that_was_removed_are_kept(tmp_path: Path, seen: bool, hours: int) -> None:
    settings = ApplierSettings(retain_hours=hours)
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(tmp_path))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    if seen:
        stop_of(applier(tmp_path), "appendOnly")
    await sink.remove_table(TABLE)
    work = applier(tmp_path, settings)
    for end in (350, 360, 370):
        snapshot = all_rounds(work)
        work.tidy(now=True)
        assert set(snapshot.tables) == {OTHER_NAME}
        await land(sink, end, Insert(6, row(str(end), "c")))
    table.update_incremental()
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await land(sink, 400, KEYED, Insert(5, row("4", "d")))
    await sink.close()
    if not hours:
        stop_of(applier(tmp_path), "not kept: copy it again")
        return
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (4, "d")]


async def test_removed_table_takes_its_changes_once_the_reason_of_its_stop_is_gone(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(tmp_path))
    append_only(tmp_path / "tables/public/t", "true")
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    stop_of(applier(tmp_path), "appendOnly")
    await sink.remove_table(TABLE)
    assert TABLE in all_rounds(applier(tmp_path)).stopped
    append_only(tmp_path / "tables/public/t", "false")
    await land(sink, 400, Insert(6, row("3", "c")))
    await sink.close()
    work = applier(tmp_path)
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b")]
    # its rows are not checked from then on
    DeltaTable(str(tmp_path / "tables/public/t")).delete()
    work.tidy(now=True)
    assert not all_rounds(applier(tmp_path)).stopped
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


async def test_table_without_recent_changes_continues(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER)
    work = applier(tmp_path)
    all_rounds(work)
    for end in (300, 310, 320):
        await land(sink, end, Insert(6, row(str(end), "x")))
        all_rounds(work)
        work.tidy(now=True)
    append_only(tmp_path / "tables/public/t", "true")
    await land(sink, 330, Insert(5, row("2", "b")))
    await sink.close()
    assert all_rounds(applier(tmp_path)).stopped[TABLE].lsn == 320
    append_only(tmp_path / "tables/public/t", "false")
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b")]


async def test_hint_has_the_command_that_copies_again(tmp_path: Path) -> None:
    path = tmp_path / "a b#1"
    path.mkdir()
    sink = await begun(make(Path(quote(str(path)))))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    all_rounds(applier(path))
    for directory in ("tables/public/t", "log/public/t"):
        log = path / directory / "_delta_log"
        log.mkdir(parents=True, exist_ok=True)
        (log / f"{1:020d}.json").write_text("{")
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    work = applier(path)
    work.open()
    all_rounds(work)
    work.tidy(now=True)
    work.close()
    command = f"subscriber alter replica --target spark://{quote(str(path))} --resync public.t"
    assert command in work.progress.stopped[TABLE]
    assert command in work.progress.stopped_logs[TABLE]
    hasty = applier(path, ApplierSettings(retain_hours=0))
    assert f"are not kept: copy it again: {command};" in stop_of(hasty, "Delta table")


def test_once_fails_if_a_table_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def landed() -> None:
        sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
        await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
        all_rounds(applier(tmp_path))
        append_only(tmp_path / "tables/public/t", "true")
        await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
        await sink.close()

    asyncio.run(landed())
    once = ["spark-apply", str(tmp_path), "--engine=local", "--once"]
    for _ in range(2):
        assert main(once) == 1
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("subscriber: stopped, and not applied: public.t (hint: ")
    append_only(tmp_path / "tables/public/t", "false")
    assert main(once) == 0
    assert capsys.readouterr().err.splitlines()[-1] == "subscriber: applied everything that was landed"


@pytest.mark.parametrize("step", ["commit", "add_columns"])
async def test_table_that_cannot_be_written_stops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The bug was that the error of one table's commit stopped the lake, and that neither status nor log named the table."""
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    real, failures = getattr(LakeDelta, step), [1]

    def refused(self: LakeDelta, *arguments: Any, **named: Any) -> Any:
        if self.directory == "tables/public/t" and failures[0]:
            failures[0] -= 1
            raise TargetError("this table has a feature of next year", hint="drop it")
        return real(self, *arguments, **named)

    monkeypatch.setattr(LakeDelta, step, refused)
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    assert not all_rounds(work).stopped, "the error of a moment stops nothing"
    failures[0] = 10**6
    for end in (400, 500):
        await land(sink, end, Insert(5, row(str(end), "c")), Insert(6, row(str(end), "c")))
        told = stop_of(work, f"Delta table {tmp_path}/tables/public/t could not be written: this table has a feature of next year")
        assert "(hint: drop it)" in told
        assert all_rounds(work).tables[OTHER_NAME].applied == end
    assert failures[0] == 10**6 - 2, "it is not tried in each round"
    failures[0] = 0
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    await sink.close()
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (400, "c"), (500, "c")]
