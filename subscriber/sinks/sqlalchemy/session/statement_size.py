"""The largest size of a statement: MariaDB's and MySQL's ``max_allowed_packet``.

A server cuts the connection of a client that sends more, often before the client has read the reason. That looks like a network failure. So
a row that does not fit is rejected before it is sent. Rows that fit one by one, but not together, are sent in several statements.

A session takes its ``max_allowed_packet`` from the global variable when it begins: a new value has effect from the next session. SQLite
reports its limits itself (SQLITE_TOOBIG), and keeps the connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.errors import ApplyError

__all__ = ["BINARY_GROWS", "StatementLimit", "learn_limit", "limit_of"]

BINARY_GROWS: Final = 4
"""How many times larger a value's text may be than its binary format, except for a numeric with thousands of zeros."""
_INFO: Final = "subscriber_statement_limit"
_MYSQL: Final = frozenset({"mysql", "mariadb"})
_SLACK: Final = 64
"""Bytes for the headers of a packet."""
_DRIVERS_OWN: Final = 1_024_000
"""The drivers of MariaDB and MySQL put rows into one INSERT up to this size."""
_LARGEST_PACKET: Final = 1024**3
_ESCAPED: Final = "\0\n\r\x1a\"'\\"
_ESCAPED_BYTES: Final = tuple(character.encode() for character in _ESCAPED)
_ESCAPES: Final = 2
"""How many times larger escapes can make a text."""
_VALUE: Final = 64
"""Bytes that any other value needs in a statement, with quotes and comma."""


class StatementLimit:
    """The largest size of one statement.

    Args:
        most: the size in bytes; None: no limit.
        setting: the name of the server's variable for the limit; None: the limit is fixed.
    """

    def __init__(self, most: int | None = None, setting: str | None = None) -> None:
        self._most = None if most is None else most - _SLACK
        self._setting = setting
        self._configured = most

    @property
    def chunk(self) -> int:
        """The number of bytes of one value that always fit into a statement."""
        return 2**30 if self._most is None else max((self._most - 1024) // 2, 64)

    def pieces(self, sql: str, rows: Sequence[Any], largest: int | None = None) -> Iterator[Sequence[Any]]:
        """Divide the rows of one INSERT into parts that each fit.

        Args:
            sql: the statement for one row.
            rows: tuples of parameters.
            largest: no row's values have more bytes in PostgreSQL's text format; None: not known. If it is small, rows are not measured.

        Raises:
            ApplyError: a row does not fit.
        """
        most = self._most
        if most is None or not rows:
            yield rows
            return
        splits = self._setting is not None and most < _DRIVERS_OWN
        if not splits and largest is not None and largest * _ESCAPES + len(rows[0]) * _VALUE + len(sql) < most:
            yield rows
            return
        begin, room = 0, most - len(sql.encode())
        taken = 0
        for number, row in enumerate(rows):
            size = self._size(row)
            if size > room:
                raise self._refused(size + len(sql.encode()))
            taken += size
            if splits and taken > room:
                yield rows[begin:number]
                begin, taken = number, size
        yield rows[begin:]

    def require(self, sql: str, row: Any) -> None:
        """Check that a row fits.

        Raises:
            ApplyError: it does not.
        """
        for _ in self.pieces(sql, [row]):
            pass

    def _size(self, row: Any) -> int:
        escapes = self._setting is not None
        total = 0
        for value in row.values() if isinstance(row, dict) else row:
            if isinstance(value, str):
                total += (len(value) if value.isascii() else len(value.encode())) + 8
                total += sum(map(value.count, _ESCAPED)) if escapes else 0
            elif isinstance(value, bytes):
                total += len(value) + 12
                total += sum(map(value.count, _ESCAPED_BYTES)) if escapes else 0
            else:
                total += _VALUE if isinstance(value, int | float) or value is None else len(str(value)) + 8
        return total

    def _refused(self, size: int) -> ApplyError:
        if self._setting is None:
            return ApplyError(
                f"a row of {size:,} bytes is larger than the target allows ({self._configured:,} bytes)",
                sqlstate="54000",
                hint="make it smaller on the publisher, or leave a column out of the publication",
            )
        needed = 2 ** (size + _SLACK).bit_length()
        hint = f"SET GLOBAL {self._setting} = {needed} in the target, and set it in the server's configuration"
        if needed > _LARGEST_PACKET:
            hint = f"the largest {self._setting} is 1 GB: make the row smaller, or leave a column out of the publication"
        return ApplyError(
            f"a row needs a statement of {size:,} bytes, and {self._setting} of the target is {self._configured:,}",
            sqlstate="54000",
            hint=hint,
        )


async def learn_limit(connection: AsyncConnection) -> None:
    """Read a session's limit after the session was opened."""
    limit = StatementLimit()
    if connection.dialect.name in _MYSQL:
        most = (await connection.execute(text("SELECT @@SESSION.max_allowed_packet"))).scalar_one()
        limit = StatementLimit(int(most), "max_allowed_packet")
    connection.info[_INFO] = limit


def limit_of(connection: AsyncConnection) -> StatementLimit:
    found = connection.info.get(_INFO)
    return found if isinstance(found, StatementLimit) else StatementLimit()
