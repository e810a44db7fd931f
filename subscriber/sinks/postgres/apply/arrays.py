"""Write array parameters. The server reads each element by the input or receive function of its own type, as it reads a single value.

Source: PostgreSQL manual, Arrays, Array Input and Output Syntax; ``array_recv`` in arrayfuncs.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

__all__ = ["binary_array", "text_array"]

_HEADER: Final = Struct(">iiIii").pack
_LENGTH: Final = Struct(">i").pack
_NULL: Final = _LENGTH(-1)


def text_array(values: Sequence[bytes | None], delimiter: bytes) -> bytes:
    """A one-dimensional array in text format. Every value is quoted, so an element is exactly its value."""
    if None not in values:
        joined = (b'"' + delimiter + b'"').join(values)  # type: ignore[arg-type]
        if b"\\" not in joined and joined.count(b'"') == 2 * (len(values) - 1):
            return b'{"' + joined + b'"}'
    return b"{" + delimiter.join([b"NULL" if value is None else _quoted(value) for value in values]) + b"}"


def _quoted(value: bytes) -> bytes:
    return b'"' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"'


def binary_array(values: Sequence[bytes | None], element_type: int) -> bytes:
    """A one-dimensional array in binary format."""
    parts = [_HEADER(1, None in values, element_type, len(values), 1)]
    for value in values:
        if value is None:
            parts.append(_NULL)
        else:
            parts += (_LENGTH(len(value)), value)
    return b"".join(parts)
