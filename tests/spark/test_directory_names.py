"""A lake in a directory of any name: Spark reads the rows that were applied, with deletion vectors and without."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from subscriber.protocol.messages import Delete, Insert
from subscriber.sinks.spark.pipeline.applier import ApplierSettings
from subscriber.sinks.spark.pipeline.planning import plan as plan_module
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.spark import snapshot
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land
from tests.unit.sinks.spark.stream import TABLE, begun, make, row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = ("plain", "a blank", "ümläut", "[x]{y}*?", "{a,b}", "50%", "a%zz:b", "a#1", "a+b", "id=7")


@pytest.mark.filterwarnings("ignore")
async def test_lake_in_a_directory_of_any_name(tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)
    for name in NAMES:
        lake = tmp_path / name
        target = f"spark://{quote(str(lake))}"
        work = applier(lake, ApplierSettings(target_rows=100))
        sink = await begun(make(Path(quote(str(lake)))))
        await land(sink, 200, KEYED, *(Insert(5, row(str(number), name)) for number in range(300)))
        all_rounds(work)
        before = snapshot(spark, target)
        # fewer than a quarter of the rows of one file, so the file is kept
        await land(sink, 300, *(Delete(5, row(str(number), None), None) for number in range(0, 50, 5)))
        await sink.close()
        published = all_rounds(work).tables[TABLE]
        files = PinnedTable(storage(lake), published).files()
        assert {file.vector is None for file in files} == {True, False}, name
        for read, gone in ((before, 0), (snapshot(spark, target), 50)):
            found = sorted(map(tuple, read.table("public.t").select("id", "note").collect()))
            assert found == [(number, name) for number in range(300) if number >= gone or number % 5], name
