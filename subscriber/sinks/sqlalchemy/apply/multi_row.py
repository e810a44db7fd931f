"""Inserts many rows by one INSERT, for a driver that makes a call for each row: SQLite.

Its ``executemany`` executes the statement once for each row, and releases and takes the interpreter's lock each time. While the event loop
is busy, that is a long wait for each row. A statement of many rows is one call, and takes half the work.

The rows of one statement are inserted one after another, with the same affinity and constraints as by separate statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from sqlalchemy import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["MultiRow", "insert_columns", "insert_rows", "multi_row"]

_PARAMETERS: Final = 999
"""Parameters of a statement: every build of SQLite accepts this number, unless it was configured for fewer."""


@dataclass(frozen=True, slots=True, eq=False)
class MultiRow:
    """An INSERT of a fixed number of rows.

    Attributes:
        sql: its text.
        rows: the number of rows.
    """

    sql: str
    rows: int

    def parameters(self, rows: Sequence[tuple[Any, ...]], first: int) -> list[tuple[Any, ...]]:
        """Return the parameters of each statement, for the rows from number ``first``. Their number must be a multiple of ``rows``."""
        return [tuple(chain.from_iterable(rows[place : place + self.rows])) for place in range(first, len(rows), self.rows)]

    def parameters_of(self, columns: Sequence[Sequence[Any]], first: int) -> list[tuple[Any, ...]]:
        """As :meth:`parameters`, for rows that are given as columns. It is faster, because no row becomes a tuple."""
        width = len(columns)
        flat: list[Any] = [None] * (width * (len(columns[0]) - first))
        for place, column in enumerate(columns):
            flat[place::width] = column[first:]
        size = width * self.rows
        return [tuple(flat[place : place + size]) for place in range(0, len(flat), size)]


def multi_row(sql: str, parameters: int, dialect: Dialect) -> MultiRow | None:
    """Build it from an INSERT of one row.

    Args:
        sql: the statement for one row; it ends with the list of its parameters.
        parameters: the number of its parameters.
        dialect: the target's.

    Returns:
        None if it gives no advantage: the driver sends many rows at once, or a row has so many parameters that a statement cannot hold two.
    """
    rows = _PARAMETERS // parameters if parameters else 0
    row = f"({', '.join('?' * parameters)})"
    if dialect.name != "sqlite" or rows < 2 or not sql.endswith(f" VALUES {row}"):
        return None
    return MultiRow(sql + f", {row}" * (rows - 1), rows)


async def insert_columns(connection: AsyncConnection, sql: str, many: MultiRow, columns: Sequence[Sequence[Any]]) -> None:
    """Insert rows that are given as columns, as :func:`insert_rows` inserts rows."""
    first = len(columns[0]) % many.rows
    if first:
        await connection.exec_driver_sql(sql, list(zip(*(column[:first] for column in columns), strict=True)))
    if len(columns[0]) > first:
        await connection.exec_driver_sql(many.sql, many.parameters_of(columns, first))


async def insert_rows(connection: AsyncConnection, sql: str, many: MultiRow | None, rows: Sequence[Any]) -> None:
    """Insert rows by the statement for one row, or as many at once as there is a statement for."""
    if many is not None and len(rows) >= many.rows:
        first = len(rows) % many.rows
        if first:
            await connection.exec_driver_sql(sql, rows[:first])
        await connection.exec_driver_sql(many.sql, many.parameters(rows, first))
    else:
        await connection.exec_driver_sql(sql, rows)
