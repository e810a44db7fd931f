"""Tests in one Spark session that has the Delta jar, where Maven brings it.

A JVM takes its jars when it starts: these tests run in a process of their own (``make test-spark``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from subscriber.errors import ConfigurationError, TargetUnavailable
from tests.support.lacking import lacking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest) -> Iterator[SparkSession]:
    """With Delta if it can be had, else without."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    with_session = [item for item in request.session.items if "spark" in getattr(item, "fixturenames", ())]
    if not all(item.path.is_relative_to(Path(__file__).parent) for item in with_session):
        # with the others' JVM these would lack the jar, and the others would stop the session of these
        pytest.fail("tests/delta needs a process of its own, because a JVM takes its jars when it starts: make test-spark")
    from subscriber.sinks.spark.session.spark_session import DELTA_CONF, spark_session

    # the client's compiler alone: jobs are short. Its code cache is too small for a thousand queries by default
    os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")
    conf = {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2", "spark.databricks.delta.snapshotPartitions": "2"}
    # VACUUM lists a directory with so many tasks, by default 10,000
    conf["spark.sql.sources.parallelPartitionDiscovery.parallelism"] = "2"
    try:
        try:
            session = spark_session("local[2]", {**conf, **DELTA_CONF})
        except TargetUnavailable:
            session = spark_session("local[2]", conf)
    except ConfigurationError as error:
        lacking(error.one_line())
    yield session
    session.stop()


@pytest.fixture(scope="session")
def delta(spark: SparkSession) -> SparkSession:
    """The session, if it has Delta."""
    from subscriber.sinks.spark.session.spark_session import DELTA_CONF, has_delta

    if not has_delta(spark):
        lacking(f"Maven does not bring {DELTA_CONF['spark.jars.packages']}")
    return spark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))  # a JVM that starts, and jobs beside those of other tests
