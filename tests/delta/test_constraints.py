"""Constraints of a table that rows of the publisher violate, under MERGE INTO."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableName
from subscriber.protocol.messages import Insert, Update
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, relation, rows
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OTHER = TableName("public", "u")


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
async def test_violated_constraint_stops_its_table_alone(tmp_path: Path, delta: SparkSession) -> None:
    """The bug was that Delta's error ended the round, and so stopped all tables."""
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER))
    other = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="u")
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), other, Insert(6, row("1", "a")))
    engine = SparkEngine(delta, Location(path=str(tmp_path)), merges_all=True)
    work = Applier(storage(tmp_path), engine)
    all_rounds(work)
    assert work.room() == 0.0
    uri = tmp_path / "tables/public/t"
    delta.sql(f"ALTER TABLE delta.`{uri}` ADD CONSTRAINT short CHECK (length(note) < 9)")
    await land(sink, 300, Update(5, None, None, row("1", "a secret value")), Update(6, None, None, row("1", "a longer text")))
    await sink.close()
    found = all_rounds(work)
    assert (TABLE in found.stopped, OTHER in found.tables, found.lsn) == (True, True, 300)
    assert "rows violate a constraint" in found.stopped[TABLE].error
    assert "secret" not in found.stopped[TABLE].error
    assert rows(tmp_path, name="u") == [(1, "a longer text")]
    named = {path.rpartition("/")[2] for path in DeltaTable(str(uri)).file_uris()}
    assert {file.name for file in uri.glob("part-00000-*.parquet")} - named, "the MERGE that failed has left a file"
    assert work.room() == 0.0, "it is not another program's"
    delta.sql(f"ALTER TABLE delta.`{uri}` DROP CONSTRAINT short")
    assert TABLE in all_rounds(Applier(storage(tmp_path), engine)).tables
    assert rows(tmp_path) == [(1, "a secret value")]
