"""Sessions with the target that run scripts: DDL, as pg_dump writes it, and queries on the system catalogs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final, Self

import psycopg

from subscriber.protocol.session_settings import READING
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.queries import run_query
from subscriber.sinks.postgres.session.target import Target

__all__ = ["ScriptSession"]

# as pg_dump's own script, except for client_min_messages
_SETTINGS: Final = {**READING, "check_function_bodies": "off", "client_min_messages": "error", "synchronous_commit": "on"}


class ScriptSession:
    """A session with an empty search_path. One call at a time."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], conninfo: str) -> None:
        self._connection = connection
        self.conninfo = conninfo

    @classmethod
    async def open(cls, conninfo: str, application_name: str) -> Self:
        """Connect.

        Raises:
            ConfigurationError: ``conninfo`` is neither a URL nor a conninfo.
            TargetUnavailable, TargetError: no session with the target.
        """
        return cls(await Target(conninfo).connect(application_name, _SETTINGS), conninfo)

    @property
    def version(self) -> int:
        """The server's major version."""
        return self._connection.info.server_version // 10000

    async def run(self, script: str) -> None:
        """Run statements, in one transaction.

        Raises:
            TargetUnavailable, TargetError: they were rolled back.
        """
        with translated():
            await self._connection.execute(script.encode(errors="surrogateescape"))

    async def query(self, sql: str, /, *values: str) -> Sequence[Sequence[str | None]]:
        """See :class:`subscriber.interfaces.Query`."""
        return await run_query(self._connection, sql, *values)

    async def try_copy(self, columns: int, rows: AsyncIterator[bytes]) -> None:
        """Copy rows, in the text format of COPY, into a temporary table of so many texts, and roll that back.

        Raises:
            TargetUnavailable, TargetError
        """
        names = ", ".join(f"c{number} text" for number in range(columns))
        with translated():
            async with self._connection.transaction(force_rollback=True), self._connection.cursor() as cursor:
                await cursor.execute(f"CREATE TEMPORARY TABLE subscriber_sample ({names})".encode())
                async with cursor.copy(b"COPY pg_temp.subscriber_sample FROM STDIN") as copy:
                    async for piece in rows:
                        await copy.write(piece)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()
