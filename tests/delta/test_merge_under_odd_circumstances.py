"""MERGE INTO by engine ``spark`` with unusual settings of a session, names of columns, and places of the lake."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from deltalake import DeltaTable

from subscriber.config import Settings, SubscriptionOptions
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.sink import SparkSink
from subscriber.spark import snapshot as spark_snapshot
from tests.delta.test_engines_on_one_lake import engine_of
from tests.support.delta_tables import delta_rows
from tests.unit.sinks.spark.damage import rot
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import TABLE, batch, begun, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@contextmanager
def configured(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """A setting of a user's: what new sessions begin with."""
    conf: Any = spark.sparkContext._jsc.sc().conf()
    conf.set(name, value)
    try:
        yield
    finally:
        conf.remove(name)


class OneTable:
    """A lake of one table, whose rounds MERGE INTO applies."""

    def __init__(self, path: Path, spark: SparkSession, columns: Sequence[tuple[str, int]]) -> None:
        self.path = path
        self._spark = spark
        self._relation = Relation(5, "public", "t", "d", tuple(Column(name, oid, -1, n == 0) for n, (name, oid) in enumerate(columns)))
        self._end = 200

    async def __aenter__(self) -> OneTable:
        target = f"spark://{quote(str(self.path))}?batch_delay=1h"
        self._sink = await begun(SparkSink(target, options=SubscriptionOptions(), settings=Settings()))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sink.close()

    async def round(self, *messages: Message) -> Snapshot:
        """Apply a transaction, by an applier that knows nothing of the last."""
        described = [self._relation] if self._end == 200 else []
        await self._sink.apply(batch(transaction(self._end, *described, *messages)))
        await self._sink.advance(Lsn(self._end))
        self._end += 100
        return all_rounds(Applier(storage(self.path), engine_of("merge", self._spark, self.path)))

    def rows(self) -> list[tuple[Any, ...]]:
        """As pyarrow reads them: all columns but our own."""
        rows = delta_rows(self.table)
        return sorted(tuple(value for name, value in item.items() if name != "_special") for item in rows)

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(str(self.path / "tables/public/t"))

    @property
    def merged(self) -> int:
        """How many rounds were MERGE INTO's."""
        # delta-rs finds no history where a directory's name has a "?" or "#"
        log = self.path / "tables/public/t/_delta_log"
        actions = [json.loads(line) for file in log.glob("*.json") for line in file.read_text().splitlines()]
        return [action["commitInfo"]["operation"] for action in actions if "commitInfo" in action].count("MERGE")


async def _changed(table: OneTable, width: int) -> None:
    """Two rounds after the first of each kind of change; one row is never changed."""
    some = [str(number) for number in range(6)]
    await table.round(*(Insert(5, row(key, *["1"] * width)) for key in some))
    await table.round(Update(5, None, None, row("1", *["2"] * width)), Delete(5, row("2", *[None] * width), None))
    await table.round(Update(5, row("3", *[None] * width), None, row("9", *["3"] * width)), Insert(5, row("2", *["4"] * width)))


CHANGED = [(0, 1), (1, 2), (2, 4), (4, 1), (5, 1), (9, 3)]


