"""Converts values of PostgreSQL types to DBAPI parameters for columns of other databases. A value is stored exactly or rejected.

The reflected type of a target column determines its *family*. For each family there is a list of PostgreSQL types whose values it can
store exactly. A type that is not in the list is rejected before anything is written (:class:`Unfit`). A single value that does not fit
(infinity in a DATE column) is rejected when it arrives (:class:`~subscriber.types.ValueRefused`). A text column accepts every type, as
PostgreSQL's text, and the hints of the errors suggest it. docs/reference/types-sql.md has the table for users.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from sqlalchemy import types as sql
from sqlalchemy.dialects import mysql

from subscriber.sinks.sqlalchemy.schema.fitting import (
    exact_in,
    finite,
    fitting_date,
    fitting_decimal,
    fitting_moment,
    fitting_time,
    fraction_digits,
    in_int8,
    integral,
    nan_as_text,
)
from subscriber.types import Codec, ValueRefused

__all__ = ["INTEGERS", "Converter", "Family", "Unfit", "converter", "family_of"]

INTEGERS: Final = frozenset({"int2", "int4", "int8", "oid", "xid", "cid", "xid8"})
_FLOATS: Final = frozenset({"float4", "float8"})
_MICROSECONDS: Final = 6
_SINGLE_INTEGERS: Final = 2**24
_DOUBLE_INTEGERS: Final = 2**53
"""Up to these numbers, all integers have an exact floating point number."""

_TEXT_BYTES: Final = ((mysql.TINYTEXT, 2**8 - 1), (mysql.MEDIUMTEXT, 2**24 - 1), (mysql.TEXT, 2**16 - 1))
"""The size of MySQL's text types, in bytes of UTF-8."""

Bind = Callable[[bytes], object]


class Family(StrEnum):
    """The kind of values that a target column stores."""

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
    """A column that stores values of every storage class unchanged (SQLite: no declared type, or BLOB)."""
    OTHER = "other"


class Unfit(Exception):
    """A column cannot store a type exactly. The text says why."""


@dataclass(frozen=True, slots=True)
class Converter:
    """The two functions that convert values to DBAPI parameters, from text and from the binary format. They are never called with NULL.

    They raise :data:`subscriber.types.codec.READ_ERRORS`, ValueRefused among them.
    """

    text: Bind
    binary: Bind


_BOOLEANS: Final = Converter(
    MappingProxyType({b"t": 1, b"f": 0}).__getitem__,
    MappingProxyType({b"\x01": 1, b"\x00": 0}).__getitem__,
)


def family_of(column_type: sql.TypeEngine[Any], dialect_name: str) -> Family:
    found = _family(column_type)
    if dialect_name != "sqlite":
        return found
    # SQLite: only the words in a column's declared type determine how it converts values (Datatypes in SQLite, 3.1)
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
            # a SET changes the order of its members
            return Family.OTHER
        case sql.String():
            return Family.TEXT
    return Family.OTHER


def converter(codec: Codec, column_type: sql.TypeEngine[Any], dialect_name: str) -> Converter:
    """Return the conversion of a type's values for a column.

    Args:
        codec: the codec of the type on the publisher.
        column_type: the column's reflected type.
        dialect_name: the target's.

    Raises:
        Unfit: the column cannot store the type without loss.
    """
    family = family_of(column_type, dialect_name)
    found = (_for_sqlite if dialect_name == "sqlite" else _for_others)(codec, family, column_type)
    if found is None:
        raise Unfit(f"type {codec.source} cannot be stored without loss in a column of type {_described(column_type)}")
    return found


def _for_sqlite(codec: Codec, family: Family, column_type: sql.TypeEngine[Any]) -> Converter | None:
    name = codec.source.builtin
    if family is Family.TEXT and not isinstance(column_type, sql.Enum):
        return _texts(codec)
    if family is Family.ANY:
        return _any(codec)
    if name == "bool" and family in {Family.BOOLEAN, Family.INTEGER, Family.NUMERIC}:
        return _BOOLEANS
    if name in INTEGERS and family in {Family.INTEGER, Family.NUMERIC}:
        return _checked(codec, in_int8) if name == "xid8" else _values(codec)
    if name == "numeric" and family is Family.INTEGER:
        return _checked(codec, integral)
    if name in _FLOATS and family in {Family.FLOAT, Family.NUMERIC}:
        return _checked(codec, nan_as_text)
    if name in INTEGERS and family is Family.FLOAT:
        return _checked(codec, exact_in(_DOUBLE_INTEGERS))
    # these columns have NUMERIC affinity: SQLite converts a text that is a number, and no text of these types is a number
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
            return _BOOLEANS
        case Family.INTEGER if name in INTEGERS:
            return _values(codec)
        case Family.INTEGER if name == "numeric":
            return _checked(codec, integral)
        case Family.FLOAT if name in _FLOATS | INTEGERS:
            return _float(codec, column_type)
        case Family.NUMERIC if name in INTEGERS | {"numeric"}:
            return _checked(codec, fitting_decimal(column_type))
        case Family.DATE if name == "date":
            return _checked(codec, fitting_date)
        case Family.TIME if name == "time":
            return _checked(codec, fitting_time(fraction_digits(column_type)))
        case Family.DATETIME if name in {"timestamp", "timestamptz"}:
            return _moments(codec, column_type)
        case Family.UUID if name == "uuid":
            return _texts(codec)
    return None


