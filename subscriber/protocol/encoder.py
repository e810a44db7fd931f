"""Encode messages to pgoutput's bytes: the exact inverse of the decoder, for tests and for publishers other than PostgreSQL.

Source: PostgreSQL manual, Logical Replication Message Formats. Decoding bytes and encoding the result gives the same bytes. The only
exception is a namespace spelled ``pg_catalog``, which the decoder accepts and PostgreSQL sends as the empty string.
"""

from __future__ import annotations

from struct import error as StructError
from struct import pack
from typing import assert_never

from subscriber.protocol.messages import (
    BINARY,
    NULL,
    TEXT,
    UNCHANGED,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Type,
    Update,
)

__all__ = ["encode"]

_Prefixable = Relation | Type | Insert | Update | Delete | Truncate | LogicalMessage
_StreamMessage = StreamStart | StreamStop | StreamCommit | StreamAbort | StreamPrepare
_PreparedMessage = BeginPrepare | Prepare | CommitPrepared | RollbackPrepared


def encode(message: Message, *, in_stream: bool | None = None) -> bytes:
    """Encode one message.

    Args:
        message: the ``xid`` of a Relation, Type, Insert, Update, Delete, Truncate or LogicalMessage is written after the tag.
        in_stream: whether the message is for a streamed block; ``xid`` must agree with it. None: do not check.

    Raises:
        ValueError: a field cannot be encoded (a number out of range, a null character in a name, two old tuples), or ``xid`` does not
            agree with ``in_stream``.
    """
    if in_stream is not None and isinstance(message, _Prefixable) and (message.xid is not None) != in_stream:
        raise ValueError(f"{type(message).__name__} needs an xid inside a streamed block, and must have none outside")
    try:
        return _encode(message)
    except StructError as error:
        raise ValueError(f"{type(message).__name__} has a field that is out of range: {error}") from None


def _encode(message: Message) -> bytes:
    match message:
        case Insert() | Update() | Delete():
            return _row(message)
        case Begin():
            return pack(">cQqI", b"B", message.final_lsn, message.commit_time, message.xid)
        case Commit():
            return pack(">cBQQq", b"C", message.flags, message.commit_lsn, message.end_lsn, message.commit_time)
        case Origin():
            return pack(">cQ", b"O", message.commit_lsn) + _text(message.name)
        case Relation():
            return _relation(message)
        case Type():
            return _head(b"Y", message.xid) + pack(">I", message.type_oid) + _namespace(message.namespace) + _text(message.name)
        case Truncate():
            ids = message.relation_ids
            return _head(b"T", message.xid) + pack(f">iB{len(ids)}I", len(ids), message.options, *ids)
        case LogicalMessage():
            flags = 1 if message.transactional else 0
            fields = pack(">BQ", flags, message.lsn) + _text(message.prefix) + pack(">I", len(message.content))
            return _head(b"M", message.xid) + fields + message.content
        case _:
            return _stream_or_prepared(message)


def _stream_or_prepared(message: _StreamMessage | _PreparedMessage) -> bytes:
    match message:
        case StreamStart(xid, first_segment):
            return pack(">cIB", b"S", xid, 1 if first_segment else 0)
        case StreamStop():
            return b"E"
        case StreamCommit(xid, flags, commit_lsn, end_lsn, commit_time):
            return pack(">cIBQQq", b"c", xid, flags, commit_lsn, end_lsn, commit_time)
        case StreamAbort(xid, subxid, None, None):
            return pack(">cII", b"A", xid, subxid)
        case StreamAbort(xid, subxid, abort_lsn, abort_time):
            return pack(">cIIQq", b"A", xid, subxid, abort_lsn, abort_time)
        case BeginPrepare(prepare_lsn, end_lsn, prepare_time, xid, gid):
            return pack(">cQQqI", b"b", prepare_lsn, end_lsn, prepare_time, xid) + _text(gid)
        case Prepare(flags, prepare_lsn, end_lsn, prepare_time, xid, gid):
            return pack(">cBQQqI", b"P", flags, prepare_lsn, end_lsn, prepare_time, xid) + _text(gid)
        case CommitPrepared(flags, commit_lsn, end_lsn, commit_time, xid, gid):
            return pack(">cBQQqI", b"K", flags, commit_lsn, end_lsn, commit_time, xid) + _text(gid)
        case RollbackPrepared(flags, prepare_end, rollback_end, prepare_time, rollback_time, xid, gid):
            return pack(">cBQQqqI", b"r", flags, prepare_end, rollback_end, prepare_time, rollback_time, xid) + _text(gid)
        case StreamPrepare(flags, prepare_lsn, end_lsn, prepare_time, xid, gid):
            return pack(">cBQQqI", b"p", flags, prepare_lsn, end_lsn, prepare_time, xid) + _text(gid)
    assert_never(message)


def _head(tag: bytes, xid: int | None) -> bytes:
    return tag if xid is None else pack(">cI", tag, xid)


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogateescape")
    if 0 in data:
        raise ValueError("a name cannot hold a null character")
    return data + b"\0"


def _namespace(name: str) -> bytes:
    if not name:
        raise ValueError("a namespace is never empty: PostgreSQL's own is pg_catalog")
    return b"\0" if name == "pg_catalog" else _text(name)


def _relation(message: Relation) -> bytes:
    parts = [
        _head(b"R", message.xid),
        pack(">I", message.relation_id),
        _namespace(message.namespace),
        _text(message.name),
        pack(">ch", message.replica_identity.encode("ascii"), len(message.columns)),
    ]
    for column in message.columns:
        parts.append(b"\1" if column.key else b"\0")
        parts.append(_text(column.name))
        parts.append(pack(">Ii", column.type_oid, column.type_modifier))
    return b"".join(parts)


def _row(message: Insert | Update | Delete) -> bytes:
    match message:
        case Insert():
            return _head(b"I", message.xid) + pack(">I", message.relation_id) + b"N" + _tuple(message.new)
        case Update():
            head = _head(b"U", message.xid) + pack(">I", message.relation_id)
            return head + _old(message.key, message.old) + b"N" + _tuple(message.new)
        case Delete():
            old = _old(message.key, message.old)
            if not old:
                raise ValueError("a Delete needs the old key or the old row")
            return _head(b"D", message.xid) + pack(">I", message.relation_id) + old


def _old(key: TupleData | None, old: TupleData | None) -> bytes:
    if key is not None and old is not None:
        raise ValueError("a change has the old key or the old row, not both")
    if key is not None:
        return b"K" + _tuple(key)
    if old is not None:
        return b"O" + _tuple(old)
    return b""


def _tuple(data: TupleData) -> bytes:
    parts = [pack(">h", len(data.values))]
    for kind, value in zip(data.kinds, data.values, strict=True):
        if value is not None and kind in {TEXT, BINARY}:
            parts.append(pack(">BI", kind, len(value)))
            parts.append(value)
        elif value is None and kind in {NULL, UNCHANGED}:
            parts.append(pack(">B", kind))
        else:
            raise ValueError("a column's kind and its value do not agree")
    return b"".join(parts)
