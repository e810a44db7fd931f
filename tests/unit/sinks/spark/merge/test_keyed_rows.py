"""Whether the table has a row of every key that is put: MERGE INTO is asked to insert nothing then."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.merge.fold import merge_keyed_rows
from subscriber.sinks.spark.schema.table_schema import TableSchema

SCHEMA = TableSchema.of_relation(Relation(5, "public", "t", "d", (Column("id", 20, -1, True), Column("v", 25, -1, False))))


def rows(schema: pa.Schema, **columns: list[Any]) -> pa.Table:
    count = len(next(iter(columns.values())))
    return pa.table({field.name: pa.array(columns.get(field.name, [None] * count), field.type) for field in schema}, schema=schema)


@pytest.mark.parametrize(
    ("there", "changes", "known", "missing"),
    [
        ([1, 2], [("u", 1, False), ("u", 2, False)], True, 0),
        ([1, 2], [("u", 1, False), ("d", 2, False)], True, 0),
        ([1], [("d", 1, False)], True, 0),
        ([1], [("u", 1, False), ("i", 3, False)], False, 0),
        # a row that comes back
        ([1], [("d", 1, False), ("i", 1, False)], True, 0),
        # one that comes and goes
        ([1], [("u", 1, False), ("i", 3, False), ("d", 3, False)], True, 0),
        # a row that moves: to a key that was not there, and to one that was
        ([1, 2], [("d", 1, False), ("u", 3, True)], False, 0),
        ([1, 2], [("d", 2, False), ("d", 1, False), ("u", 2, True)], True, 0),
        # an UPDATE whose row is not there is passed over
        ([1], [("u", 1, False), ("u", 5, False)], True, 1),
        ([1], [("u", 5, False), ("i", 5, False)], False, 1),
        # what a table begins with
        ([], [("i", 1, False)], False, 0),
        ([1], [("t", None, False), ("i", 1, False)], False, 0),
    ],
)
def test_whether_the_keys_are_known(there: list[int], changes: list[tuple[str, int | None, bool]], *, known: bool, missing: int) -> None:
    ops, ids, moved = ([change[place] for change in changes] for place in range(3))
    count = len(changes)
    found = merge_keyed_rows(
        rows(SCHEMA.current, id=there, v=["old"] * len(there)),
        rows(SCHEMA.landing, _op=ops, id=ids, _moved=moved, _lsn=[5] * count, _seq=list(range(count)), v=["new"] * count),
        SCHEMA,
    )
    assert found.known is known
    assert found.missing.updates == missing
    left = set() if found.cleared else set(there)
    assert found.known is (set(found.puts["id"].to_pylist()) <= left)
