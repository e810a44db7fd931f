"""Decode pgoutput's bytes to messages. Any bytes give a message or a ProtocolError, in time and memory linear in their length.

Source: PostgreSQL manual, Logical Replication Message Formats; protocol versions 1 to 4. The manual leaves out:

- Inside a streamed block (Stream Start to Stream Stop) Relation, Type, Insert, Update, Delete, Truncate and Message carry a
  (sub)transaction id right after the tag. No byte of the message says so: the reader must know its state (``in_stream``), which
  :class:`Decoder` tracks.
- Stream Abort has an LSN and a time if and only if ``streaming 'parallel'`` was requested. Its length shows which form it is.
- An empty namespace means pg_catalog.

The decoder rejects unknown flags, so that encoding a decoded message gives the same bytes. It keeps the flags that the manual calls
"currently unused", and those of Truncate, as received.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, cast

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.malformed import ends_early, malformed, tag_name, trailing_bytes
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    ReplicaIdentity,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Tag,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from subscriber.protocol.tuples import read_tuple

__all__ = ["Decoder", "decode"]

# "x" is the tag, which was read already
_BEGIN: Final = Struct(">xQqI")
_COMMIT: Final = Struct(">xBQQq")
_ORIGIN: Final = Struct(">xQ")
_STREAM_START: Final = Struct(">xIB")
_STREAM_STOP: Final = Struct(">x")
_STREAM_COMMIT: Final = Struct(">xIBQQq")
_STREAM_ABORT: Final = Struct(">xII")
_STREAM_ABORT_PARALLEL: Final = Struct(">xIIQq")
_BEGIN_PREPARE: Final = Struct(">xQQqI")
_PREPARE: Final = Struct(">xBQQqI")
_ROLLBACK_PREPARED: Final = Struct(">xBQQqqI")
_UINT32: Final = Struct(">I")
_RELATION_TAIL: Final = Struct(">ch")
_COLUMN_TAIL: Final = Struct(">Ii")
_TRUNCATE: Final = Struct(">iB")
_MESSAGE: Final = Struct(">BQ")

_NEW: Final = ord("N")
_KEY: Final = ord("K")
_OLD: Final = ord("O")


def decode(payload: bytes, *, in_stream: bool = False) -> Message:
    """Decode one message.

    Args:
        payload: the payload of one XLogData frame, or one row of ``pg_logical_slot_get_binary_changes``.
        in_stream: whether the message is between Stream Start and Stream Stop.

    Raises:
        ProtocolError: the bytes are not a message; it has the tag and the offset.
    """
    if not payload:
        raise ProtocolError("empty message", offset=0)
    read = _READERS.get(payload[0])
    if read is None:
        raise ProtocolError("unknown message type", offset=0, tag=tag_name(payload[0]))
    return read(payload, in_stream)


class Decoder:
    """Decodes the messages of one connection in order, and tracks which of them are inside a streamed block.

    Attributes:
        in_stream: whether the next message is inside a streamed block.
    """

    __slots__ = ("in_stream",)

    def __init__(self) -> None:
        self.in_stream = False

    def decode(self, payload: bytes) -> Message:
        """Decode the next message.

        Raises:
            ProtocolError: as :func:`decode`; or a Stream Start inside a block, or a Stream Stop outside. The state does not change.
        """
        message = decode(payload, in_stream=self.in_stream)
        if type(message) is StreamStart:
            if self.in_stream:
                raise malformed(payload, 0, "STREAM START while a streamed block is open")
            self.in_stream = True
        elif type(message) is StreamStop:
            if not self.in_stream:
                raise malformed(payload, 0, "STREAM STOP without STREAM START")
            self.in_stream = False
        return message


def _lsn(value: int) -> Lsn:
    # skips Lsn's own range check: the value was read from 64 unsigned bits
    return int.__new__(Lsn, value)


def _fixed(payload: bytes, layout: Struct) -> tuple[Any, ...]:
    """Unpack a message that consists of fixed fields only."""
    if len(payload) < layout.size:
        raise ends_early(payload)
    if len(payload) > layout.size:
        raise trailing_bytes(payload, layout.size)
    return layout.unpack(payload)


def _at(payload: bytes, offset: int, layout: Struct) -> tuple[Any, ...]:
    """Unpack fixed fields in the middle of a message."""
    if len(payload) - offset < layout.size:
        raise ends_early(payload)
    return layout.unpack_from(payload, offset)


def _text(payload: bytes, offset: int) -> tuple[str, int]:
    """Read a null-terminated string."""
    end = payload.find(0, offset)
    if end < 0:
        raise malformed(payload, min(offset, len(payload)), "string without its terminating null")
    return payload[offset:end].decode("utf-8", "surrogateescape"), end + 1


def _last_text(payload: bytes, offset: int) -> str:
    """Read a null-terminated string that ends the message."""
    text, end = _text(payload, offset)
    if end != len(payload):
        raise trailing_bytes(payload, end)
    return text


def _namespace(payload: bytes, offset: int) -> tuple[str, int]:
    text, offset = _text(payload, offset)
    return text or "pg_catalog", offset


def _prefix(payload: bytes, in_stream: bool) -> tuple[int | None, int]:
    """Read the (sub)transaction id if there is one; return it and the offset of the rest of the message."""
    if not in_stream:
        return None, 1
    return _at(payload, 1, _UINT32)[0], 5


def _boolean(payload: bytes, offset: int, value: int, what: str) -> bool:
    if value > 1:
        raise malformed(payload, offset, f"unknown {what}")
    return value == 1


def _begin(payload: bytes, in_stream: bool) -> Begin:
    final_lsn, commit_time, xid = _fixed(payload, _BEGIN)
    return Begin(_lsn(final_lsn), commit_time, xid)


def _commit(payload: bytes, in_stream: bool) -> Commit:
    flags, commit_lsn, end_lsn, commit_time = _fixed(payload, _COMMIT)
    return Commit(flags, _lsn(commit_lsn), _lsn(end_lsn), commit_time)


def _origin(payload: bytes, in_stream: bool) -> Origin:
    (commit_lsn,) = _at(payload, 0, _ORIGIN)
    return Origin(_lsn(commit_lsn), _last_text(payload, _ORIGIN.size))


def _relation(payload: bytes, in_stream: bool) -> Relation:
    xid, offset = _prefix(payload, in_stream)
    (relation_id,) = _at(payload, offset, _UINT32)
    namespace, offset = _namespace(payload, offset + 4)
    name, offset = _text(payload, offset)
    identity, count = _at(payload, offset, _RELATION_TAIL)
    if identity not in {b"d", b"n", b"f", b"i"}:
        raise malformed(payload, offset, "unknown replica identity")
    if count < 0:
        raise malformed(payload, offset + 1, "negative number of columns")
    offset += _RELATION_TAIL.size
    columns = []
    for _ in range(count):
        column, offset = _column(payload, offset)
        columns.append(column)
    if offset != len(payload):
        raise trailing_bytes(payload, offset)
    replica_identity = cast("ReplicaIdentity", identity.decode("ascii"))
    return Relation(relation_id, namespace, name, replica_identity, tuple(columns), xid)


def _column(payload: bytes, offset: int) -> tuple[Column, int]:
    if offset >= len(payload):
        raise ends_early(payload)
    key = _boolean(payload, offset, payload[offset], "column flags")
    name, offset = _text(payload, offset + 1)
    type_oid, type_modifier = _at(payload, offset, _COLUMN_TAIL)
    return Column(name, type_oid, type_modifier, key), offset + _COLUMN_TAIL.size


def _type(payload: bytes, in_stream: bool) -> Type:
    xid, offset = _prefix(payload, in_stream)
    (type_oid,) = _at(payload, offset, _UINT32)
    namespace, offset = _namespace(payload, offset + 4)
    return Type(type_oid, namespace, _last_text(payload, offset), xid)


def _row_header(payload: bytes, in_stream: bool) -> tuple[int | None, int, int, int]:
    """Read the first fields of Insert, Update and Delete: xid, relation id, and the kind and offset of the first tuple."""
    start = 5 if in_stream else 1
    if len(payload) < start + 5:
        raise ends_early(payload)
    xid = int.from_bytes(payload[1:5]) if in_stream else None
    return xid, int.from_bytes(payload[start : start + 4]), payload[start + 4], start + 5


def _last_tuple(payload: bytes, offset: int) -> TupleData:
    data, end = read_tuple(payload, offset)
    if end != len(payload):
        raise trailing_bytes(payload, end)
    return data


def _insert(payload: bytes, in_stream: bool) -> Insert:
    xid, relation_id, kind, offset = _row_header(payload, in_stream)
    if kind != _NEW:
        raise malformed(payload, offset - 1, "expected a new tuple (N)")
    return Insert(relation_id, _last_tuple(payload, offset), xid)


def _update(payload: bytes, in_stream: bool) -> Update:
    xid, relation_id, kind, offset = _row_header(payload, in_stream)
    key = old = None
    if kind != _NEW:
        if kind == _KEY:
            key, offset = read_tuple(payload, offset)
        elif kind == _OLD:
            old, offset = read_tuple(payload, offset)
        else:
            raise malformed(payload, offset - 1, "expected an old key, an old or a new tuple (K, O or N)")
        if offset >= len(payload):
            raise ends_early(payload)
        if payload[offset] != _NEW:
            raise malformed(payload, offset, "expected a new tuple (N)")
        offset += 1
    return Update(relation_id, key, old, _last_tuple(payload, offset), xid)


def _delete(payload: bytes, in_stream: bool) -> Delete:
    xid, relation_id, kind, offset = _row_header(payload, in_stream)
    if kind == _KEY:
        return Delete(relation_id, _last_tuple(payload, offset), None, xid)
    if kind == _OLD:
        return Delete(relation_id, None, _last_tuple(payload, offset), xid)
    raise malformed(payload, offset - 1, "expected an old key or an old tuple (K or O)")


def _truncate(payload: bytes, in_stream: bool) -> Truncate:
    xid, offset = _prefix(payload, in_stream)
    count, options = _at(payload, offset, _TRUNCATE)
    if count < 0:
        raise malformed(payload, offset, "negative number of relations")
    offset += _TRUNCATE.size
    end = offset + 4 * count
    if end > len(payload):
        raise ends_early(payload)
    if end < len(payload):
        raise trailing_bytes(payload, end)
    relation_ids = tuple(relation_id for (relation_id,) in _UINT32.iter_unpack(payload[offset:]))
    return Truncate(TruncateOption(options), relation_ids, xid)


def _message(payload: bytes, in_stream: bool) -> LogicalMessage:
    xid, offset = _prefix(payload, in_stream)
    flags, lsn = _at(payload, offset, _MESSAGE)
    transactional = _boolean(payload, offset, flags, "message flags")
    prefix, offset = _text(payload, offset + _MESSAGE.size)
    (length,) = _at(payload, offset, _UINT32)
    offset += 4
    if length > len(payload) - offset:
        raise ends_early(payload)
    if length < len(payload) - offset:
        raise trailing_bytes(payload, offset + length)
    return LogicalMessage(transactional, _lsn(lsn), prefix, payload[offset:], xid)


def _stream_start(payload: bytes, in_stream: bool) -> StreamStart:
    xid, first_segment = _fixed(payload, _STREAM_START)
    return StreamStart(xid, _boolean(payload, 5, first_segment, "segment flag"))


def _stream_stop(payload: bytes, in_stream: bool) -> StreamStop:
    _fixed(payload, _STREAM_STOP)
    return StreamStop()


def _stream_commit(payload: bytes, in_stream: bool) -> StreamCommit:
    xid, flags, commit_lsn, end_lsn, commit_time = _fixed(payload, _STREAM_COMMIT)
    return StreamCommit(xid, flags, _lsn(commit_lsn), _lsn(end_lsn), commit_time)


def _stream_abort(payload: bytes, in_stream: bool) -> StreamAbort:
    if len(payload) <= _STREAM_ABORT.size:
        xid, subxid = _fixed(payload, _STREAM_ABORT)
        return StreamAbort(xid, subxid)
    xid, subxid, abort_lsn, abort_time = _fixed(payload, _STREAM_ABORT_PARALLEL)
    return StreamAbort(xid, subxid, _lsn(abort_lsn), abort_time)


def _begin_prepare(payload: bytes, in_stream: bool) -> BeginPrepare:
    prepare_lsn, end_lsn, prepare_time, xid = _at(payload, 0, _BEGIN_PREPARE)
    return BeginPrepare(_lsn(prepare_lsn), _lsn(end_lsn), prepare_time, xid, _last_text(payload, _BEGIN_PREPARE.size))


def _prepare(payload: bytes, in_stream: bool) -> Prepare:
    flags, prepare_lsn, end_lsn, prepare_time, xid = _at(payload, 0, _PREPARE)
    return Prepare(flags, _lsn(prepare_lsn), _lsn(end_lsn), prepare_time, xid, _last_text(payload, _PREPARE.size))


def _commit_prepared(payload: bytes, in_stream: bool) -> CommitPrepared:
    flags, commit_lsn, end_lsn, commit_time, xid = _at(payload, 0, _PREPARE)
    return CommitPrepared(flags, _lsn(commit_lsn), _lsn(end_lsn), commit_time, xid, _last_text(payload, _PREPARE.size))


def _rollback_prepared(payload: bytes, in_stream: bool) -> RollbackPrepared:
    flags, prepare_end, rollback_end, prepare_time, rollback_time, xid = _at(payload, 0, _ROLLBACK_PREPARED)
    gid = _last_text(payload, _ROLLBACK_PREPARED.size)
    return RollbackPrepared(flags, _lsn(prepare_end), _lsn(rollback_end), prepare_time, rollback_time, xid, gid)


def _stream_prepare(payload: bytes, in_stream: bool) -> StreamPrepare:
    flags, prepare_lsn, end_lsn, prepare_time, xid = _at(payload, 0, _PREPARE)
    return StreamPrepare(flags, _lsn(prepare_lsn), _lsn(end_lsn), prepare_time, xid, _last_text(payload, _PREPARE.size))


_READERS: Final[dict[int, Callable[[bytes, bool], Message]]] = {
    Tag.BEGIN: _begin,
    Tag.COMMIT: _commit,
    Tag.ORIGIN: _origin,
    Tag.RELATION: _relation,
    Tag.TYPE: _type,
    Tag.INSERT: _insert,
    Tag.UPDATE: _update,
    Tag.DELETE: _delete,
    Tag.TRUNCATE: _truncate,
    Tag.MESSAGE: _message,
    Tag.STREAM_START: _stream_start,
    Tag.STREAM_STOP: _stream_stop,
    Tag.STREAM_COMMIT: _stream_commit,
    Tag.STREAM_ABORT: _stream_abort,
    Tag.BEGIN_PREPARE: _begin_prepare,
    Tag.PREPARE: _prepare,
    Tag.COMMIT_PREPARED: _commit_prepared,
    Tag.ROLLBACK_PREPARED: _rollback_prepared,
    Tag.STREAM_PREPARE: _stream_prepare,
}
