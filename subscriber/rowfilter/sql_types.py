"""The types that row filters can be evaluated with: their names, their literals, and their values as Python objects.

Values compare as PostgreSQL compares them:

===================================  =================================================================================================
type                                 Python
===================================  =================================================================================================
bool, int2, int4, int8               bool, int
numeric                              Decimal
float4, float8                       float
text, varchar                        str
bpchar                               str without trailing spaces, which do not count
bytea, uuid                          bytes
date, timestamp, timestamptz, time   int: days or microseconds since 2000-01-01 or midnight; infinity is a float
===================================  =================================================================================================

A literal is read if PostgreSQL certainly reads it, on every version and with every setting, as the same value. Others are refused.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from struct import Struct
from typing import Any, Final

from subscriber.rowfilter.filter_errors import USER_TYPE, RowFilterError, not_allowed, unsupported
from subscriber.types import PgType, codec
from subscriber.types.builtin import SQL_NAMES

__all__ = ["INTEGERS", "STAMPS", "TEXTS", "TYPE_WORDS", "float4", "in_range", "read_literal", "type_of", "value_reader"]

TYPE_WORDS: Final[tuple[tuple[tuple[str, ...], str], ...]] = tuple(
    (tuple(words.split()), name)
    for words, name in (
        ("timestamp with time zone", "timestamptz"),
        ("timestamp without time zone", "timestamp"),
        ("time without time zone", "time"),
        ("double precision", "float8"),
        ("character varying", "varchar"),
        ("timestamptz", "timestamptz"),
        ("timestamp", "timestamp"),
        ("time", "time"),
        ("date", "date"),
        ("smallint", "int2"),
        ("int2", "int2"),
        ("integer", "int4"),
        ("int", "int4"),
        ("int4", "int4"),
        ("bigint", "int8"),
        ("int8", "int8"),
        ("numeric", "numeric"),
        ("decimal", "numeric"),
        ("dec", "numeric"),
        ("real", "float4"),
        ("float4", "float4"),
        ("float8", "float8"),
        ("float", "float8"),
        ("text", "text"),
        ("varchar", "varchar"),
        ("bpchar", "bpchar"),
        ("boolean", "bool"),
        ("bool", "bool"),
        ("uuid", "uuid"),
        ("bytea", "bytea"),
    )
)
"""The words that name a type in a cast, longest first. Type modifiers are not accepted."""

INTEGERS: Final = {"int2": 2**15, "int4": 2**31, "int8": 2**63}
"""The integer types, each with the number after its largest one."""

TEXTS: Final = frozenset({"text", "varchar", "bpchar"})

# what a date and a timestamp hold, by datatype/timestamp.h
_DATES: Final = range(-2_451_545, 2_145_031_949)
STAMPS: Final = range(-211_813_488_000_000_000, 9_223_371_331_200_000_000)
_FIRST_USER_OID: Final = 16_384
_EPOCH_ORDINAL: Final = datetime.date(2000, 1, 1).toordinal()
_ERA_DAYS: Final = 146_097
_DAY: Final = 86_400_000_000
_FLOAT4: Final = Struct(">f")
_NUMBER: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")
_DATE: Final = re.compile(r"([0-9]{4,7})-([0-9]{2})-([0-9]{2})(?: (BC))?")
_TIME: Final = re.compile(r"([0-9]{2}):([0-9]{2})(?::([0-9]{2})(?:\.([0-9]{1,6}))?)?")
_STAMP: Final = re.compile(r"([0-9]{4,7}-[0-9]{2}-[0-9]{2})(?: ([0-9:.]+?))?(?:([+-])([0-9]{2})(?::?([0-9]{2}))?(?::([0-9]{2}))?)?( BC)?")
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_BYTEA: Final = re.compile(r"\\x(?:[0-9a-fA-F]{2})*")
_BOOLEANS: Final = {"t": True, "true": True, "f": False, "false": False}

Read = Callable[[bytes], Any]


def type_of(type_: PgType, column: str) -> str:
    """Return the name by which this package knows the type of a column.

    Raises:
        RowFilterError: PostgreSQL does not allow the type, or its values cannot be compared here.
    """
    if type_.domain is not None or type_.oid >= _FIRST_USER_OID:
        raise not_allowed(USER_TYPE)
    if type_.builtin is None or type_.builtin not in _READERS:
        raise unsupported(f'column "{column}" has type {type_}', hint=f"types that can be evaluated: {', '.join(sorted(_READERS))}")
    return type_.builtin


def value_reader(type_: PgType, name: str) -> tuple[Read, Read]:
    """Return the functions that read a column's values from the text and the binary format."""
    found = codec(type_)
    if name in _FROM_TEXT:
        convert = _FROM_TEXT[name]

        def read_text(data: bytes) -> Any:
            return convert(found.text(data, binary=False))

        def read_binary(data: bytes) -> Any:
            return convert(found.text(data, binary=True))

        return read_text, read_binary
    return lambda data: found.value(data, binary=False), lambda data: found.value(data, binary=True)


def in_range(number: int, name: str) -> int:
    """Return the number if the integer type holds it.

    Raises:
        RowFilterError: it is out of range.
    """
    if not -INTEGERS[name] <= number < INTEGERS[name]:
        raise RowFilterError(f"{SQL_NAMES[name]} out of range", sqlstate="22003")
    return number


