"""Many rows by one INSERT, where a driver makes a call for each row: SQLite.

Its ``executemany`` steps through the statement once a row, and lets go of the interpreter's lock and takes it again each time. While the
event loop has something to do, that is a long wait for each row. One statement of many rows is one step, and half of the work besides.

The rows of one statement are inserted one after another, with the column's affinity and constraints as each by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from sqlalchemy import Dialect
from sqlalchemy.ext.asyncio import AsyncConnection

__all__ = ["MultiRow", "insert_rows", "multi_row"]

_PARAMETERS: Final = 999
"""Of a statement: every build of SQLite takes so many, unless it was made to take less."""


@dataclass(frozen=True, slots=True, eq=False)
class MultiRow:
    """An INSERT of so many rows.

    Attributes:
        sql: its text.
        rows: how many.
    """

    sql: str
    rows: int

    def parameters(self, rows: Sequence[tuple[Any, ...]], first: int) -> list[tuple[Any, ...]]:
        """Those of each statement, for the rows from number ``first`` on, which are so many that none is left."""
        return [tuple(chain.from_iterable(rows[place : place + self.rows])) for place in range(first, len(rows), self.rows)]


def multi_row(sql: str, parameters: int, dialect: Dialect) -> MultiRow | None:
    """Build it of an INSERT of one row.

    Args:
        sql: ends with the list of its parameters.
        parameters: how many there are.
        dialect: the target's.

    Returns:
        None where it is not worth it: a driver that sends many rows at once, or a row so wide that a statement has no place for several.
    """
    rows = _PARAMETERS // parameters if parameters else 0
    row = f"({', '.join('?' * parameters)})"
    if dialect.name != "sqlite" or rows < 2 or not sql.endswith(f" VALUES {row}"):
        return None
    return MultiRow(sql + f", {row}" * (rows - 1), rows)


async def insert_rows(connection: AsyncConnection, sql: str, many: MultiRow | None, rows: Sequence[Any]) -> None:
    """Insert rows by the statement for one row, or as many at once as there is a statement for."""
    if many is not None and len(rows) >= many.rows:
        first = len(rows) % many.rows
        if first:
            await connection.exec_driver_sql(sql, rows[:first])
        await connection.exec_driver_sql(many.sql, many.parameters(rows, first))
    else:
        await connection.exec_driver_sql(sql, rows)
