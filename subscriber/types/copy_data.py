"""Split COPY data into rows or columns of fields (``bytes`` or None), in the text and the binary format. It comes in pieces of any size.

The fields have the format that the stream uses for values; :mod:`subscriber.types.codec` reads them. Source: PostgreSQL manual, COPY,
File Formats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from struct import Struct
from typing import Final, Protocol

from subscriber.errors import ProtocolError

__all__ = ["CopyDecoder", "copy_decoder"]

Fields = tuple[bytes | None, ...]
Columns = tuple[int, Sequence[Sequence[bytes | None]]]

_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\x00"
_INT16: Final = Struct(">h").unpack_from
_INT32: Final = Struct(">i").unpack_from
_HEADER_SIZE: Final = len(_SIGNATURE) + 8
_CRITICAL_FLAGS: Final = 0xFFFF0000

_ESCAPE: Final = re.compile(rb"\\(x[0-9A-Fa-f]{1,2}|[0-7]{1,3}|.)", re.DOTALL)
_CONTROL: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_NULL: Final = rb"\N"
_HEX: Final = rb"\\x"
_MOST: Final = 1024**2
"""Larger pieces are read row by row: they may have large values, which are not copied as a whole."""


class CopyDecoder(Protocol):
    """Decodes one COPY stream."""

    def feed(self, data: bytes) -> list[Fields]:
        """Take the next piece; return the rows that it completes.

        Raises:
            ProtocolError: it is not COPY data, or has another number of columns.
        """
        ...

    def columns(self, data: bytes) -> Columns:
        """Take the next piece, as :meth:`feed` does; return how many rows it completes, and the fields of each of their columns.

        Raises:
            ProtocolError: as :meth:`feed`.
        """
        ...

    def finish(self) -> None:
        """End the data.

        Raises:
            ProtocolError: a row is not complete.
        """
        ...


def copy_decoder(columns: int, *, binary: bool) -> CopyDecoder:
    """Return the decoder for a COPY of this many columns."""
    return _BinaryDecoder(columns) if binary else _TextDecoder(columns)


class _TextDecoder:
    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rest = b""
        self._row = 0

    def feed(self, data: bytes) -> list[Fields]:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        lines.reverse()
        rows = []
        while lines:
            # a large line is not kept beside its fields
            rows.append(self._fields(lines.pop()))
        return rows

    def columns(self, data: bytes) -> Columns:
        width = self._columns
        if width == 0 or self._rest or len(data) > _MOST or not data.endswith(b"\n"):
            return _transposed(self.feed(data), width)
        # the ends of rows become fields, too: they must be at the right places
        fields = data.replace(b"\n", b"\t\n\t").split(b"\t")
        rows = data.count(b"\n")
        if len(fields) != rows * (width + 1) + 1 or fields[width :: width + 1] != [b"\n"] * rows:
            # for its error
            return _transposed(self.feed(data), width)
        self._row += rows
        columns: list[list[bytes]] = [fields[number : -1 : width + 1] for number in range(width)]
        if b"\\" in data:
            return rows, [_all_unescaped(column) for column in columns]
        return rows, columns

    def finish(self) -> None:
        if self._rest:
            raise ProtocolError(f"COPY data ends within row {self._row + 1}")

    def _fields(self, line: bytes) -> Fields:
        self._row += 1
        if self._columns == 0:
            if line:
                raise ProtocolError(f"row {self._row} of COPY data has columns, but none is expected")
            return ()
        fields = line.split(b"\t")
        if len(fields) != self._columns:
            raise ProtocolError(f"row {self._row} of COPY data has {len(fields)} columns, not {self._columns}")
        if b"\\" not in line:
            return tuple(fields)
        del line
        return tuple([_unescaped(field) if b"\\" in field else field for field in fields])


def _all_unescaped(column: list[bytes]) -> Sequence[bytes | None]:
    return [_unescaped(field) if b"\\" in field else field for field in column]


def _transposed(rows: list[Fields], width: int) -> Columns:
    return len(rows), list(zip(*rows, strict=True)) if rows else [()] * width


def _unescaped(field: bytes) -> bytes | None:
    if field == _NULL:
        return None
    if field.startswith(_HEX) and field.rfind(b"\\") == 1:
        # bytea: often large
        return field[1:]
    return _ESCAPE.sub(_character, field)


def _character(match: re.Match[bytes]) -> bytes:
    escape = match[1]
    if escape in _CONTROL:
        return _CONTROL[escape]
    if escape[:1] == b"x" and len(escape) > 1:
        return bytes([int(escape[1:], 16)])
    if escape[:1].isdigit() and escape < b"8":
        return bytes([int(escape, 8) & 0xFF])
    return escape


class _BinaryDecoder:
    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._rest = b""
        self._row = 0
        self._begun = False
        self._ended = False

    def feed(self, data: bytes) -> list[Fields]:
        data = self._rest + data
        position = 0
        if not self._begun:
            found = _header_end(data)
            if found is None:
                self._rest = data
                return []
            position = found
            self._begun = True
        rows: list[Fields] = []
        while not self._ended:
            row = self._fields(data, position)
            if row is None:
                break
            fields, position = row
            if not self._ended:
                rows.append(fields)
        if self._ended and position < len(data):
            raise ProtocolError("COPY data continues after its trailer")
        self._rest = data[position:]
        return rows

    def columns(self, data: bytes) -> Columns:
        return _transposed(self.feed(data), self._columns)

    def finish(self) -> None:
        if not self._ended:
            raise ProtocolError(f"COPY data ends before its trailer, after {self._row} rows")

    def _fields(self, data: bytes, position: int) -> tuple[Fields, int] | None:
        size = len(data)
        if position + 2 > size:
            return None
        (count,) = _INT16(data, position)
        position += 2
        if count == -1:
            self._ended = True
            return (), position
        if count != self._columns:
            raise ProtocolError(f"row {self._row + 1} of COPY data has {count} columns, not {self._columns}")
        fields: list[bytes | None] = []
        for _ in range(count):
            if position + 4 > size:
                return None
            (length,) = _INT32(data, position)
            position += 4
            if length < 0:
                if length != -1:
                    raise ProtocolError(f"row {self._row + 1} of COPY data has a field of negative length")
                fields.append(None)
                continue
            end = position + length
            if end > size:
                return None
            fields.append(data[position:end])
            position = end
        self._row += 1
        return tuple(fields), position


def _header_end(data: bytes) -> int | None:
    """Return where the rows begin; None if the header is not complete."""
    if not data.startswith(_SIGNATURE[: len(data)]):
        raise ProtocolError("COPY data does not begin with the signature of the binary format")
    if len(data) < _HEADER_SIZE:
        return None
    flags, extension = (_INT32(data, len(_SIGNATURE) + start)[0] for start in (0, 4))
    if flags & _CRITICAL_FLAGS or extension < 0:
        raise ProtocolError("COPY data in the binary format has unknown flags")
    end: int = _HEADER_SIZE + extension
    return end if len(data) >= end else None