def _text_column(codec: Codec, column_type: sql.TypeEngine[Any]) -> Converter | None:
    if isinstance(column_type, sql.Enum):
        # MySQL's ENUM ignores case and stores '' for an unknown label: accept only an enum whose labels it has
        labels = codec.source.labels
        return _texts(codec) if labels and set(labels) <= set(column_type.enums) else None
    if isinstance(column_type, sql.CHAR):
        # MySQL removes blanks at the end when it reads a CHAR; in PostgreSQL's char(n) they have no meaning: remove them here
        return _checked_text(codec, _stripped if codec.source.builtin == "bpchar" else _without_blanks_behind)
    fits = _within(column_type)
    return _texts(codec) if fits is None else _checked_text(codec, fits)


def _float(codec: Codec, column_type: sql.TypeEngine[Any]) -> Converter | None:
    name = codec.source.builtin
    if getattr(column_type, "scale", None) is not None:
        # FLOAT(7,2) rounds
        return None
    single = not isinstance(column_type, sql.Double)
    if name in _FLOATS:
        return None if single and name == "float8" else _checked(codec, finite)
    return _checked(codec, exact_in(_SINGLE_INTEGERS if single else _DOUBLE_INTEGERS))


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
    # BINARY(n) pads a value with zeros
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
        raise ValueRefused("a value with trailing blanks in a CHAR column", hint="make the column VARCHAR in the target")
    return text


def _within(column_type: sql.TypeEngine[Any]) -> Callable[[str], str] | None:
    """Return a check for blanks at the end of a value that is too long: MySQL cuts them off in every mode. The server rejects the rest."""
    limit = getattr(column_type, "length", None)
    if limit is not None:
        return _uncut(lambda text: len(text) > limit, f"trailing blanks beyond the {limit} characters of the column")
    size = next((size for kind, size in _TEXT_BYTES if isinstance(column_type, kind)), None)
    if size is None:
        return None
    return _uncut(lambda text: len(text.encode()) > size, f"trailing blanks beyond the {size} bytes of the column")


def _uncut(is_longer: Callable[[str], bool], what: str) -> Callable[[str], str]:
    def check(text: str) -> str:
        if text.endswith(" ") and is_longer(text):
            raise ValueRefused(f"a value with {what}", hint="make the column longer in the target")
        return text

    return check


def _stripped(text: str) -> str:
    return text.rstrip(" ")


def _any(codec: Codec) -> Converter:
    """Use the nearest exact storage class: integers, floats and bytes as such, all other types as text."""
    name = codec.source.builtin
    if name == "bool":
        return _BOOLEANS
    if name == "xid8":
        return Converter(codec.text_from_text, codec.text_from_binary)
    if name in INTEGERS or codec.python is bytes:
        return _values(codec)
    if name in _FLOATS:
        return _checked(codec, nan_as_text)
    return Converter(codec.text_from_text, codec.text_from_binary)


def _moments(codec: Codec, column_type: sql.TypeEngine[Any]) -> Converter:
    """Timestamps. If the column keeps microseconds (MySQL), the usual text goes to the driver unchanged: parsing it would cost time."""
    slow = _checked(codec, fitting_moment(fraction_digits(column_type)))
    if getattr(column_type, "fsp", None) != _MICROSECONDS:
        return slow
    zoned = codec.source.builtin == "timestamptz"

    def read(data: bytes) -> object:
        text = data.decode("ascii")
        # a year of four digits, and neither infinity nor BC
        if text[4:5] == "-" and text[10:11] == " " and text[-1] != "C":
            if not zoned:
                return text
            if text[-3:] == "+00":
                return text[:-3]
        return slow.text(data)

    return Converter(read, slow.binary)
