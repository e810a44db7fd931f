"""The content of CopyData while a walsender streams: XLogData and keepalives from it, standby status updates to it.

Source: PostgreSQL manual, Streaming Replication Protocol. Times are microseconds since the PostgreSQL epoch.

The walsender sets the LSNs of XLogData to 0 for messages that are not the last of their WAL record (Relation, Type, the Begin before
an Origin). So these LSNs are not positions to resume from, and they do not grow monotonically.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError
from typing import Final, assert_never

from subscriber import _cython as cython
from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.malformed import ends_early, malformed, tag_name, trailing_bytes

__all__ = [
    "PAYLOAD",
    "PrimaryKeepalive",
    "StandbyStatusUpdate",
    "XLogData",
    "decode_frame",
    "decode_status_update",
    "encode_frame",
    "header",
    "payloads",
]

_XLOG_DATA: Final = Struct(">cQQq")
PAYLOAD: Final = _XLOG_DATA.size
"""Offset of the message in an XLogData."""
_KEEPALIVE: Final = Struct(">cQqB")
_STATUS: Final = Struct(">cQQQqB")
_LARGE: Final = 1024 * 1024
_XLOG_FIELDS: Final = Struct(">xQQq").unpack_from
_W: Final = ord("w")
_K: Final = ord("k")
_R: Final = ord("r")


class XLogData:
    """``w``: one message of the output plugin. It has plain slots because there is one per row.

    Attributes:
        start_lsn: start of the WAL record, or 0.
        end_lsn: for a logical walsender the same as ``start_lsn``.
        send_time: by the server's clock.
        payload: the message.
    """

    __slots__ = ("end_lsn", "payload", "send_time", "start_lsn")
    __match_args__ = ("start_lsn", "end_lsn", "send_time", "payload")

    def __init__(self, start_lsn: Lsn, end_lsn: Lsn, send_time: int, payload: bytes) -> None:
        self.start_lsn = start_lsn
        self.end_lsn = end_lsn
        self.send_time = send_time
        self.payload = payload

    def _fields(self) -> tuple[object, ...]:
        return (self.start_lsn, self.end_lsn, self.send_time, self.payload)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, XLogData):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        # without the payload, which holds row values
        return f"XLogData(start_lsn='{self.start_lsn}', end_lsn='{self.end_lsn}', send_time={self.send_time})"


@dataclass(frozen=True, slots=True)
class PrimaryKeepalive:
    """``k``. ``end_lsn`` is how far the walsender has decoded (not the end of the server's WAL)."""

    end_lsn: Lsn
    send_time: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class StandbyStatusUpdate:
    """``r``: the positions received, flushed and applied. ``flush`` lets the server recycle WAL."""

    write: Lsn
    flush: Lsn
    apply: Lsn
    send_time: int
    reply_requested: bool


def decode_frame(data: bytes) -> XLogData | PrimaryKeepalive:
    """Decode one CopyData from a walsender.

    Raises:
        ProtocolError: it is neither XLogData nor a keepalive.
    """
    if not data:
        raise ProtocolError("empty CopyData", offset=0)
    tag = data[0]
    if tag == _W:
        if len(data) < PAYLOAD:
            raise ends_early(data)
        start_lsn, end_lsn, send_time = _XLOG_FIELDS(data)
        # skips Lsn's own range check, which 64 unsigned bits cannot fail: this runs once per row
        return XLogData(int.__new__(Lsn, start_lsn), int.__new__(Lsn, end_lsn), send_time, data[PAYLOAD:])
    if tag == _K:
        _check_length(data, _KEEPALIVE)
        _, end_lsn, send_time, reply = _KEEPALIVE.unpack(data)
        return PrimaryKeepalive(Lsn(end_lsn), send_time, _reply_requested(data, reply))
    raise ProtocolError("unknown CopyData from the walsender", offset=0, tag=tag_name(tag))


def header(data: bytes) -> XLogData | PrimaryKeepalive:
    """Decode as :func:`decode_frame`, but without the payload of an XLogData, so that a large one is not copied."""
    return decode_frame(data[:PAYLOAD] if data[:1] == b"w" else data)


def payloads(frames: list[bytes], start: int, tags: Collection[int]) -> list[bytes]:
    """Return the payloads of the frames from ``start``, up to the first frame that is not an XLogData with one of these tags.

    A transaction may have thousands of consecutive rows, and only the header of the last one is needed. Of a large frame only the header
    stays in ``frames``.
    """
    found: list[bytes] = []
    add = found.append
    header: cython.Py_ssize_t = PAYLOAD
    large: cython.Py_ssize_t = PAYLOAD + _LARGE
    tag: cython.Py_ssize_t = _W
    place: cython.Py_ssize_t
    size: cython.Py_ssize_t
    data: bytes
    text: cython.p_char
    for place in range(start, len(frames)):
        data = frames[place]
        size = len(data)
        if size <= header or data[0] != tag or data[header] not in tags:
            break
        text = data
        add(text[header:size])
        if size > large:
            frames[place] = data[:header]
    return found


def decode_status_update(data: bytes) -> StandbyStatusUpdate:
    """Decode one CopyData from a subscriber. This is the publisher's side.

    Raises:
        ProtocolError: it is not a standby status update.
    """
    if not data:
        raise ProtocolError("empty CopyData", offset=0)
    if data[0] != _R:
        raise ProtocolError("unknown CopyData from the standby", offset=0, tag=tag_name(data[0]))
    _check_length(data, _STATUS)
    _, write, flush, apply, send_time, reply = _STATUS.unpack(data)
    return StandbyStatusUpdate(Lsn(write), Lsn(flush), Lsn(apply), send_time, _reply_requested(data, reply))


def encode_frame(frame: XLogData | PrimaryKeepalive | StandbyStatusUpdate) -> bytes:
    """Encode one CopyData.

    Raises:
        ValueError: a number is out of range.
    """
    try:
        match frame:
            case XLogData():
                return _XLOG_DATA.pack(b"w", frame.start_lsn, frame.end_lsn, frame.send_time) + frame.payload
            case PrimaryKeepalive():
                return _KEEPALIVE.pack(b"k", frame.end_lsn, frame.send_time, frame.reply_requested)
            case StandbyStatusUpdate():
                return _STATUS.pack(b"r", frame.write, frame.flush, frame.apply, frame.send_time, frame.reply_requested)
    except StructError as error:
        raise ValueError(f"{type(frame).__name__} has a field that is out of range: {error}") from None
    assert_never(frame)


def _check_length(data: bytes, layout: Struct) -> None:
    if len(data) < layout.size:
        raise ends_early(data)
    if len(data) > layout.size:
        raise trailing_bytes(data, layout.size)


def _reply_requested(data: bytes, value: int) -> bool:
    if value > 1:
        raise malformed(data, len(data) - 1, "unknown reply flag")
    return value == 1
