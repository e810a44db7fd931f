"""From a value of a PostgreSQL type to what the DBAPI is given for a column of another database: never bent, or refused.

A column of the target belongs to a *family*, by its reflected type. For each family there is a list of PostgreSQL types whose values can
be kept in it exactly; a type outside the list is refused before anything is written (:class:`Unfit`), a single value that does not fit
(infinity into DATE) when it comes (:class:`~subscriber.types.ValueRefused`). A text column takes every type, as PostgreSQL's own text:
that is the remedy that all refusals name. docs/types.md is the table for people.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import types as sql
from sqlalchemy.dialects import mysql

from subscriber.types import Codec, ValueRefused

__all__ = ["INTEGERS", "Converter", "Family", "Unfit", "converter", "family_of"]

INTEGERS: Final = frozenset({"int2", "int4", "int8", "oid", "xid", "cid", "xid8"})
_FLOATS: Final = frozenset({"float4", "float8"})
_INT8_MAX: Final = 2**63 - 1
_INT8_MIN: Final = -(2**63)
_SINGLE_INTEGERS: Final = 2**24
_DOUBLE_INTEGERS: Final = 2**53
"""Up to where all integers are floating point numbers."""
_TEXT_REMEDY: Final = "make the column a text column in the target"

Bind = Callable[[bytes], object]


class Family(StrEnum):
    """What a target column holds."""

    TEXT = "text"
    BYTES = "bytes"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    FLOAT = "floating point"
    NUMERIC = "numeric"
    DATE = "date"
    TIME = "time"
    DATETIME = "datetime"
    UUID = "uuid"
    JSON = "json"
    ANY = "any"
    """A column that keeps whatever class of value it is given (SQLite, no declared type or BLOB)."""
    OTHER = "other"


class Unfit(Exception):
    """A type that cannot be kept exactly in a column; the text says why."""


@dataclass(frozen=True, slots=True)
class Converter:
    """The two functions that make DBAPI parameters of values, from text and from the binary format. NULL never comes to them.

    They raise :data:`subscriber.types.codec.READ_ERRORS`, ValueRefused among them.
    """

    text: Bind
    binary: Bind


def family_of(column_type: sql.TypeEngine[Any], dialect_name: str) -> Family:
    """The family of a reflected column."""
    found = _family(column_type)
    if dialect_name != "sqlite":
        return found
    # SQLite: what a column does to values is told by the words in its declared type alone (Datatypes in SQLite, 3.1)
    return Family.ANY if isinstance(column_type, sql.NullType) or found is Family.BYTES else found


def _family(column_type: sql.TypeEngine[Any]) -> Family:
    match column_type:
        case sql.Boolean():
            return Family.BOOLEAN
        case sql.Integer():
            return Family.INTEGER
        case sql.Float():
            return Family.FLOAT
        case sql.Numeric():
            return Family.NUMERIC
        case sql.DateTime():
            return Family.DATETIME
        case sql.Date():
            return Family.DATE
        case sql.Time():
            return Family.TIME
        case sql.JSON():
            return Family.JSON
        case sql.Uuid():
            return Family.UUID
        case sql.LargeBinary() | sql.BINARY() | sql.VARBINARY() | mysql.TINYBLOB() | mysql.MEDIUMBLOB() | mysql.LONGBLOB():
            return Family.BYTES
        case mysql.SET():
            # it orders the members anew
            return Family.OTHER
        case sql.String():
            return Family.TEXT
    return Family.OTHER


def converter(codec: Codec, column_type: sql.TypeEngine[Any], dialect_name: str) -> Converter:
    """How values of a type get into a column.

    Args:
        codec: of the type at the publisher.
        column_type: of the column, as reflected.
        dialect_name: of the target. Not PostgreSQL: there every value is a text, and the server's own input functions decide.

    Raises:
        Unfit: the column cannot keep all values of the type, or none.
    """
    family = family_of(column_type, dialect_name)
    found = (_for_sqlite if dialect_name == "sqlite" else _for_others)(codec, family, column_type)
    if found is None:
        raise Unfit(f"type {codec.source} cannot be kept without loss in a column of type {_described(column_type)}")
    return found


def _for_sqlite(codec: Codec, family: Family, column_type: sql.TypeEngine[Any]) -> Converter | None:
    name = codec.source.builtin
    if family is Family.TEXT and not isinstance(column_type, sql.Enum):
        return _texts(codec)
    if family is Family.ANY:
        return _any(codec)
    if name == "bool" and family in {Family.BOOLEAN, Family.INTEGER, Family.NUMERIC}:
        return _checked(codec, int)
    if name in INTEGERS and family in {Family.INTEGER, Family.NUMERIC}:
        return _checked(codec, _in_int8) if name == "xid8" else _values(codec)
    if name == "numeric" and family is Family.INTEGER:
        return _checked(codec, _integral)
    if name in _FLOATS and family in {Family.FLOAT, Family.NUMERIC}:
        return _checked(codec, _nan_as_text)
    if name in INTEGERS and family is Family.FLOAT:
        return _checked(codec, _exact_in(_DOUBLE_INTEGERS))
    # all these have NUMERIC affinity: a text that is a number becomes one, and no text of those types is
    if name in _TEXTUAL_IN_SQLITE.get(family, frozenset()):
        return _texts(codec)
    return None


_TEXTUAL_IN_SQLITE: Final = MappingProxyType(
    {
        Family.DATE: frozenset({"date"}),
        Family.TIME: frozenset({"time", "timetz"}),
        Family.DATETIME: frozenset({"timestamp", "timestamptz", "date"}),
        Family.UUID: frozenset({"uuid"}),
    }
)


def _for_others(codec: Codec, family: Family, column_type: sql.TypeEngine[Any]) -> Converter | None:
    name = codec.source.builtin
    match family:
        case Family.TEXT:
            return _text_column(codec, column_type)
        case Family.BYTES:
            return _bytes(codec, column_type)
        case Family.BOOLEAN | Family.INTEGER if name == "bool":
            return _checked(codec, int)
        case Family.INTEGER if name in INTEGERS:
            return _values(codec)
        case Family.INTEGER if name == "numeric":
            return _checked(codec, _integral)
        case Family.FLOAT if name in _FLOATS | INTEGERS:
            return _float(codec, column_type)
        case Family.NUMERIC if name in INTEGERS | {"numeric"}:
            return _checked(codec, _fitting_decimal(column_type))
        case Family.DATE if name == "date":
            return _checked(codec, _date)
        case Family.TIME if name == "time":
            return _checked(codec, _clock(_fraction_digits(column_type)))
        case Family.DATETIME if name in {"timestamp", "timestamptz"}:
            return _checked(codec, _moment(_fraction_digits(column_type)))
        case Family.UUID if name == "uuid":
            return _texts(codec)
    return None


def _text_column(codec: Codec, column_type: sql.TypeEngine[Any]) -> Converter | None:
    if isinstance(column_type, sql.Enum):
        # without regard to case, and '' for what it does not know: only for an enum whose labels it has
        labels = codec.source.labels
        return _texts(codec) if labels and set(labels) <= set(column_type.enums) else None
    if isinstance(column_type, sql.CHAR) and codec.source.builtin != "bpchar":
        # MySQL takes blanks off the end when it reads
        return _checked_text(codec, _without_blanks_behind)
    return _texts(codec)


def _float(codec: Codec, column_type: sql.TypeEngine[Any]) -> Converter | None:
    name = codec.source.builtin
    if getattr(column_type, "scale", None) is not None:
        # FLOAT(7,2) rounds
        return None
    single = not isinstance(column_type, sql.Double)
    if name in _FLOATS:
        return None if single and name == "float8" else _checked(codec, _finite)
    return _checked(codec, _exact_in(_SINGLE_INTEGERS if single else _DOUBLE_INTEGERS))


def _described(column_type: sql.TypeEngine[Any]) -> str:
    return str(column_type.__visit_name__).upper()


def _values(codec: Codec) -> Converter:
    return Converter(codec.value_from_text, codec.value_from_binary)


def _checked(codec: Codec, check: Callable[[Any], object]) -> Converter:
    from_text, from_binary = codec.value_from_text, codec.value_from_binary
    return Converter(lambda data: check(from_text(data)), lambda data: check(from_binary(data)))


def _texts(codec: Codec) -> Converter:
    return Converter(codec.text_from_text, codec.text_from_binary)


def _checked_text(codec: Codec, check: Callable[[str], object]) -> Converter:
    as_text, from_binary = codec.text_from_text, codec.text_from_binary
    return Converter(lambda data: check(as_text(data)), lambda data: check(from_binary(data)))


def _bytes(codec: Codec, column_type: sql.TypeEngine[Any]) -> Converter:
    # BINARY(n) fills up with zeros
    check = _of_length(column_type.length or 1) if isinstance(column_type, sql.BINARY) else _unchanged
    if codec.python is bytes:
        return _checked(codec, check)
    return _checked_text(codec, lambda text: check(text.encode()))


def _unchanged(value: bytes) -> bytes:
    return value


def _of_length(length: int) -> Callable[[bytes], bytes]:
    def check(value: bytes) -> bytes:
        if len(value) < length:
            raise ValueRefused(f"a value shorter than BINARY({length})", hint="make the column VARBINARY in the target")
        return value

    return check


def _without_blanks_behind(text: str) -> str:
    if text.endswith(" "):
        raise ValueRefused("a value with blanks at its end in a CHAR column", hint="make the column VARCHAR in the target")
    return text


def _any(codec: Codec) -> Converter:
    """In the class that is nearest and exact: integers, floats and bytes as such, all else as text."""
    name = codec.source.builtin
    if name == "bool":
        return _checked(codec, int)
    if name == "xid8":
        return Converter(codec.text_from_text, codec.text_from_binary)
    if name in INTEGERS or codec.python is bytes:
        return _values(codec)
    if name in _FLOATS:
        return _checked(codec, _nan_as_text)
    return Converter(codec.text_from_text, codec.text_from_binary)


def _refuse(what: str) -> ValueRefused:
    return ValueRefused(what, hint=_TEXT_REMEDY)


def _in_int8(value: int) -> int:
    if not _INT8_MIN <= value <= _INT8_MAX:
        raise _refuse("a number of more than 64 bits in an integer column")
    return value


def _integral(value: Decimal) -> int:
    if not value.is_finite() or value != value.to_integral_value():
        raise _refuse("a numeric that is no whole number in an integer column")
    return _in_int8(int(value))


def _nan_as_text(value: float) -> float | str:
    # SQLite makes NULL of a NaN; any column but a STRICT one keeps a text as it is
    return "NaN" if math.isnan(value) else value


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise _refuse("NaN or infinity in a floating point column")
    return value


def _exact_in(largest: int) -> Callable[[int], float]:
    def check(value: int) -> float:
        if not -largest <= value <= largest:
            raise _refuse("an integer that has no exact floating point number in a floating point column")
        return float(value)

    return check


def _fitting_decimal(column_type: sql.TypeEngine[Any]) -> Callable[[Any], object]:
    precision = getattr(column_type, "precision", None) or 10
    scale = getattr(column_type, "scale", None) or 0

    def check(value: Any) -> object:
        number = Decimal(value)
        if not number.is_finite():
            raise _refuse("NaN or infinity in a decimal column")
        # MySQL rounds what has more digits behind the point without a word
        _, digits, exponent = number.as_tuple()
        assert isinstance(exponent, int)
        text = "".join(map(str, digits))
        significant = text.rstrip("0")
        behind = -(exponent + len(text) - len(significant)) if significant else 0
        before = number.adjusted() + 1 if significant else 0
        if behind > scale or before > precision - scale:
            raise _refuse(f"a numeric of more digits than DECIMAL({precision},{scale}) holds")
        return number

    return check


def _fraction_digits(column_type: sql.TypeEngine[Any]) -> int:
    """How many digits of a second a column keeps; MySQL rounds the others without a word."""
    digits = getattr(column_type, "fsp", 6)
    return 0 if digits is None else int(digits)


def _seconds(microsecond: int, digits: int) -> None:
    if microsecond % 10 ** (6 - digits):
        raise _refuse(f"a time with more than {digits} digits of a second")


def _date(value: datetime.date | str) -> datetime.date:
    if isinstance(value, str):
        raise _refuse("infinity, or a year before 1 or after 9999, in a date column")
    return value


def _clock(digits: int) -> Callable[[Any], object]:
    def check(value: datetime.time | str) -> object:
        # 24:00:00 is text: MySQL takes it, as a duration
        if not isinstance(value, str):
            _seconds(value.microsecond, digits)
        return value

    return check


def _moment(digits: int) -> Callable[[Any], object]:
    def check(value: datetime.datetime | str) -> object:
        if isinstance(value, str):
            raise _refuse("infinity, or a year before 1 or after 9999, in a datetime column")
        _seconds(value.microsecond, digits)
        return value.replace(tzinfo=None)

    return check
