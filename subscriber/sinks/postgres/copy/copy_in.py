"""COPY FROM STDIN through asyncpg, and its errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Final, Self

import asyncpg

from subscriber.errors import SubscriberError, TargetUnavailable
from subscriber.interfaces import CopyFormat, TableName
from subscriber.sinks.postgres.session.postgres_errors import Diagnostics, copy_column, is_lost, target_error
from subscriber.waits import moved

__all__ = ["CopyIn"]

_PIECE_BYTES: Final = 256 * 1024


class CopyIn:
    """A context manager around a transaction with one COPY. Its errors become errors of this package that name the table and the column.

    An error of the data source is raised unchanged, and the connection is terminated.

    Args:
        connection: the session that copies.
        table: the target table.
        columns: the columns of the data.
    """

    def __init__(self, connection: asyncpg.Connection[Any], table: TableName, columns: Sequence[str]) -> None:
        self._connection = connection
        self._table = table
        self._columns = list(columns)
        self._failure: SubscriberError | None = None

    def __enter__(self) -> Self:
        return self

    async def copy(self, copy_format: CopyFormat, data: AsyncIterator[bytes], *, into: TableName | None = None) -> None:
        """Copy the data. asyncpg waits for ever if the connection is lost while its send buffer is full; then the copy is cancelled.

        Args:
            copy_format: of the data.
            data: the rows.
            into: another table, from which the rows go to the target table later.
        """
        connection, table = self._connection, into or self._table
        copying = asyncio.create_task(
            connection.copy_to_table(
                table.name, source=self._rows(data), columns=self._columns, schema_name=table.namespace, format=copy_format.value
            )
        )

        def stop(_connection: object) -> None:
            copying.cancel()

        connection.add_termination_listener(stop)
        try:
            await copying
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if connection.is_closed() and task is not None and not task.cancelling():
                raise TargetUnavailable(f'connection to the target was lost while copying table "{self._table}"') from None
            raise
        finally:
            connection.remove_termination_listener(stop)

    async def _rows(self, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        # On an error of the data, asyncpg asks the server to cancel the COPY, and waits for ever if the server has rejected it already.
        # So the connection is terminated, but not before asyncpg has taken the error: else it logs an exception that was never retrieved.
        try:
            async for chunk in data:
                # send a large row in pieces, because asyncpg and its transport copy each piece
                for start in range(0, len(chunk), _PIECE_BYTES):
                    yield chunk[start : start + _PIECE_BYTES]
                    # asyncpg has sent it, or has room for more
                    moved()
                del chunk
        except SubscriberError as error:
            self._failure = error
            asyncio.get_running_loop().call_soon(self._connection.terminate)
            raise

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        if self._failure is not None and isinstance(error, Exception):
            raise self._failure from None
        if isinstance(error, asyncpg.PostgresError):
            diagnostics = Diagnostics.of_asyncpg(error)
            mapped = target_error(diagnostics)
            column = copy_column(diagnostics, self._columns) or diagnostics.column
            mapped.add_note(f'while copying table "{self._table}"' + (f' column "{column}"' if column else ""))
            raise mapped from None
        if isinstance(error, Exception) and is_lost(error):
            raise TargetUnavailable(f'connection to the target was lost while copying table "{self._table}"') from error
