"""Every type of PostgreSQL's catalogue, read back from a lake by Spark SQL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from subscriber import Until
from subscriber.spark import snapshot
from tests.integration.lake.test_replica import subscription
from tests.integration.lake.test_types import declared, plain
from tests.support import every_type
from tests.support.database import Database
from tests.support.lake_types import differences, lake_type
from tests.support.lakes import applied

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
async def test_spark_reads_every_type(publisher18_db: Database, tmp_path: Path, spark: SparkSession) -> None:
    publisher, lake = publisher18_db, tmp_path / "lake"
    publisher.execute(every_type.SETUP)
    every_type.create_table(publisher, "t")
    every_type.fill(publisher, "t")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE app.t")
    await subscription(publisher, lake).run(Until())
    await applied(lake)
    frame = snapshot(spark, str(lake)).table("app.t")
    frame.createOrReplaceTempView("every_type")
    found = spark.sql("SELECT * FROM every_type").toArrow()
    types = {name: lake_type(type_) for name, type_ in declared(publisher, "t").items()}
    assert {name: plain(found.schema.field(name).type) for name in types} == types
    rows: dict[int, dict[str, Any]] = {row["id"]: row for row in found.to_pylist()}
    wrong = differences(rows, every_type.texts(publisher, "t"), types)
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:20])
    # json is text that Spark understands
    numbers = spark.sql("SELECT get_json_object(c_json, '$.a[1]') AS x FROM every_type WHERE id = 0").collect()
    assert numbers[0]["x"] == "x"
