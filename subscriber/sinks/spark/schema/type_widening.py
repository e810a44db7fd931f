"""Converts columns from one type of the lake to a wider one, after a column's type has changed on the publisher.

Values that become text get PostgreSQL's text in UTC, as in our sessions (see ``values.py``). Casts of Arrow write some of it differently,
or fail.

A value that its column could not hold is in ``_special`` as text. If the new type can hold it, it moves into the column, so that it is
equal to a value that arrives later.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.schema.arrow_columns import with_column
from subscriber.sinks.spark.schema.arrow_values import cast_text
from subscriber.sinks.spark.schema.table_schema import SPECIAL

__all__ = ["converted", "with_specials_converted"]

_PLAIN_ELEMENT: Final = re.compile(r'[^{}",\\\s]+')


def converted(column: pa.ChunkedArray, type_: pa.DataType) -> pa.ChunkedArray:
    """Convert a column to a type that :func:`subscriber.sinks.spark.schema.arrow_types.widened` gave for its type and others."""
    if column.type == type_:
        return column
    return pa.chunked_array([_array(chunk, type_) for chunk in column.chunks], type_)


def with_specials_converted(after: pa.Table, before: pa.Table) -> pa.Table:
    """Move values from ``_special`` into converted columns that can hold them now. ``after`` are the converted rows."""
    special = before[SPECIAL] if SPECIAL in before.schema.names else None
    if special is None or special.null_count == len(special):
        return after
    retyped = [field for field in after.schema if field.name in before.schema.names and before.schema.field(field.name).type != field.type]
    if not retyped:
        return after
    held: list[dict[str, str]] = [{} if text is None else json.loads(text) for text in special.to_pylist()]
    for field in retyped:
        rows = [row for row, values in enumerate(held) if field.name in values]
        if not rows:
            continue
        is_date = pa.types.is_date(before.schema.field(field.name).type) and pa.types.is_timestamp(field.type)
        texts = [held[row].pop(field.name) for row in rows]
        found, refused = cast_text(pa.array(map(_at_midnight, texts) if is_date else texts, pa.string()), field.type)
        for place, text in refused.items():
            held[rows[place]][field.name] = text
        indices = list(range(after.num_rows))
        for place, row in enumerate(rows):
            indices[row] = after.num_rows + place
        column = pa.chunked_array([*after[field.name].chunks, found], field.type).take(pa.array(indices, pa.int64()))
        after = with_column(after, field.name, column)
    if SPECIAL not in after.schema.names:
        return after
    left = pa.array([json.dumps(values, sort_keys=True) if values else None for values in held], pa.string())
    return with_column(after, SPECIAL, left)


def _at_midnight(text: str) -> str:
    """Convert a date that Arrow does not support to PostgreSQL's timestamp."""
    date, *era = text.split(" ")
    return text if "infinity" in text else " ".join([date, "00:00:00", *era])


def _array(array: pa.Array, type_: pa.DataType) -> pa.Array:
    if pa.types.is_string(type_):
        if pa.types.is_boolean(array.type) or pa.types.is_integer(array.type) or pa.types.is_date(array.type):
            return array.cast(type_)
        write = _writer(array.type)
        if write is not None:
            return pa.array([None if value is None else write(value) for value in array.to_pylist()], type_)
    if pa.types.is_list(type_) and pa.types.is_list(array.type) and array.type.value_type != type_.value_type:
        elements = _array(array.flatten(), type_.value_type)
        lengths = pc.fill_null(pc.list_value_length(array), 0)
        ends = pc.cumulative_sum(lengths).to_pylist()
        return pa.ListArray.from_arrays(pa.array([0, *ends], pa.int32()), elements, type=type_, mask=array.is_null())
    return array.cast(type_)


def _writer(type_: pa.DataType) -> Callable[[Any], str] | None:
    if pa.types.is_float32(type_):
        return _float4
    if pa.types.is_floating(type_):
        return _float8
    if pa.types.is_decimal(type_):
        return "{:f}".format
    if pa.types.is_timestamp(type_):
        return _timestamptz if type_.tz else _timestamp
    if pa.types.is_binary(type_):
        return lambda value: f"\\x{value.hex()}"
    if pa.types.is_list(type_):
        return _list_writer(type_.value_type)
    return None


def _timestamp(value: datetime) -> str:
    text = value.isoformat(sep=" ")
    return text.rstrip("0") if value.microsecond else text


def _timestamptz(value: datetime) -> str:
    return f"{_timestamp(value.replace(tzinfo=None))}+00"


def _float4(value: float) -> str:
    # the fewest digits that result in this value again; nine always do
    texts = (f"{value:.{digits}e}" for digits in range(9))
    return _shortest(value, next((text for text in texts if _rounded(float(text)) == value), "nan"), 6)


def _rounded(value: float) -> float:
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    except OverflowError:  # rounded up, beyond the largest value
        return math.inf
    return float(rounded)


def _float8(value: float) -> str:
    return _shortest(value, f"{Decimal(repr(value)).normalize():e}", 15)


def _shortest(value: float, scientific: str, digits: int) -> str:
    """The text that PostgreSQL writes: with an exponent below -4, and above the type's count of exact digits."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    mantissa, exponent = scientific.rstrip().split("e")
    sign, figures = mantissa[: mantissa.startswith("-")], mantissa.lstrip("-").replace(".", "").rstrip("0") or "0"
    power = int(exponent)
    if not -4 <= power < digits:
        return f"{sign}{figures[0]}{'.' * (len(figures) > 1)}{figures[1:]}e{'-' if power < 0 else '+'}{abs(power):02d}"
    if power < 0:
        return f"{sign}0.{'0' * (-power - 1)}{figures}"
    whole, rest = figures[: power + 1].ljust(power + 1, "0"), figures[power + 1 :]
    return f"{sign}{whole}{'.' * bool(rest)}{rest}"


def _list_writer(element: pa.DataType) -> Callable[[list[Any]], str]:
    if pa.types.is_boolean(element):
        write: Callable[[Any], str] = lambda value: "t" if value else "f"  # noqa: E731 -- one of several
    else:
        write = _writer(element) or str

    def text(values: list[Any]) -> str:
        return "{" + ",".join("NULL" if value is None else _element(write(value)) for value in values) + "}"

    return text


def _element(text: str) -> str:
    if _PLAIN_ELEMENT.fullmatch(text) and text.upper() != "NULL":
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
