"""Columns of Arrow tables."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["with_column"]


def with_column(rows: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The rows with other values in one column."""
    position = rows.schema.get_field_index(name)
    return rows.set_column(position, rows.schema.field(position), column)
