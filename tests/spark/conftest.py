"""Tests that need Spark itself: ``make test-spark``. Without pyspark or Java they are skipped, and say why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from subscriber.errors import ConfigurationError

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
        pytest.skip(error.one_line())
    yield session
    session.stop()
