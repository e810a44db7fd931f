"""Histories by executors of Spark: the same rows as by threads, readable by Delta's jar; and the change log that they come from."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.history import history_name
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.engines.spark_engine import SparkEngine
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.model import NAMES, RELATIONS, Publisher, Values
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_history import assert_versions, history_rows, kept
from tests.unit.sinks.spark.stream import batch, begun

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


async def test_executors_write_histories(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    dice, publisher = random.Random(7), Publisher(7)
    states: dict[int, dict[str, Counter[Values]]] = {100: publisher.rows()}
    settings = ApplierSettings(target_rows=12, log_files=5)
    sink = await begun(kept(tmp_path, NAMES), tables=NAMES)
    real, kills = LakeDelta.commit, 0

    def fragile(delta: LakeDelta, *arguments: Any, **named: Any) -> None:
        if dice.random() < 0.08:
            raise Killed
        real(delta, *arguments, **named)
        if dice.random() < 0.08:
            raise Killed

    monkeypatch.setattr(LakeDelta, "commit", fragile)
    for number in range(5):
        for _ in range(2):
            await sink.apply(batch(publisher.transaction(25)))
            states[publisher.end] = publisher.rows()
        await sink.advance(Lsn(publisher.end))
        # engines take turns, because the work and the tables are the same
        engine = SparkEngine(spark, Location(path=str(tmp_path))) if number % 2 == 0 else LocalEngine(storage(tmp_path))
        work = Applier(storage(tmp_path), engine, settings)
        try:
            work.run_round()
            work.tidy(now=True)
        except Killed:
            kills += 1
    monkeypatch.undo()
    await sink.close()
    snapshot = all_rounds(Applier(storage(tmp_path), SparkEngine(spark, Location(path=str(tmp_path))), settings))
    assert kills
    for relation in RELATIONS:
        name = TableName("public", relation.name)
        rows = history_rows(tmp_path, snapshot, name)
        assert_versions(rows, states, relation.name, snapshot.lsn)
        table = snapshot.tables[history_name(name, ())]
        files = LakeDelta(storage(tmp_path), table.path)
        assert files.load()
        found = spark.read.parquet(*(f"{tmp_path}/{table.path}/{path}" for path in files.files_at(table.version)))
        assert found.count() == len(rows)


async def test_delta_reads_a_history(tmp_path: Path, delta: SparkSession) -> None:
    publisher = Publisher(8)
    sink = await begun(kept(tmp_path, NAMES), tables=NAMES)
    states: dict[int, dict[str, Counter[Values]]] = {}
    uri = f"{tmp_path}/history/public/keyed"
    work = Applier(storage(tmp_path), SparkEngine(delta, Location(path=str(tmp_path))), ApplierSettings(target_rows=12))
    for _ in range(3):
        await sink.apply(batch(publisher.transaction(30)))
        await sink.advance(Lsn(publisher.end))
        states[publisher.end] = publisher.rows()
        all_rounds(work)
        # maintenance by others, whose files have current and ended versions
        delta.sql(f"OPTIMIZE delta.`{uri}`").collect()
    await sink.close()
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert_versions(history_rows(tmp_path, snapshot, TableName("public", "keyed")), states, "keyed", snapshot.lsn)
    for lsn, state in states.items():
        there = delta.read.format("delta").load(uri).where(f"_lsn <= {lsn} AND (_end_lsn IS NULL OR _end_lsn > {lsn})")
        assert there.count() == state["keyed"].total()
