"""Write array parameters. The server reads each element by the input or receive function of its own type, as it reads a single value.

A binary array is faster for both sides than a text. Besides values in binary format, it can hold some values that the publisher sends as
texts: the binary format of ``text`` is the same, and values of the types in :data:`CONVERTED` are converted here. A conversion accepts only
what the type's output function writes in the usual case. If there is any other value, the result is None, and the texts are sent.

Numbers, dates and times are converted by the compiled form only: in Python, the conversion takes longer than to send the text.

Source: PostgreSQL manual, Arrays, Array Input and Output Syntax; ``array_recv`` in arrayfuncs.c; ``timestamptz_recv`` in timestamp.c;
``numeric_recv`` in numeric.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from subscriber import _cython as cython

__all__ = ["CONVERTED", "converted_array", "field_array", "text_array"]

_BOOL: Final = 16
_DATE: Final = 1082
_TIMESTAMPTZ: Final = 1184
_NUMERIC: Final = 1700
_SIZES: Final = {20: 8, 21: 2, 23: 4, _DATE: 4, 1114: 8, _TIMESTAMPTZ: 8}
"""bigint, smallint, integer, date, timestamp, timestamp with time zone; the size of a value in binary format."""
CONVERTED: Final = frozenset({_BOOL, _NUMERIC, *_SIZES})
"""These types, boolean and numeric."""

_HEADER: Final = Struct(">iiIii").pack
_NULL: Final = b"\xff\xff\xff\xff"
_TIMES: Final = (1114, _TIMESTAMPTZ)
_EPOCH: Final = 730426
"""The day 2000-01-01, if day 1 is March 1 of the year 0."""
_BOOLEAN: Final = {b"t": b"\0\0\0\1\1", b"f": b"\0\0\0\1\0", None: _NULL}


def text_array(values: Sequence[bytes | None], delimiter: bytes) -> bytes:
    """A one-dimensional array in text format. Every value is quoted, so an element is exactly its value."""
    try:
        joined = (b'"' + delimiter + b'"').join(values)  # type: ignore[arg-type]
    except TypeError:
        # a NULL; to search for one takes longer than to join the values
        pass
    else:
        if b"\\" not in joined and joined.count(b'"') == 2 * (len(values) - 1):
            return b'{"' + joined + b'"}'
    return b"{" + delimiter.join([b"NULL" if value is None else _quoted(value) for value in values]) + b"}"


def _quoted(value: bytes) -> bytes:
    return b'"' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def field_array(fields: Sequence[bytes | None], element_type: int) -> bytes:
    """A one-dimensional array in binary format. Each value has its length before it, as four bytes."""
    nulls = False
    try:
        body = b"".join(fields)  # type: ignore[arg-type]
    except TypeError:
        nulls = True
        body = b"".join([_NULL if field is None else field for field in fields])
    return _HEADER(1, nulls, element_type, len(fields), 1) + body


def converted_array(values: Sequence[bytes | None], element_type: int) -> bytes | None:
    """A one-dimensional array in binary format of values in text format; None: there is a value that is not converted.

    Args:
        values: texts.
        element_type: one of :data:`CONVERTED`.
    """
    if element_type == _BOOL:
        body = _boolean_elements(values)
    elif element_type == _NUMERIC:
        body = _numeric_elements(values)
    else:
        body = _number_elements(values, element_type)
    return None if body is None else _HEADER(1, None in values, element_type, len(values), 1) + body


def _boolean_elements(values: Sequence[bytes | None]) -> bytes | None:
    try:
        return b"".join([_BOOLEAN[value] for value in values])
    except KeyError:
        return None


def _number_elements(values: Sequence[bytes | None], element_type: int) -> bytes | None:
    """Convert integers of at most 18 digits, dates, and times. A date is a number of days since 2000, a time of microseconds."""
    if not cython.compiled:
        return None
    width: cython.Py_ssize_t = _SIZES[element_type]
    date: cython.Py_ssize_t = element_type == _DATE
    time: cython.Py_ssize_t = not date and element_type in _TIMES
    zone: cython.Py_ssize_t = element_type == _TIMESTAMPTZ
    epoch: cython.Py_ssize_t = _EPOCH
    value: bytes | None
    text: cython.p_char
    position: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t
    first: cython.Py_ssize_t
    length: cython.Py_ssize_t
    number: cython.Py_ssize_t
    digit: cython.Py_ssize_t
    year: cython.Py_ssize_t
    month: cython.Py_ssize_t
    day: cython.Py_ssize_t
    seconds: cython.Py_ssize_t
    unit: cython.Py_ssize_t
    limit: cython.Py_ssize_t = 1
    limit = limit << (8 * width - 1) if width < 8 else 10**18
    body: bytearray = bytearray(len(values) * (4 + width))
    for value in values:
        if value is None:
            for place in range(4):
                body[position + place] = 255
            position += 4
            continue
        text = value
        length = len(value)
        if date or time:
            # 2000-01-31, 2000-01-31 12:34:56[.123456][+01[:23[:45]]]
            if length < 19 if time else length != 10:
                return None
            for place in range(19 if time else 10):
                digit = text[place]
                if place == 4 or place == 7:  # noqa: PLR1714 - faster
                    if digit != 45:
                        return None
                elif place == 10:
                    if digit != 32:
                        return None
                elif place == 13 or place == 16:  # noqa: PLR1714
                    if digit != 58:
                        return None
                elif digit < 48 or digit > 57:
                    return None
            year = text[0] * 1000 + text[1] * 100 + text[2] * 10 + text[3] - 48 * 1111
            month = text[5] * 10 + text[6] - 48 * 11
            day = text[8] * 10 + text[9] - 48 * 11
            if year < 1000 or month < 1 or month > 12 or day < 1:
                return None
            if month == 2:
                if day > 28 + (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)):
                    return None
            elif day > 31 - (month == 4 or month == 6 or month == 9 or month == 11):  # noqa: PLR1714
                return None
            # years that begin in March, so that the leap day is the last one
            if month < 3:
                year -= 1
                month += 12
            number = 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day - epoch
            if time:
                seconds = (text[11] * 10 + text[12] - 48 * 11) * 3600
                day = text[14] * 10 + text[15] - 48 * 11
                month = text[17] * 10 + text[18] - 48 * 11
                if seconds > 23 * 3600 or day > 59 or month > 59:
                    return None
                number = (number * 86400 + seconds + day * 60 + month) * 1_000_000
                place = 19
                if place < length and text[place] == 46:
                    unit = 1_000_000
                    place += 1
                    while place < length and 48 <= text[place] <= 57:
                        unit //= 10
                        number += (text[place] - 48) * unit
                        place += 1
                    if unit < 1 or place == 20:
                        return None
                if zone:
                    if place >= length or (text[place] != 43 and text[place] != 45):
                        return None
                    first = text[place] == 45
                    seconds = 0
                    unit = 3600
                    while True:
                        if place + 3 > length or unit < 1:
                            return None
                        day = text[place + 1] - 48
                        month = text[place + 2] - 48
                        if day < 0 or day > 5 or month < 0 or month > 9:
                            return None
                        seconds += (day * 10 + month) * unit
                        unit //= 60
                        place += 3
                        if place == length:
                            break
                        if text[place] != 58:
                            return None
                    if seconds >= 16 * 3600:
                        return None
                    number += seconds * 1_000_000 if first else -seconds * 1_000_000
                if place != length:
                    return None
        else:
            first = 1 if length and text[0] == 45 else 0
            if not 0 < length - first <= 18:
                return None
            number = 0
            for place in range(first, length):
                digit = text[place] - 48
                if digit < 0 or digit > 9:
                    return None
                number = number * 10 + digit
            if number >= limit + first:
                return None
            if first:
                number = -number
        body[position + 3] = width
        position += 4 + width
        for place in range(1, width + 1):
            body[position - place] = number & 255
            number >>= 8
    return bytes(body[:position])


def _numeric_elements(values: Sequence[bytes | None]) -> bytes | None:
    """Convert decimal fractions of at most 1000 characters: to digits of base 10000, with the number of decimal digits after the point."""
    if not cython.compiled:
        return None
    value: bytes | None
    text: cython.p_char
    size: cython.Py_ssize_t = 0
    position: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t
    start: cython.Py_ssize_t
    first: cython.Py_ssize_t
    point: cython.Py_ssize_t
    length: cython.Py_ssize_t
    scale: cython.Py_ssize_t
    left: cython.Py_ssize_t
    number: cython.Py_ssize_t
    digit: cython.Py_ssize_t
    for value in values:
        # the point can divide four digits, and so can the end
        size += 4 if value is None else 16 + len(value) // 2
    body: bytearray = bytearray(size)
    for value in values:
        if value is None:
            for place in range(4):
                body[position + place] = 255
            position += 4
            continue
        text = value
        length = len(value)
        first = 1 if length and text[0] == 45 else 0
        point = first
        while point < length and text[point] != 46:
            point += 1
        if point == first or point + 1 == length or length > 1000:
            return None
        scale = length - point - 1 if point < length else 0
        start = position
        position += 12
        # the first digit of base 10000 has the decimal digits that are left of a multiple of four
        left = (point - first - 1) % 4 + 1
        number = 0
        for place in range(first, length):
            if place == point:
                continue
            digit = text[place] - 48
            if digit < 0 or digit > 9:
                return None
            number = number * 10 + digit
            left -= 1
            if left == 0:
                body[position] = number >> 8
                body[position + 1] = number & 255
                position += 2
                number = 0
                left = 4
        if left < 4:
            for _ in range(left):
                number *= 10
            body[position] = number >> 8
            body[position + 1] = number & 255
            position += 2
        number = position - start - 4
        body[start + 2] = number >> 8
        body[start + 3] = number & 255
        number = (number - 8) // 2
        body[start + 4] = number >> 8
        body[start + 5] = number & 255
        # the weight of the first digit, the sign, and the scale
        body[start + 7] = (point - first - 1) // 4
        body[start + 8] = 64 if first else 0
        body[start + 10] = scale >> 8
        body[start + 11] = scale & 255
    return bytes(body[:position])
