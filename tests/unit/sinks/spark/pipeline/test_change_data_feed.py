"""The Change Data Feed of a table equals its change log: it has the net changes of each commit, once, whatever was killed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge import units as merge_unit_module
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.engine import Engine
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.planning import plan as plan_module
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import seeds
from tests.unit.sinks.spark.model import NAMES, Publisher, text_of
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, storage
from tests.unit.sinks.spark.stream import batch, begun, make

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


def columns_of(table: str) -> list[str]:
    return {"keyed": ["id", "big"], "pairs": ["name", "n", "big", "v"], "full": ["a"], "log": ["what"]}[table]


Feed = Mapping[int, tuple[Counter[Row], Counter[Row]]]
"""The deleted and the inserted rows of each version."""


async def changed_lake(path: Path, dice: random.Random, monkeypatch: pytest.MonkeyPatch, engine: Callable[[], Engine]) -> Snapshot:
    """A lake whose tables have feeds, after changes and kills, with all changes in the logs."""
    # tables of a test are small, and small files are rewritten: here some are, and others get deletion vectors
    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)
    monkeypatch.setattr(plan_module, "_DELETED_PART", 2)
    publisher = Publisher(dice.randrange(1000))
    sink = await begun(make(path), tables=NAMES)
    settings = ApplierSettings(target_rows=10)
    await sink.apply(batch(publisher.transaction(60)))
    await sink.advance(Lsn(publisher.end))
    all_rounds(Applier(storage(path), engine(), settings))
    for table in NAMES:
        DeltaTable(str(path / "tables/public" / table.name)).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    real, kills = LakeDelta.commit, 0

    def fragile(table: LakeDelta, *arguments: Any, **named: Any) -> None:
        if dice.random() < 0.1:
            raise Killed
        real(table, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(LakeDelta, "commit", fragile)
        for _ in range(8):
            await sink.apply(batch(publisher.transaction(20)))
            await sink.advance(Lsn(publisher.end))
            try:
                Applier(storage(path), engine(), settings).run_round()
            except Killed:
                kills += 1
    await sink.close()
    work = Applier(storage(path), engine(), settings)
    snapshot = all_rounds(work)
    work.tidy(now=True)
    assert kills
    return snapshot


def assert_fed(path: Path, feed: Callable[[str, list[str]], Feed]) -> None:
    """The feed of each table has the difference between the log's states at two commits. ``feed`` reads it from version 2 on."""
    for table in NAMES:
        columns, uri = columns_of(table.name), str(path / "tables/public" / table.name)
        states = {100: Counter[Row](), **dict(logged(path, table.name, columns))}
        lsns = {entry["version"]: _reached(entry, states) for entry in DeltaTable(uri).history() if "userMetadata" in entry}
        changes = feed(uri, columns)
        before = states[lsns[max(version for version in lsns if version < 2)]]
        for version in sorted(version for version in lsns if version >= 2):
            after = states[lsns[version]]
            gone, new = changes.get(version, (Counter(), Counter()))
            # columns that are not compared may have changed alone; then a row of the feed is on both sides
            assert gone - new == before - after, (table, version)
            assert new - gone == after - before, (table, version)
            before = after


def _reached(entry: Mapping[str, Any], states: Mapping[int, Counter[Row]]) -> int:
    lsn = int(Lsn.parse(json.loads(entry["userMetadata"])["lsn"]))
    return max(known for known in states if known <= lsn)


def fed(uri: str, columns: list[str]) -> Feed:
    """By delta-rs."""
    found: dict[int, tuple[Counter[Row], Counter[Row]]] = {}
    for item in pa.table(DeltaTable(uri).load_cdf(starting_version=2)).to_pylist():
        side = item["_change_type"] in {"insert", "update_postimage"}
        sides = found.setdefault(item["_commit_version"], (Counter(), Counter()))
        sides[side][tuple(text_of(item[name]) for name in columns)] += 1
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@seeds(1, 3)
async def test_feed_is_the_changes_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    kinds = Counter[str]()

    def counted(name: str) -> None:
        real = getattr(merge_unit_module, name)

        def call(place: Storage, unit: Unit) -> UnitResult:
            kinds[name] += unit.feed
            found: UnitResult = real(place, unit)
            return found

        monkeypatch.setattr(merge_unit_module, name, call)

    for name in ("_merged", "_marked"):
        counted(name)
    await changed_lake(tmp_path, random.Random(seed), monkeypatch, lambda: LocalEngine(storage(tmp_path)))
    assert all(kinds[name] for name in ("_merged", "_marked"))
    assert_fed(tmp_path, fed)
