"""Rows of the Change Data Feed: the difference between a table before a commit and after it."""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa
import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.spark.merge.units import changed_rows
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema


def schema_of(*keys: str, identity: str = "d") -> TableSchema:
    columns = (("id", pa.int32()), ("v", pa.string()))
    return TableSchema(TableName("public", "t"), identity, tuple(LakeColumn(name, name, type_, name in keys) for name, type_ in columns))


def rows_of(schema: TableSchema, *rows: tuple[int | None, str | None]) -> pa.Table:
    return pa.Table.from_pylist([{"id": id_, "v": value, "_special": None} for id_, value in rows], schema=schema.current)


def found(schema: TableSchema, before: pa.Table, after: pa.Table) -> list[tuple[str, int, str]]:
    return sorted((item["_change_type"], item["id"], item["v"]) for item in changed_rows(before, after, schema).to_pylist())


def test_rows_that_are_as_before_are_not_in_the_feed() -> None:
    schema = schema_of("id")
    before = rows_of(schema, (1, "same"), (2, "old"), (3, "gone"))
    after = rows_of(schema, (4, "new"), (2, "newer"), (1, "same"))
    assert found(schema, before, after) == [
        ("delete", 3, "gone"),
        ("insert", 4, "new"),
        ("update_postimage", 2, "newer"),
        ("update_preimage", 2, "old"),
    ]
    assert found(schema, before, before) == []
    assert found(schema, rows_of(schema), rows_of(schema)) == []


@pytest.mark.parametrize("seed", range(10))
def test_feed_of_equal_rows_counts_them(seed: int) -> None:
    dice, schema = random.Random(seed), schema_of("id", "v", identity="f")
    before, after = ([(dice.randrange(3), dice.choice("ab")) for _ in range(dice.randrange(12))] for _ in range(2))
    changes = Counter(found(schema, rows_of(schema, *before), rows_of(schema, *after)))
    gone, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
    assert changes == Counter({("delete", *row): n for row, n in gone.items()} | {("insert", *row): n for row, n in new.items()})
