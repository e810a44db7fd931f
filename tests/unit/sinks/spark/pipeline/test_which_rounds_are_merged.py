"""Which tables engine ``spark`` gives to MERGE INTO: those whose units are too large for a task."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest

from subscriber.interfaces import TableName
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.merge.keys import rank
from subscriber.sinks.spark.pipeline.engines.engine import TableRound
from subscriber.sinks.spark.pipeline.engines.spark_engine import is_merged, packed, task_count
from subscriber.sinks.spark.pipeline.planning.plan import plan_table
from subscriber.sinks.spark.pipeline.planning.table_work import BaseFile, TableWork
from subscriber.sinks.spark.schema.evolution import Stretch
from subscriber.sinks.spark.schema.table_schema import TableSchema

TARGET = 100
SCHEMA = TableSchema.of_relation(Relation(5, "public", "t", "d", (Column("id", 20, -1, True), Column("v", 25, -1, False))))


def merged(base: list[BaseFile], **changes: range) -> bool:
    """Whether a round is MERGE's; ``changes``: keys by operation."""
    rows = [(op, key) for op, keys in changes.items() for key in keys]
    table = pa.table(
        {
            "_op": pa.array([op for op, _ in rows], pa.string()),
            "_lsn": pa.array([5] * len(rows), pa.int64()),
            "_seq": pa.array(range(len(rows)), pa.int64()),
            "_moved": pa.array([False] * len(rows)),
            "_un": pa.nulls(len(rows), pa.list_(pa.string())),
            "id": pa.array([key for _, key in rows], pa.int64()),
        }
    )
    stretches = (Stretch(("a",), SCHEMA, ()),)
    task = TableWork(directory="t", schema=SCHEMA, base=tuple(base), stretches=stretches, after=0, target_rows=TARGET)
    # what is asked of them is nothing
    delta, source, declared = cast("Any", None), cast("Any", None), cast("Any", (None, None))
    return is_merged(TableRound(TableName("public", "t"), "app", delta, source, task, plan_table(task, table), None, declared), 8)


def file(rows: int, low: int | None, high: int | None = None, name: str = "f") -> BaseFile:
    return BaseFile(name, rows, None if low is None else (rank(low), rank(low if high is None else high)))


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ([file(8 * TARGET, 0, 10_000)], {"u": range(500)}, False),
        ([file(8 * TARGET + 1, 0, 10_000)], {"u": range(500)}, True),
        # no change of a key in the large file
        ([file(8 * TARGET + 1, 0, 10_000), file(80, 20_000, 30_000, "g")], {"u": range(20_000, 20_003)}, False),
        # files that overlap are one unit
        ([file(5 * TARGET, 0, 99), file(5 * TARGET, 90, 200, "g")], {"u": range(3)}, True),
        ([file(5 * TARGET, 0, 99), file(5 * TARGET, 100, 200, "g")], {"u": range(3)}, False),
        # keys divide nothing
        ([file(9 * TARGET, None)], {"u": range(60)}, True),
        # a unit divides new rows
        ([file(2, 0, 1)], {"i": range(2, 2 + 21 * TARGET)}, False),
        ([], {"i": range(9 * TARGET)}, False),
    ],
)
def test_large_units_are_merged(base: list[BaseFile], changes: dict[str, range], *, expected: bool) -> None:
    assert merged(base, **changes) is expected


@pytest.mark.parametrize(
    ("weights", "parts", "expected"),
    [
        ([], 3, []),
        ([5], 3, [[0]]),
        ([1, 1, 9, 1], 2, [[2], [0, 1, 3]]),
        ([4, 3, 2, 1], 2, [[0, 3], [1, 2]]),
    ],
)
def test_units_are_packed_by_their_weight(weights: list[int], parts: int, expected: list[list[int]]) -> None:
    assert packed(weights, parts) == expected


@pytest.mark.parametrize(("rows", "cores", "expected"), [(0, 2, 2), (500_000, 2, 2), (2_000_000, 2, 5), (10**8, 2, 6), (500_000, 100, 100)])
def test_small_work_has_a_task_for_each_core(rows: int, cores: int, expected: int) -> None:
    assert task_count(rows, cores) == expected
