"""Spark with the Delta jar maintains the tables while an engine applies: what it may do, and what stops a table."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert, Message, Update
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from tests.delta.test_engines_on_one_lake import by_the_jar, engine_of
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

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


@pytest.mark.endurance
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


@pytest.mark.endurance
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


MAPPED = (
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = 2, 'delta.minWriterVersion' = 5)"
)
WRITTEN_BY = {
    "appendOnly": ("ALTER TABLE {} SET TBLPROPERTIES ('delta.appendOnly' = 'true')",),
    "type widening": (
        "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableTypeWidening' = 'true')",
        "ALTER TABLE {} ALTER COLUMN id TYPE BIGINT",
    ),
    "in-commit timestamps": ("ALTER TABLE {} SET TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true')",),
    "row tracking": ("ALTER TABLE {} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')",),
    "clustering": ("ALTER TABLE {} CLUSTER BY (note)", "OPTIMIZE {}"),
    "checkpoints": ("ALTER TABLE {} SET TBLPROPERTIES ('delta.checkpointPolicy' = 'v2')",),
    "serializable": ("ALTER TABLE {} SET TBLPROPERTIES ('delta.isolationLevel' = 'Serializable')",),
    "constraint": ("ALTER TABLE {} ADD CONSTRAINT small CHECK (id < 300)",),
    "column mapping": (MAPPED,),
    "rename": (
        MAPPED,
        "ALTER TABLE {} RENAME COLUMN note TO remark",
    ),
    "INSERT": ("INSERT INTO {} (id, note) VALUES (77, 'theirs')",),
    "UPDATE": ("UPDATE {} SET note = 'theirs' WHERE id = 1",),
    "DELETE": ("DELETE FROM {} WHERE id = 1",),
    "undone": ("DELETE FROM {} WHERE id = 1", "RESTORE TABLE {} TO VERSION AS OF 1"),
    "MERGE": ("MERGE INTO {} t USING (SELECT 1 AS id) s ON t.id = s.id WHEN MATCHED THEN DELETE",),
    "drop": (MAPPED, "ALTER TABLE {} DROP COLUMN note"),
    # without a query, Delta leaves a table as it is that is named by its path
    "replace": ("CREATE OR REPLACE TABLE {} USING DELTA AS SELECT 7 AS id, 'theirs' AS note",),
    "file": (),
    "directory": (),
    "newest version": ("ALTER TABLE {} SET TBLPROPERTIES ('a.b' = 'c')",),
}
"""What another writer may do to a table. Files are removed by :data:`REMOVED`."""
REMOVED = {"file": "*.parquet", "directory": "", "newest version": "_delta_log/*2.json"}


@pytest.mark.endurance
@pytest.mark.parametrize("name", ["local", "spark"])
async def test_the_other_tables_go_on_whatever_is_done_to_one(tmp_path: Path, delta: SparkSession, name: str) -> None:
    """The bug was that engine ``spark`` retried for ever if a table was ``appendOnly``, and that nothing named the table."""
    others = [TableName("public", f"t{number}") for number in range(len(WRITTEN_BY))]
    sink = await begun(make(tmp_path), tables=(TABLE, *others))
    relations = [replace(RELATION, relation_id=50 + number, name=table.name) for number, table in enumerate(others)]
    changes: list[Message] = [RELATION, Insert(5, row("1", "a", None))]
    for one in relations:
        changes += [one, *(Insert(one.relation_id, row(str(number), "a", None)) for number in (1, 2))]
    await sink.apply(batch(transaction(200, *changes)))
    await sink.advance(Lsn(200))
    work = Applier(storage(tmp_path), engine_of(name, delta, tmp_path))
    assert not all_rounds(work).stopped
    for table, (kind, statements) in zip(others, WRITTEN_BY.items(), strict=True):
        for statement in statements:
            delta.sql(statement.format(f"delta.`{tmp_path}/tables/public/{table.name}`")).collect()
        if kind == "directory":
            shutil.rmtree(tmp_path / "tables/public" / table.name)
        elif kind in REMOVED:
            for file in (tmp_path / "tables/public" / table.name).glob(REMOVED[kind]):
                file.unlink()
    for end in (300, 400):
        changes = [Insert(5, row(str(end), "b", None))]
        for one in relations:
            changes += [Insert(one.relation_id, row(str(end), None, None)), Update(one.relation_id, None, None, row("2", str(end), None))]
        await sink.apply(batch(transaction(end, *changes)))
        await sink.advance(Lsn(end))
        snapshot = all_rounds(work)
        assert snapshot.lsn == snapshot.tables[TABLE].applied == end
        stopped = {kind for kind, table in zip(WRITTEN_BY, others, strict=True) if table in snapshot.stopped}
        needs_delta = {"type widening", "in-commit timestamps", "row tracking", "clustering", "rename"} if name == "local" else {"rename"}
        assert stopped >= {
            "appendOnly",
            "constraint",
            "INSERT",
            "UPDATE",
            "DELETE",
            "undone",
            "MERGE",
            "drop",
            "replace",
            *REMOVED,
            *needs_delta,
        }
        assert stopped.isdisjoint({"serializable", "column mapping", "checkpoints"})
        for table, stop in snapshot.stopped.items():
            assert f"/tables/public/{table.name}" in stop.error
            assert "(hint: " in stop.error
        told = snapshot.stopped[others[[*WRITTEN_BY].index("appendOnly")]].error
        assert "UNSET TBLPROPERTIES" in told
        assert "--engine spark" not in told
    await sink.close()
