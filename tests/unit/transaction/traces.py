"""A short notation for what a publisher sends and for what reassembly makes of it.

A trace is words: ``S7!`` and ``S7`` (Stream Start, first segment and later), ``E``, ``c7``, ``p7``, ``A7,8``, ``B9``, ``C``, ``b9``,
``P``, ``K9``, ``r9``, ``O``, and the records ``I U D T R Y M``, with their xid inside a chunk and a label to know them by: ``I8:x``.
``m:x`` is a message that is not transactional. A result is words as well: ``9(x y)`` a transaction with two records, ``p7(x)`` a
prepared one, ``K9``, ``r9``, ``m:x``, ``truncate(id,count)``, ``discard(id)``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    TEXT,
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
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from subscriber.transaction.model import PreparedTransaction, Transaction
from subscriber.transaction.reassembly import Output, Reassembly, SpoolDiscard, SpoolTruncate

_WORD = re.compile(r"([A-Za-z])(\d+)?(!)?(?:,(\d+))?(?::(\w+))?")
_GID = "the gid"


def final_lsn(xid: int) -> Lsn:
    """LSN of the commit or prepare record of a transaction of a trace; its end is 8 bytes further."""
    return Lsn(xid * 0x100)


def row(label: str) -> TupleData:
    return TupleData(bytes([TEXT]), [label.encode()])


def record(tag: str, label: str, xid: int | None) -> Message:
    match tag:
        case "I":
            return Insert(1, row(label), xid)
        case "U":
            return Update(1, None, None, row(label), xid)
        case "D":
            return Delete(1, row(label), None, xid)
        case "T":
            return Truncate(TruncateOption(0), tuple(label.encode()), xid)
        case "R":
            return Relation(1, "public", label, "d", (Column("id", 23, -1, True),), xid)
        case "Y":
            return Type(70000, "public", label, xid)
        case "M":
            return LogicalMessage(True, Lsn(1), "prefix", label.encode(), xid)
        case "m":
            return LogicalMessage(False, Lsn(1), "prefix", label.encode())
    raise AssertionError(tag)


def label_of(payload: bytes, *, prefixed: bool) -> str:
    """What :func:`record` was given."""
    match decode(payload, in_stream=prefixed):
        case Insert(_, new) | Update(_, _, _, new):
            return (new.values[0] or b"").decode()
        case Delete(_, TupleData() as key, _):
            return (key.values[0] or b"").decode()
        case Truncate(_, relation_ids):
            return bytes(relation_ids).decode()
        case Relation(name=name) | Type(name=name):
            return name
        case LogicalMessage(content=content):
            return content.decode()
        case other:
            raise AssertionError(other)


def messages(trace: str) -> Iterator[Message]:
    current = 0
    for word in trace.split():
        match = _WORD.fullmatch(word)
        assert match is not None, word
        tag, number, first, sub, label = match.groups()
        xid = int(number) if number else current
        lsn, end = final_lsn(xid), Lsn(final_lsn(xid) + 8)
        match tag:
            case "B":
                yield Begin(lsn, 0, xid)
            case "C":
                yield Commit(0, lsn, end, 1000 + xid)
            case "b":
                yield BeginPrepare(lsn, end, 1000 + xid, xid, _GID)
            case "P":
                yield Prepare(0, lsn, end, 1000 + xid, xid, _GID)
            case "K":
                yield CommitPrepared(0, lsn, end, 0, xid, _GID)
            case "r":
                yield RollbackPrepared(0, lsn, end, 0, 0, xid, _GID)
            case "O":
                yield Origin(Lsn(5), label or "origin")
            case "S":
                yield StreamStart(xid, bool(first))
            case "E":
                yield StreamStop()
            case "c":
                yield StreamCommit(xid, 0, lsn, end, 1000 + xid)
            case "p":
                yield StreamPrepare(0, lsn, end, 1000 + xid, xid, _GID)
            case "A":
                yield StreamAbort(xid, int(sub))
            case _:
                yield record(tag, label or "-", int(number) if number else None)
        if tag in "Bb":
            current = xid


def feed(reassembly: Reassembly, trace: str) -> list[Output]:
    found: list[Output] = []
    for message in messages(trace):
        found += reassembly.feed(encode(message))
    return found


def labels(records: Sequence[bytes], *, prefixed: bool) -> str:
    return " ".join(label_of(payload, prefixed=prefixed) for payload in records)


def show(outputs: Sequence[Output]) -> str:
    return " ".join(map(_show, outputs))


def _show(output: Output) -> str:
    match output:
        case Transaction(xid=xid):
            return f"{xid}({labels(output.records, prefixed=output.prefixed)})"
        case PreparedTransaction(transaction):
            return f"p{_show(transaction)}"
        case CommitPrepared(xid=xid):
            return f"K{xid}"
        case RollbackPrepared(xid=xid):
            return f"r{xid}"
        case LogicalMessage(content=content):
            return f"m:{content.decode()}"
        case SpoolTruncate(spool_id, count):
            return f"truncate({spool_id},{count})"
        case SpoolDiscard(spool_id):
            return f"discard({spool_id})"
