"""Parse COPY data in text format into rows of raw values. Source: manual, COPY, File Formats, Text Format."""

from __future__ import annotations

import re
from typing import Final

from subscriber.errors import ProtocolError

__all__ = ["CopyReader"]

_ESCAPE: Final = re.compile(rb"\\([0-7]{1,3}|x[0-9A-Fa-f]{1,2}|.)", re.DOTALL)
_LETTERS: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}


class CopyReader:
    """Splits a stream of COPY data, in pieces of any size, into rows."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rest = b""

    def feed(self, data: bytes) -> list[list[bytes | None]]:
        """Return the rows that ``data`` completes. Values are in text format, NULL is None.

        Raises:
            ProtocolError: a row has a different number of fields.
        """
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        return [self._row(line) for line in lines]

    def finish(self) -> None:
        """Check the end of the stream.

        Raises:
            ProtocolError: it ends in the middle of a row.
        """
        if self._rest:
            raise ProtocolError("COPY data ends in the middle of a row")

    def _row(self, line: bytes) -> list[bytes | None]:
        fields: list[bytes | None] = list(line.split(b"\t")) if self._columns else []
        if len(fields) != self._columns:
            raise ProtocolError(f"a row of COPY data has {len(fields)} fields, not {self._columns}")
        if b"\\" in line:
            return [None if field == b"\\N" else _unescaped(field) for field in fields]
        return fields


def _unescaped(field: bytes | None) -> bytes | None:
    return _ESCAPE.sub(_meaning, field) if field is not None and b"\\" in field else field


def _meaning(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if code[:1].isdigit() and code[:1] < b"8":
        return bytes([int(code, 8) & 0xFF])
    if len(code) > 1:
        return bytes([int(code[1:], 16)])
    return _LETTERS.get(code, code)
