"""TupleData, and the few bytes of a payload that can be looked at without decoding it: the hot path.

Source: PostgreSQL manual, Logical Replication Message Formats, TupleData::

    Int16   number of columns
    per column:
    Byte1   'n' NULL | 'u' unchanged TOASTed value, not sent | 't' text | 'b' binary
    Int32   length of the value          ('t' and 'b' only)
    Byten   the value                    ('t' and 'b' only)

Everything here runs once a row. That is why :func:`read_tuple` reads first and asks afterwards: lengths are read as unsigned, so that a
negative one is only a very long one; a value that ends past the payload makes the next read fail, or is seen once behind the loop.
No read is repeated to check it, and nothing is allocated from a claimed count or length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as StructError
from typing import Final

from subscriber.protocol.failures import ends_early, malformed
from subscriber.protocol.messages import BINARY, NULL, TEXT, UNCHANGED, TupleData

__all__ = ["peek_xid", "read_alike", "read_tuple", "relation_id"]

_INT16: Final = Struct(">h").unpack_from
_UINT32: Final = Struct(">I").unpack_from
_NO_VALUE: Final = (ValueError, ArithmeticError, LookupError, StructError)


def read_tuple(payload: bytes, offset: int) -> tuple[TupleData, int]:
    """Read the TupleData that starts at ``offset``; return it and the offset behind it.

    Raises:
        ProtocolError: the bytes there are not a TupleData.
    """
    unpack = _UINT32
    values: list[bytes | None] = []
    append = values.append
    kinds = bytearray()
    add_kind = kinds.append
    position = offset + 2
    try:
        (count,) = _INT16(payload, offset)
        for _ in range(count):
            kind = payload[position]
            if kind == TEXT or kind == BINARY:  # noqa: PLR1714, SIM109 - a third faster
                (length,) = unpack(payload, position + 1)
                start = position + 5
                position = start + length
                append(payload[start:position])
            elif kind == NULL or kind == UNCHANGED:  # noqa: PLR1714, SIM109
                position += 1
                append(None)
            else:
                raise malformed(payload, position, "unknown kind of column")
            add_kind(kind)
    except (IndexError, StructError):
        raise ends_early(payload) from None
    if count < 0:
        raise malformed(payload, offset, "negative number of columns")
    if position > len(payload):
        raise ends_early(payload)
    return TupleData(bytes(kinds), values), position


def read_alike(
    records: Sequence[bytes],
    places: range,
    *,
    tag: int,
    offset: int,
    header: bytes,
    kind: int,
    binds: Sequence[Callable[[bytes], object]],
) -> list[tuple[object, ...]]:
    """Read raw messages that differ in nothing but their values, up to the first that is anything else.

    Args:
        records: messages.
        places: which of them, one behind the other.
        tag: each has.
        offset: behind tag and xid.
        header: what stands there: relation, the byte that announces the tuple, the tuple's number of columns.
        kind: of every value but NULL, TEXT or BINARY.
        binds: make something of a value, one a column.

    Returns:
        What was made of the values, None for NULL; as many rows as there are such messages. The message that ends them is for somebody else
        to read, who says what is wrong with it, if anything is: a value may be of the other kind or not sent, or refused by its ``bind``.
    """
    length_at = _UINT32
    rows: list[tuple[object, ...]] = []
    add_row = rows.append
    first = offset + len(header)
    try:
        for place in places:
            record = records[place]
            if record[offset:first] != header or record[0] != tag:
                break
            position = first
            row: list[object] = []
            for bind in binds:
                found = record[position]
                if found == kind:
                    start = position + 5
                    position = start + length_at(record, position + 1)[0]
                    row.append(bind(record[start:position]))
                elif found == NULL:
                    position += 1
                    row.append(None)
                else:
                    return rows
            if position != len(record):
                break
            # a tuple of plain values is nothing to the garbage collector, which has much to do here
            add_row(tuple(row))
    except _NO_VALUE:
        pass
    return rows


def peek_xid(payload: bytes) -> int:
    """Return the Int32 behind the tag.

    That is the (sub)transaction's id in Relation, Type, Insert, Update, Delete, Truncate and Message inside a streamed block, and the top
    transaction's in Stream Start, Stream Commit and Stream Abort. In any other message it is something else: the caller knows the tag.

    Raises:
        ProtocolError: the payload is shorter than that.
    """
    if len(payload) < 5:
        raise ends_early(payload)
    return int.from_bytes(payload[1:5])


def relation_id(payload: bytes, prefixed: bool) -> int:
    """Return the relation's id of a raw Relation, Insert, Update or Delete.

    Args:
        payload: the whole message.
        prefixed: whether a (sub)transaction id stands before it, as inside a streamed block.

    Raises:
        ProtocolError: the payload is shorter than that.
    """
    start = 5 if prefixed else 1
    if len(payload) < start + 4:
        raise ends_early(payload)
    return int.from_bytes(payload[start : start + 4])
