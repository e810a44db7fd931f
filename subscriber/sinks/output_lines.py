"""The content of an output line about a change or a transaction, before it is written as JSON or as text.

A :data:`Line` is an ordered mapping that begins with ``kind``. Entries that do not apply are left out. :mod:`subscriber.sinks.json_lines`
and :mod:`subscriber.sinks.text_lines` write lines. Both accept names and values from any bytes, and never raise an error.

A committed transaction has a line ``begin``, one line per change, and a line ``commit``. A prepared one has ``begin prepare``, its changes,
and ``prepare``. Its end is a single line ``commit prepared`` or ``rollback prepared``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, assert_never

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn, datetime_from_postgres
from subscriber.protocol.messages import Relation
from subscriber.transaction.changes import Change, DeleteChange, InsertChange, MessageChange, Row, TruncateChange, UpdateChange
from subscriber.transaction.header import TransactionHeader, TransactionKind

__all__ = [
    "ChangeFormat",
    "Line",
    "LineValue",
    "change_line",
    "closing_line",
    "message_line",
    "moment",
    "opening_line",
    "readable",
    "without_none",
]

LineValue = str | bytes | int | None | Lsn | TableName | Row | Sequence[TableName | int | dict[str, str | int | bool]]
Line = dict[str, LineValue]

_OPENING: Final[dict[TransactionKind, str]] = {"commit": "begin", "prepare": "begin prepare"}


class ChangeFormat(Protocol):
    """A format of output lines for transactions. A line contains no line break, and only characters that UTF-8 can encode."""

    def opening(self, header: TransactionHeader) -> str | None:
        """The line before a transaction's changes; None for COMMIT PREPARED and ROLLBACK PREPARED, which have no changes."""
        ...

    def change(self, header: TransactionHeader, change: Change) -> str: ...

    def closing(self, header: TransactionHeader) -> str:
        """The line at the end of the transaction."""
        ...

    def message(self, lsn: Lsn, prefix: str, content: bytes) -> str:
        """The line of a logical message outside any transaction."""
        ...


def opening_line(header: TransactionHeader) -> Line | None:
    """A line ``begin`` or ``begin prepare``, or None."""
    kind = _OPENING.get(header.kind)
    return None if kind is None else _transaction(header, kind)


def closing_line(header: TransactionHeader) -> Line:
    """The line at the end of the transaction."""
    return _transaction(header, header.kind)


def _transaction(header: TransactionHeader, kind: str) -> Line:
    return without_none(
        {
            "kind": kind,
            "xid": header.xid,
            "gid": header.gid,
            "lsn": header.commit_lsn,
            "end_lsn": header.end_lsn,
            "time": moment(header.commit_time),
            "origin": header.origin,
        }
    )


def change_line(change: Change, xid: int | None = None) -> Line:
    """The line of one change.

    Args:
        change: a change of a transaction.
        xid: xid of the transaction, if the line must contain it.
    """
    line: Line = {"kind": change.kind, "xid": xid}
    match change:
        case InsertChange():
            line |= {"relation": _name(change.relation), "new": change.new}
        case UpdateChange():
            line |= {"relation": _name(change.relation), "key": change.key, "old": change.old, "new": change.new}
        case DeleteChange():
            line |= {"relation": _name(change.relation), "key": change.key, "old": change.old}
        case TruncateChange():
            line |= {
                "relations": [_name(relation) for relation in change.relations],
                "cascade": change.cascade,
                "restart_identity": change.restart_identity,
            }
        case MessageChange():
            line |= message_line(change.lsn, change.prefix, change.content, transactional=True)
        case _:
            assert_never(change)
    return without_none(line)


def message_line(lsn: Lsn, prefix: str, content: bytes, *, transactional: bool) -> Line:
    return {"kind": "message", "transactional": transactional, "lsn": lsn, "prefix": prefix, "content": readable(content)}


def without_none(line: Line) -> Line:
    """Remove entries that are None."""
    return {name: value for name, value in line.items() if value is not None}


def readable(content: bytes) -> str | bytes:
    """The content as text if it is UTF-8 without a zero byte, else unchanged."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    return content if "\0" in text else text


def moment(microseconds: int) -> str | int:
    """A time in ISO 8601. If it is outside Python's range of years, it stays a number of microseconds since the PostgreSQL epoch."""
    try:
        return datetime_from_postgres(microseconds).isoformat(timespec="microseconds")
    except OverflowError:
        return microseconds


def _name(relation: Relation) -> TableName:
    return TableName(relation.namespace, relation.name)
