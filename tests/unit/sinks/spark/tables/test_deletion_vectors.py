"""Deletion vectors: rounds that mark rows in files instead of rewriting them leave the same rows."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyroaring import BitMap

from subscriber.errors import TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Message, Truncate, TruncateOption, Update
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.planning import plan as plan_module
from subscriber.sinks.spark.tables import delta as delta_module
from subscriber.sinks.spark.tables.deletion_vectors import VECTORS, DeletionVector, live_rows, read_vector, write_vectors
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import seeds
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, relation, rows
from tests.unit.sinks.spark.stream import batch, begun, make, row

pytestmark = pytest.mark.slow

TABLE = "tables/public/t"
KEYED_NAME = TableName("public", "t")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a test are small, and small files are rewritten."""
    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)


def applier(path: Path, **settings: Any) -> Applier:
    return Applier(storage(path), LocalEngine(storage(path)), ApplierSettings(**{"target_rows": 1000, **settings}))


def files(path: Path) -> dict[str, tuple[int, int]]:
    """The rows and the deleted rows of each file."""
    delta = LakeDelta(storage(path), TABLE)
    assert delta.load()
    return {path: (file.rows or 0, file.vector.deleted if file.vector is not None else 0) for path, file in delta.table_files().items()}


async def filled(path: Path, count: int = 1000) -> OpenedSparkSink:
    sink = await begun(make(path))
    await land(sink, 200, KEYED, *(Insert(5, row(str(number), "a")) for number in range(count)))
    all_rounds(applier(path))
    return sink


@pytest.mark.parametrize("deleted", [range(3), range(0, 100_000, 7), range(200_000)], ids=["small", "large", "runs"])
def test_vector_is_read_as_it_was_written(tmp_path: Path, deleted: range) -> None:
    place = storage(tmp_path)
    written = write_vectors(place, "t", {"a": BitMap(deleted), "b": BitMap([5])})
    assert read_vector(place, "t", written["a"]) == BitMap(deleted)
    assert read_vector(place, "t", written["b"]) == BitMap([5])
    assert live_rows(BitMap([0, 2]), 4).to_pylist() == [1, 3]
    for file in (tmp_path / "t").rglob("*.bin"):
        content = bytearray(file.read_bytes())
        content[30] ^= 1
        file.write_bytes(content)
        with pytest.raises(TargetError, match="is damaged"):
            read_vector(place, "t", written["a"])


def test_vector_in_the_commit_is_read(tmp_path: Path) -> None:
    """Other programs write such, and this one did before 2026-11-26."""
    vector = DeletionVector("i", "^Bg9^0rr910000000000iXQKl0rr91000935c8Xg4/^dvcibT#", 40, 4)
    assert read_vector(storage(tmp_path), "t", vector) == BitMap([15, 16, 38, 46])


async def test_few_changes_leave_the_file(tmp_path: Path) -> None:
    sink = await filled(tmp_path)
    (old,) = files(tmp_path)
    changes: list[Message] = [Update(5, None, None, row(str(number), "b")) for number in range(0, 100, 10)]
    moved = Update(5, row("55", None), None, row("5000", "c"))
    await land(sink, 300, *changes, Delete(5, row("999", None), None), moved, Insert(5, row("7000", "d")))
    await sink.close()
    work = applier(tmp_path)
    all_rounds(work)
    assert files(tmp_path)[old] == (1000, 12)
    assert sorted(files(tmp_path).values()) == [(12, 0), (1000, 12)]
    found = dict(rows(tmp_path))
    expected = {**dict.fromkeys(range(1000), "a"), **dict.fromkeys(range(0, 100, 10), "b"), 5000: "c", 7000: "d"}
    assert found == {number: value for number, value in expected.items() if number not in {55, 999}}
    protocol = DeltaTable(str(tmp_path / TABLE)).protocol()
    assert protocol.reader_features == ["deletionVectors"]
    assert {*(protocol.writer_features or ())} == {"appendOnly", "deletionVectors", "invariants"}


