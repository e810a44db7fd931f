"""Which rounds engine ``merge`` gives to MERGE INTO, and which to units: by the changes, and by the table's files."""

from __future__ import annotations

from typing import Any, cast

import pyarrow as pa
import pytest

from subscriber.abc import TableName
from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.merge.keys import rank
from subscriber.sinks.spark.pipeline.engines import TableRound
from subscriber.sinks.spark.pipeline.merge_engine import _is_merged
from subscriber.sinks.spark.pipeline.plan import BaseFile, TableWork, plan_table
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
    return _is_merged(TableRound(TableName("public", "t"), "app", delta, source, task, plan_table(task, table), None, declared))


def file(rows: int, low: int | None, high: int | None = None, name: str = "f") -> BaseFile:
    return BaseFile(name, rows, None if low is None else (rank(low), rank(low if high is None else high)))


WIDE = file(100, 0, 99)


@pytest.mark.parametrize(
    ("base", "changes", "expected"),
    [
        ([WIDE], {"u": range(24)}, True),
        ([WIDE], {"u": range(25)}, False),
        ([WIDE], {"u": range(10), "i": range(100, 110), "d": range(90, 94)}, True),
        ([WIDE], {"u": range(10), "i": range(100, 110), "d": range(90, 95)}, False),
        # however many
        ([WIDE], {"i": range(100, 100 + 9 * TARGET)}, False),
        ([WIDE], {"d": range(100)}, False),
        ([file(2, 0, 1)], {"i": range(2, 2 + 21 * TARGET)}, False),
        # two clusters that are touched, and small
        ([file(10, 0, 9), file(10, 20, 29, "g")], {"u": range(5, 24)}, True),
        ([file(10, 0, 9), file(10, 20, 29, "g")], {"u": range(5, 24), "i": range(30, 100)}, False),
        # files that overlap and would be divided
        ([file(80, 0, 99), file(80, 0, 99, "g")], {"u": range(3)}, False),
        # keys divide nothing
        ([file(100, 7)], {"u": range(7, 8), "i": range(7, 8)}, True),
        ([file(100, 7), file(100, 7, name="g")], {"i": range(7, 300)}, True),
        ([file(100, None)], {"u": range(60)}, True),
        # more than one task should hold
        ([file(8 * TARGET + 1, 0, 10_000)], {"u": range(500)}, True),
        ([file(8 * TARGET, 0, 10_000)], {"u": range(500)}, False),
        # a first load
        ([], {"i": range(3)}, False),
        # many small files
        ([file(3, 10 * number, 10 * number + 5, str(number)) for number in range(17)], {"u": range(3)}, False),
        ([file(3, 10 * number, 10 * number + 5, str(number)) for number in range(16)], {"u": range(3)}, True),
    ],
)
def test_steady_rounds_are_merged(base: list[BaseFile], changes: dict[str, range], *, expected: bool) -> None:
    assert merged(base, **changes) is expected
