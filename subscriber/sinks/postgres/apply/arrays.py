"""Read columns of raw messages, and write them as array parameters.

The server reads each element by the input or receive function of its own type, as it reads a single value. A binary array is faster for
both sides than a text. Besides values in binary format, it can hold some values that the publisher sends as texts: the binary format of
``text`` is the same, and values of the types in :data:`CONVERTED` are converted here. A conversion accepts only what the type's output
function writes in the usual case. If there is any other value, there is no binary array, and the texts are sent.

A binary array is written directly from the messages: an object for each value would take longer than all the rest. Python itself needs
these objects, and there numbers, dates and times are not converted, because that takes longer than to send the text.

In loops over values are no names of constants, because they would be Python objects: 110 is n, and 1082 the type ``date``.
All functions for messages trust that :func:`~subscriber.protocol.tuples.records_alike` has found them to have the given parts.

Source: PostgreSQL manual, Arrays, Array Input and Output Syntax; ``array_recv`` in arrayfuncs.c; ``timestamptz_recv`` in timestamp.c;
``numeric_recv`` in numeric.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, Final

from subscriber import _cython as cython
from subscriber.protocol.tuples import read_rows

__all__ = ["AS_TEXT", "CONVERTED", "column_arrays", "column_values", "text_array"]

_NUMERIC: Final = 1700
_SIZES: Final = {16: 1, 20: 8, 21: 2, 23: 4, 1082: 4, 1114: 8, 1184: 8}
"""boolean, bigint, smallint, integer, date, timestamp, timestamp with time zone; the size of a value in binary format."""
CONVERTED: Final = frozenset({_NUMERIC, *_SIZES})
"""These types, and numeric."""
AS_TEXT: Final = 0
"""For :func:`column_arrays`: no binary array of this column."""

_HEADER: Final = Struct(">iiIii").pack
_LENGTH: Final = Struct(">i").pack
_NULL: Final = b"\xff\xff\xff\xff"
_NO_LIMIT: Final = 2**62


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


Part = tuple[bytes, bytes]


def column_values(
    records: Sequence[bytes], offset: int, parts: Sequence[Part], columns: Sequence[int], *, first: bool = False
) -> list[Any]:
    """The values of some columns of the last tuple of each message, or of its first one.

    Args:
        records: messages.
        offset: the offset after tag and xid.
        parts: see :func:`~subscriber.protocol.tuples.read_rows`.
        columns: indexes of columns.
        first: take the first tuple, which is the old row of an UPDATE.

    Returns:
        For one column its values, for several a tuple for each message.
    """
    if not cython.compiled:
        return list(map(itemgetter(*columns), _tuples(records, offset, parts, first=first)))
    found: list[Any] = []
    one: cython.Py_ssize_t = len(columns) == 1
    text: cython.p_uchar
    at: cython.Py_ssize_t
    position: cython.Py_ssize_t
    length: cython.Py_ssize_t
    column: cython.Py_ssize_t
    begin: cython.Py_ssize_t
    start: cython.Py_ssize_t = offset + len(parts[0][0])
    last: cython.Py_ssize_t = len(parts) > 1 and not first
    # an old tuple
    skipped: cython.Py_ssize_t = len(parts[0][1]) if last else 0
    second: cython.Py_ssize_t = len(parts[1][0]) if last else 0
    record: bytes
    for record in records:
        text = record
        begin = _skip(text, start, skipped) + second
        position, at = begin, 0
        values: list[bytes | None] = []
        for column in columns:
            if column < at:
                position, at = begin, 0
            position = _skip(text, position, column - at)
            at = column
            length = _length(text, position)
            values.append(None if length < 0 else record[position + 5 : position + 5 + length])
        found.append(values[0] if one else tuple(values))
    return found


def column_arrays(records: list[bytes], offset: int, parts: Sequence[Part], columns: Sequence[tuple[int, int, bool]]) -> list[bytes | None]:
    """One-dimensional arrays in binary format of columns of the last tuple of each message.

    Args:
        records: messages.
        offset: the offset after tag and xid.
        parts: see :func:`~subscriber.protocol.tuples.read_rows`.
        columns: for each array the index of the column, ascending; the type of its elements, or :data:`AS_TEXT`; and whether the values
            are in binary format already. Else they are texts, and the type is one of :data:`CONVERTED`.

    Returns:
        The arrays; None: there is a value that is not converted.
    """
    if not cython.compiled:
        values = list(zip(*_tuples(records, offset, parts, first=False), strict=True))
        return [_joined(values[index], element_type) if is_binary else None for index, element_type, is_binary in columns]
    found: list[bytes | None] = []
    count: cython.Py_ssize_t = len(records)
    at: cython.Py_ssize_t = 0
    index: cython.Py_ssize_t
    row: cython.Py_ssize_t
    first: cython.Py_ssize_t = offset + len(parts[0][0])
    # an old tuple
    skipped: cython.Py_ssize_t = len(parts[0][1]) if len(parts) > 1 else 0
    second: cython.Py_ssize_t = len(parts[1][0]) if len(parts) > 1 else 0
    record: bytes
    memory = bytearray(8 * count)
    raw: cython.p_uchar = memory
    # where the next column of each record begins
    starts: cython.p_Py_ssize_t = cython.cast(cython.p_Py_ssize_t, raw)
    for row in range(count):
        record = records[row]
        starts[row] = _skip(record, first, skipped) + second
    for index, element_type, is_binary in columns:
        for row in range(count):
            record = records[row]
            starts[row] = _skip(record, starts[row], index - at)
        at = index
        found.append(_array(records, starts, element_type, is_binary) if element_type != AS_TEXT else None)
    return found


def _tuples(records: Sequence[bytes], offset: int, parts: Sequence[Part], *, first: bool) -> list[tuple[bytes | None, ...]]:
    rows = read_rows(records, range(len(records)), tag=records[0][0], offset=offset, parts=parts, size=_NO_LIMIT) if records else []
    if len(parts) == 1:
        return rows
    count = len(parts[0][1])
    return [row[:count] for row in rows] if first else [row[count:] for row in rows]


def _joined(values: Sequence[bytes | None], element_type: int) -> bytes:
    body = b"".join([_NULL if value is None else _LENGTH(len(value)) + value for value in values])
    return _HEADER(1, None in values, element_type, len(values), 1) + body


@cython.cfunc
@cython.inline
def _length(text: cython.p_uchar, position: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """The length of the value that begins with its kind; -1: NULL or unchanged."""
    length: cython.Py_ssize_t = -1
    if text[position] != 110 and text[position] != 117:  # n: NULL, u: unchanged
        length = text[position + 1]
        length = length << 8 | text[position + 2]
        length = length << 8 | text[position + 3]
        length = length << 8 | text[position + 4]
    return length


@cython.cfunc
@cython.inline
def _after(text: cython.p_uchar, position: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Where the next value begins."""
    length: cython.Py_ssize_t = _length(text, position)
    return position + 1 if length < 0 else position + 5 + length