@pytest.mark.parametrize("value", ["LEGACY", "EXCEPTION"])
async def test_old_days_are_the_same_whatever_calendar_a_session_has(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    mode = "spark.sql.parquet.datetimeRebaseModeIn"
    with configured(delta, f"{mode}Read", value), configured(delta, f"{mode}Write", value):
        async with OneTable(tmp_path, delta, [("day", 1082), ("at", 1184), ("local", 1114)]) as table:
            days = ["0001-01-01", "1000-01-01", "1582-10-10", "2024-02-29"]
            await table.round(*(Insert(5, row(day, f"{day} 00:00:00+00", f"{day} 00:00:00")) for day in days))
            for number in range(2):
                moments = [f"{days[number]} 0{number + 1}:00:00+00", f"{days[number]} 0{number + 1}:00:00"]
                await table.round(Update(5, None, None, row(days[number], *moments)))
            found = [tuple(map(str, values)) for values in table.rows()]
            hours = ["01", "02", "00", "00"]
            expected = [(day, f"{day} {hour}:00:00+00:00", f"{day} {hour}:00:00") for day, hour in zip(days, hours, strict=True)]
            assert (found, table.merged) == (expected, 2)
            monkeypatch.setattr("subscriber.sinks.spark.reading.snapshot.has_delta", lambda _: False)
            texts = spark_snapshot(delta.newSession(), str(tmp_path)).table(str(TABLE)).selectExpr("string(day)", "string(local)").collect()
            assert sorted(map(tuple, texts)) == [(day, local) for day, _, local in expected]


async def test_files_have_their_counts_where_a_session_collects_none(tmp_path: Path, delta: SparkSession) -> None:
    with configured(delta, "spark.databricks.delta.stats.collect", "false"):
        async with OneTable(tmp_path, delta, [("id", 23), ("v", 23)]) as table:
            await _changed(table, 1)
            assert (table.rows(), table.merged) == (CHANGED, 2)
            assert None not in table.table.get_add_actions(flatten=True).column("num_records").to_pylist()


async def test_lists_as_keys_are_told_apart_whatever_texts_a_session_makes_of_them(tmp_path: Path, delta: SparkSession) -> None:
    with configured(delta, "spark.sql.legacy.castComplexTypesToString.enabled", "true"):
        async with OneTable(tmp_path, delta, [("l", 1022), ("v", 23)]) as table:
            await table.round(Insert(5, row("{}", "1")), Insert(5, row("{NULL}", "1")))
            await table.round(Update(5, None, None, row("{}", "2")))
            assert (table.rows(), table.merged) == ([([], 2), ([None], 1)], 1)


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("_gone", "_metadata"),
        ("_metadata", "_GONE"),
        ("_GONE", "_change_type"),
        ("_change_type", "_Gone_"),
        ("_Gone_", "__row_index"),
        ("__row_index", "_gone"),
    ],
)
async def test_columns_of_names_that_are_used_otherwise(tmp_path: Path, delta: SparkSession, key: str, other: str) -> None:
    async with OneTable(tmp_path, delta, [(key, 23), (other, 23)]) as table:
        await _changed(table, 1)
        assert (table.rows(), table.merged) == (CHANGED, 2)


@pytest.mark.parametrize(
    "name", ["_file_name_", "_ROW_ID_", "_row_dropped_", "_target_row_present_", "_source_row_present_", "_tmp_metadata_row_index"]
)
async def test_tables_with_names_of_merges_own_are_not_merged(tmp_path: Path, delta: SparkSession, name: str) -> None:
    async with OneTable(tmp_path, delta, [("id", 23), (name, 23)]) as table:
        await _changed(table, 1)
        assert (table.rows(), table.merged) == (CHANGED, 0)


async def test_columns_that_spark_does_not_tell_apart(tmp_path: Path, delta: SparkSession) -> None:
    names = ["kıl", "kil", "s", "ſ", "µ", "μ", "K", "k", "i", "İ", "A", "a"]
    async with OneTable(tmp_path, delta, [("id", 23), *((name, 23) for name in names)]) as table:
        await _changed(table, len(names))
        assert (table.rows(), table.merged) == ([(key, *[value] * len(names)) for key, value in CHANGED], 2)
        found = delta.read.format("delta").load(str(tmp_path / "tables/public/t")).drop("_special").collect()
        assert sorted(map(tuple, found)) == table.rows()


async def test_a_lake_in_a_directory_of_an_odd_name(tmp_path: Path, delta: SparkSession) -> None:
    name = "a[b]{a,b} a*a?`b#b"
    (tmp_path / name).mkdir()
    async with OneTable(tmp_path / name, delta, [("id", 23), ("v", 23)]) as table:
        await _changed(table, 1)
        assert (table.rows(), table.merged) == (CHANGED, 2)
        found = spark_snapshot(delta, f"spark://{quote(str(table.path))}").table(str(TABLE)).select("id", "v").collect()
        assert sorted(map(tuple, found)) == CHANGED


async def test_page_that_only_delta_reads_and_that_is_damaged_stops_its_table(tmp_path: Path, delta: SparkSession) -> None:
    async with OneTable(tmp_path, delta, [("id", 23), ("note", 25)]) as one:
        await one.round(*(Insert(5, row(str(number), f"note {number}")) for number in range(5)))
        rot(tmp_path / "tables/public/t", column=1)
        snapshot = await one.round(Update(5, None, None, row("1", "new")))
    assert snapshot.lsn == 300
    assert ".parquet is damaged" in snapshot.stopped[TABLE].error
