"""The SELECT list for reading a table with ADBC, and the conversion of its result to the lake's columns.

The values are the same as those from COPY and the landing zone.

Types with the same binary form as in the lake (integers, floats, booleans, bytea, text) are selected unchanged. So are dates and timestamps
that the lake can hold. A second column has the text of those that it cannot hold. (If all were selected as text, that would be most of the
publisher's work for such a copy.) All other types are selected as the text of their output function, and cast like landed values
(``values.py``). ``concat`` returns that text; a cast to text would trim ``character(n)``. ``num_nulls`` distinguishes NULL from a composite
value whose fields are all NULL; ``IS NULL`` does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import ConfigurationError
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.sinks.spark.landing.row_buffer import cast_columns, special_column
from subscriber.sinks.spark.schema.arrow_types import arrow_type
from subscriber.sinks.spark.schema.arrow_values import Specials, cast_text
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema

__all__ = ["current_rows", "select_list"]

_NATIVE: Final = frozenset({16, 17, 20, 21, 23, 25, 700, 701, 1043})
"""bool, bytea, int8, int2, int4, text, float4, float8, varchar."""


_TEMPORAL: Final = {
    1082: ("date", "0001-01-01", "10000-01-01"),
    1114: ("timestamp", "0001-01-01 00:00:00", "10000-01-01 00:00:00"),
    1184: ("timestamptz", "0001-01-01 00:00:00+00", "10000-01-01 00:00:00+00"),
}
"""Type, the first value that the lake can hold, and the first value after the last."""
_MOST: Final = 1664
"""Maximum number of expressions of a SELECT: MaxTupleAttributeNumber of htup_details.h."""


def select_list(names: Sequence[str], types: Sequence[int], schema: TableSchema) -> str:
    """The expressions for the columns of a published table, in order. ``schema``: of the lake's table, which has the same columns."""
    columns = list(zip(names, types, schema.columns, strict=True))
    temporal = sum(_is_temporal(oid, column.type) for _, oid, column in columns)
    pairs = len(columns) + temporal <= _MOST
    return ", ".join(
        expression for name, oid, column in columns for expression in _expressions(quote_identifier(name), oid, column.type, pairs=pairs)
    )


def _is_temporal(oid: int, arrow: pa.DataType) -> bool:
    return oid in _TEMPORAL and arrow == arrow_type(oid, -1)


def _expressions(column: str, oid: int, arrow: pa.DataType, *, pairs: bool) -> Iterator[str]:
    if oid in _NATIVE:
        yield column
    elif pairs and _is_temporal(oid, arrow):
        name, first, end = _TEMPORAL[oid]
        low, high = (f"pg_catalog.{name} {quote_literal(value)}" for value in (first, end))
        yield f"CASE WHEN {column} >= {low} AND {column} < {high} THEN {column} END"
        yield f"CASE WHEN {column} < {low} OR {column} >= {high} THEN pg_catalog.concat({column}) END"
    else:
        yield f"CASE WHEN pg_catalog.num_nulls({column}) = 0 THEN pg_catalog.concat({column}) END"


def current_rows(schema: TableSchema, columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Convert selected columns to rows of the current-state table.

    Raises:
        ApplyError: a text is not UTF-8.
        ConfigurationError: these are not the columns that :func:`select_list` selects.
    """
    selected = list(_paired(schema, columns))

    def cast(number: int, column: LakeColumn) -> tuple[pa.Array, Specials]:
        array, beyond = selected[number]
        if pa.types.is_string(array.type):
            return cast_text(array, column.type)
        return array.cast(column.type), {} if beyond is None else _texts(beyond)

    arrays, specials = cast_columns(schema, cast)
    count = len(columns[0])
    return pa.RecordBatch.from_arrays([*arrays, special_column(specials, count)], schema=schema.current)


def _paired(schema: TableSchema, columns: Sequence[pa.Array]) -> Iterator[tuple[pa.Array, pa.Array | None]]:
    """The values of each column, and for temporal columns with the texts of values that the lake cannot hold."""
    place = 0
    for _ in schema.columns:
        pair = place < len(columns) and pa.types.is_temporal(columns[place].type)
        end = place + 1 + pair
        if end > len(columns):
            raise _other_columns(schema)
        yield columns[place], columns[end - 1] if pair else None
        place = end
    if place < len(columns):
        raise _other_columns(schema)


def _other_columns(schema: TableSchema) -> ConfigurationError:
    return ConfigurationError(
        f'table "{schema.table}": the columns on the publisher do not match those of the copy',
        hint="run the same version of the subscriber and the applier",
    )


def _texts(beyond: pa.Array) -> Specials:
    if beyond.null_count == len(beyond):
        return {}
    rows = pc.indices_nonzero(pc.is_valid(beyond))
    return dict(zip(rows.to_pylist(), beyond.take(rows).to_pylist(), strict=True))
