"""Units read every file that may have the row of a change. Otherwise the row's earlier version would remain."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.merge.keys import rank
from subscriber.sinks.spark.pipeline.planning.plan import plan_table
from subscriber.sinks.spark.pipeline.planning.table_work import BaseFile, TableWork
from subscriber.sinks.spark.schema.evolution import Stretch
from subscriber.sinks.spark.schema.table_schema import TableSchema

SCHEMA = TableSchema.of_relation(Relation(5, "public", "t", "d", (Column("id", 20, -1, True), Column("v", 25, -1, False))))


def file(name: str, rows: int, low: int, high: int) -> BaseFile:
    return BaseFile(name, rows, (rank(low), rank(high)), 1_000_000)


def require_all_read(base: list[BaseFile], keys: list[int], moved: tuple[int, int] | None) -> None:
    """Plan changes of these keys, and of a row that moves from one key to another."""
    all_ = [*keys, *(moved or ())]
    moves = [*([False] * len(keys)), *([False, True] if moved else [])]
    changes = pa.table(
        {
            "_op": pa.array(["u"] * len(keys) + (["d", "u"] if moved else []), pa.string()),
            "_lsn": pa.array([5] * len(all_), pa.int64()),
            "_seq": pa.array(range(len(all_)), pa.int64()),
            "_moved": pa.array(moves),
            "_un": pa.nulls(len(all_), pa.list_(pa.string())),
            "id": pa.array(all_, pa.int64()),
        }
    )
    work = TableWork(
        directory="t", schema=SCHEMA, base=tuple(base), stretches=(Stretch(("a",), SCHEMA, ()),), after=0, target_rows=1000, vectors=True
    )
    units = plan_table(work, changes).units
    for key in all_:
        column = pa.chunked_array([pa.array([key], pa.int64())])
        (unit,) = [one for one in units if any(range_.mask(column)[0].as_py() for range_ in one.ranges)]
        read = {one.path for one in unit.base}
        for one in base:
            assert one.range is not None
            assert one.path in read or not one.range[0] <= rank(key) <= one.range[1], (key, one.path)


def test_file_that_others_merge_and_one_unit_has_alone() -> None:
    large = [file(f"large-{number}", 1000, number * 100, number * 100 + 99) for number in range(3)]
    wide = [file(f"wide-{number}", 200, 10, 150) for number in range(16)]
    require_all_read([*large, *wide, file("joined", 200, 110, 250)], [5, 120], (130, 240))


@pytest.mark.parametrize("seed", range(2))
def test_random_files(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(15):
        large = [file(f"large-{number}", dice.randrange(250, 1500), number * 100, number * 100 + 99) for number in range(6)]
        small = []
        for number in range(dice.randrange(60)):
            low = dice.randrange(600)
            small.append(file(f"small-{number}", dice.randrange(1, 250), low, min(low + dice.randrange(200), 599)))
        keys = [dice.randrange(600) for _ in range(dice.randrange(1, 30))]
        require_all_read([*large, *small], keys, (dice.randrange(600), dice.randrange(600)))
