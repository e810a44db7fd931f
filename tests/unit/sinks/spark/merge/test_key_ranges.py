"""Ranges of keys: which parts of landed files a unit of work has to read."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.sinks.spark.merge.key_ranges import KeyRange, row_groups
from subscriber.sinks.spark.merge.keys import rank

Group = tuple[str, list[Any]]
"""Operations and keys of a row group."""


def landed(type_: pa.DataType, groups: list[Group]) -> pq.ParquetFile:
    stream = io.BytesIO()
    schema = pa.schema([("_op", pa.string()), ("id", type_)])
    with pq.ParquetWriter(stream, schema, use_dictionary=["_op"]) as writer:
        for operations, keys in groups:
            writer.write_table(pa.table({"_op": pa.array(list(operations)), "id": pa.array(keys, type_)}, schema=schema))
    return pq.ParquetFile(io.BytesIO(stream.getvalue()))


def chosen(file: pq.ParquetFile, type_: pa.DataType, *ranges: KeyRange) -> list[int]:
    return row_groups(file.schema_arrow, file.metadata, pa.field("id", type_), ranges)


def test_only_groups_with_such_keys() -> None:
    file = landed(pa.int64(), [("ccc", [1, 5, 9]), ("iii", [10, 11, 12]), ("cdi", [20, 30, 10])])
    assert chosen(file, pa.int64(), KeyRange(None, (1, 10))) == [0]
    assert chosen(file, pa.int64(), KeyRange((1, 10), (1, 13))) == [1, 2]
    assert chosen(file, pa.int64(), KeyRange((1, 13), (1, 20))) == [2]
    assert chosen(file, pa.int64(), KeyRange((1, 31), None)) == []
    assert chosen(file, pa.int64(), KeyRange(None, (1, 2)), KeyRange((1, 12), (1, 13))) == [0, 1, 2]
    assert chosen(file, pa.int64(), KeyRange(None, None)) == [0, 1, 2]


def test_a_truncate_is_everybodys() -> None:
    # 't' lies between 'i' and 'u': such a group may have one
    file = landed(pa.int32(), [("it", [1, None]), ("iu", [1, 2]), ("ii", [1, 2])])
    assert chosen(file, pa.int32(), KeyRange((1, 100), None)) == [0, 1]


def test_null_keys_are_below_all_others() -> None:
    file = landed(pa.string(), [("ii", [None, "b"]), ("ii", ["a", "b"]), ("ii", [None, None])])
    assert chosen(file, pa.string(), KeyRange(None, (1, "a"))) == [0, 2]
    assert chosen(file, pa.string(), KeyRange((1, "c"), None)) == [2]  # a group of NULLs alone states no range


@pytest.mark.parametrize("type_", [pa.string(), pa.int64()])
def test_values_of_another_type_have_another_order(type_: pa.DataType) -> None:
    file = landed(pa.int32(), [("ii", [1, 2])])
    above = "9" if type_ == pa.string() else 9
    assert chosen(file, type_, KeyRange((1, above), None)) == [0]


bounds = st.none() | st.integers(-20, 20).map(rank)


@given(st.lists(st.lists(st.none() | st.integers(-20, 20), min_size=1, max_size=4), max_size=5), bounds, bounds)
def test_no_row_of_a_range_is_left_out(groups: list[list[int | None]], low: Any, high: Any) -> None:
    file = landed(pa.int64(), [("i" * len(keys), keys) for keys in groups])
    range_ = KeyRange(low, high)
    found = set(chosen(file, pa.int64(), range_))
    for number, keys in enumerate(groups):
        inside = range_.mask(pa.chunked_array([pa.array(keys, pa.int64())])).to_pylist()
        assert number in found or not any(inside)
