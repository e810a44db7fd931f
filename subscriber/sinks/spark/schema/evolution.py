"""How a table's columns in the lake follow the publisher's.

* A new column is added. Older rows have NULL in it. If that may be wrong, the table is copied again first (``schema_gaps.py``).
* A dropped column remains, and becomes NULL in all rows, which takes one rewrite of the table's files. If a column of that name is added
  later, it is the same column in the lake.
* If a type changes, the lake's type becomes the narrowest one that holds both, or text. Then all files are rewritten once.
* A new replica identity applies to the changes that were described with it. If a round has changes with several identities, they are
  applied in stretches, one after the other. The same is done where a column is dropped or comes back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from subscriber.sinks.spark.schema.arrow_types import widened
from subscriber.sinks.spark.schema.table_schema import SPECIAL, LakeColumn, TableSchema

__all__ = ["Stretch", "absent_columns", "dropped_columns", "evolved_schema", "retyped_columns", "stretches"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Changes that are folded together: files in order, and the table's new columns with the replica identity of these changes.

    ``absent`` are fields of the table that the publisher's table did not have at the time.
    """

    files: tuple[str, ...]
    schema: TableSchema
    absent: tuple[str, ...]


def evolved_schema(present: pa.Schema | None, described: Sequence[TableSchema]) -> TableSchema:
    """The table's new columns, from those of the Delta table (None: there is none) and the schemas of the changes, in order."""
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


def retyped_columns(present: pa.Schema, schema: TableSchema) -> tuple[str, ...]:
    """Columns whose type differs from the table's files."""
    there = set(schema.current.names)
    return tuple(field.name for field in present if field.name in there and schema.current.field(field.name).type != field.type)


def dropped_columns(schema: TableSchema, described: TableSchema) -> tuple[str, ...]:
    """Fields of the table that the publisher no longer has."""
    there = {column.field for column in described.columns}
    return tuple(column.field for column in schema.columns if column.field not in there)


def absent_columns(schema: TableSchema, described: Sequence[TableSchema]) -> tuple[str, ...]:
    """Fields of the table that the publisher did not have at some time, even if it has them again."""
    return tuple(column.field for column in schema.columns if not all(column.field in one.arrow.names for one in described))


def stretches(schema: TableSchema, valued: Collection[str], files: Sequence[tuple[str, TableSchema]]) -> tuple[Stretch, ...]:
    """Divide changes into stretches that can be folded together.

    Args:
        schema: the table's new columns.
        valued: columns of the Delta table, if it exists, in which rows may have values.
        files: the landed files, each with its schema, in order.
    """
    found: list[tuple[list[str], list[TableSchema]]] = []
    known = set(valued)
    before: set[str] = set()
    for file, described in files:
        fields = set(described.arrow.names)
        if found and _is_like(found[-1][1][-1], described) and before <= fields and not (fields - before) & known:
            found[-1][0].append(file)
            found[-1][1].append(described)
        else:
            found.append(([file], [described]))
        known |= fields
        before = fields
    return tuple(
        Stretch(tuple(names), schema.with_identity(all_[-1].identity, all_[-1].keys), dropped_columns(schema, all_[0]))
        for names, all_ in found
    )


def _is_like(one: TableSchema, other: TableSchema) -> bool:
    """Whether both have the same replica identity."""
    return one.full and other.full if one.full or other.full else one.keys == other.keys
