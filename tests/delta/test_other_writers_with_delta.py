"""Spark with the Delta jar maintains the tables while an engine applies: what it may do, and what stops a table."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert, Update
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from tests.delta.test_engines_on_one_lake import by_the_jar, engine_of
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(900), pytest.mark.endurance, pytest.mark.filterwarnings("ignore")]

FOR_ALL = (
    "OPTIMIZE {}",
    "OPTIMIZE {} ZORDER BY (note)",
    "VACUUM {} RETAIN 200 HOURS",
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'a.b' = 'c')",
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')",
    "ALTER TABLE {} ALTER COLUMN note COMMENT 'of another writer'",
    "ALTER TABLE {} ADD CONSTRAINT small CHECK (id < 1000000)",
    "ALTER TABLE {} ADD COLUMN theirs INT",
    "REORG TABLE {} APPLY (PURGE)",
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = 2, 'delta.minWriterVersion' = 5)",
)
ONLY_FOR_DELTA = (
    "ALTER TABLE {} CLUSTER BY (id)",
    "OPTIMIZE {} FULL",
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
)


@pytest.mark.parametrize("name", ["local", "spark"])
async def test_maintenance_by_spark(tmp_path: Path, delta: SparkSession, name: str) -> None:
    dice, uri = random.Random(name), str(tmp_path / "tables/public/t")
    sink = await begun(make(tmp_path))
    notes = dict.fromkeys(range(40), "a")
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), note, None)) for n, note in notes.items()))))
    await sink.advance(Lsn(200))
    work = Applier(storage(tmp_path), engine_of(name, delta, tmp_path), ApplierSettings(target_rows=100))
    snapshot, end = all_rounds(work), 200
    for statement in (*FOR_ALL, *(ONLY_FOR_DELTA if name == "spark" else ONLY_FOR_DELTA[:1])):
        delta.sql(statement.format(f"delta.`{uri}`")).collect()
        end += 100
        changed, new = dice.choice([*notes]), len(notes)
        notes |= {changed: str(end), new: str(end)}
        await sink.apply(
            batch(transaction(end, Update(5, None, None, row(str(changed), str(end), None)), Insert(5, row(str(new), str(end), None))))
        )
        await sink.advance(Lsn(end))
        snapshot = all_rounds(work)
        assert snapshot.lsn == end
        if name == "local" and statement in ONLY_FOR_DELTA:
            assert 'cannot write: table feature "clustering"' in snapshot.stopped[TABLE].error
            # Delta cannot drop that feature, but its own MERGE writes it
            snapshot = all_rounds(Applier(storage(tmp_path), engine_of("spark", delta, tmp_path)))
        assert not snapshot.stopped, statement
        found = by_the_jar(delta, tmp_path, snapshot)["t"]
        assert {entry[0]: entry[1] for entry in found} == notes, statement
        assert found.total() == len(notes)
    await sink.close()
    history = delta.sql(f"DESCRIBE HISTORY delta.`{uri}`").collect()
    told = [json.loads(entry["userMetadata"]) for entry in history if entry["userMetadata"]]
    assert [one["lsn"] for one in told if one["subscriber"] == "apply"] == [str(Lsn(lsn)) for lsn in range(end, 100, -100)]
    assert DeltaTable(uri).version() == snapshot.tables[TABLE].version


async def test_deletion_vector_of_another_writer_stops_the_table(tmp_path: Path, delta: SparkSession) -> None:
    uri = str(tmp_path / "tables/public/t")
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), "a", None)) for n in range(40)))))
    await sink.advance(Lsn(200))
    snapshot = all_rounds(Applier(storage(tmp_path), engine_of("local", delta, tmp_path)))
    delta.sql(f"ALTER TABLE delta.`{uri}` SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true')").collect()
    before = DeltaTable(uri).file_uris()
    delta.sql(f"DELETE FROM delta.`{uri}` WHERE id = 3").collect()
    assert DeltaTable(uri).file_uris() == before
    await sink.apply(batch(transaction(300, Insert(5, row("40", "b", None)))))
    await sink.advance(Lsn(300))
    await sink.close()
    stopped = all_rounds(Applier(storage(tmp_path), engine_of("local", delta, tmp_path))).stopped[TABLE]
    assert "was changed by another writer, in version 3 " in stopped.error
    assert stopped.last == snapshot.tables[TABLE]
    # undone by hand, it may have any rows
    delta.sql(f"RESTORE TABLE delta.`{uri}` TO VERSION AS OF 2").collect()
    assert TABLE in all_rounds(Applier(storage(tmp_path), engine_of("local", delta, tmp_path))).stopped
