"""The user's settings of Spark take precedence over the applier's own defaults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
from subscriber.sinks.spark.session.spark_session import spark_session
conf = {"spark.log.level": "ERROR", "spark.sql.session.timeZone": "Europe/Berlin", "spark.driver.memory": "600m"}
spark = spark_session("local[1]", conf)
for name in ("spark.app.name", "spark.sql.shuffle.partitions", "spark.sql.session.timeZone", "spark.python.worker.reuse", "spark.x"):
    print("=", name, spark.conf.get(name))
print("=", "memory", spark.sparkContext._jvm.Runtime.getRuntime().maxMemory() // 1024**2)
spark.stop()
"""


@pytest.mark.timeout(400)
def test_settings_of_the_user_take_precedence(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    (tmp_path / "spark-defaults.conf").write_text("spark.sql.shuffle.partitions  64\nspark.sql.session.timeZone=Asia/Tokyo\n")
    environment = {**os.environ, "SPARK_CONF_DIR": str(tmp_path), "PYSPARK_SUBMIT_ARGS": "--conf 'spark.x=b c' pyspark-shell"}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(line[2:].split(" ", 1) for line in done.stdout.splitlines() if line.startswith("= "))
    assert int(found.pop("memory")) <= 600
    assert found == {
        "spark.app.name": "subscriber spark-apply",
        "spark.sql.shuffle.partitions": "64",
        "spark.sql.session.timeZone": "Europe/Berlin",
        "spark.python.worker.reuse": "true",
        "spark.x": "b c",
    }