async def test_missing_rows_and_values_not_sent(tmp_path: Path) -> None:
    sink = await filled(tmp_path)
    unsent: list[Message] = [Update(5, None, None, row("7", "unchanged")), Update(5, row("8", None), None, row("8000", "unchanged"))]
    missing: list[Message] = [
        Update(5, None, None, row("5000", "x")),
        Delete(5, row("5001", None), None),
        Update(5, row("5002", None), None, row("5003", "x")),
    ]
    await land(sink, 300, *unsent, *missing)
    await sink.close()
    work = applier(tmp_path)
    all_rounds(work)
    assert dict(rows(tmp_path)) == dict.fromkeys((*range(8), *range(9, 1000), 8000), "a")
    assert (work.missing.updates, work.missing.deletes) == (2, 1)


async def test_file_with_many_deleted_rows_is_rewritten(tmp_path: Path) -> None:
    sink = await filled(tmp_path)
    (old,) = files(tmp_path)
    for end in range(10):
        changed = range(end * 30, end * 30 + 30)
        await land(sink, 300 + end * 100, *(Update(5, None, None, row(str(number), f"b{end}")) for number in changed))
        all_rounds(applier(tmp_path))
        assert (old in files(tmp_path)) == (end < 8)
    await sink.close()
    assert all(deleted * 4 < count for count, deleted in files(tmp_path).values())
    assert dict(rows(tmp_path)) == {number: f"b{number // 30}" if number < 300 else "a" for number in range(1000)}


async def test_file_without_a_row_left_is_removed_and_truncate_removes_all(tmp_path: Path) -> None:
    sink = await filled(tmp_path, 1000)
    await land(sink, 300, Insert(5, row("2000", "b")))
    all_rounds(applier(tmp_path))
    assert len(files(tmp_path)) == 2
    await land(sink, 400, Update(5, None, None, row("500", "b")), Delete(5, row("2000", None), None))
    all_rounds(applier(tmp_path))
    assert sorted(files(tmp_path).values()) == [(1, 0), (1000, 1)]
    await land(sink, 500, Truncate(TruncateOption(0), (5,)), Insert(5, row("1", "c")))
    await sink.close()
    all_rounds(applier(tmp_path))
    assert rows(tmp_path) == [(1, "c")]


async def test_table_property_and_setting_forbid_vectors(tmp_path: Path) -> None:
    sink = await filled(tmp_path)
    DeltaTable(str(tmp_path / TABLE)).alter.set_table_properties({"delta.enableDeletionVectors": "false"}, raise_if_not_exists=False)
    await land(sink, 300, Update(5, None, None, row("5", "b")))
    all_rounds(applier(tmp_path))
    assert list(files(tmp_path).values()) == [(1000, 0)]
    DeltaTable(str(tmp_path / TABLE)).alter.set_table_properties({"delta.enableDeletionVectors": "true"})
    await land(sink, 400, Update(5, None, None, row("6", "b")))
    all_rounds(applier(tmp_path, vectors=False))
    assert list(files(tmp_path).values()) == [(1000, 0)]
    await land(sink, 500, Update(5, None, None, row("7", "b")))
    await sink.close()
    all_rounds(applier(tmp_path))
    assert sorted(files(tmp_path).values()) == [(1, 0), (1000, 1)]
    # without vectors, files that have one are rewritten when they are changed
    assert dict(rows(tmp_path)) == {**dict.fromkeys(range(1000), "a"), 5: "b", 6: "b", 7: "b"}


