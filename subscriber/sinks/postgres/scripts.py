"""Sessions with the target that run scripts: DDL, as pg_dump writes it, and queries on the system catalogs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Self

import psycopg

from subscriber.sinks.postgres.session.errors import translated
from subscriber.sinks.postgres.session.target import Target

__all__ = ["ScriptSession"]

# as pg_dump's own script, except for client_min_messages
_SETUP: Final = """
SELECT pg_catalog.set_config('search_path', '', false);
SELECT pg_catalog.set_config(s.name, v.setting, false)
  FROM (VALUES ('statement_timeout', '0'), ('lock_timeout', '0'), ('idle_in_transaction_session_timeout', '0'),
               ('transaction_timeout', '0'), ('standard_conforming_strings', 'on'), ('check_function_bodies', 'off'),
               ('xmloption', 'content'), ('row_security', 'off'), ('client_min_messages', 'error'), ('synchronous_commit', 'on'),
               ('jit', 'off')) AS v (name, setting)
  JOIN pg_catalog.pg_settings AS s ON s.name = v.name
"""


class ScriptSession:
    """A session with an empty search_path. One call at a time."""

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> None:
        self._connection = connection

    @classmethod
    async def open(cls, conninfo: str, application_name: str) -> Self:
        """Connect.

        Raises:
            ConfigurationError: ``conninfo`` is neither a URL nor a conninfo.
            TargetUnavailable, TargetError: no session with the target.
        """
        connection = await Target(conninfo).connect(application_name)
        try:
            with translated():
                await connection.execute(_SETUP)
        except BaseException:
            await connection.close()
            raise
        return cls(connection)

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

    async def query(self, sql: str) -> Sequence[Sequence[str | None]]:
        """Return the rows of a query, whose columns are text.

        Raises:
            TargetUnavailable, TargetError
        """
        with translated():
            return await (await self._connection.execute(sql.encode())).fetchall()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._connection.close()
