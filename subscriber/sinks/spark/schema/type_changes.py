"""Whether a column still has the publisher's values after ALTER TABLE changed its type.

Such an ALTER TABLE casts the values on the publisher and does not send the results. The values in the lake are converted to the lake's
wider type (see ``evolution.py``). This module knows which values are then still the same, for casts without USING and with the usual
settings of a session: numbers that keep their value, texts that do not change, and types with only one text for each value. Not known are
rounding, blanks of ``char(n)``, time zones, digits of ``numeric`` in columns that are text in the lake, and types that are not built in.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from subscriber.sinks.spark.schema.arrow_types import element_type
from subscriber.sinks.spark.schema.table_schema import LakeColumn

__all__ = ["keeps_values"]

_TEXT: Final = 25
_VARCHAR: Final = 1043
_NUMERIC: Final = 1700
_FLOAT4, _FLOAT8 = 700, 701
_DATE, _TIMESTAMP = 1082, 1114
_INTEGERS: Final = frozenset({20, 21, 23})
_ONE_TEXT: Final = frozenset({
    16,  # bool
    17,  # bytea
    19,  # name
    26,  # oid
    114,  # json
    2950,  # uuid
    3802,  # jsonb
    *_INTEGERS, _FLOAT4, _FLOAT8, _DATE, _TIMESTAMP, _NUMERIC, _TEXT, _VARCHAR,
})  # fmt: skip
"""Types whose values have the same text in every session."""
_LENGTHS: Final = frozenset({_VARCHAR, 1562})
"""``varchar`` and ``varbit``: a longer type keeps the values unchanged."""
_PRECISIONS: Final = frozenset({1083, _TIMESTAMP, 1184, 1266})
"""Time types, whose modifier is the number of digits of seconds."""
_MOST_DIGITS: Final = 6


def keeps_values(before: LakeColumn, now: LakeColumn, lake: pa.DataType) -> bool:
    """Whether values of one declaration are known to equal the results of the publisher's cast to another, in a type of the lake."""
    if before.declared is None or now.declared is None:
        # of a lake that was created before declarations were stored
        incomparable = before.type != now.type and not pa.types.is_string(before.type) and not pa.types.is_string(now.type)
        return not (incomparable and pa.types.is_string(lake))
    return before.declared == now.declared or _keeps(*before.declared, *now.declared, lake)


def _keeps(oid: int, modifier: int, to: int, limit: int, lake: pa.DataType) -> bool:
    elements = element_type(oid), element_type(to)
    if elements[0] is not None and elements[1] is not None:
        # if an array's column cannot hold a value, it is kept as text, for all types of elements
        return _keeps(elements[0], modifier, elements[1], limit, pa.string())
    as_text = pa.types.is_string(lake)
    if oid == to:
        if oid == _NUMERIC:
            return _keeps_digits(_scale(modifier), _scale(limit), as_text=as_text)
        return _is_wider(oid, modifier, limit)
    if to in {_TEXT, _VARCHAR}:
        return (oid in _ONE_TEXT or element_type(oid) in _ONE_TEXT) and (limit == -1 or oid not in {_TEXT, _VARCHAR, 19, 114, 3802})
    if oid in _INTEGERS:
        return _keeps_integer(oid, to, limit, as_text=as_text)
    if oid == _NUMERIC:
        scale = _scale(modifier)
        return to in _INTEGERS and scale is not None and scale <= 0
    return not as_text and (oid, to) in {(_FLOAT4, _FLOAT8), (_DATE, _TIMESTAMP)}


def _is_wider(oid: int, modifier: int, limit: int) -> bool:
    if oid in _LENGTHS:
        return limit == -1 or limit >= modifier > -1
    if oid in _PRECISIONS:
        return limit in {-1, _MOST_DIGITS} or limit >= modifier > -1
    return False


def _keeps_integer(oid: int, to: int, limit: int, *, as_text: bool) -> bool:
    if to in _INTEGERS:
        return True
    if to == _NUMERIC:
        return _keeps_digits(0, _scale(limit), as_text=as_text)
    # a float4 has enough digits only for an int2
    return not as_text and (oid, to) in {(21, _FLOAT4), (21, _FLOAT8), (23, _FLOAT8)}


def _scale(modifier: int) -> int | None:
    """Digits after the point. Negative: zeros before it. None: each value has its own number."""
    if modifier < 4:
        return None
    scale = (modifier - 4) & 0x7FF
    return scale - 0x800 if scale & 0x400 else scale


def _keeps_digits(scale: int | None, to: int | None, *, as_text: bool) -> bool:
    if to is None:
        return True
    if scale is None or to < scale:
        return False
    return not as_text or max(scale, 0) == max(to, 0)
