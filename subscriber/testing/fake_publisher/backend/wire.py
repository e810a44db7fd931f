"""The frontend/backend protocol, version 3, from the server's side: read a client's messages, build the server's.

Bytes in, values out; no IO. A message that is not valid gives a :class:`ServerError` with SQLSTATE 08P01, as from a server.

Source: PostgreSQL manual, Frontend/Backend Protocol, Message Formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import error as StructError
from struct import pack, unpack_from
from typing import Final

from subscriber.testing.fake_publisher.server_errors import ServerError

__all__ = [
    "CANCEL",
    "COPY_BOTH",
    "COPY_DONE",
    "GSS",
    "MAX_MESSAGE",
    "NO_DATA",
    "READY",
    "TLS",
    "Field",
    "Reader",
    "Startup",
    "authentication",
    "backend_key",
    "command_complete",
    "copy_data",
    "copy_out",
    "data_row",
    "error_response",
    "message",
    "negotiate_version",
    "parameter_description",
    "parameter_status",
    "read_startup",
    "row_description",
]

TLS: Final = 80877103
GSS: Final = 80877104
CANCEL: Final = 80877102
_VERSION_3: Final = 3 << 16
MAX_MESSAGE: Final = 1 << 30
"""Longest message that is read from a client."""
_TEXT: Final = 25


@dataclass(frozen=True, slots=True)
class Startup:
    """The first message of a connection.

    Attributes:
        code: :data:`TLS`, :data:`GSS`, :data:`CANCEL`, or the protocol version.
        parameters: of a start.
        cancel: process id and key of a cancel request.
    """

    code: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    cancel: tuple[int, bytes] = (0, b"")

    @property
    def minor(self) -> int:
        """The minor protocol version."""
        return self.code & 0xFFFF


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a result."""

    name: str
    type_oid: int = _TEXT


class Reader:
    """Read the fields of one message from its front.

    Raises:
        ServerError: the message is too short.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 0

    def string(self) -> str:
        end = self._data.find(b"\0", self._offset)
        if end < 0:
            raise _invalid("a string has no end")
        text = self._data[self._offset : end]
        self._offset = end + 1
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise _invalid("a string is not UTF-8") from None

    def int16(self) -> int:
        return self._number(">h", 2)

    def int32(self) -> int:
        return self._number(">i", 4)

    def byte(self) -> int:
        return self._number(">B", 1)

    def taken(self, length: int) -> bytes:
        found = self._data[self._offset : self._offset + length]
        if length < 0 or len(found) < length:
            raise _invalid("insufficient data left in message")
        self._offset += length
        return found

    def rest(self) -> bytes:
        return self._data[self._offset :]

    def _number(self, layout: str, size: int) -> int:
        try:
            (found,) = unpack_from(layout, self._data, self._offset)
        except StructError:
            raise _invalid("insufficient data left in message") from None
        self._offset += size
        return int(found)


def _invalid(what: str) -> ServerError:
    return ServerError("08P01", f"invalid message format: {what}", fatal=True)


def read_startup(data: bytes) -> Startup:
    """Read the content of a startup packet, without its length.

    Raises:
        ServerError: it is not valid, or of another major version.
    """
    reader = Reader(data)
    code = reader.int32()
    if code in {TLS, GSS}:
        return Startup(code)
    if code == CANCEL:
        return Startup(code, cancel=(reader.int32(), reader.rest()))
    if code >> 16 != _VERSION_3 >> 16:
        raise ServerError("0A000", f"unsupported frontend protocol {code >> 16}.{code & 0xFFFF}: server supports 3.0 to 3.0", fatal=True)
    parameters: dict[str, str] = {}
    while name := reader.string():
        parameters[name] = reader.string()
    if not parameters.get("user"):
        raise ServerError("28000", "no PostgreSQL user name specified in startup packet", fatal=True)
    return Startup(code, parameters)


def message(tag: bytes, body: bytes = b"") -> bytes:
    """One message of the server."""
    return tag + pack(">I", len(body) + 4) + body


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogateescape") + b"\0"


READY: Final[Mapping[str, bytes]] = {status: message(b"Z", status.encode()) for status in ("I", "T", "E")}
"""ReadyForQuery: idle, in a transaction, in a failed transaction."""
NO_DATA: Final = message(b"n")
COPY_DONE: Final = message(b"c")
COPY_BOTH: Final = message(b"W", pack(">bh", 0, 0))


def authentication(code: int, body: bytes = b"") -> bytes:
    """An Authentication message. Code 0: authenticated."""
    return message(b"R", pack(">I", code) + body)


def parameter_status(name: str, value: str) -> bytes:
    """ParameterStatus."""
    return message(b"S", _text(name) + _text(value))


def backend_key(pid: int, key: bytes) -> bytes:
    """BackendKeyData."""
    return message(b"K", pack(">I", pid) + key)


def negotiate_version(unknown: Sequence[str]) -> bytes:
    """NegotiateProtocolVersion: only 3.0 is spoken."""
    return message(b"v", pack(">II", _VERSION_3, len(unknown)) + b"".join(map(_text, unknown)))


def error_response(error: ServerError) -> bytes:
    """ErrorResponse."""
    return message(b"E", _report("FATAL" if error.fatal else "ERROR", error))


def warning(sqlstate: str, text: str) -> bytes:
    """NoticeResponse."""
    return message(b"N", _report("WARNING", ServerError(sqlstate, text)))


def _report(severity: str, error: ServerError) -> bytes:
    fields = [("S", severity), ("V", severity), ("C", error.sqlstate), ("M", error.message)]
    fields += [(tag, text) for tag, text in (("D", error.detail), ("H", error.hint)) if text]
    return b"".join(tag.encode() + _text(text) for tag, text in fields) + b"\0"


def row_description(fields: Sequence[Field], formats: Sequence[int] = ()) -> bytes:
    """RowDescription. ``formats`` gives 0 (text) or 1 (binary) for each field; by default all are text."""
    parts = [pack(">h", len(fields))]
    for place, found in enumerate(fields):
        size = {16: 1, 20: 8, 21: 2, 23: 4, 26: 4}.get(found.type_oid, -1)
        parts += [_text(found.name), pack(">IhIhih", 0, 0, found.type_oid, size, -1, formats[place] if formats else 0)]
    return message(b"T", b"".join(parts))


def data_row(values: Sequence[bytes | None]) -> bytes:
    """DataRow."""
    parts = [pack(">h", len(values))]
    parts += [b"\xff\xff\xff\xff" if value is None else pack(">I", len(value)) + value for value in values]
    return message(b"D", b"".join(parts))


def command_complete(tag: str) -> bytes:
    """CommandComplete."""
    return message(b"C", _text(tag))


def parameter_description(oids: Sequence[int]) -> bytes:
    """ParameterDescription."""
    return message(b"t", pack(f">h{len(oids)}I", len(oids), *oids))


def copy_out(columns: int, *, binary: bool) -> bytes:
    """CopyOutResponse."""
    return message(b"H", pack(f">bh{columns}h", binary, columns, *([int(binary)] * columns)))


def copy_data(data: bytes) -> bytes:
    """CopyData."""
    return message(b"d", data)
