"""Convert values of databases of other kinds to PostgreSQL's text, in order to compare them.

The publisher writes every value as text (DateStyle ISO, time zone UTC, extra_float_digits 3). A target stores that text, or uses a type of
its own that holds the value exactly (docs/reference/types-sql.md). This module converts the driver's value of such a type to PostgreSQL's
text. It does not know how the target stored the value, so a value that was changed on its way differs.

Floats are compared by their bits, because a value has several texts. This includes reals: PostgreSQL writes the shortest text that gives
the bits, and a target its double. Only equal values are treated as equal.
"""

from __future__ import annotations

import datetime
import math
import re
import struct
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Final

from subscriber.errors import TargetError

__all__ = ["array_literal", "normalizer"]

Normalizer = Callable[[object], str | None]

_QUOTED: Final = re.compile(r'[{}",\\\s]', re.ASCII)
_MICROSECONDS: Final = datetime.timedelta(microseconds=1)


def normalizer(type_name: str) -> Normalizer:
    """Return a function that makes the values of one column comparable, for both sides.

    Args:
        type_name: PostgreSQL's name of the column's type on the publisher, without modifier; for a domain, its base type.

    Returns:
        A function from the driver's value, or PostgreSQL's text, to text. None stays None. It raises TargetError for a value of a
        class that does not occur in such a column.
    """
    special = _SPECIAL.get(type_name)

    def normalized(value: object) -> str | None:
        if value is None:
            return None
        return special(value) if special is not None else _plain(value)

    return normalized


def array_literal(elements: Sequence[object], text: Callable[[object], str] | None = None) -> str:
    """PostgreSQL's text of a list as a one-dimensional array with lower bound 1.

    Args:
        elements: the list.
        text: gives the text of an element. None: that of its class; not for floats.
    """
    return "{" + ",".join("NULL" if element is None else _element((text or _plain)(element)) for element in elements) + "}"


def _element(text: str) -> str:
    if text and text.upper() != "NULL" and not _QUOTED.search(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _plain(value: object) -> str:
    match value:
        case str():
            return value
        case bool():
            return "t" if value else "f"
        case int() | float():
            return str(value)
        case Decimal():
            return "NaN" if value.is_nan() else f"{value:f}"
        case bytes() | bytearray() | memoryview():
            return f"\\x{bytes(value).hex()}"
        case datetime.datetime():
            return _datetime(value)
        case datetime.date():
            return value.isoformat()
        case datetime.time():
            return _time(value)
        case datetime.timedelta():  # from MySQL's drivers for TIME
            return _clock(value // _MICROSECONDS)
        case uuid.UUID():
            return str(value)
        case _:
            raise TargetError(f"a value of class {type(value).__name__} cannot be compared", hint="report this: the type is missing here")


def _boolean(value: object) -> str:
    if value in {"t", "f"}:
        return str(value)
    return "t" if value else "f"


def _double(value: object) -> str:
    return struct.pack(">d", _number(value)).hex()


def _real(value: object) -> str:
    number = _number(value)
    try:
        bits = struct.pack(">f", number)
    except OverflowError:
        return f"not a real: {number!r}"
    # PostgreSQL's text is a rounded real; any other value must be exactly a real, else it would be rounded here
    exact = isinstance(value, str) or math.isnan(number) or struct.unpack(">f", bits)[0] == number
    return bits.hex() if exact else f"not a real: {number!r}"


def _number(value: object) -> float:
    if isinstance(value, str | int | float | Decimal):
        number = float(value)
        # treat all NaN as equal
        return math.nan if math.isnan(number) else number
    return float(_plain(value))


def _datetime(value: datetime.datetime) -> str:
    zone = ""
    if value.tzinfo is not None:
        value, zone = value.astimezone(datetime.UTC), "+00"
    return f"{value.date().isoformat()} {_time(value.time().replace(tzinfo=None))}{zone}"


def _instant(value: object) -> str:
    if isinstance(value, datetime.datetime) and value.tzinfo is None:
        # a target without time zones stores UTC
        value = value.replace(tzinfo=datetime.UTC)
    return _plain(value)


def _time(value: datetime.time) -> str:
    if value.tzinfo is not None:
        raise TargetError("a time with a zone has no unique text", hint="report this: the target should store it as text")
    return _clock(((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond)


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    minutes, second = divmod(seconds, 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour:02}:{minute:02}:{second:02}" + (f".{fraction:06}".rstrip("0") if fraction else "")


def _bits(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        raise TargetError("a bit string as a number has lost its length", hint="report this: the target should store it as text")
    return _plain(value)


_SPECIAL: Final[dict[str, Callable[[object], str]]] = {
    "boolean": _boolean,
    "real": _real,
    "double precision": _double,
    "timestamp with time zone": _instant,
    "bit": _bits,
    "bit varying": _bits,
}
