"""Queries with the parameters $1, $2 and so on: see :class:`subscriber.interfaces.Query`."""

from __future__ import annotations

from typing import Any

import psycopg

from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.session.postgres_errors import translated

__all__ = ["become", "fetch_rows", "run_query"]


async def run_query(connection: psycopg.AsyncConnection[tuple[Any, ...]], sql: str, /, *values: object) -> list[tuple[Any, ...]]:
    """Run one query and return its rows, if any. The server plans it for these values.

    Raises:
        TargetError: or a subclass.
    """
    with translated():
        cursor = psycopg.AsyncRawCursor(connection)
        await cursor.execute(sql.encode(), values or None, prepare=False)
        return await cursor.fetchall() if cursor.description is not None else []


async def fetch_rows(connection: psycopg.AsyncConnection[tuple[Any, ...]], sql: str, /, *parameters: object) -> list[tuple[Any, ...]]:
    """The same with the parameters %s.

    Raises:
        TargetError: or a subclass.
    """
    with translated():
        cursor = await connection.execute(sql.encode(), parameters or None)
        return await cursor.fetchall() if cursor.description is not None else []


async def become(connection: psycopg.AsyncConnection[tuple[Any, ...]], role: str | None) -> None:
    """Switch the session to a role; None: back to its own, which may have a default.

    Raises:
        TargetError: or a subclass.
    """
    await run_query(connection, f"SET ROLE {quote_identifier(role)}" if role else "SET role TO DEFAULT")
