"""A session of Spark Connect is refused in one line."""

from __future__ import annotations

from typing import Any

import pytest

from subscriber.errors import ConfigurationError
from subscriber.sinks.spark.session.spark_session import refuse_connect, spark_session


def test_spark_connect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    connected: Any = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(ConfigurationError, match="not one of Spark Connect"):
        refuse_connect(connected)
    with pytest.raises(ConfigurationError, match="not one of Spark Connect"):
        spark_session("sc://127.0.0.1:15002")
    monkeypatch.setenv("SPARK_REMOTE", "sc://127.0.0.1:15002")
    with pytest.raises(ConfigurationError, match="not one of Spark Connect"):
        spark_session(None)
