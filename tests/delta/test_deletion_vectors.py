"""Deletion vectors that this package writes are read by Spark with Delta's jar and by delta-rs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Message, Update
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
from subscriber.sinks.spark.pipeline.planning import plan as plan_module
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.delta.test_engines_on_one_lake import by_delta_rs, by_the_jar, engine_of
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROPERTY = {"delta.enableDeletionVectors": "true"}


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
async def test_engines_take_turns_on_tables_with_vectors(tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of both engines, and of MERGE where it can be used; OPTIMIZE and VACUUM between them."""
    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)
    publisher = Publisher(77)
    sink = await begun(make(tmp_path), tables=NAMES)
    location = Location(path=str(tmp_path))
    engines: list[Engine] = [
        LocalEngine(storage(tmp_path)),
        SparkEngine(delta, location),
        SparkEngine(delta, location, merges_all=True),
    ]
    uri = str(tmp_path / "tables/public/keyed")
    seen = 0
    for number in range(9):
        await sink.apply(batch(publisher.transaction(150 if number < 3 else 8)))
        await sink.advance(Lsn(publisher.end))
        work = Applier(storage(tmp_path), engines[number % 3], ApplierSettings(target_rows=100))
        snapshot = work.run_round()
        assert snapshot is not None
        assert read(tmp_path, snapshot) == publisher.rows()
        if number == 5:
            delta.sql(f"OPTIMIZE delta.`{uri}`")
        if number in {4, 8}:
            delta.sql(f"VACUUM delta.`{uri}` RETAIN 168 HOURS")
        if number == 2:
            DeltaTable(uri).alter.set_table_properties(PROPERTY, raise_if_not_exists=False)
        if number in {3, 5, 7, 8}:
            assert by_the_jar(delta, tmp_path, snapshot) == by_delta_rs(tmp_path, snapshot)
        files = LakeDelta(storage(tmp_path), "tables/public/keyed")
        assert files.load()
        vectors = [file.vector for file in files.table_files().values() if file.vector is not None]
        seen += any(vector.text.startswith("_dv") for vector in vectors)
    await sink.close()
    assert seen > 1


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
async def test_merge_stores_vectors_that_the_local_engine_extends(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)
    sink = await begun(make(tmp_path))
    files = LakeDelta(storage(tmp_path), "tables/public/t")
    there: dict[int, str | None] = dict.fromkeys(range(100), "a")
    steps: list[tuple[str, list[Message], int, dict[int, str | None]]] = [
        ("local", [RELATION, *(Insert(5, row(str(n), "a", None)) for n in there)], 0, {}),
        ("merge", [Delete(5, row("5", None, None), None), Update(5, None, None, row("6", "b", None))], 2, {5: None, 6: "b"}),
        ("local", [Delete(5, row("7", None, None), None), Update(5, None, None, row("8", "c", None))], 4, {7: None, 8: "c"}),
        ("merge", [Delete(5, row("9", None, None), None), Update(5, None, None, row("8", "d", None))], 5, {9: None, 8: "d"}),
    ]
    path = ""
    for number, (name, messages, deleted, changed) in enumerate(steps):
        await sink.apply(batch(transaction(200 + 100 * number, *messages)))
        await sink.advance(Lsn(200 + 100 * number))
        snapshot = all_rounds(Applier(storage(tmp_path), engine_of(name, delta, tmp_path)))
        there |= changed
        found = by_the_jar(delta, tmp_path, snapshot)["t"]
        assert found == by_delta_rs(tmp_path, snapshot)["t"]
        assert {entry[0]: entry[1] for entry in found} == {key: note for key, note in there.items() if note is not None}
        assert files.load()
        if not number:
            (path,) = files.table_files()
            DeltaTable(files.uri).alter.set_table_properties(PROPERTY, raise_if_not_exists=False)
            continue
        # the log names the vector: the file stays, and was not written again
        actions = files.actions(files.version) or []
        (stored,) = (action["add"]["deletionVector"] for action in actions if action.get("add", {}).get("path") == path)
        operation = next(action["commitInfo"]["operation"] for action in actions if "commitInfo" in action)
        assert (operation, stored["cardinality"]) == ("MERGE" if name == "merge" else "WRITE", deleted)
        if name == "merge":
            assert stored["storageType"] == "u"
    await sink.close()