async def test_first_vector_is_told_and_a_table_may_have_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bug was that pandas stopped reading after a small change, without a word."""
    sink = await filled(tmp_path)
    caplog.set_level(logging.INFO)
    told: list[str] = []
    for end, settings in ((300, {"without_vectors": [KEYED_NAME]}), (400, {}), (500, {})):
        await land(sink, end, Update(5, None, None, row("5", str(end))))
        all_rounds(applier(tmp_path, **settings))
        told = [one.getMessage() for one in caplog.records if "first deletion vector" in one.getMessage()]
        assert len(told) == (end > 300)
        assert any(deleted for _, deleted in files(tmp_path).values()) == (end > 300)
    assert "tables/public/t gets its first deletion vector: to_pandas" in told[0]
    await sink.close()


async def test_column_added_dropped_and_retyped_beside_vectors(tmp_path: Path) -> None:
    sink = await filled(tmp_path)
    await land(sink, 300, Update(5, None, None, row("5", "b")))
    all_rounds(applier(tmp_path))
    wide = relation("d", ("id", 23, True), ("note", 25, False), ("extra", 23, False))
    await land(sink, 400, wide, Update(5, None, None, row("6", "c", "6")))
    all_rounds(applier(tmp_path))
    wider = relation("d", ("id", 20, True), ("note", 25, False), ("extra", 23, False))
    await land(sink, 500, wider, Update(5, None, None, row("7", "d", "7")))
    all_rounds(applier(tmp_path))
    await land(sink, 600, relation("d", ("id", 20, True), ("extra", 23, False)), Update(5, None, None, row("8", "8")))
    await sink.close()
    all_rounds(applier(tmp_path))
    found = {item[0]: item[1:] for item in rows(tmp_path, ("id", "note", "extra"))}
    assert len(found) == 1000
    assert [found[number] for number in (5, 6, 7, 8, 9)] == [(None, None), (None, 6), (None, 7), (None, 8), (None, None)]


async def test_files_of_vectors_are_removed_after_the_grace_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_module, "_CHECKPOINT_VERSIONS", 4)
    sink = await filled(tmp_path)
    place = tmp_path / TABLE / VECTORS
    for number in range(12):
        await land(sink, 300 + number, Update(5, None, None, row(str(number), "b")))
        all_rounds(applier(tmp_path))
    assert len(list(place.iterdir())) >= 12
    DeltaTable(str(tmp_path / TABLE)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False, full=True)
    # as Delta's MERGE names them
    other = tmp_path / TABLE / "deletion_vector_61d16c75-6994-46b7-a15b-8b538852e50e.bin"
    other.write_bytes(b"of a killed job")
    os.utime(other, (0, 0))
    work = applier(tmp_path, retain_hours=0)
    work._next_sweep = 0.0
    await land(sink, 400, Update(5, None, None, row("12", "b")))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    now = LakeDelta(storage(tmp_path), TABLE)
    assert now.load()
    used = {file.vector.file for file in now.table_files().values() if file.vector is not None}
    assert {f"{VECTORS}/{file.name}" for file in place.iterdir()} == used
    assert not other.exists()
    assert dict(rows(tmp_path)) == {**dict.fromkeys(range(1000), "a"), **dict.fromkeys(range(13), "b")}


@seeds(1, 2)
async def test_random_changes_leave_the_publishers_rows(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With keys of several columns, values not sent, TRUNCATE and keys that change; the log is read from checkpoints too."""
    monkeypatch.setattr(delta_module, "_CHECKPOINT_VERSIONS", 7)
    dice, publisher = random.Random(seed), Publisher(seed + 500)
    sink = await begun(make(tmp_path), tables=NAMES)
    work, seen = applier(tmp_path, target_rows=60), 0
    for number in range(40):
        await sink.apply(batch(publisher.transaction(120 if number < 8 else dice.randrange(1, 8))))
        await sink.advance(Lsn(publisher.end))
        cut = work.run_round()
        assert cut is not None
        assert read(tmp_path, cut) == publisher.rows()
        for name in ("keyed", "pairs"):
            delta = LakeDelta(storage(tmp_path), f"tables/public/{name}")
            seen += delta.load() and any(file.vector is not None for file in delta.table_files().values())
        if dice.random() < 0.1:
            work = applier(tmp_path, target_rows=60)
    await sink.close()
    assert seen > 10
