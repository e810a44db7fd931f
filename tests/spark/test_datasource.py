"""``postgres_changes`` on Spark: streams that stop and resume from their checkpoints, and batches, while landed files become change log."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Update
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.planning import plan as plan_module
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.spark import register
from tests.unit.sinks.spark.model import NAMES, Publisher
from tests.unit.sinks.spark.pipeline.test_applier import SMALL, all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, relation
from tests.unit.sinks.spark.reading.test_change_feed import landed_of
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Change = tuple[int, int, str, int | None, str | None]
COLUMNS = ("_lsn", "_seq", "_op", "id", "big")


def changes_of(frame: DataFrame) -> list[Change]:
    return [tuple(row[name] for name in COLUMNS) for row in frame.collect()]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
async def test_a_stream_gives_each_change_once_in_order_over_restarts(tmp_path: Path, spark: SparkSession) -> None:
    register(spark)
    lake, checkpoint = tmp_path / "lake", str(tmp_path / "checkpoint")
    publisher = Publisher(7)
    sink = await begun(make(lake), tables=NAMES)
    work = Applier(storage(lake), LocalEngine(storage(lake)), SMALL)
    expected: list[Change] = []
    found: list[Change] = []
    lsns: list[int] = []

    def run() -> None:
        """A new query each time: it reads what exists now, then it ends."""

        def take(frame: DataFrame, _: int) -> None:
            found.extend(changes_of(frame))

        stream = spark.readStream.format("postgres_changes").option("table", "public.keyed").load(str(lake))
        query = stream.writeStream.foreachBatch(take).option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        assert query.awaitTermination(180)
        assert query.exception() is None

    for step in range(6):
        for _ in range(4):
            await sink.apply(batch(publisher.transaction(25)))
            await sink.advance(Lsn(publisher.end))
        last = expected[-1][0] if expected else 0
        expected += [change for row in landed_of(lake, 1) if (change := _change(row))[0] > last]
        lsns.append(publisher.end)
        if step % 2:
            # what the stream has read, and what it has not, becomes change log; no landed file is left
            all_rounds(work)
            work.tidy(now=True)
        if step != 2:
            run()
    await sink.close()
    assert found == expected
    assert len(expected) > 100
    run()
    assert found == expected
    # batches: all of it, and a range
    assert changes_of(_batch(spark, lake)) == expected
    low, high = lsns[1], lsns[3]
    some = _batch(spark, lake, startingLsn=str(Lsn(low)), endingLsn=str(Lsn(high)))
    assert changes_of(some) == [change for change in expected if low < change[0] <= high]
    first = _batch(spark, lake).first()
    assert first is not None
    assert first["_ts"].astimezone(UTC) == datetime.fromtimestamp(946_684_800 + first["_lsn"], UTC)
    # ranges without a row
    for options in ({"startingLsn": "FF/0"}, {"endingLsn": "0/1"}, {"endingLsn": "0/0"}):
        assert _batch(spark, lake, **options).collect() == []
    for options, message in (
        ({"table": "keyed"}, "does not have the form schema.table"),
        ({"startingLsn": "x"}, "startingLsn: "),
        ({"startingLsn": "latest"}, 'startingLsn: "latest" is not valid: it is "earliest", or an LSN'),
        ({"endingLsn": "earliest"}, "endingLsn: "),
    ):
        with pytest.raises(Exception, match=message):
            _batch(spark, lake, **options).collect()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
async def test_a_stream_that_runs_ends_where_a_type_was_widened(tmp_path: Path, spark: SparkSession) -> None:
    register(spark)
    lake, checkpoint = tmp_path / "a#1", str(tmp_path / "checkpoint")
    sink = await begun(make(Path(quote(str(lake)))))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    found: list[tuple[Any, ...]] = []

    def query(**options: str) -> StreamingQuery:
        stream = spark.readStream.format("postgres_changes").options(table="public.t", **options).load(str(lake))
        take = stream.writeStream.foreachBatch(lambda frame, _: found.extend((row["id"], row["note"]) for row in frame.collect()))
        return take.option("checkpointLocation", checkpoint).start()

    with pytest.raises(Exception, match="endingLsn is an option of batch queries"):
        query(endingLsn="0/1").processAllAvailable()
    running = query()
    running.processAllAvailable()
    assert found == [(1, "a")]
    await land(sink, 300, relation("d", ("id", 25, True), ("note", 25, False)), Insert(5, row("hush", "b")))
    with pytest.raises(Exception, match=r'column "id" of table "public\.t" is of another type than when the query started') as refused:
        running.processAllAvailable()
    assert "hush" not in str(refused.value)
    await sink.close()
    # the other types come with the next one
    again = query()
    again.processAllAvailable()
    again.stop()
    assert found == [(1, "a"), ("hush", "b")]


def _batch(spark: SparkSession, lake: Path, **options: str) -> DataFrame:
    return spark.read.format("postgres_changes").options(**{"table": "public.keyed", **options}).load(str(lake))


def _change(row: dict[str, Any]) -> Change:
    return tuple(row[name] for name in COLUMNS)


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
async def test_a_dataframe_of_a_snapshot_stays_at_it(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from subscriber.spark import snapshot

    register(spark)
    assert "PYSPARK_PYTHON" not in caplog.text
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/usr/bin/false")
    register(spark)
    assert "Set the environment variable PYSPARK_PYTHON" in caplog.text
    monkeypatch.undo()
    register(spark)
    sink = await begun(make(tmp_path))
    work = Applier(storage(tmp_path), LocalEngine(storage(tmp_path)), SMALL)
    await land(sink, 200, KEYED, *(Insert(5, row(str(number), "a")) for number in range(20)))
    all_rounds(work)
    options = {"path": str(tmp_path), "table": "public.t"}
    loaded = spark.read.format("postgres_snapshot").options(**options).load()
    first = snapshot(spark, str(tmp_path))
    await land(sink, 300, Insert(5, row("20", "b")))
    await sink.close()
    all_rounds(work)
    pinned = spark.read.format("postgres_snapshot").options(**options, asOfLsn=str(first.lsn)).load()
    assert loaded.count() == loaded.count() == pinned.count() == first.table("public.t").count() == 20
    newest = snapshot(spark, str(tmp_path))
    assert newest.lsn > first.lsn
    assert newest.tables == ["public.t"]
    rows = spark.read.format("postgres_snapshot").options(**options).load().join(newest.table("public.t"), "id")
    assert rows.count() == 21
    await _read_deletion_vectors(tmp_path, spark, monkeypatch)


async def _read_deletion_vectors(path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that a table with deletion vectors was read by Python: whole files, and only where it is installed."""
    from subscriber.spark import snapshot

    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)
    sink = await begun(make(path))
    work = Applier(storage(path), LocalEngine(storage(path)), ApplierSettings(target_rows=100))
    await land(sink, 400, KEYED, *(Insert(5, row(str(number), "c")) for number in range(21, 500)))
    all_rounds(work)
    await land(sink, 500, *(Delete(5, row(str(number), None), None) for number in range(0, 500, 9)))
    await land(sink, 600, *(Update(5, None, None, row(str(number), "d")) for number in range(1, 500, 90)))
    await sink.close()
    all_rounds(work)
    opened = snapshot(spark, str(path))
    table = PinnedTable(storage(path), opened._found.tables[TABLE])
    assert sum(file.vector is not None for file in table.files()) > 1
    frame = opened.table("public.t")
    found = {entry["id"]: entry["note"] for entry in frame.collect()}
    expected = {number: "a" if number < 20 else "b" if number == 20 else "c" for number in range(500) if number % 9}
    assert found == expected | dict.fromkeys((number for number in range(1, 500, 90)), "d")
    assert frame.count() == len(expected)
    plan = frame.where("id = 30").select("note")._jdf.queryExecution().executedPlan().toString()
    assert "EqualTo(id,30)" in plan
    assert "Python" not in plan
    assert [entry["note"] for entry in frame.where("id = 30").collect()] == ["c"]
