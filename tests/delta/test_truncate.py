"""TRUNCATE of a table to which other writers gave features, properties and comments: it continues, and keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Delete, Insert, Message, Truncate, TruncateOption, Update
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.planning import plan as plan_module
from tests.delta.test_engines_on_one_lake import by_delta_rs, by_the_jar, engine_of
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, batch, begun, make, row, transaction

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]

FOR_ALL = (
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableDeletionVectors' = 'true', 'a.b' = 'c')",
    "ALTER TABLE {} ALTER COLUMN note COMMENT 'of another writer'",
    "ALTER TABLE {} SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name', 'delta.minReaderVersion' = 2, 'delta.minWriterVersion' = 5)",
    "COMMENT ON TABLE {} IS 'ours too'",
)
ONLY_FOR_DELTA = ("ALTER TABLE {} CLUSTER BY (id)", "ALTER TABLE {} SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')")
CLEARED = Truncate(TruncateOption(0), (5,))
STEPS: tuple[tuple[list[Message], dict[int, str]], ...] = (
    (
        [Update(5, None, None, row("1", "b", None)), Delete(5, row("2", None, None), None)],
        {0: "a", 1: "b"} | dict.fromkeys(range(3, 40), "a"),
    ),
    ([CLEARED], {}),
    ([CLEARED], {}),
    ([Insert(5, row("1", "c", None)), Insert(5, row("50", "c", None))], {1: "c", 50: "c"}),
    (
        [
            Update(5, None, None, row("1", "lost", None)),
            CLEARED,
            Insert(5, row("1", "d", None)),
            Insert(5, row("7", "d", None)),
            Insert(5, row("8", "lost", None)),
            Update(5, row("7", None, None), None, row("9", "e", None)),
            Delete(5, row("8", None, None), None),
        ],
        {1: "d", 9: "e"},
    ),
    ([Insert(5, row("2", "lost", None)), CLEARED], {}),
    ([Insert(5, row("3", "f", None)), Delete(5, row("3", None, None), None), Insert(5, row("4", "f", None))], {4: "f"}),
)


@pytest.mark.parametrize("name", ["local", "spark"])
async def test_truncate_keeps_what_others_gave_the_table(
    tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The bug was that engine ``spark`` stopped a clustered table at TRUNCATE, and for good, because the next rounds had it too."""
    monkeypatch.setattr(plan_module, "_TINY_BYTES", 0)
    uri = f"delta.`{tmp_path}/tables/public/t`"
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, *(Insert(5, row(str(n), "a", None)) for n in range(40)))))
    await sink.advance(Lsn(200))
    all_rounds(Applier(storage(tmp_path), engine_of(name, delta, tmp_path)))
    for statement in (*FOR_ALL, *(ONLY_FOR_DELTA if name == "spark" else ())):
        delta.sql(statement.format(uri)).collect()

    def detail() -> tuple[object, ...]:
        (found,) = delta.sql(f"DESCRIBE DETAIL {uri}").collect()
        comments = [field.metadata.get("comment") for field in delta.table(uri).schema]
        return found["clusteringColumns"], found["properties"], found["description"], found["tableFeatures"], comments

    before = detail()
    assert before[0] == (["id"] if name == "spark" else [])
    assert before[1]["a.b"] == "c"  # type: ignore[index]
    assert before[4] == [None, "of another writer", None, None]
    end = 200
    for messages, expected in STEPS:
        end += 100
        await sink.apply(batch(transaction(end, *messages)))
        await sink.advance(Lsn(end))
        # a new one each time: nothing is known but what the table says
        work = Applier(storage(tmp_path), engine_of(name, delta, tmp_path), ApplierSettings(target_rows=100))
        snapshot = all_rounds(work)
        assert not snapshot.stopped, snapshot.stopped
        assert snapshot.lsn == end
        found = by_the_jar(delta, tmp_path, snapshot)
        assert sorted((entry[0], entry[1]) for entry in found["t"].elements()) == sorted(expected.items())
        if name == "local":
            assert found == by_delta_rs(tmp_path, snapshot)
        assert work.missing.updates + work.missing.deletes == 0
        assert detail() == before
    await sink.close()
    history = delta.sql(f"DESCRIBE HISTORY {uri}").collect()
    told = [json.loads(entry["userMetadata"]) for entry in history if entry["userMetadata"]]
    assert [one["lsn"] for one in told if one["subscriber"] == "apply"] == [str(Lsn(lsn)) for lsn in range(end, 100, -100)]
