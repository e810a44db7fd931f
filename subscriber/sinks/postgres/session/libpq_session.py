"""A session of psycopg that a :class:`subscriber.sinks.postgres.session.catalog_reader.CatalogReader` uses as one of asyncpg.

asyncpg needs a session of libpq that it connects like. For a few queries of the catalog, that session is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import psycopg
from psycopg import AsyncRawCursor

__all__ = ["LibpqSession"]


class _Record(tuple[Any, ...]):
    """A row, with the methods of asyncpg's that are used."""

    names: Sequence[str]

    def items(self) -> Iterator[tuple[str, Any]]:
        return zip(self.names, self, strict=True)

    def values(self) -> Iterator[Any]:
        return iter(self)


def _records(cursor: psycopg.AsyncCursor[Any]) -> Callable[[Sequence[Any]], _Record]:
    names = [column.name for column in cursor.description or ()]

    def record(values: Sequence[Any]) -> _Record:
        found = _Record(values)
        found.names = names
        return found

    return record


class LibpqSession:
    """The methods have the names and meanings of asyncpg's.

    Args:
        connection: in autocommit mode.
    """

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        self.connection: Final = connection

    async def fetch(self, query: str, *parameters: object) -> list[_Record]:
        async with AsyncRawCursor(self.connection, row_factory=_records) as cursor:
            await cursor.execute(query.encode(), parameters or None)
            return await cursor.fetchall() if cursor.description is not None else []

    async def fetchval(self, query: str) -> Any:
        return (await self.fetch(query))[0][0]

    async def execute(self, query: str, *parameters: object) -> None:
        if parameters:
            await self.fetch(query, *parameters)
        else:
            await self.connection.execute(query.encode())

    def transaction(self) -> AbstractAsyncContextManager[Any]:
        return self.connection.transaction()

    def is_closed(self) -> bool:
        return self.connection.closed

    def terminate(self) -> None:
        self.connection.pgconn.finish()

    async def close(self, *, timeout: float | None = None) -> None:
        await self.connection.close()

    def get_server_pid(self) -> int:
        return self.connection.info.backend_pid

    @property
    def server_encoding(self) -> str:
        return self.connection.info.parameter_status("server_encoding") or ""