@cython.cfunc
@cython.inline
def _skip(text: cython.p_uchar, position: cython.Py_ssize_t, count: cython.Py_ssize_t) -> cython.Py_ssize_t:
    """Where the value after so many others begins."""
    while count > 0:
        position = _after(text, position)
        count -= 1
    return position


@cython.cfunc
def _array(
    records: list[bytes], starts: cython.p_Py_ssize_t, element_type: cython.Py_ssize_t, is_binary: cython.Py_ssize_t
) -> bytes | None:
    """The array of a column. ``starts``: where its values begin."""
    count: cython.Py_ssize_t = len(records)
    width: cython.Py_ssize_t = 0 if is_binary or element_type == _NUMERIC else _SIZES[element_type]
    row: cython.Py_ssize_t
    start: cython.Py_ssize_t
    length: cython.Py_ssize_t
    place: cython.Py_ssize_t
    number: cython.Py_ssize_t
    nulls: cython.Py_ssize_t = 0
    position: cython.Py_ssize_t = 20
    size: cython.Py_ssize_t = 20
    record: bytes
    text: cython.p_uchar
    for row in range(count):
        record = records[row]
        text = record
        length = _length(text, starts[row])
        # a numeric: the point can divide four digits, and so can the end
        size += 4 if length < 0 else 4 + width if width else 4 + length if is_binary else 16 + length // 2
    body: bytearray = bytearray(size)
    out: cython.p_uchar = body
    for row in range(count):
        record = records[row]
        text = record
        start = starts[row]
        length = _length(text, start)
        start += 5
        if length < 0:
            nulls = 1
            for place in range(4):
                out[position + place] = 255
            position += 4
        elif is_binary:
            length += 4
            start -= 4
            if length < 200:
                for place in range(length):
                    out[position + place] = text[start + place]
            else:
                body[position : position + length] = record[start : start + length]
            position += length
        elif not width:
            position = _write_numeric(text, start, length, out, position)
            if position < 0:
                return None
        else:
            number = _number(text, start, length, element_type)
            if number == 1 << 62:
                return None
            out[position] = out[position + 1] = out[position + 2] = 0
            out[position + 3] = width
            position += 4 + width
            for place in range(1, width + 1):
                out[position - place] = number & 255
                number >>= 8
    body[:20] = _HEADER(1, nulls, element_type, count, 1)
    return bytes(body[:position])


