r"""JSON lines: one object a line, always valid JSON and valid UTF-8.

Rows are objects of column names and values. A value has PostgreSQL's text form: a JSON string, or null for NULL. Values never become JSON
numbers, which cannot hold every ``numeric`` exactly. There are three special cases:

* A value in binary format (``-o binary=true``, or a logical message that is no text) is written as ``"\\x…"`` in hexadecimal, and its
  name is listed under ``"binary"``.
* A column whose TOASTed value did not change, and so was not sent, is not in the row but is listed under ``"unchanged"``.
* A byte of text or of a name that is not UTF-8 (a database in SQL_ASCII) is written as the four characters ``\xNN``.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.output_lines import Line, change_line, closing_line, message_line, opening_line
from subscriber.transaction.changes import Change, Unchanged
from subscriber.transaction.header import TransactionHeader

__all__ = ["JsonLines", "json_line"]

_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_ESCAPED_BYTE: Final = re.compile("[\udc80-\udcff]")


class JsonLines:
    """Writes transactions as JSON lines; implements :class:`subscriber.sinks.output_lines.ChangeFormat`."""

    def opening(self, header: TransactionHeader) -> str | None:
        """``begin`` or ``begin prepare``, with xid, LSNs, time and origin."""
        line = opening_line(header)
        return None if line is None else json_line(line)

    def change(self, header: TransactionHeader, change: Change) -> str:
        """A change, with the xid of its transaction."""
        return json_line(change_line(change, header.xid))

    def closing(self, header: TransactionHeader) -> str:
        """``commit``, ``prepare``, ``commit prepared`` or ``rollback prepared``."""
        return json_line(closing_line(header))

    def message(self, lsn: Lsn, prefix: str, content: bytes) -> str:
        """A logical message outside any transaction."""
        return json_line(message_line(lsn, prefix, content, transactional=False))


def json_line(line: Line) -> str:
    """Write any line as one JSON object, without a line break."""
    found: dict[str, Any] = {}
    unchanged: dict[str, list[str]] = {}
    binary: dict[str, None] = {}
    for name, value in line.items():
        if isinstance(value, dict):
            columns: dict[str, str | None] = {}
            found[name] = columns
            for column, item in value.items():
                if isinstance(item, Unchanged):
                    unchanged.setdefault("unchanged" if name == "new" else f"{name}_unchanged", []).append(column)
                elif isinstance(item, bytes):
                    columns[column] = _hexadecimal(item)
                    binary[column] = None
                else:
                    columns[column] = item
        elif isinstance(value, bytes):
            found[name] = _hexadecimal(value)
            binary[name] = None
        elif isinstance(value, TableName):
            found |= _names(value)
        elif isinstance(value, Lsn):
            found[name] = str(value)
        elif isinstance(value, list):
            found[name] = [_names(item) if isinstance(item, TableName) else item for item in value]
        else:
            found[name] = value
    found |= unchanged
    if binary:
        found["binary"] = list(binary)
    text = _encode(found)
    return text if text.isascii() else _ESCAPED_BYTE.sub(_escape, text)


def _hexadecimal(value: bytes) -> str:
    return f"\\x{value.hex()}"


def _names(table: TableName) -> dict[str, str]:
    return {"namespace": table.namespace, "relation": table.name}


def _escape(match: re.Match[str]) -> str:
    # inside a JSON string, where a backslash is written as two
    return f"\\\\x{ord(match[0]) & 0xFF:02x}"
