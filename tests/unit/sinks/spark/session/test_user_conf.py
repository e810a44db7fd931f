"""The user's settings of Spark are found and take precedence, and a session of Spark Connect is refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import ConfigurationError
from subscriber.sinks.spark.session.spark_session import refuse_connect, spark_session
from subscriber.sinks.spark.session.user_conf import user_conf


def test_defaults_file_and_arguments_are_read(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# comment\n! comment\n\nspark.master            spark://host:7077\nspark.sql.shuffle.partitions=64\n"
        "  spark.ui.enabled : true  \nspark.executor.extraJavaOptions  -Dkey=value -XX:+UseG1GC\nother.name 1\n"
    )
    environment = {
        "SPARK_CONF_DIR": str(tmp_path),
        "PYSPARK_SUBMIT_ARGS": "--conf spark.driver.memory=3g --conf 'spark.a=b c' pyspark-shell",
    }
    assert user_conf(environment) == {
        "spark.master": "spark://host:7077",
        "spark.sql.shuffle.partitions": "64",
        "spark.ui.enabled": "true",
        "spark.executor.extraJavaOptions": "-Dkey=value -XX:+UseG1GC",
        "spark.driver.memory": "3g",
        "spark.a": "b c",
    }


def test_without_a_defaults_file_there_are_no_settings(tmp_path: Path) -> None:
    assert user_conf({"SPARK_CONF_DIR": str(tmp_path)}) == {}


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
