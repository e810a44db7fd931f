"""The Arrow type of each PostgreSQL type in the lake, as the table in ``docs/reference/lake.md`` says."""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa

__all__ = ["arrow_type", "element_type", "parse_type", "type_name", "widened"]

_NUMERIC: Final = 1700
_TIMESTAMPTZ: Final = pa.timestamp("us", "UTC")
_TIMESTAMP: Final = pa.timestamp("us")

_SCALARS: Final[dict[int, pa.DataType]] = {
    16: pa.bool_(),
    17: pa.binary(),
    20: pa.int64(),
    21: pa.int16(),
    23: pa.int32(),
    26: pa.int64(),
    700: pa.float32(),
    701: pa.float64(),
    1082: pa.date32(),
    1114: _TIMESTAMP,
    1184: _TIMESTAMPTZ,
}
"""Built-in scalar types by oid that are not text in the lake; ``numeric`` depends on its modifier."""

_ELEMENTS: Final[dict[int, int]] = {
    199: 114,  # json
    1000: 16,  # bool
    1001: 17,  # bytea
    1002: 18,  # "char"
    1003: 19,  # name
    1005: 21,  # int2
    1007: 23,  # int4
    1009: 25,  # text
    1014: 1042,  # bpchar
    1015: 1043,  # varchar
    1016: 20,  # int8
    1021: 700,  # float4
    1022: 701,  # float8
    1028: 26,  # oid
    1115: 1114,  # timestamp
    1182: 1082,  # date
    1185: 1184,  # timestamptz
    1231: 1700,  # numeric
    2951: 2950,  # uuid
    3807: 3802,  # jsonb
}
"""Built-in array types whose elements are in the table above."""

_NAMES: Final[dict[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": _TIMESTAMP,
    "timestamptz": _TIMESTAMPTZ,
    "binary": pa.binary(),
    "string": pa.string(),
}
_DECIMAL: Final = re.compile(r"decimal\((\d+),(\d+)\)")
_LIST: Final = re.compile(r"list<(.+)>")

_MAX_PRECISION: Final = 38


def element_type(oid: int) -> int | None:
    """The oid of an array type's elements. None if it is not an array, or is an array that stays text."""
    return _ELEMENTS.get(oid)


def arrow_type(oid: int, modifier: int) -> pa.DataType:
    """The Arrow type of a column, by the oid and modifier (``atttypmod``, -1 for none) of its type."""
    element = _ELEMENTS.get(oid)
    if element is not None:
        return pa.list_(arrow_type(element, modifier))
    if oid == _NUMERIC:
        return _decimal(modifier)
    return _SCALARS.get(oid, pa.string())


def _decimal(modifier: int) -> pa.DataType:
    if modifier < 4:
        return pa.string()
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
    if scale & 0x400 or scale > precision or precision > _MAX_PRECISION:
        return pa.string()  # a negative scale, or too many digits
    return pa.decimal128(precision, scale)


def type_name(arrow: pa.DataType) -> str:
    """The name of the type in a manifest; :func:`parse_type` reads it."""
    if pa.types.is_decimal(arrow):
        return f"decimal({arrow.precision},{arrow.scale})"
    if pa.types.is_list(arrow):
        return f"list<{type_name(arrow.value_type)}>"
    for name, known in _NAMES.items():
        if known == arrow:
            return name
    raise ValueError(f"the lake has no type {arrow}")


def parse_type(name: str) -> pa.DataType:
    """The reverse of :func:`type_name`. If there is no such type, raise ValueError."""
    if match := _DECIMAL.fullmatch(name):
        return pa.decimal128(int(match[1]), int(match[2]))
    if match := _LIST.fullmatch(name):
        return pa.list_(parse_type(match[1]))
    if name not in _NAMES:
        raise ValueError(f'the lake has no type "{name}"')
    return _NAMES[name]


def widened(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The narrowest type that holds every value of both; text if there is no other."""
    if one == other:
        return one
    integers = [pa.int16(), pa.int32(), pa.int64()]
    floats = [pa.float32(), pa.float64()]
    for ladder in (integers, floats):
        if one in ladder and other in ladder:
            return max(one, other, key=ladder.index)
    for whole, other_ in ((one, other), (other, one)):
        if whole in integers and other_ in floats and whole != pa.int64():
            return pa.float32() if whole == pa.int16() and other_ == pa.float32() else pa.float64()
    if {one, other} == {pa.date32(), _TIMESTAMP}:
        return _TIMESTAMP
    places = [_places(type_) for type_ in (one, other)]
    if places[0] is not None and places[1] is not None:
        scale = max(places[0][1], places[1][1])
        precision = max(places[0][0], places[1][0]) + scale
        return pa.decimal128(precision, scale) if precision <= _MAX_PRECISION else pa.string()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(widened(one.value_type, other.value_type))
    return pa.string()


def _places(type_: pa.DataType) -> tuple[int, int] | None:
    """Digits before and after the point."""
    if pa.types.is_decimal(type_):
        return type_.precision - type_.scale, type_.scale
    return {pa.int16(): (5, 0), pa.int32(): (10, 0), pa.int64(): (19, 0)}.get(type_)