def float4(number: float | Decimal) -> float:
    """Round to single precision: the nearest float4, and of two the even one.

    Raises:
        RowFilterError: it is out of range.
    """
    if not math.isfinite(number):
        return float(number)
    try:
        rounded: float = _FLOAT4.unpack(_FLOAT4.pack(float(number)))[0]
    except OverflowError:
        raise RowFilterError("value out of range: overflow", sqlstate="22003") from None
    if not number or rounded == number:
        return rounded
    if abs(rounded) < 2.0**-126:
        raise unsupported("a real number close to zero")
    # rounding to double and then to single may end one step away
    bits = int.from_bytes(_FLOAT4.pack(rounded), "big")
    exact = Fraction(number)
    near: list[int] = [bits, bits - 1, bits + 1]
    values = {each: float(_FLOAT4.unpack(each.to_bytes(4, "big"))[0]) for each in near}
    finite = [each for each in near if math.isfinite(values[each])]
    return values[min(finite, key=lambda each: (abs(Fraction(values[each]) - exact), each & 1))]


def read_literal(text: str, name: str) -> Any:
    """Read the text of a constant.

    Raises:
        RowFilterError: PostgreSQL refuses it, or may read it as another value.
    """
    try:
        return _READERS[name](text)
    except RowFilterError:
        raise
    except (ValueError, ArithmeticError, LookupError):
        # PostgreSQL may accept it. The message leaves out the text: a constant of a filter may be private data
        raise unsupported(
            f"a constant of type {SQL_NAMES.get(name, name)} that is not written as PostgreSQL prints values of the type",
            hint="the datestyle is ISO; a timestamp with time zone needs its offset, as in '2026-01-31 12:00:00+00'",
        ) from None


def _integer(name: str) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            raise ValueError
        return in_range(int(text), name)

    return read


def _numeric(text: str) -> Decimal:
    if text == "NaN":
        return Decimal(text)
    if not _NUMBER.fullmatch(text):
        raise ValueError
    return Decimal(text)


def _float8(text: str) -> float:
    if text in {"NaN", "Infinity", "-Infinity"}:
        return float(text)
    exact = _numeric(text)
    number = float(exact)
    if not math.isfinite(number) or (exact and abs(number) < 2.0**-1022):
        raise unsupported("a floating-point number close to zero or too large")
    return number


def _float4(text: str) -> float:
    return float(text) if text in {"NaN", "Infinity", "-Infinity"} else float4(_numeric(text))


def _days(text: str) -> int | float:
    if text in {"infinity", "-infinity"}:
        return float(text)
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError
    days = _days_of(int(match[1]), int(match[2]), int(match[3]), bc=match[4] is not None)
    if days not in _DATES:
        raise ValueError
    return days


def _days_of(year: int, month: int, day: int, *, bc: bool) -> int:
    if year == 0:
        raise ValueError
    year = 1 - year if bc else year
    # the calendar repeats after 400 years
    eras, rest = divmod(year - 1, 400)
    return eras * _ERA_DAYS + datetime.date(rest + 1, month, day).toordinal() - _EPOCH_ORDINAL


def _microseconds(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError
    hour, minute, second = int(match[1]), int(match[2]), int(match[3] or 0)
    micro = int((match[4] or "").ljust(6, "0"))
    if minute > 59 or second > 59 or hour > 24 or (hour == 24 and (minute or second or micro)):
        raise ValueError
    return ((hour * 60 + minute) * 60 + second) * 1_000_000 + micro


def _stamp(text: str, *, zone: bool) -> int | float:
    if text in {"infinity", "-infinity"}:
        return float(text)
    match = _STAMP.fullmatch(text)
    if match is None or (match[3] is not None) != zone:
        raise ValueError
    days = _days(match[1] + (match[7] or ""))
    time = _microseconds(match[2]) if match[2] else 0
    if time == _DAY:
        raise ValueError
    offset = ((int(match[4]) * 60 + int(match[5] or 0)) * 60 + int(match[6] or 0)) * 1_000_000 if zone else 0
    if offset >= 16 * 3600 * 1_000_000:
        raise ValueError
    stamp = days * _DAY + time - (offset if match[3] == "+" else -offset)
    if stamp not in STAMPS:
        raise ValueError
    return stamp


def _uuid(text: str) -> bytes:
    if not _UUID.fullmatch(text):
        raise ValueError
    return bytes.fromhex(text.replace("-", ""))


def _bytea(text: str) -> bytes:
    if not _BYTEA.fullmatch(text):
        raise ValueError
    return bytes.fromhex(text[2:])


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "bool": lambda text: _BOOLEANS[text],
    "int2": _integer("int2"),
    "int4": _integer("int4"),
    "int8": _integer("int8"),
    "numeric": _numeric,
    "float4": _float4,
    "float8": _float8,
    "text": lambda text: text,
    "varchar": lambda text: text,
    "bpchar": lambda text: text.rstrip(" "),
    "date": _days,
    "timestamp": lambda text: _stamp(text, zone=False),
    "timestamptz": lambda text: _stamp(text, zone=True),
    "time": _microseconds,
    "uuid": _uuid,
    "bytea": _bytea,
}
"""The types of constants and columns."""

_FROM_TEXT: Final = {name: _READERS[name] for name in ("text", "varchar", "bpchar", "date", "timestamp", "timestamptz", "time", "uuid")}
"""Types whose values are read from PostgreSQL's text."""
