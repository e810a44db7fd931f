r"""Readable lines: the kind of event, then ``name=value``.

::

    begin xid=742 lsn=0/15A3F48 end_lsn=0/15A3F78 time=2026-01-31T12:00:00.000000+00:00
    update public.t key=(id='1') new=(id='2' note=NULL photo=UNCHANGED data=\x00ff)
    commit xid=742 lsn=0/15A3F48 end_lsn=0/15A3F78 time=2026-01-31T12:00:00.000000+00:00

Text is in single quotes, with backslash escapes for the quote, the backslash and characters that are not printable. So a value cannot
contain a line break or a terminal command. NULL, UNCHANGED (not sent) and binary values (``\x`` and hexadecimal) are not quoted.
"""

from __future__ import annotations

import re
from typing import Final

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.output_lines import Line, LineValue, change_line, closing_line, message_line, opening_line
from subscriber.transaction.changes import Change, Row, Unchanged, Value
from subscriber.transaction.header import TransactionHeader

__all__ = ["TextLines", "text_line"]

_BARE: Final = re.compile(r"[A-Za-z0-9_.:/+-]+", re.ASCII)
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


class TextLines:
    """Writes transactions as text; implements :class:`subscriber.sinks.output_lines.ChangeFormat`."""

    def opening(self, header: TransactionHeader) -> str | None:
        """``begin`` or ``begin prepare``."""
        line = opening_line(header)
        return None if line is None else text_line(line)

    def change(self, header: TransactionHeader, change: Change) -> str:
        """A change, without the xid: the lines before and after the changes contain it."""
        return text_line(change_line(change))

    def closing(self, header: TransactionHeader) -> str:
        """``commit``, ``prepare``, ``commit prepared`` or ``rollback prepared``."""
        return text_line(closing_line(header))

    def message(self, lsn: Lsn, prefix: str, content: bytes) -> str:
        """A logical message outside any transaction."""
        return text_line(message_line(lsn, prefix, content, transactional=False))


def text_line(line: Line) -> str:
    """Write any line, without a line break."""
    return " ".join(_entry(name, value) for name, value in line.items())


def _entry(name: str, value: LineValue) -> str:
    if name == "kind":
        return str(value)
    written = _written(name, value)
    return written if isinstance(value, TableName) else f"{name}={written}"


def _written(name: str, value: LineValue) -> str:
    match value:
        case None:
            return "NULL"
        case bool():
            return "true" if value else "false"
        case dict():
            return _row(value)
        case str():
            # a message's content is always quoted, as the value of a column; other texts only if needed
            return value if name != "content" and _BARE.fullmatch(value) else _quoted(value, "'")
        case bytes():
            return f"\\x{value.hex()}"
        case int():
            return str(value)
        case TableName():
            return _table(value)
        case _:
            return "(" + " ".join(f"({text_line({**item})})" if isinstance(item, dict) else _written("", item) for item in value) + ")"


def _row(row: Row) -> str:
    return "(" + " ".join(f"{_name(name)}={_value(value)}" for name, value in row.items()) + ")"


def _value(value: Value) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, Unchanged):
        return "UNCHANGED"
    return f"\\x{value.hex()}" if isinstance(value, bytes) else _quoted(value, "'")


def _table(table: TableName) -> str:
    return f"{_name(table.namespace)}.{_name(table.name)}"


def _name(name: str) -> str:
    return name if name.isidentifier() and name.isprintable() else _quoted(name, '"')


def _quoted(text: str, quote: str) -> str:
    if text.isprintable() and quote not in text and "\\" not in text:
        return f"{quote}{text}{quote}"
    return quote + "".join(_character(character, quote) for character in text) + quote


def _character(character: str, quote: str) -> str:
    if character == quote:
        return f"\\{quote}"
    if named := _NAMED.get(character):
        return named
    if character.isprintable():
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code & 0xFF:02x}"  # a byte that is not UTF-8
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
