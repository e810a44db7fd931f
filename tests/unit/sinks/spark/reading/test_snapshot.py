"""Which files Spark is given to read where it has no Delta jar: those of the snapshot, by names that it takes as they are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.reading.snapshot import snapshot
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier
from tests.unit.sinks.spark.stream import RELATION, batch, begun, make, row, transaction


class NoSpark:
    """In place of a session and its reader: records what it was asked to read."""

    def __init__(self) -> None:
        self.files: tuple[str, ...] = ()
        self.conf: dict[str, str] = {}

    @property
    def read(self) -> Self:
        return self

    def schema(self, _: Any) -> Self:
        return self

    def parquet(self, *files: str, **_: str) -> Self:
        self.files = files
        return self


@pytest.mark.spark
@pytest.mark.parametrize("name", ["plain", "a blank", "ümläut", "[x]{y}*?", "50%", "a%zz:b", "a#1"])
async def test_a_lake_may_lie_in_a_directory_of_any_name(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    lake = tmp_path / name
    url = quote(str(lake))
    sink = await begun(make(Path(url)))
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), None, None)) for n in range(30)))))
    await sink.advance(Lsn(200))
    await sink.close()
    all_rounds(applier(lake))
    spark: Any = NoSpark()
    snapshot(spark, f"spark://{url}").table("public.t")
    # as Hadoop reads a pattern: a backslash before a character takes it as it is
    assert not [file for file in spark.files if re.search(r"(?<!\\)[\[\]{}*?]", file)]
    named = {Path(re.sub(r"\\(.)", r"\1", file)) for file in spark.files}
    assert named == set((lake / "tables/public/t").glob("*.parquet"))
    assert len(named) > 1
