"""A copy replaces a table that another writer changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableEntry, TableState
from subscriber.protocol.messages import Insert
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, rows, start
from tests.unit.sinks.spark.stream import TABLE, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import commit as foreign_commit
from tests.unit.sinks.spark.tables.foreign_writer import protocol


async def test_empty_copy_replaces_a_table_that_another_writer_emptied(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path)), applier(tmp_path)
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    all_rounds(work)
    DeltaTable(str(tmp_path / "tables/public/t")).delete()
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"", 600)
    await land(sink, 700)
    assert not all_rounds(applier(tmp_path)).stopped
    await land(sink, 800, KEYED, Insert(5, row("8", "eight")))
    await sink.close()
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(8, "eight")]


@pytest.mark.parametrize("feature", ["clustering", "column mapping"])
async def test_copy_replaces_a_table_that_cannot_be_written(tmp_path: Path, feature: str) -> None:
    """The bug was that a table with a feature that Delta cannot drop stayed stopped."""
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
    await copy(sink, TABLE, b"7\tseven\n", 400)
    await land(sink, 500, Insert(5, row("8", "eight")))
    await sink.close()
    snapshot = all_rounds(applier(tmp_path))
    assert not snapshot.stopped
    assert snapshot.lsn == 500
    assert rows(tmp_path) == [(7, "seven"), (8, "eight")]
    assert "delta.columnMapping.mode" not in DeltaTable(str(tmp_path / "tables/public/t")).metadata().configuration
