"""Progress events, totals and metrics say what the rounds of an applier did."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from subscriber.cli.http.applier_metrics import ApplierCollector
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert, Update
from subscriber.sinks.spark.catalog.status_files import APPLIER, read_quietly
from subscriber.sinks.spark.landing.manifest import EPOCH_OFFSET
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.transaction.model import Transaction
from tests.support.delta_tables import delta_bytes
from tests.unit.sinks.spark.pipeline.test_applier import applier, storage
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

SETTINGS = ApplierSettings(freshness=2.0)


def committed(end: int, ago: float, *messages: Any) -> Transaction:
    """A transaction that was committed so many seconds ago."""
    found = transaction(end, *messages)
    found.commit_time = int((time.time() - ago - EPOCH_OFFSET) * 1e6)
    return found


async def _two_rounds(path: Path) -> Applier:
    sink = await begun(make(path))
    work = applier(path, SETTINGS)
    work.open()
    inserts = [Insert(5, row(str(number), "a", None)) for number in range(20)]
    await sink.apply(batch(committed(200, 30.0, RELATION, *inserts), committed(210, 20.0, Update(5, None, None, row("1", "b", None)))))
    await sink.advance(Lsn(210))
    assert work.run_round() is not None
    await sink.apply(batch(committed(220, 0.5, Update(5, None, None, row("2", "c", None)))))
    await sink.advance(Lsn(220))
    assert work.run_round() is not None
    assert work.run_round() is None
    await sink.close()
    return work


async def test_events_have_the_form_of_structured_streaming(tmp_path: Path) -> None:
    work = await _two_rounds(tmp_path)
    first, second = work.progress.recent
    assert (first["batchId"], second["batchId"]) == (0, 1)
    assert first["id"] == second["id"] != first["runId"] == second["runId"]
    assert (first["numInputRows"], second["numInputRows"]) == (21, 1)
    (source,) = second["sources"]
    assert (source["startOffset"], source["endOffset"], source["latestOffset"]) == ("0/D2", "0/DC", "0/DC")
    assert second["sink"]["metrics"]["tables"] == "1"
    assert {"latestOffset", "queryPlanning", "addBatch", "commitOffsets", "triggerExecution"} == second["durationMs"].keys()
    freshness = first["observedMetrics"]["freshness"]
    # of the oldest commit, which was received and landed at once
    assert 30 <= freshness["receivedSeconds"] <= freshness["landedSeconds"] <= freshness["seconds"] < 60
    assert freshness["isMissed"]
    assert str(TABLE) in first["observedMetrics"]["slowestTables"]
    work.close()
    listener = pytest.importorskip("pyspark.sql.streaming.listener")
    read = listener.StreamingQueryProgress.fromJson(json.loads(json.dumps(second)))
    assert (read.batchId, read.numInputRows, read.sources[0].endOffset) == (1, 1, "0/DC")


async def test_totals_are_what_is_on_disk_and_rounds_continue_after_a_restart(tmp_path: Path) -> None:
    work = await _two_rounds(tmp_path)
    totals = work.progress.totals
    assert (totals.rounds, totals.late, totals.rows) == (2, 1, 22)
    assert totals.size == sum(file.stat().st_size for file in (tmp_path / "landing").glob("*.parquet"))
    # all but the commit that creates the table, and spaces in JSON
    created = len((tmp_path / "tables/public/t/_delta_log" / f"{0:020d}.json").read_text())
    assert totals.written["table"] == pytest.approx(delta_bytes(tmp_path / "tables") - created, rel=0.1)
    assert work.tidy(now=True) == totals.written["log"] > 0
    files = DeltaTable(str(tmp_path / "log/public/t")).get_add_actions(flatten=True)
    assert totals.written["log"] == sum(files.column("size_bytes").to_pylist())
    work.close()
    again = Applier(storage(tmp_path), LocalEngine(storage(tmp_path)), SETTINGS)
    again.open()
    assert again.progress.start().number == 2
    told = read_quietly(storage(tmp_path), APPLIER)
    assert (told["batches"], told["freshness"]["target"], told["engine"]) == (2, 2.0, "local")
    again.close()


async def test_metrics_of_an_applier(tmp_path: Path) -> None:
    collector = ApplierCollector()
    assert all(not family.samples for family in collector.collect())
    work = await _two_rounds(tmp_path)
    collector.watch(work.progress)
    found = {
        (sample.name.removeprefix("subscriber_applier_"), *sample.labels.values()): sample.value
        for family in collector.collect()
        for sample in family.samples
    }
    work.close()
    assert found["rounds_total",] == 2
    assert found["late_rounds_total",] == 1
    assert found["rows_total",] == 22
    assert found["lsn_bytes", "applied"] == found["lsn_bytes", "landed"] == 220
    assert 0.5 <= found["lag_seconds", "landed"] <= found["lag_seconds", "applied"] < 20
    assert found["write_amplification",] == pytest.approx(found["written_bytes_total", "table"] / found["landed_bytes_total",])
    assert found["table_seconds", str(TABLE)] > 0
    assert found["tables_parked",] == 0
    assert found["phase_seconds_total", "addBatch"] > 0
