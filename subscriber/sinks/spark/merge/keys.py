"""Identify rows by their keys: numbers for equal keys, and the order of values for ranges of keys.

All functions work on Arrow columns. Keys are equal if they are equal in all key columns, including NULLs. A value that its column cannot
hold (an infinite timestamp) is NULL there, and its text in ``_special`` is part of the key. Values are equal if their texts are equal. If a
key changes between two values that are equal to PostgreSQL's operators (-0 and 0), the publisher sends the old key, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.schema.table_schema import SPECIAL
from subscriber.sinks.spark.tables.data_file import Bound

__all__ = ["group_ids", "is_orderable", "key_columns", "rank"]


def rank(value: Any) -> Bound:
    """A value's place in the order of keys. NULL sorts first; text is ordered by code points."""
    return (0,) if value is None else (1, value)


def is_orderable(type_: pa.DataType) -> bool:
    """Whether a key of this type can have ranges. Floats have NaN, and lists have no order in Arrow."""
    return not (pa.types.is_floating(type_) or pa.types.is_nested(type_))


def key_columns(table: pa.Table, keys: Sequence[str]) -> list[pa.ChunkedArray]:
    """The columns that form the key of each row, including the texts of values that they could not hold."""
    special = table[SPECIAL]
    if special.null_count < len(special):
        texts: list[str | None] = []
        for text in special.to_pylist():
            values = {} if text is None else {field: value for field, value in json.loads(text).items() if field in keys}
            texts.append(json.dumps(values, sort_keys=True) if values else None)
        special = pa.chunked_array([pa.array(texts, pa.string())])
    return [*(table[key] for key in keys), special]


def group_ids(columns: Sequence[pa.ChunkedArray]) -> pa.Array:
    """Number the rows, from 0 without gaps. Rows that are equal in all columns have the same number."""
    found: pa.Array | None = None
    for column in columns:
        if column.null_count == len(column) and found is not None:
            continue
        ids, count = _encoded(column)
        # renumbered after each column, so that the product of two numbers stays below 2**63
        found = ids if found is None else _encoded(pc.add(pc.multiply(found, count), ids))[0]
    assert found is not None
    return found


def _encoded(column: pa.ChunkedArray | pa.Array) -> tuple[pa.Array, int]:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    if pa.types.is_nested(array.type):
        array = pa.array([None if value is None else repr(value) for value in array.to_pylist()], pa.string())
    encoded = array.dictionary_encode(null_encoding="encode")
    return encoded.indices.cast(pa.int64()), len(encoded.dictionary)