@cython.cfunc
def _number(
    text: cython.p_uchar, start: cython.Py_ssize_t, length: cython.Py_ssize_t, element_type: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """The number of an integer of at most 18 digits, of a boolean, a date or a time."""
    number: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t
    first: cython.Py_ssize_t
    digit: cython.Py_ssize_t
    limit: cython.Py_ssize_t = 10**18
    if element_type == 16:
        if length != 1 or (text[start] != 116 and text[start] != 102):
            return 1 << 62
        return 1 if text[start] == 116 else 0
    if element_type == 1082 or element_type == 1114 or element_type == 1184:  # noqa: PLR1714 - faster
        return _moment(text, start, length, element_type)
    if element_type != 20:
        limit = 2147483648 if element_type == 23 else 32768
    first = 1 if length and text[start] == 45 else 0
    if not 0 < length - first <= 18:
        return 1 << 62
    for place in range(start + first, start + length):
        digit = text[place] - 48
        if digit < 0 or digit > 9:
            return 1 << 62
        number = number * 10 + digit
    if number >= limit + first:
        return 1 << 62
    return -number if first else number


@cython.cfunc
def _moment(
    text: cython.p_uchar, start: cython.Py_ssize_t, length: cython.Py_ssize_t, element_type: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """A date is a number of days since 2000, a time of microseconds."""
    # 2000-01-31, 2000-01-31 12:34:56[.123456][+01[:23[:45]]]
    time: cython.Py_ssize_t = element_type != 1082
    place: cython.Py_ssize_t
    first: cython.Py_ssize_t
    number: cython.Py_ssize_t
    digit: cython.Py_ssize_t
    year: cython.Py_ssize_t
    month: cython.Py_ssize_t
    day: cython.Py_ssize_t
    seconds: cython.Py_ssize_t
    unit: cython.Py_ssize_t
    end: cython.Py_ssize_t = start + length
    if length < 19 if time else length != 10:
        return 1 << 62
    for place in range(19 if time else 10):
        digit = text[start + place]
        if place == 4 or place == 7:  # noqa: PLR1714 - faster
            if digit != 45:
                return 1 << 62
        elif place == 10:
            if digit != 32:
                return 1 << 62
        elif place == 13 or place == 16:  # noqa: PLR1714
            if digit != 58:
                return 1 << 62
        elif digit < 48 or digit > 57:
            return 1 << 62
    year = text[start] * 1000 + text[start + 1] * 100 + text[start + 2] * 10 + text[start + 3] - 48 * 1111
    month = text[start + 5] * 10 + text[start + 6] - 48 * 11
    day = text[start + 8] * 10 + text[start + 9] - 48 * 11
    if year < 1000 or month < 1 or month > 12 or day < 1:
        return 1 << 62
    if month == 2:
        if day > 28 + (year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)):
            return 1 << 62
    elif day > 31 - (month == 4 or month == 6 or month == 9 or month == 11):  # noqa: PLR1714
        return 1 << 62
    # years that begin in March, so that the leap day is the last one; 2000-01-01 is day 730426, if day 1 is March 1 of the year 0
    if month < 3:
        year -= 1
        month += 12
    number = 365 * year + year // 4 - year // 100 + year // 400 + (153 * (month - 3) + 2) // 5 + day - 730426
    if not time:
        return number
    seconds = (text[start + 11] * 10 + text[start + 12] - 48 * 11) * 3600
    day = text[start + 14] * 10 + text[start + 15] - 48 * 11
    month = text[start + 17] * 10 + text[start + 18] - 48 * 11
    if seconds > 23 * 3600 or day > 59 or month > 59:
        return 1 << 62
    number = (number * 86400 + seconds + day * 60 + month) * 1_000_000
    place = start + 19
    if place < end and text[place] == 46:
        unit = 1_000_000
        place += 1
        while place < end and 48 <= text[place] <= 57:
            unit //= 10
            number += (text[place] - 48) * unit
            place += 1
        if unit < 1 or place == start + 20:
            return 1 << 62
    if element_type == 1184:
        if place >= end or (text[place] != 43 and text[place] != 45):
            return 1 << 62
        first = text[place] == 45
        seconds = 0
        unit = 3600
        while True:
            if place + 3 > end or unit < 1:
                return 1 << 62
            day = text[place + 1] - 48
            month = text[place + 2] - 48
            if day < 0 or day > 5 or month < 0 or month > 9:
                return 1 << 62
            seconds += (day * 10 + month) * unit
            unit //= 60
            place += 3
            if place == end:
                break
            if text[place] != 58:
                return 1 << 62
        if seconds >= 16 * 3600:
            return 1 << 62
        number += seconds * 1_000_000 if first else -seconds * 1_000_000
    return number if place == end else 1 << 62


@cython.cfunc
def _write_numeric(
    text: cython.p_uchar, start: cython.Py_ssize_t, length: cython.Py_ssize_t, out: cython.p_uchar, position: cython.Py_ssize_t
) -> cython.Py_ssize_t:
    """Write a decimal fraction of at most 1000 characters: its digits of base 10000, and the number of decimal digits after the point.

    Returns:
        The position after it; -1: it is not converted.
    """
    place: cython.Py_ssize_t
    point: cython.Py_ssize_t
    number: cython.Py_ssize_t = 0
    digit: cython.Py_ssize_t
    begin: cython.Py_ssize_t = position
    end: cython.Py_ssize_t = start + length
    first: cython.Py_ssize_t = start + (1 if length and text[start] == 45 else 0)
    point = first
    while point < end and text[point] != 46:
        point += 1
    if point == first or point + 1 == end or length > 1000:
        return -1
    scale: cython.Py_ssize_t = end - point - 1 if point < end else 0
    position += 12
    # the first digit of base 10000 has the decimal digits that are left of a multiple of four
    left: cython.Py_ssize_t = (point - first - 1) % 4 + 1
    for place in range(first, end):
        if place == point:
            continue
        digit = text[place] - 48
        if digit < 0 or digit > 9:
            return -1
        number = number * 10 + digit
        left -= 1
        if left == 0:
            out[position] = number >> 8
            out[position + 1] = number & 255
            position += 2
            number = 0
            left = 4
    if left < 4:
        for _ in range(left):
            number *= 10
        out[position] = number >> 8
        out[position + 1] = number & 255
        position += 2
    number = position - begin - 4
    out[begin] = out[begin + 1] = 0
    out[begin + 2] = number >> 8
    out[begin + 3] = number & 255
    number = (number - 8) // 2
    out[begin + 4] = number >> 8
    out[begin + 5] = number & 255
    # the weight of the first digit, the sign, and the scale
    out[begin + 6] = 0
    out[begin + 7] = (point - first - 1) // 4
    out[begin + 8] = 64 if first > start else 0
    out[begin + 9] = 0
    out[begin + 10] = scale >> 8
    out[begin + 11] = scale & 255
    return position
