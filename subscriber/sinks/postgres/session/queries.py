"""Queries with the parameters $1, $2 and so on: see :class:`subscriber.interfaces.Query`."""

from __future__ import annotations

from typing import Any

import psycopg

from subscriber.sinks.postgres.session.postgres_errors import translated

__all__ = ["run_query"]


async def run_query(connection: psycopg.AsyncConnection[tuple[Any, ...]], sql: str, /, *values: str) -> list[tuple[Any, ...]]:
    """Run one query and return its rows, if any. The server plans it for these values.

    Raises:
        TargetError: or a subclass.
    """
    with translated():
        cursor = psycopg.AsyncRawCursor(connection)
        await cursor.execute(sql.encode(), values or None, prepare=False)
        return await cursor.fetchall() if cursor.description is not None else []
