"""TupleData, and the fields of a payload that can be read without decoding it: the hot path.

Source: PostgreSQL manual, Logical Replication Message Formats, TupleData::

    Int16   number of columns
    per column:
    Byte1   'n' NULL | 'u' unchanged TOASTed value, not sent | 't' text | 'b' binary
    Int32   length of the value          ('t' and 'b' only)
    Byten   the value                    ('t' and 'b' only)

Everything here runs once per row. Therefore :func:`read_tuple` reads first and checks afterwards. It reads lengths as unsigned, so that a
negative length is only a very large one. If a value ends past the payload, the next read fails or the check after the loop finds it.
No read is repeated to check it, and a claimed count or length never causes an allocation.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Final

from subscriber import _cython as cython
from subscriber.protocol.malformed import ends_early, malformed
from subscriber.protocol.messages import BINARY, NULL, TEXT, UNCHANGED, TupleData

__all__ = ["keep_columns", "places_by_header", "read_rows", "read_tuple", "records_alike", "relation_id"]

_INSERT: Final = ord("I")
_UPDATE: Final = ord("U")
_DELETE: Final = ord("D")
_INT16: Final = Struct(">h").unpack_from
_UINT32: Final = Struct(">I").unpack_from
_COUNT: Final = Struct(">h").pack


def read_tuple(payload: bytes, offset: int) -> tuple[TupleData, int]:
    """Read the TupleData that starts at ``offset``; return it and the offset after it.

    Raises:
        ProtocolError: the bytes there are not a TupleData.
    """
    compiled = cython.compiled
    unpack = _UINT32
    values: list[bytes | None] = []
    append = values.append
    kinds = bytearray()
    add_kind = kinds.append
    position: cython.Py_ssize_t = offset + 2
    size: cython.Py_ssize_t = len(payload)
    start: cython.Py_ssize_t
    length: cython.Py_ssize_t
    kind: cython.Py_ssize_t
    text: cython.p_char = payload
    try:
        (count,) = _INT16(payload, offset)
        for _ in range(count):
            kind = payload[position]
            if kind == TEXT or kind == BINARY:  # noqa: PLR1714, SIM109 - a third faster
                start = position + 5
                if compiled:
                    length = payload[position + 1]
                    length = length << 8 | payload[position + 2]
                    length = length << 8 | payload[position + 3]
                    position = start + (length << 8 | payload[position + 4])
                    # a slice of a C string is not limited by its end
                    if position > size:
                        break
                else:
                    (length,) = unpack(payload, position + 1)
                    position = start + length
                append(text[start:position])
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


def read_rows(
    records: Sequence[bytes], places: range, *, tag: int, offset: int, parts: Sequence[tuple[bytes, bytes]], size: int
) -> list[tuple[bytes | None, ...]]:
    """Read raw messages that differ only in their values, up to the first message that differs in something else.

    The values of a row are a tuple of bytes, which the garbage collector does not track. Columns are made of many rows at once: appending
    each value to its column would take three times as long for a single row, and no less for many.

    Args:
        records: messages.
        places: which of them to read, consecutive.
        tag: the tag that each must have.
        offset: the offset after tag and xid.
        parts: one tuple of the message, or the old and the new one. For each: the bytes before its first column (relation, tuple marker,
            number of columns), and the kind of each column's values: TEXT, BINARY, or UNCHANGED. A NULL may replace a value, but not an
            unchanged one.
        size: end after the message that brings the total to this many bytes, and before a larger message that is not the first one.

    Returns:
        For each message the values of all parts, with None for NULL and for unchanged ones. The caller reads the message at which reading
        ended, and reports its error, if it has one.
    """
    rows: list[tuple[bytes | None, ...]] = []
    _read_alike(records, places, tag=tag, offset=offset, parts=parts, size=size, rows=rows)
    return rows


def records_alike(
    records: Sequence[bytes], places: range, *, tag: int, offset: int, parts: Sequence[tuple[bytes, bytes]], size: int
) -> list[bytes]:
    """Return the messages that :func:`read_rows` would read, without reading their values."""
    count = _read_alike(records, places, tag=tag, offset=offset, parts=parts, size=size, rows=None)
    return list(records[places.start : places.start + count])


def _read_alike(
    records: Sequence[bytes],
    places: range,
    *,
    tag: cython.Py_ssize_t,
    offset: cython.Py_ssize_t,
    parts: Sequence[tuple[bytes, bytes]],
    size: cython.Py_ssize_t,
    rows: list[tuple[bytes | None, ...]] | None,
) -> int:
    """Read messages; see :func:`read_rows`. Return their number. ``rows`` gets their values."""
    compiled = cython.compiled
    length_at = _UINT32
    wanted: cython.Py_ssize_t = rows is not None
    null: cython.Py_ssize_t = NULL
    unchanged: cython.Py_ssize_t = UNCHANGED
    count: cython.Py_ssize_t = 0
    left: cython.Py_ssize_t = size
    position: cython.Py_ssize_t
    start: cython.Py_ssize_t
    end: cython.Py_ssize_t
    length: cython.Py_ssize_t
    kind: cython.Py_ssize_t
    found: cython.Py_ssize_t
    record: bytes
    head: bytes
    kinds: bytes
    text: cython.p_char
    try:
        for place in places:
            record = records[place]
            end = len(record)
            if record[0] != tag or (end > size and count):
                break
            position = offset
            text = record
            row: list[bytes | None] = []
            for head, kinds in parts:
                start = position + len(head)
                if record[position:start] != head:
                    return count
                position = start
                for kind in kinds:
                    found = record[position]
                    if found == kind != unchanged:
                        start = position + 5
                        if compiled:
                            if start > end:
                                return count
                            length = record[position + 1]
                            length = length << 8 | record[position + 2]
                            length = length << 8 | record[position + 3]
                            position = start + (length << 8 | record[position + 4])
                            # a slice of a C string is not limited by its end
                            if position > end:
                                return count
                        else:
                            position = start + length_at(record, position + 1)[0]
                        if wanted:
                            row.append(text[start:position])
                    elif found == (unchanged if kind == unchanged else null):
                        position += 1
                        if wanted:
                            row.append(None)
                    else:
                        return count
            if position != end:
                break
            count += 1
            if rows is not None:
                rows.append(tuple(row))
            left -= position
            if left <= 0:
                break
    except (IndexError, StructError):
        pass
    return count


def keep_columns(payload: bytes, offset: int, kept: bytes) -> tuple[bytes, int]:
    """Leave columns out of the TupleData that starts at ``offset``; return what remains as bytes, and the offset after the TupleData.

    Args:
        payload: the whole message.
        offset: of the TupleData.
        kept: a byte for each column; 0: it is left out.

    Raises:
        ProtocolError: the bytes there are not a TupleData, or it has another number of columns.
    """
    unpack = _UINT32
    position: cython.Py_ssize_t = offset + 2
    begin: cython.Py_ssize_t = -1
    count: cython.Py_ssize_t = 0
    size: cython.Py_ssize_t = len(payload)
    kind: cython.Py_ssize_t
    keeps: cython.Py_ssize_t
    parts: list[bytes] = [b""]
    try:
        if _INT16(payload, offset)[0] != len(kept):
            raise malformed(payload, offset, "another number of columns than the relation has")
        for keeps in kept:
            if keeps:
                count += 1
                if begin < 0:
                    begin = position
            elif begin >= 0:
                parts.append(payload[begin:position])
                begin = -1
            kind = payload[position]
            if kind == TEXT or kind == BINARY:  # noqa: PLR1714, SIM109 - faster
                position += 5 + unpack(payload, position + 1)[0]
            elif kind == NULL or kind == UNCHANGED:  # noqa: PLR1714, SIM109
                position += 1
            else:
                raise malformed(payload, position, "unknown kind of column")
            if position > size:
                raise ends_early(payload)
    except (IndexError, StructError):
        raise ends_early(payload) from None
    if begin >= 0:
        parts.append(payload[begin:position])
    parts[0] = _COUNT(count)
    return b"".join(parts), position


def places_by_header(records: Sequence[bytes], place: int, end: int, offset: int, size: int = 2**62) -> tuple[dict[bytes, list[int]], int]:
    """Group consecutive changes of rows by what they begin with: tag, relation, marker of the tuple, number of columns; without the xid.

    Args:
        records: messages.
        place: the first one.
        end: the place after the last one.
        offset: the offset after tag and xid.
        size: end after the message that brings the total to this many bytes.

    Returns:
        For each such header the places of its changes; and the place of the first message after them. It is at the end, or the limit was
        reached, or it is no change of a row, or too short to be one.
    """
    groups: dict[bytes, list[int]] = {}
    index: cython.Py_ssize_t = place
    count: cython.Py_ssize_t = end
    head: cython.Py_ssize_t = offset + 7
    left: cython.Py_ssize_t = size
    tag: cython.Py_ssize_t
    record: bytes
    while index < count and left > 0:
        record = records[index]
        if len(record) < head:
            break
        tag = record[0]
        if tag != _INSERT and tag != _UPDATE and tag != _DELETE:  # noqa: PLR1714 - faster
            break
        header = record[:head] if offset == 1 else record[:1] + record[offset:head]
        places = groups.get(header)
        if places is None:
            places = groups[header] = []
        places.append(index)
        left -= len(record)
        index += 1
    return groups, index


def relation_id(payload: bytes, prefixed: bool) -> int:
    """Return the relation's id of a raw Relation, Insert, Update or Delete.

    Args:
        payload: the whole message.
        prefixed: whether a (sub)transaction id precedes it, as inside a streamed block.

    Raises:
        ProtocolError: the payload is too short.
    """
    start = 5 if prefixed else 1
    if len(payload) < start + 4:
        raise ends_early(payload)
    return int.from_bytes(payload[start : start + 4])
