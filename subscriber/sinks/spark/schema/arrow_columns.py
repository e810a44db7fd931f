"""Columns of Arrow tables."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["nullable", "sorted_by", "with_column"]


def with_column(rows: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The rows with other values in one column."""
    position = rows.schema.get_field_index(name)
    return rows.set_column(position, rows.schema.field(position), column)


def sorted_by(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """The rows in the order of these columns."""
    # numbers as column names: Arrow reads a name that begins with a dot or a bracket as a path into a struct
    named = {str(number): rows[name] for number, name in enumerate(names)}
    return rows.take(pc.sort_indices(pa.table(named), sort_keys=[(name, "ascending") for name in named]))


def nullable(schema: pa.Schema) -> pa.Schema:
    """The columns, all of which may be NULL."""
    return pa.schema([field.with_nullable(True) for field in schema])
