"""Write array parameters. The server reads each element by the input or receive function of its own type, as it reads a single value.

A binary array is faster for both sides than a text. Besides values in binary format, it can hold some values that the publisher sends as
texts: the binary format of ``text`` is the same, and integers and booleans are converted here (:data:`CONVERTED`). A conversion accepts
only what the type's output function writes. For any other value it gives None, and the text is sent.

Source: PostgreSQL manual, Arrays, Array Input and Output Syntax; ``array_recv`` in arrayfuncs.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

from subscriber import _cython as cython

__all__ = ["CONVERTED", "boolean_array", "converted_array", "field_array", "integer_array", "text_array"]

CONVERTED: Final = {16: 1, 20: 8, 21: 2, 23: 4}
"""The types whose texts are converted: boolean, bigint, smallint, integer; the size of a value in binary format."""

_HEADER: Final = Struct(">iiIii").pack
_NULL: Final = b"\xff\xff\xff\xff"
_BOOLEAN: Final = {b"t": b"\0\0\0\1\1", b"f": b"\0\0\0\1\0", None: _NULL}
_DIGITS: Final = 18


def text_array(values: Sequence[bytes | None], delimiter: bytes) -> bytes:
    """A one-dimensional array in text format. Every value is quoted, so an element is exactly its value."""
    if None not in values:
        joined = (b'"' + delimiter + b'"').join(values)  # type: ignore[arg-type]
        if b"\\" not in joined and joined.count(b'"') == 2 * (len(values) - 1):
            return b'{"' + joined + b'"}'
    return b"{" + delimiter.join([b"NULL" if value is None else _quoted(value) for value in values]) + b"}"


def _quoted(value: bytes) -> bytes:
    return b'"' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def field_array(fields: Sequence[bytes | None], element_type: int) -> bytes:
    """A one-dimensional array in binary format. Each value has its length before it, as four bytes."""
    nulls = None in fields
    parts = [_NULL if field is None else field for field in fields] if nulls else fields
    return _HEADER(1, nulls, element_type, len(fields), 1) + b"".join(parts)  # type: ignore[arg-type]


def converted_array(values: Sequence[bytes | None], element_type: int) -> bytes | None:
    """A one-dimensional array in binary format of values in text format; None: a value is not as the type writes it.

    Args:
        values: texts.
        element_type: one of :data:`CONVERTED`.
    """
    size = CONVERTED[element_type]
    body = boolean_array(values) if size == 1 else integer_array(values, size)
    return None if body is None else _HEADER(1, None in values, element_type, len(values), 1) + body


def boolean_array(values: Sequence[bytes | None]) -> bytes | None:
    """The elements of a binary array of booleans; None: a value is neither ``t`` nor ``f``."""
    try:
        return b"".join([_BOOLEAN[value] for value in values])
    except KeyError:
        return None


def integer_array(values: Sequence[bytes | None], size: int) -> bytes | None:
    """The elements of a binary array of integers of ``size`` bytes; None: a value is no decimal number of at most 18 digits that fits.

    In Python, the conversion takes longer than the text: there it is always None.
    """
    if not cython.compiled:
        return None
    width: cython.Py_ssize_t = size
    value: bytes | None
    text: cython.p_char
    position: cython.Py_ssize_t = 0
    place: cython.Py_ssize_t
    first: cython.Py_ssize_t
    length: cython.Py_ssize_t
    number: cython.Py_ssize_t
    digit: cython.Py_ssize_t
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
        first = 1 if length and text[0] == 45 else 0
        if not 0 < length - first <= _DIGITS:
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
