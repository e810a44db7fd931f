"""The Change Data Feed of a table equals its change log: Delta's ``table_changes`` has the net changes of each commit, once."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.delta.test_engines_on_one_lake import engine_of
from tests.unit.sinks.spark.model import NAMES, Publisher, text_of
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, storage
from tests.unit.sinks.spark.stream import batch, begun, make

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

Row = tuple[str | None, ...]


def logged(path: Path, table: str, columns: list[str]) -> Iterator[tuple[int, Counter[Row]]]:
    """The rows that a table has after each transaction, folded from its change log without the code of the applier."""
    log = DeltaTable(str(path / "log/public" / table)).to_pyarrow_table().sort_by([("_lsn", "ascending"), ("_seq", "ascending")])
    keys = {"keyed": ["id"], "pairs": ["name", "n"]}.get(table, columns)
    rows: dict[Row, list[dict[str, Any]]] = {}
    left: dict[str, Any] = {}
    for lsn in pc.unique(log["_lsn"]).to_pylist():
        for item in log.filter(pc.equal(log["_lsn"], lsn)).to_pylist():
            key = tuple(text_of(item[name]) for name in keys) + ((item["_special"],) if table not in {"keyed", "pairs"} else ())
            there = rows.setdefault(key, [])
            if item["_op"] == "t":
                rows.clear()
            elif item["_op"] == "d":
                left = there.pop()
            else:
                before = left if item["_moved"] else (there[-1] if there and table in {"keyed", "pairs"} else {})
                item |= {name: before[name] for name in item["_un"] or ()}
                if table in {"keyed", "pairs"}:
                    there.clear()
                there.append(item)
        yield lsn, Counter(tuple(text_of(item[name]) for name in columns) for all_ in rows.values() for item in all_)


def fed(spark: SparkSession, uri: str, columns: list[str], last: int) -> dict[int, tuple[Counter[Row], Counter[Row]]]:
    """The deleted and the inserted rows of each version, by ``table_changes``."""
    texts = [f"CAST({name} AS STRING)" for name in columns]
    found: dict[int, tuple[Counter[Row], Counter[Row]]] = {}
    reader = spark.read.format("delta").option("readChangeFeed", "true").option("startingVersion", 2).option("endingVersion", last)
    for version, type_, *values in reader.load(uri).selectExpr("_commit_version", "_change_type", *texts).collect():
        side = type_ in {"insert", "update_postimage"}
        found.setdefault(version, (Counter(), Counter()))[side][tuple(values)] += 1
    return found


def columns_of(table: str) -> list[str]:
    return {"keyed": ["id", "big"], "pairs": ["name", "n", "big", "v"], "full": ["a"], "log": ["what"]}[table]


@pytest.mark.parametrize("name", ["local", "merge"])
async def test_table_changes_are_the_changes_of_the_log(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    dice, publisher = random.Random(name), Publisher(3)
    sink = await begun(make(tmp_path), tables=NAMES)
    settings = ApplierSettings(target_rows=10)
    await sink.apply(batch(publisher.transaction(60)))
    await sink.advance(Lsn(publisher.end))
    snapshot: Snapshot = all_rounds(Applier(storage(tmp_path), engine_of(name, delta, tmp_path), settings))
    for table in NAMES:
        uri = tmp_path / "tables/public" / table.name
        delta.sql(f"ALTER TABLE delta.`{uri}` SET TBLPROPERTIES ('delta.enableChangeDataFeed' = 'true')").collect()
    real, kills = LakeDelta.commit, 0

    def fragile(table: LakeDelta, *arguments: Any, **named: Any) -> None:
        if dice.random() < 0.1:
            raise Killed
        real(table, *arguments, **named)

    monkeypatch.setattr(LakeDelta, "commit", fragile)
    for _ in range(8):
        await sink.apply(batch(publisher.transaction(20)))
        await sink.advance(Lsn(publisher.end))
        try:
            Applier(storage(tmp_path), engine_of(name, delta, tmp_path), settings).run_round()
        except Killed:
            kills += 1
    monkeypatch.undo()
    await sink.close()
    work = Applier(storage(tmp_path), engine_of(name, delta, tmp_path), settings)
    snapshot = all_rounds(work)
    work.tidy(now=True)
    assert kills
    for table in NAMES:
        columns = columns_of(table.name)
        states = {100: Counter[Row](), **dict(logged(tmp_path, table.name, columns))}
        history = DeltaTable(str(tmp_path / "tables/public" / table.name)).history()
        lsns = {entry["version"]: _reached(entry, states) for entry in history if "userMetadata" in entry}
        changes = fed(delta, str(tmp_path / "tables/public" / table.name), columns, snapshot.tables[table].version)
        versions = sorted(version for version in lsns if version >= 2)
        before = states[max(lsn for lsn in states if lsn <= lsns[max(version for version in lsns if version < 2)])]
        for version in versions:
            after = states[lsns[version]]
            gone, new = changes.get(version, (Counter(), Counter()))
            # columns that are not compared may have changed alone; then a row of the feed is on both sides
            assert gone - new == before - after, (table, version)
            assert new - gone == after - before, (table, version)
            before = after


def _reached(entry: dict[str, Any], states: dict[int, Counter[Row]]) -> int:
    lsn = int(Lsn.parse(json.loads(entry["userMetadata"])["lsn"]))
    return max(known for known in states if known <= lsn)
