"""``subscriber demo --target spark``: the same show with a lake, and the same proof by Spark SQL. Needs Spark: ``make test-spark``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.testing.load.tables import TABLES
from tests.support.lakes import storage

WAIT_SECONDS = 500.0


def demo(scratch: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "subscriber", "demo", *arguments]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_into_a_lake_that_spark_keeps(scratch: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    done = demo(scratch, "--target=spark", f"--keep={tmp_path / 'kept'}", "--rows=2000", "--seconds=4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Both databases hold the same rows." in done.stdout
    assert re.search(r"target: +a lake in \S+, applied by engine local, read by Spark \d", done.stdout)
    assert re.search(r"rows applied \([\d,]+/s\); behind: .*, \d+\.\d\d s", done.stdout)
    assert re.search(r"4\. The proof: .*by Spark SQL, at LSN [0-9A-F]+/[0-9A-F]+", done.stdout)
    assert "DIFFERENT" not in done.stdout
    assert "NOT THE SAME" not in done.stdout
    for table in TABLES:
        assert f"\n   {table} " in done.stdout
    # the examples of the first page, with their output
    assert re.search(r"lake = snapshot\(spark, .*joined\.orderBy.*\+---.*readStream.*\| +c\|", done.stdout, re.DOTALL), done.stdout
    kept = read_snapshot(storage(tmp_path / "kept"))
    assert kept is not None
    assert {name.name for name in kept.tables} == {*TABLES}
    left = [path.name for path in scratch.iterdir()]
    assert not [name for name in left if name.startswith("subscriber-demo")]


@pytest.mark.spark
def test_directory_with_other_files_is_not_changed(scratch: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    (tmp_path / "mine").write_text("x")
    done = demo(scratch, f"--target=spark://{tmp_path}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"subscriber: {tmp_path} exists and is not empty (hint: the demo makes a lake there")
    assert (tmp_path / "mine").read_text() == "x"
