"""Damaged and missing files of one Delta table: only that table leaves the snapshot, and copying it again repairs it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from subscriber.errors import SubscriberError, TargetError
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.messages import Insert, Relation, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshots
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge import parquet as parquet_module
from subscriber.sinks.spark.merge import units as merge_unit_module
from subscriber.sinks.spark.merge.fold import MergedRows, merge_keyed_rows
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.damage import rot, unwritable
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, rows
from tests.unit.sinks.spark.stream import TABLE, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import OTHER, OTHER_NAME

pytestmark = pytest.mark.slow

LOG = "_delta_log"


def commit(table: Path, number: int) -> Path:
    return table / LOG / f"{number:020d}.json"


def checkpointed(table: Path) -> Path:
    DeltaTable(str(table)).create_checkpoint()
    (found,) = (table / LOG).glob("*.checkpoint.parquet")
    return found


def remove(files: Iterable[Path]) -> None:
    for file in files:
        file.unlink()


def replace(table: Path) -> None:
    """Another program removes the table, and makes one of its own with as many versions."""
    shutil.rmtree(table)
    for number in range(3):
        write_deltalake(str(table), pa.table({"theirs": [number]}), mode="append")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "garbage": (lambda table: commit(table, 1).write_bytes(b"\0garbage"), "Json error"),
    "cut off": (lambda table: commit(table, 1).write_bytes(commit(table, 1).read_bytes()[:-30]), "Truncated record"),
    "empty": (lambda table: commit(table, 1).write_bytes(b""), "version 1 of its log is damaged"),
    "gap": (lambda table: commit(table, 1).unlink(), "is damaged|has lost version"),
    "first": (lambda table: commit(table, 0).unlink(), "is damaged"),
    "checkpoint": (lambda table: checkpointed(table).write_bytes(b"garbage" * 100), "Parquet"),
    "log": (lambda table: shutil.rmtree(table / LOG), "has lost version 2, which was published: it is gone"),
    "replaced": (replace, "a commit up to 0/12C is not in its log"),
    "file": (lambda table: remove(table.glob("*.parquet")), r"file .*\.parquet is missing"),
    "none": (lambda table: None, ""),
    "moved": (lambda table: commit(table, 2).rename(table.parents[2] / "kept"), ""),
    "rot": (rot, r"file .*\.parquet is damaged"),
    "content": (lambda table: [file.write_bytes(b"garbage") for file in table.glob("*.parquet")], r"file .*\.parquet is damaged"),
}


async def damaged(path: Path, damage: str) -> OpenedSparkSink:
    """Two tables with two rows each, at 300. Then one is damaged, and both get changes at 400."""
    sink = await begun(make(path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    work = applier(path)
    all_rounds(work)
    await land(sink, 300, Update(5, None, None, row("1", "b")), Update(6, None, None, row("1", "b")))
    all_rounds(work)
    work.tidy(now=True)
    DAMAGES[damage][0](path / "tables/public/t")
    await land(sink, 400, Update(5, None, None, row("1", "c")), Update(6, None, None, row("1", "c")))
    return sink


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage not in {"moved", "none"}])
async def test_damaged_table_leaves_the_snapshot_alone_and_a_new_copy_repairs_it(tmp_path: Path, damage: str) -> None:
    sink = await damaged(tmp_path, damage)
    reason = stop_of(applier(tmp_path), DAMAGES[damage][1])
    assert "--resync" in reason
    work = applier(tmp_path)
    snapshot = all_rounds(work)
    assert snapshot.lsn == 400
    assert DeltaTable(str(tmp_path / snapshot.tables[OTHER_NAME].path)).to_pyarrow_table()["note"].to_pylist() == ["c"]
    work.tidy(now=True)
    # alter --resync
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tc\n7\tseven\n", 500)
    await land(sink, 600, Insert(5, row("8", "eight")))
    await sink.close()
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert rows(tmp_path) == [(1, "c"), (7, "seven"), (8, "eight")]
    work.tidy(now=True)
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


@pytest.mark.parametrize("damage", ["garbage", "log", "moved", "replaced"])
async def test_earlier_snapshots_do_not_read_the_table_that_began_again(tmp_path: Path, damage: str) -> None:
    sink = await damaged(tmp_path, damage)
    work = applier(tmp_path)
    assert all_rounds(work).stopped
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tc\n7\tseven\n", 500)
    all_rounds(work)
    await land(sink, 600, Insert(5, row("8", "eight")))
    await sink.close()
    newest = all_rounds(work)
    earlier = Snapshots(storage(tmp_path)).last(lambda each: each.landed <= 300)
    assert earlier is not None
    assert earlier.tables[TABLE].version <= newest.tables[TABLE].version
    old, new = (PinnedTable(storage(tmp_path), table) for table in (earlier.tables[TABLE], newest.tables[TABLE]))
    with pytest.raises(TargetError, match="began again"):
        old.files()
    assert new.files()


async def test_damaged_table_continues_once_its_log_is_restored(tmp_path: Path) -> None:
    path, kept = commit(tmp_path / "tables/public/t", 2), tmp_path / "kept"
    sink = await damaged(tmp_path, "moved")
    stop_of(applier(tmp_path), "has lost version 2|is damaged")
    await land(sink, 500, Insert(5, row("2", "d")))
    await sink.close()
    work = applier(tmp_path)
    all_rounds(work)
    kept.rename(path)
    work._next_look = 0.0
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "c"), (2, "d")]


async def test_table_with_a_rotten_page_is_read_again_after_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await damaged(tmp_path, "none")
    whole = rot(tmp_path / "tables/public/t")
    work = applier(tmp_path)
    stop_of(work, r"file .*\.parquet is damaged")
    read = list[str]()
    real = parquet_module._read

    def recorded(storage: Storage, path: str, *rest: Any) -> pa.Table:
        read.append(path)
        return real(storage, path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(parquet_module, "_read", recorded)
        await land(sink, 500, Insert(5, row("2", "d")), Update(6, None, None, row("1", "d")))
        assert all_rounds(work).lsn == 500
    assert {path.rpartition("/")[0] for path in read} == {"landing", "tables/public/other"}
    for file, content in whole:
        file.write_bytes(content)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    await land(sink, 600, Insert(5, row("3", "e")))
    await sink.close()
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "c"), (2, "d"), (3, "e")]


@pytest.mark.parametrize("begun_by", ["round", "log"])
@pytest.mark.parametrize("damage", [rot, lambda copy: remove(copy.glob("*.parquet"))])
async def test_damaged_copy_stops_its_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begun_by: str, damage: Callable[[Path], object]
) -> None:
    sink = await begun(make(tmp_path), tables=(OTHER_NAME,))
    await land(sink, 200, OTHER, Insert(6, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tc\n7\tseven\n", 300)
    (directory,) = (tmp_path / "copy").iterdir()
    if begun_by == "round":
        damage(directory)
    await land(sink, 400, Insert(6, row("2", "b")))
    if begun_by == "log":
        all_rounds(work)
        damage(directory)
    snapshot = all_rounds(work)
    assert snapshot.lsn == snapshot.tables[OTHER_NAME].applied == 400
    assert ("the copy of the table is damaged" in snapshot.stopped[TABLE].error) if begun_by == "round" else not snapshot.stopped
    work.tidy(now=True)
    assert len(DeltaTable(str(tmp_path / "log/public/other")).to_pyarrow_table()) == 2
    if begun_by == "log":
        assert "--resync" in work.progress.stopped_logs[TABLE]
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tc\n8\teight\n", 500)
    await land(sink, 600, Insert(6, row("3", "c")))
    await sink.close()
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "c"), (8, "eight")]
    work.tidy(now=True)
    assert caplog.text.count("begins again") == (begun_by == "round"), "a stopped log is not tried before a minute has passed"
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    work.tidy(now=True)
    assert caplog.text.count("begins again") == 1
    assert not work.progress.stopped_logs
    assert sorted(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()["id"].drop_null().to_pylist()) == [1, 8]
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


@pytest.mark.parametrize("directory", ["", LOG])
async def test_table_without_permissions_stops_alone_and_continues_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    sink = await damaged(tmp_path, "none")
    work = applier(tmp_path)
    with unwritable(tmp_path / "tables/public/t" / directory):
        for end in (400, 500):
            assert "permission denied" in stop_of(work, str(tmp_path / "tables/public/t"))
            assert all_rounds(work).lsn == end
            await land(sink, end + 100, Insert(5, row(str(end), "d")), Insert(6, row(str(end), "d")))
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 61)
    await sink.close()
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "c"), (400, "d"), (500, "d")]


@pytest.mark.parametrize("directory", ["", LOG])
async def test_change_log_without_permissions_stops_alone_and_continues_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    sink = await damaged(tmp_path, "none")
    work = applier(tmp_path)
    all_rounds(work)
    with unwritable(tmp_path / "log/public/t" / directory):
        for _ in range(2):
            work.tidy(now=True)
            assert "permission denied" in work.progress.stopped_logs[TABLE]
        assert len(DeltaTable(str(tmp_path / "log/public/other")).to_pyarrow_table()) == 3
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 61)
    await sink.close()
    work.tidy()
    assert not work.progress.stopped_logs
    assert len(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()) == 3


@pytest.mark.parametrize("newest", [1, 2])
async def test_running_applier_notices_that_the_newest_version_was_removed(tmp_path: Path, newest: int) -> None:
    """The bug was that it went on from a version that was gone, because delta-rs does not notice this if only version 0 is left."""
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    work = applier(tmp_path)
    for end in range(200, 200 + newest):
        await land(sink, end, KEYED, Insert(5, row(str(end), "a")), OTHER, Insert(6, row(str(end), "a")))
        all_rounds(work)
    commit(tmp_path / "tables/public/t", newest).unlink()
    await land(sink, 400, Insert(5, row("400", "a")), Insert(6, row("400", "a")))
    assert "--resync" in stop_of(work, rf"has lost version {newest}|the newest version in the log {newest - 1} is older")
    snapshot = all_rounds(work)
    assert snapshot.lsn == snapshot.tables[OTHER_NAME].applied == 400
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\tc\n", 500)
    await land(sink, 600, KEYED, Insert(5, row("8", "eight")))
    await sink.close()
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "c"), (8, "eight")]


async def test_table_that_may_not_be_read_stops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await damaged(tmp_path, "none")
    await sink.close()
    real = DeltaTable.is_deltatable

    def denied(uri: str) -> bool:
        if uri.endswith("/t"):
            raise OSError(f"Generic LocalFileSystem error: Unable to walk dir: {uri}/_delta_log: Permission denied (os error 13)")
        return real(uri)

    monkeypatch.setattr("subscriber.sinks.spark.tables.delta_reader.DeltaTable.is_deltatable", denied)
    work = applier(tmp_path)
    stop_of(work, "permission denied")
    work.tidy(now=True)
    assert set(work.progress.stopped_logs) == {TABLE}
    assert len(DeltaTable(str(tmp_path / "log/public/other")).to_pyarrow_table()) == 3


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pa.ArrowInvalid("12345 is out of range"), "Arrow cannot compute"),
        (TargetError("the unit failed", hint="12"), "/tables/public/t could not be written: the unit failed"),
        (KeyError("12345"), "unexpected KeyError in units.py, line "),
        (pa.ArrowMemoryError("malloc of size 12345 failed"), "/tables/public/t: there is not enough memory"),
        (MemoryError("12345"), "could not be written: there is not enough memory"),
    ],
)
async def test_error_of_a_unit_stops_its_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    """The bug was that an error that names no file stopped the lake."""
    sink = await damaged(tmp_path, "none")
    await sink.close()
    now = time.monotonic
    work = applier(tmp_path)

    def broken(base: pa.Table, changes: pa.Table, schema: TableSchema) -> MergedRows:
        if schema.table == TABLE:
            raise error
        return merge_keyed_rows(base, changes, schema)

    with monkeypatch.context() as patch:
        patch.setattr(merge_unit_module, "merge_keyed_rows", broken)
        assert "12345" not in stop_of(work, words)
        assert all_rounds(work).lsn == 400
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "c")]


async def test_tables_that_fail_at_once_are_stopped_at_once(tmp_path: Path) -> None:
    """The bug was that each of them took two more rounds, before anything was published."""
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME, TableName("public", "third")))
    third = Relation(7, "public", "third", "d", OTHER.columns)
    await land(sink, 200, KEYED, OTHER, third, *(Insert(number, row("1", "a")) for number in (5, 6, 7)))
    await sink.close()
    rounds: list[int] = []

    class Failing(LocalEngine):
        def run(self, units: Sequence[Unit]) -> list[UnitResult | SubscriberError]:
            rounds.append(len(units))
            found = zip(units, super().run(units), strict=True)
            return [done if unit.directory == "tables/public/third" else TargetError("no") for unit, done in found]

    work = Applier(storage(tmp_path), Failing(storage(tmp_path)))
    snapshot = all_rounds(work)
    assert {*snapshot.stopped} == {TABLE, OTHER_NAME}
    assert all("could not be written: no" in stop.error for stop in snapshot.stopped.values())
    assert snapshot.lsn == 200
    assert rounds == [3, 2]


async def test_store_that_cannot_be_read_stops_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await damaged(tmp_path, "empty")
    await sink.close()

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("Generic S3 error: error sending request")

    monkeypatch.setattr("subscriber.sinks.spark.tables.delta.DeltaTable.is_deltatable", unreachable)
    with pytest.raises(TargetError, match="Generic S3 error") as told:
        LakeDelta(storage(tmp_path), "tables/public/t").load()
    assert type(told.value) is TargetError


async def test_damaged_change_log_gets_nothing_until_its_directory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await damaged(tmp_path, "none")
    await sink.close()
    log = tmp_path / "log/public/t"
    commit(log, 1).write_bytes(b"garbage")
    work = applier(tmp_path)
    assert not all_rounds(work).stopped
    for _ in range(2):
        work.tidy(now=True)
        assert "is damaged" in work.progress.stopped_logs[TABLE]
        assert "remove its directory" in work.progress.stopped_logs[TABLE]
    assert len(DeltaTable(str(tmp_path / "log/public/other")).to_pyarrow_table()) == 3
    shutil.rmtree(log)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    work.tidy()
    assert not work.progress.stopped_logs
    assert DeltaTable(str(log)).to_pyarrow_table()["_lsn"].to_pylist() == [300, 400]


@pytest.mark.parametrize("noticed", [True, False])
async def test_change_log_of_a_damaged_table_lacks_nothing(tmp_path: Path, noticed: bool) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    work = applier(tmp_path)
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(work)
    await land(sink, 300, Update(5, None, None, row("1", "b")), Update(6, None, None, row("1", "b")))
    all_rounds(work)
    last = commit(tmp_path / "tables/public/t", 2)
    whole = last.read_bytes()
    if noticed:
        last.write_bytes(b"garbage")
    work = applier(tmp_path)
    await land(sink, 400, Update(5, None, None, row("1", "c")), Update(6, None, None, row("1", "c")))
    assert (TABLE in all_rounds(work).stopped) is noticed
    if not noticed:
        work._tables.opened.clear()
        last.write_bytes(b"garbage")
    work.tidy(now=True)
    last.write_bytes(whole)
    await land(sink, 500, Update(5, None, None, row("1", "d")), Update(6, None, None, row("1", "d")))
    await sink.close()
    work = applier(tmp_path)
    assert not all_rounds(work).stopped
    work.tidy(now=True)
    for name in ("t", "other"):
        log = DeltaTable(str(tmp_path / f"log/public/{name}")).to_pyarrow_table().sort_by("_lsn")
        assert log["note"].to_pylist() == ["a", "b", "c", "d"]
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


async def test_change_log_continues_a_minute_after_it_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await damaged(tmp_path, "none")
    work = applier(tmp_path)
    all_rounds(work)
    work.tidy(now=True)
    await land(sink, 500, Update(5, None, None, row("1", "d")))
    await sink.close()
    all_rounds(work)
    last = max((tmp_path / "log/public/t" / LOG).glob("*.json"))
    whole = last.read_bytes()
    last.write_bytes(b"garbage")
    work.tidy(now=True)
    assert TABLE in work.progress.stopped_logs
    last.write_bytes(whole)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    work.tidy()
    assert not work.progress.stopped_logs
    assert max(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()["_lsn"].to_pylist()) == 500


async def test_a_copied_table_that_was_removed_is_named(tmp_path: Path) -> None:
    """Its copy was removed when it was published. The message must not name the copy."""
    sink = await begun(make(tmp_path), tables=(OTHER_NAME,))
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 200)
    await land(sink, 250, KEYED, Insert(5, row("2", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    work.tidy(now=True)
    shutil.rmtree(tmp_path / "tables/public/t")
    await land(sink, 300, Update(5, None, None, row("1", "b")))
    await sink.close()
    reason = stop_of(work, "is gone")
    assert "tables/public/t" in reason
    assert "copy/" not in reason
