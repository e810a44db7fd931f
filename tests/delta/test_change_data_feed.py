"""Delta's own ``table_changes`` equals the change log, whichever engine wrote the table."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.delta.test_engines_on_one_lake import engine_of
from tests.unit.sinks.spark.pipeline.test_change_data_feed import Feed, Row, assert_fed, changed_lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def spark_feed(delta: SparkSession) -> Callable[[str, list[str]], Feed]:
    """Reads the feed of a table by ``table_changes``."""

    def fed(uri: str, columns: list[str]) -> Feed:
        texts = [f"CAST({column} AS STRING)" for column in columns]
        found: dict[int, tuple[Counter[Row], Counter[Row]]] = {}
        rows = delta.sql(f"SELECT * FROM table_changes('delta.`{uri}`', 2)")
        for version, type_, *values in rows.selectExpr("_commit_version", "_change_type", *texts).collect():
            side = type_ in {"insert", "update_postimage"}
            found.setdefault(version, (Counter(), Counter()))[side][tuple(values)] += 1
        return found

    return fed


@pytest.mark.parametrize("name", ["local", "merge"])
async def test_table_changes_are_the_changes_of_the_log(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await changed_lake(tmp_path, random.Random(3), monkeypatch, lambda: engine_of(name, delta, tmp_path))
    assert_fed(tmp_path, spark_feed(delta))
