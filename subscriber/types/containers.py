"""Arrays, ranges, multiranges and composite values: convert the binary format to PostgreSQL's own text, and array texts to lists.

The caller passes the functions that read the parts. Sources: ``array_send``, ``array_out``, ``range_send``, ``range_out``,
``multirange_send``, ``record_send``, ``record_out``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any, Final

__all__ = ["ArrayReader", "array_text", "array_value", "multirange_text", "range_text", "record_text", "vector_text"]

_INT32: Final = Struct(">i")
_UINT32_INT32: Final = Struct(">Ii")
_ARRAY_HEAD: Final = Struct(">iiI")
_DIMENSION: Final = Struct(">ii")

_MAX_DIMENSIONS: Final = 6

_BLANKS: Final = " \t\n\v\f\r"
_SPACE: Final = frozenset(_BLANKS)

Read = Callable[[bytes], str]


def _field(data: bytes, position: int) -> tuple[bytes | None, int]:
    """Return the value whose length is at ``position`` (None for NULL), and the position of the next one."""
    (length,) = _INT32.unpack_from(data, position)
    start = position + 4
    if length == -1:
        return None, start
    end = start + length
    if length < 0 or end > len(data):
        raise ValueError("incorrect binary data format: a field ends past its value")
    return data[start:end], end


def _require_end(data: bytes, position: int) -> None:
    if position != len(data):
        raise ValueError("incorrect binary data format: trailing bytes")


def array_text(data: bytes, read: Read, delimiter: str) -> str:
    """Text of an array. ``read`` reads its elements."""
    sizes, bounds, texts = _array(data, read)
    if not sizes:
        return "{}"
    elements = [_array_element(text, delimiter) for text in texts]
    body = _nested(elements, sizes, delimiter)
    if all(bound == 1 for bound in bounds):
        return body
    return "".join(f"[{bound}:{bound + size - 1}]" for bound, size in zip(bounds, sizes, strict=True)) + f"={body}"


def vector_text(data: bytes, read: Read) -> str:
    """Text of an int2vector or oidvector: an array in the binary format, numbers with spaces in text."""
    return " ".join(text or "" for text in _array(data, read)[2])


def _array(data: bytes, read: Read) -> tuple[list[int], list[int], list[str | None]]:
    dimensions, _, _ = _ARRAY_HEAD.unpack_from(data)
    if not 0 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError("incorrect binary data format: number of dimensions of an array")
    sizes, bounds = [], []
    position = _ARRAY_HEAD.size
    count = 1 if dimensions else 0
    for _ in range(dimensions):
        size, bound = _DIMENSION.unpack_from(data, position)
        position += _DIMENSION.size
        sizes.append(size)
        bounds.append(bound)
        count *= size
    if count < 0 or count * 4 > len(data):
        raise ValueError("incorrect binary data format: number of elements of an array")
    texts: list[str | None] = []
    for _ in range(count):
        element, position = _field(data, position)
        texts.append(None if element is None else read(element))
    _require_end(data, position)
    return sizes, bounds, texts


def _array_element(text: str | None, delimiter: str) -> str:
    if text is None:
        return "NULL"
    plain = text and text.upper() != "NULL" and not any(char in '"\\{}' or char == delimiter or char in _SPACE for char in text)
    if plain:
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _nested(elements: Sequence[str], sizes: Sequence[int], delimiter: str) -> str:
    for size in reversed(sizes):
        elements = [f"{{{delimiter.join(elements[start : start + size])}}}" for start in range(0, len(elements), size)]
    return elements[0]


def range_text(data: bytes, read: Read) -> str:
    """Text of a range. ``read`` reads its bounds."""
    flags = data[0]
    position = 1
    if flags & 0x01:
        _require_end(data, position)
        return "empty"
    bounds = []
    for infinite in (0x08, 0x10):
        bound: bytes | None = None
        if not flags & infinite:
            bound, position = _field(data, position)
        bounds.append("" if bound is None else _quoted(read(bound), "()[],"))
    _require_end(data, position)
    return f"{'[' if flags & 0x02 else '('}{bounds[0]},{bounds[1]}{']' if flags & 0x04 else ')'}"


def multirange_text(data: bytes, read_range: Read) -> str:
    """Text of a multirange. ``read_range`` reads its ranges."""
    (count,) = _INT32.unpack_from(data)
    position = 4
    ranges = []
    for _ in range(count):
        found, position = _field(data, position)
        if found is None:
            raise ValueError("incorrect binary data format: a NULL in a multirange")
        ranges.append(read_range(found))
    _require_end(data, position)
    return f"{{{','.join(ranges)}}}"


def record_text(data: bytes, reader_of: Callable[[int, int], Read]) -> str:
    """Text of a composite value. ``reader_of(index, oid)`` returns the function that reads an attribute."""
    (count,) = _INT32.unpack_from(data)
    position = 4
    fields = []
    for index in range(count):
        oid = _UINT32_INT32.unpack_from(data, position)[0]
        read = reader_of(index, oid)
        found, position = _field(data, position + 4)
        fields.append("" if found is None else _quoted(read(found), "(),"))
    _require_end(data, position)
    return f"({','.join(fields)})"


def _quoted(text: str, special: str) -> str:
    """Quote a part of a range or record if it needs quotes: quotes and backslashes are doubled."""
    if text and not any(char in '"\\' or char in special or char in _SPACE for char in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '""')
    return f'"{escaped}"'


class ArrayReader:
    """Splits the text of an array. There is one reader for each delimiter.

    Args:
        delimiter: between elements.
    """

    __slots__ = ("_token",)

    def __init__(self, delimiter: str) -> None:
        escaped = re.escape(delimiter)
        self._token = re.compile(rf'[ \t\n\v\f\r]*(?:([{{}}{escaped}])|"((?:[^"\\]|\\.)*)"|((?:[^{{}}"\\{escaped}]|\\.)+))', re.DOTALL)

    def read(self, text: str, convert: Callable[[str], Any]) -> list[Any]:
        """Return nested lists of the elements, converted by ``convert``; NULL is None.

        Raises:
            ValueError: the text is not an array.
        """
        position = 0
        stack: list[list[Any]] = []
        done: list[Any] | None = None
        while position < len(text) and done is None:
            match = self._token.match(text, position)
            if match is None:
                break
            position = match.end()
            mark, quoted, plain = match.groups()
            if mark == "{":
                inner: list[Any] = []
                if stack:
                    stack[-1].append(inner)
                stack.append(inner)
            elif not stack:
                break
            elif mark == "}":
                closed = stack.pop()
                done = None if stack else closed
            elif quoted is not None:
                stack[-1].append(convert(_ESCAPED.sub(r"\1", quoted)))
            elif plain is not None:
                stack[-1].append(None if plain.upper() == "NULL" else convert(_ESCAPED.sub(r"\1", plain.rstrip(_BLANKS))))
        if done is None or position != len(text):
            raise ValueError("malformed array literal")
        return done


_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


def array_value(data: bytes, reader: ArrayReader, convert: Callable[[str], Any]) -> list[Any] | str:
    """Read an array's text as a list (of lists). If an index does not start at 1, which a list cannot express, return the text."""
    text = data.decode()
    return text if text.startswith("[") else reader.read(text, convert)
