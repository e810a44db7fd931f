"""A table's columns as a SELECT for ADBC, and what comes of it as the lake's columns: the same values as by way of COPY and the landing.

Types whose binary form is the lake's own (integers, floats, booleans, bytea, text) are selected as they are. All others come as the text of
their output function, and are cast as landed values are (``values.py``). ``concat`` gives that text; a cast to text would not: it
trims ``character(n)``. ``num_nulls`` tells NULL from a composite value whose fields are all NULL; ``IS NULL`` would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa

from subscriber.abc import PublishedTable
from subscriber.errors import ApplyError
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.spark.rows import special_column
from subscriber.sinks.spark.schema import TableSchema
from subscriber.sinks.spark.values import NotText, cast_text

__all__ = ["current_rows", "select_list"]

_NATIVE: Final = frozenset({16, 17, 20, 21, 23, 25, 700, 701, 1043})
"""bool, bytea, int8, int2, int4, text, float4, float8, varchar."""


def select_list(table: PublishedTable) -> str:
    """The expressions of a table's columns, in their order."""
    return ", ".join(_expression(name, oid) for name, oid in zip(table.columns, table.column_types, strict=True))


def _expression(name: str, oid: int) -> str:
    column = quote_identifier(name)
    if oid in _NATIVE:
        return column
    return f"CASE WHEN pg_catalog.num_nulls({column}) = 0 THEN pg_catalog.concat({column}) END"


def current_rows(schema: TableSchema, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Selected columns as rows of the current-state table.

    Raises:
        ApplyError: a text is not UTF-8.
    """
    arrays: list[pa.Array] = []
    specials: dict[int, dict[str, str]] = {}
    for column, array in zip(schema.columns, columns, strict=True):
        try:
            cast, refused = (cast_text(array, column.type)) if pa.types.is_string(array.type) else (array.cast(column.type), {})
        except NotText:
            raise ApplyError(
                f'table "{schema.table}", column "{column.name}": bytes that are not UTF-8',
                hint="the publisher's database has encoding SQL_ASCII: mend the rows there; the lake holds UTF-8 only",
            ) from None
        arrays.append(cast)
        for row, text in refused.items():
            specials.setdefault(row, {})[column.field] = text
    count = len(columns[0])
    return pa.RecordBatch.from_arrays([*arrays, special_column(specials, count)], schema=schema.current)
