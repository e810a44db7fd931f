"""Whether ALTER TABLE left the values of a column as they were when it changed the type.

The publisher casts the values and does not send the results. They are the same if PostgreSQL's text of each value is, in every session: for
casts of built-in types that never round, cut or pad a value, or use a time zone. The lake converts its values to the new type or, if it
keeps both, to a wider one, by their texts (``type_widening.py``). A USING clause is not known here, and not considered.
"""

from __future__ import annotations

from typing import Final

from subscriber.sinks.spark.schema.arrow_types import element_type

__all__ = ["keeps_texts"]

_TEXT: Final = 25
_VARCHAR: Final = 1043
_NUMERIC: Final = 1700
_TIMESTAMP: Final = 1114
_INTEGERS: Final = frozenset({20, 21, 23})
_ONE_TEXT: Final = frozenset({
    16,  # bool
    17,  # bytea
    19,  # name
    26,  # oid
    114,  # json
    700,  # float4
    701,  # float8
    1082,  # date
    2950,  # uuid
    3802,  # jsonb
    *_INTEGERS, _TIMESTAMP, _NUMERIC, _TEXT, _VARCHAR,
})  # fmt: skip
"""Types whose values have the same text in every session."""
_LENGTHS: Final = frozenset({_VARCHAR, 1562})
"""``varchar`` and ``varbit``: a longer type keeps the values unchanged."""
_PRECISIONS: Final = frozenset({1083, _TIMESTAMP, 1184, 1266})
"""Time types, whose modifier is the number of digits of seconds."""
_MOST_DIGITS: Final = 6


def keeps_texts(oid: int, modifier: int, to: int, limit: int) -> bool:
    """Whether values of a type (oid and modifier) are known to have the same texts after the publisher's cast to another."""
    if (oid, modifier) == (to, limit):
        return True
    elements = element_type(oid), element_type(to)
    if elements[0] is not None and elements[1] is not None:
        return keeps_texts(elements[0], modifier, elements[1], limit)
    if to in {_TEXT, _VARCHAR} and to != oid:
        return limit == -1 and (oid in _ONE_TEXT or elements[0] in _ONE_TEXT)
    if oid in _LENGTHS and to == oid:
        return limit == -1 or limit >= modifier > -1
    if oid in _PRECISIONS and to == oid:
        return limit in {-1, _MOST_DIGITS} or limit >= modifier > -1
    if oid in _INTEGERS:
        return to in _INTEGERS or (to == _NUMERIC and _scale(limit) in {None, 0})
    if oid == _NUMERIC and to == _NUMERIC:
        scale, digits = _scale(modifier), _scale(limit)
        return digits is None or (scale is not None and scale <= digits and max(scale, 0) == max(digits, 0))
    return oid == _NUMERIC and to in _INTEGERS and (_scale(modifier) or 0) <= 0 < modifier


def _scale(modifier: int) -> int | None:
    """Digits after the point. Negative: zeros before it. None: each value has its own number."""
    if modifier < 4:
        return None
    scale = (modifier - 4) & 0x7FF
    return scale - 0x800 if scale & 0x400 else scale
