"""Tests that need Spark itself: ``make test-spark``. Without pyspark or Java they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from subscriber.errors import ConfigurationError
from tests.support.lacking import lacking

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def spark() -> Iterator[SparkSession]:
    """A session of this test alone, in this process; warnings are Spark's own affair (``filterwarnings``)."""
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    from subscriber.sinks.spark.session.spark_session import spark_session

    try:
        session = spark_session("local[2]", {"spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "2"})
    except ConfigurationError as error:
        lacking(error.one_line())
    yield session
    session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.spark)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))  # a JVM that starts, and jobs beside those of other tests
