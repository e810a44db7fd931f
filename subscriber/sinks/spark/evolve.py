"""How a table's columns in the lake follow the publisher's.

* A new column is added; rows from before have NULL in it, whatever its default: the publisher does not send them again.
* A dropped column stays, and is NULL in all rows from then on, which takes writing the table's files anew, once; a column of lists keeps
  in rows that do not change what it had. A column of that name that comes back later is that one.
* A type that changed becomes the narrowest one that holds both, text if nothing else does; then all files are written anew, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from subscriber.sinks.spark.schema import SPECIAL, LakeColumn, TableSchema
from subscriber.sinks.spark.types import widened

__all__ = ["dropped_columns", "evolved", "needs_rewrite"]


def evolved(present: pa.Schema | None, described: Sequence[TableSchema]) -> TableSchema:
    """The table's columns from now on.

    Args:
        present: of its Delta table; None if there is none.
        described: what changes that are to be applied were described with, in order; not empty.
    """
    last = described[-1]
    types: dict[str, pa.DataType] = {field.name: field.type for field in present or [] if field.name != SPECIAL}
    for schema in described:
        for column in schema.columns:
            types[column.field] = widened(types[column.field], column.type) if column.field in types else column.type
    by_field = {column.field: column for column in last.columns}
    columns = [
        replace(by_field[field], type=type_) if field in by_field else LakeColumn(field, field, type_, key=False)
        for field, type_ in types.items()
    ]
    return replace(last, columns=tuple(columns))


def needs_rewrite(present: pa.Schema, schema: TableSchema) -> bool:
    """Whether a column's type is another than in the files there are."""
    return any(schema.current.field(field.name).type != field.type for field in present if schema.current.get_field_index(field.name) >= 0)


def dropped_columns(schema: TableSchema, described: TableSchema) -> tuple[str, ...]:
    """Fields of the table that the publisher has no more."""
    there = {column.field for column in described.columns}
    return tuple(column.field for column in schema.columns if column.field not in there)
