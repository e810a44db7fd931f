"""Ranges of a table's first key column: of units of work, and of files that store their range."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.keys import rank
from subscriber.sinks.spark.tables.data_file import Bound

__all__ = ["RANGE", "KeyRange", "packed_range", "read_range", "row_groups"]

RANGE: Final = b"subscriber.range"
"""Key in a file's metadata."""


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Values of a table's first key column, from ``low`` (inclusive) to ``high`` (exclusive); None: unbounded."""

    low: Bound | None = None
    high: Bound | None = None

    def mask(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Mark the values of a column that are in the range."""
        inside: Any = pa.chunked_array([pa.array([True] * len(column), pa.bool_())])
        if self.low is not None and len(self.low) == 2:
            inside = pc.fill_null(pc.greater_equal(column, pa.scalar(self.low[1], column.type)), False)
        if self.high is not None and len(self.high) == 2:
            below = pc.fill_null(pc.less(column, pa.scalar(self.high[1], column.type)), True)
            inside = pc.and_(inside, below)
        return inside

    def meets(self, low: Bound, high: Bound) -> bool:
        """Whether the range overlaps the values from ``low`` to ``high``."""
        return (self.low is None or high >= self.low) and (self.high is None or low < self.high)


def packed_range(key: str, column: pa.ChunkedArray, low: Bound, high: Bound) -> bytes:
    """Encode a range for a file's metadata, under :data:`RANGE`. An Arrow stream is exact for every type."""
    sink = pa.BufferOutputStream()
    values = [bound[1] if len(bound) == 2 else None for bound in (low, high)]
    batch = pa.record_batch([pa.array(values, column.type)], names=[key])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue().to_pybytes())


def read_range(storage: Storage, path: str, key: str | None) -> tuple[Bound, Bound] | None:
    """The range of a file's first key column. None if unknown.

    Our own files store it. For a file that Spark wrote, Parquet's statistics are used, for types whose statistics are exact.
    """
    with storage.parquet(path) as file:
        schema, metadata = file.schema_arrow, file.metadata
    packed = (schema.metadata or {}).get(RANGE)
    if packed is None:
        return _stated_range(schema, metadata, key)
    with pa.ipc.open_stream(base64.b64decode(packed)) as reader:
        stated = reader.read_all()
    if stated.column_names != [key]:
        return None  # of another key, which the table had before
    low, high = stated.column(0).to_pylist()
    return rank(low), rank(high)


def _stated_range(schema: pa.Schema, metadata: pq.FileMetaData, key: str | None) -> tuple[Bound, Bound] | None:
    position = -1 if key is None else schema.get_field_index(key)
    if position < 0 or not _is_stated(schema.field(position).type):
        return None
    ranges = [_range_of_group(metadata.row_group(number), str(key)) for number in range(metadata.num_row_groups)]
    known = [range_ for range_ in ranges if range_ is not None]
    if not known or len(known) < len(ranges):
        return None
    return min(low for low, _ in known), max(high for _, high in known)


def _range_of_group(group: pq.RowGroupMetaData, key: str) -> tuple[Bound, Bound] | None:
    column = next(column for index in range(group.num_columns) if (column := group.column(index)).path_in_schema == key)
    stated = column.statistics
    if stated is None or not stated.has_min_max or not stated.has_null_count:
        return None
    return rank(None) if stated.null_count else rank(stated.min), rank(stated.max)


def _is_stated(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_date(type_) or pa.types.is_string(type_))


def row_groups(schema: pa.Schema, metadata: pq.FileMetaData, key: pa.Field, ranges: Sequence[KeyRange]) -> list[int]:
    """Row groups of a landed file that may have changes of some keys, or a TRUNCATE.

    ``key`` is the table's current first key column. If the file has another type, its values are in another order.
    """
    everything = range(metadata.num_row_groups)
    position = schema.get_field_index(key.name)
    if position < 0 or schema.field(position).type != key.type or not _is_stated(key.type):
        return list(everything)

    def wanted(group: pq.RowGroupMetaData) -> bool:
        keys, operations = _range_of_group(group, key.name), _range_of_group(group, "_op")
        if keys is None or operations is None or operations[0] <= rank("t") <= operations[1]:
            return True
        return any(range_.meets(*keys) for range_ in ranges)

    return [number for number in everything if wanted(metadata.row_group(number))]
