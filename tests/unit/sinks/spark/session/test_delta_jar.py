"""Which Spark a Delta jar is for; and a session whose jar is another Spark's, or is not there (needs Spark and Maven: make test-spark)."""

from __future__ import annotations

import pytest

from subscriber.sinks.spark.session.spark_session import jar_is_for


@pytest.mark.parametrize(
    ("jar", "spark"),
    [
        ("spark://127.0.0.1:1/jars/io.delta_delta-spark_4.1_2.13-4.4.0.jar", "4.1"),
        ("file:/jars/delta-spark_4.0_2.13-4.3.1.jar", "4.0"),
        ("delta-spark_2.13-4.0.0.jar", "4.0"),
        ("delta-spark_2.12-3.3.1.jar", "3.5"),
        ("delta-spark_2.13-9.9.0.jar", None),
        ("delta-storage-4.4.0.jar", None),
        ("", None),
    ],
)
def test_version_of_spark_in_the_name_of_a_jar(jar: str, spark: str | None) -> None:
    assert jar_is_for(jar) == spark
