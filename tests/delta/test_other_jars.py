"""A Delta jar for another Spark, or a missing one, is reported before any work. Each case has a process, one JVM has one jar."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from subscriber import Until
from subscriber.sinks.spark.session.spark_session import DELTA_CONF
from tests.integration.lake.test_replica import subscription
from tests.support.database import Database
from tests.support.program import subscriber


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("packages", "words"),
    [
        (
            "io.delta:delta-spark_2.13:4.0.0",
            "Delta's jar io.delta_delta-spark_2.13-4.0.0.jar is for Spark 4.0, but this is 4.1",
        ),
        ("", "Spark's settings name Delta's extension, but its jar is missing"),
    ],
)
async def test_a_jar_that_does_not_match(publisher18_db: Database, tmp_path: Path, packages: str, words: str) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    lake = tmp_path / "lake"
    await subscription(publisher18_db, lake).run(Until())
    conf = [f"--conf={name}={value}" for name, value in {**DELTA_CONF, "spark.jars.packages": packages}.items()]
    done = await asyncio.to_thread(
        subscriber, "spark-apply", str(lake), "--engine=spark", "--master=local[1]", "--once", *conf, timeout=500.0
    )
    if "unresolved dependency" in done.errors:
        pytest.skip("Maven is not reached")
    (line,) = [line for line in done.errors.splitlines() if line.startswith("subscriber: ")]
    assert done.status == 1
    assert line.startswith(f"subscriber: {words}"), line
    assert line.endswith(
        "(hint: set spark.jars.packages as docs/explanation/lake.md says, or leave out spark.sql.extensions to do without MERGE INTO)"
    )
    assert not (lake / "snapshots").exists()
