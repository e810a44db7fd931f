"""The messages of events, as a publisher could have sent them: a transaction is whole, and if it was streamed it is a single block."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from struct import Struct
from typing import Final

from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    BeginPrepare,
    CommitPrepared,
    LogicalMessage,
    Origin,
    Prepare,
    RollbackPrepared,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Tag,
)
from subscriber.transaction.model import Event, PreparedTransaction, Transaction
from subscriber.transaction.reassembly import Reassembly, SpoolDiscard, SpoolTruncate

__all__ = ["around", "decode_events", "tags", "transaction_of", "whole_messages"]

_BEGIN: Final = Struct(">cQqI").pack
_COMMIT: Final = Struct(">cBQQq").pack
_BEGIN_FIELDS: Final = Struct(">xQqI").unpack_from
_END_FIELD: Final = Struct(">10xQ").unpack_from
_B, _C, _O = int(Tag.BEGIN), int(Tag.COMMIT), int(Tag.ORIGIN)
_FIRST: Final = itemgetter(0)


def tags(payloads: Sequence[bytes]) -> bytes:
    """The tags of messages."""
    return bytes(map(_FIRST, payloads))


def transaction_of(event: Event) -> Transaction | None:
    """The changes of an event; None: it has none."""
    found = event.transaction if isinstance(event, PreparedTransaction) else event
    return found if isinstance(found, Transaction) else None


def whole_messages(transactions: Sequence[Transaction]) -> list[bytes]:
    """The messages of transactions that are in memory and were not streamed: most are."""
    found: list[bytes] = []
    add = found.append
    for each in transactions:
        add(_BEGIN(b"B", each.final_lsn, each.commit_time, each.xid))
        if each.origin is not None:
            add(encode(each.origin))
        found += each.records
        add(_COMMIT(b"C", 0, each.final_lsn, each.end_lsn, each.commit_time))
    return found


def around(event: Event) -> tuple[list[bytes], list[bytes]]:
    """The messages before and after the records of an event."""
    match event:
        case CommitPrepared() | RollbackPrepared():
            return [encode(event)], []
        case LogicalMessage():
            return [], []
        case PreparedTransaction(transaction, gid):
            lsn, end, moment, xid = transaction.final_lsn, transaction.end_lsn, transaction.commit_time, transaction.xid
            if transaction.prefixed:
                return _stream_start(transaction), [encode(StreamStop()), encode(StreamPrepare(0, lsn, end, moment, xid, gid))]
            begin = encode(BeginPrepare(lsn, end, moment, xid, gid))
            return [begin, *_origin(transaction)], [encode(Prepare(0, lsn, end, moment, xid, gid))]
        case Transaction():
            lsn, end, moment, xid = event.final_lsn, event.end_lsn, event.commit_time, event.xid
            if event.prefixed:
                return _stream_start(event), [encode(StreamStop()), encode(StreamCommit(xid, 0, lsn, end, moment))]
            return [_BEGIN(b"B", lsn, moment, xid), *_origin(event)], [_COMMIT(b"C", 0, lsn, end, moment)]


def _stream_start(transaction: Transaction) -> list[bytes]:
    return [encode(StreamStart(transaction.xid, first_segment=True)), *_origin(transaction)]


def _origin(transaction: Transaction) -> list[bytes]:
    return [] if transaction.origin is None else [encode(transaction.origin)]


def decode_events(payloads: list[bytes]) -> list[Event]:
    """The events of whole messages.

    Raises:
        ProtocolError: they are something else.
    """
    found: list[Event] = []
    kinds = tags(payloads)
    place, count = 0, len(payloads)
    reassembly = Reassembly()
    add, new = found.append, int.__new__
    while place < count:
        end = kinds.find(_C, place) if kinds[place] == _B else -1
        if end < 0:
            for output in reassembly.feed(payloads[place]):
                assert not isinstance(output, SpoolDiscard | SpoolTruncate)  # nothing is spilled or aborted
                add(output)
            place += 1
            continue
        # no message is built for these, as in Reassembly
        final_lsn, commit_time, xid = _BEGIN_FIELDS(payloads[place])
        (end_lsn,) = _END_FIELD(payloads[end])
        origin = None
        if kinds[place + 1] == _O:
            place += 1
            message = decode(payloads[place])
            origin = message if isinstance(message, Origin) else None
        records = payloads[place + 1 : end]
        size = len(records[0]) if end == place + 2 else sum(map(len, records))
        add(Transaction(xid, new(Lsn, final_lsn), new(Lsn, end_lsn), commit_time, False, records, origin, 0, size))
        place = end + 1
    return found
