"""Another writer writes into a table between the commit of an executors' copy and the next commit."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from subscriber.interfaces import Position, PublishedTable, TableEntry, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.copy.order import base_file_name
from subscriber.sinks.spark.merge.parquet import write_rows
from subscriber.sinks.spark.merge.work_unit import Unit
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, _foreign, copy, land, rows, start
from tests.unit.sinks.spark.stream import TABLE, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import commit as foreign_commit
from tests.unit.sinks.spark.tables.foreign_writer import protocol

PUBLISHED = PublishedTable(
    name=TABLE,
    relation_id=5,
    kind="r",
    columns=("id", "note"),
    key_columns=("id",),
    replica_identity="d",
    column_types=(23, 25),
    column_modifiers=(-1, -1),
)


async def copied(sink: OpenedSparkSink, path: Path, lsn: int, notes: dict[int, str]) -> None:
    """As executors copy a table: its files lie in its directory."""
    copying = sink.open_table(TABLE)
    await copying.begin()
    await copying.start_copy()
    await copying.describe(PUBLISHED)
    schema = TableSchema.of_published(PUBLISHED)
    directory = "tables/public/t"
    storage(path).make_directory(directory)
    unit = Unit(directory=directory, schema=schema, base=(), stretches=(), after=0, target_rows=100)
    values = [pa.array(notes.keys(), pa.int32()), pa.array(notes.values(), pa.string()), pa.nulls(len(notes), pa.string())]
    made = pa.Table.from_arrays(values, schema=schema.current)
    generation = sink.lake.table(TABLE).generation
    copying._done = tuple(write_rows(storage(path), unit, made, lambda: base_file_name(copying.relation_id, generation)))
    await copying.finish_copy(Position("sync", "7", 1, Lsn(lsn)))
    await copying.finish_sync(Lsn(lsn))
    await copying.close()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("killed", [False, True])
async def test_commit_by_another_writer_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool, killed: bool) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    if again:
        await sink.add_tables([TABLE], TableEntry(TableState.READY))
        await land(sink, 120, KEYED, Insert(5, row("1", "former")))
        all_rounds(work)
        await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copied(sink, tmp_path, 150, {1: "a", 2: "b"})
    await land(sink, 200, KEYED, Insert(5, row("3", "c")))
    real = LakeDelta.commit

    def between(self: LakeDelta, added: Any, removed: Any, application: str, *rest: Any, **named: Any) -> None:
        real(self, added, removed, application, *rest, **named)
        if application.endswith("-copied"):
            _foreign(tmp_path)
            if killed:
                raise Killed
            self.load()

    with monkeypatch.context() as patched:
        patched.setattr(LakeDelta, "commit", between)
        with pytest.raises(Killed) if killed else contextlib.nullcontext():
            stop_of(work, "another writer")
    version = DeltaTable(str(tmp_path / "tables/public/t")).version()
    assert f"TO VERSION AS OF {version - 1};" in stop_of(applier(tmp_path), f"was changed by another writer, in version {version} ")
    DeltaTable(str(tmp_path / "tables/public/t")).restore(version - 1)
    await sink.close()
    all_rounds(applier(tmp_path))
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (3, "c")]


async def test_commit_by_another_writer_after_planning_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copied(sink, tmp_path, 150, {1: "a"})
    await land(sink, 200, KEYED, Insert(5, row("3", "c")))
    await sink.close()
    real = Applier._apply

    def between(self: Applier, works: Any, *rest: Any) -> None:
        _foreign(tmp_path)
        for one in works:
            one.delta.load()
        real(self, works, *rest)

    monkeypatch.setattr(Applier, "_apply", between)
    stop_of(work, r"another writer, in version 2, and by the applier behind that, in version 3")
    # also to an applier that knows nothing of the copy
    stop_of(applier(tmp_path), r"another writer, in version 2, and by the applier behind that, in version 3")


async def test_restarted_copy_keeps_the_files_of_the_former_one(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copied(sink, tmp_path, 150, {1: "a", 2: "b"})
    await land(sink, 200, KEYED)
    all_rounds(work)
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    copying = sink.open_table(TABLE)
    directory = tmp_path / "tables/public/t"
    for _ in range(2):
        await copying.begin()
        await copying.start_copy()
        (directory / base_file_name(copying.relation_id, sink.lake.table(TABLE).generation)).write_bytes(b"")
    await copying.begin()
    await copying.close()
    await sink.close()
    assert [str(file) for file in directory.glob("*.parquet")] == DeltaTable(str(directory)).file_uris()
    assert rows(tmp_path) == [(1, "a"), (2, "b")]


async def test_copy_without_other_writers_is_published(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path), tables=()), applier(tmp_path)
    for number in range(2):
        await sink.add_tables([TABLE], TableEntry(TableState.INIT))
        if number:
            # into what the copy replaces
            _foreign(tmp_path)
        await copied(sink, tmp_path, 150 + 100 * number, {1: "a", 2: "b"})
        await land(sink, 200 + 100 * number, KEYED, Insert(5, row("3", "c")))
        all_rounds(work)
        assert rows(tmp_path) == [(1, "a"), (2, "b"), (3, "c")]
        if not number:
            await sink.remove_table(TABLE)
    await sink.close()
    work.tidy(now=True)
    assert len(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()) == 7


@pytest.mark.parametrize("executors", [False, True])
async def test_empty_copy_replaces_a_table_that_another_writer_emptied(tmp_path: Path, executors: bool) -> None:
    sink, work = await begun(make(tmp_path)), applier(tmp_path)
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    all_rounds(work)
    DeltaTable(str(tmp_path / "tables/public/t")).delete()
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await (copied(sink, tmp_path, 600, {}) if executors else copy(sink, TABLE, b"", 600))
    await land(sink, 700)
    assert not all_rounds(applier(tmp_path)).stopped
    await land(sink, 800, KEYED, Insert(5, row("8", "eight")))
    await sink.close()
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(8, "eight")]


@pytest.mark.parametrize("executors", [False, True])
@pytest.mark.parametrize("feature", ["clustering", "column mapping"])
async def test_copy_replaces_a_table_that_cannot_be_written(tmp_path: Path, feature: str, executors: bool) -> None:
    """The bug was that a table with a feature that Delta cannot drop stayed stopped; executors' copy gave it columns without numbers."""
    sink, _ = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    schema = json.loads(table.schema().to_json())
    actions = [protocol("clustering", "domainMetadata")]
    configuration = {"a.b": "c"}
    if feature == "column mapping":
        actions = [{"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}]
        configuration |= {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "9"}
        for number, field in enumerate(schema["fields"]):
            field["metadata"] |= {"delta.columnMapping.id": number + 4, "delta.columnMapping.physicalName": field["name"]}
    metadata = {"id": table.metadata().id, "format": {"provider": "parquet", "options": {}}, "partitionColumns": []}
    foreign_commit(tmp_path, *actions, {"metaData": {**metadata, "schemaString": json.dumps(schema), "configuration": configuration}})
    await land(sink, 300, Insert(5, row("2", "b")))
    assert bool(all_rounds(applier(tmp_path)).stopped) == (feature == "clustering")
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await (copied(sink, tmp_path, 400, {7: "seven"}) if executors else copy(sink, TABLE, b"7\tseven\n", 400))
    await land(sink, 500, Insert(5, row("8", "eight")))
    await sink.close()
    snapshot = all_rounds(applier(tmp_path))
    assert not snapshot.stopped
    assert snapshot.lsn == 500
    assert rows(tmp_path) == [(7, "seven"), (8, "eight")]
    assert "delta.columnMapping.mode" not in DeltaTable(str(tmp_path / "tables/public/t")).metadata().configuration
