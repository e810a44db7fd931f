"""Snapshots of the target that several sessions share."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

import psycopg

from subscriber.interfaces import ExportSnapshot, Query
from subscriber.protocol.quoting import quote_literal
from subscriber.protocol.session_settings import READING
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.queries import run_query
from subscriber.sinks.postgres.session.target import Target

__all__ = ["exporting", "read_snapshot"]

_BEGIN: Final = "BEGIN TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"
_EXPORT: Final = "SELECT pg_catalog.pg_export_snapshot(), pg_catalog.pg_current_snapshot()::text"
# of a hung requester; the snapshot keeps VACUUM from removing rows
_IDLE: Final = "SET idle_in_transaction_session_timeout = '10min'"


@contextlib.asynccontextmanager
async def exporting(target: Target, application_name: str) -> AsyncIterator[ExportSnapshot]:
    """See :meth:`subscriber.interfaces.ExportingSink.exporting`."""
    connection = await target.connect(application_name)
    try:
        with translated():
            await connection.execute(_IDLE)

        async def export() -> tuple[str, int]:
            with translated():
                # in one roundtrip: apply is held meanwhile
                cursor = await connection.execute(f"{_BEGIN}; {_EXPORT}".encode())
                cursor.nextset()
                ((name, xids),) = await cursor.fetchall()
            return name, int(xids.partition(":")[0])

        yield export
    finally:
        await connection.close()


@contextlib.asynccontextmanager
async def read_snapshot(conninfo: str, snapshot_name: str | None, jobs: int, *, application_name: str) -> AsyncIterator[Sequence[Query]]:
    """Open sessions that share a snapshot.

    Args:
        conninfo: URL or conninfo of the target.
        snapshot_name: the exported snapshot; None: each session has one of its own.
        jobs: how many sessions.
        application_name: of each session.

    Raises:
        ConfigurationError: ``conninfo`` is neither a URL nor a conninfo.
        TargetUnavailable, TargetError: also if the snapshot does not exist any more.
    """
    target = Target(conninfo)
    async with contextlib.AsyncExitStack() as stack:
        queries: list[Query] = []
        for _ in range(jobs):
            connection = await target.connect(application_name, READING)
            stack.push_async_callback(connection.close)
            with translated():
                await connection.execute(_BEGIN)
                if snapshot_name is not None:
                    await connection.execute(f"SET TRANSACTION SNAPSHOT {quote_literal(snapshot_name)}".encode())
                await connection.execute("SAVEPOINT clean")
            queries.append(_query(connection))
        yield queries


def _query(connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> Query:
    async def run(sql: str, /, *values: str) -> Sequence[Sequence[str | None]]:
        try:
            return await run_query(connection, sql, *values)
        finally:
            # releases the locks on the tables: a TRUNCATE must not wait for the end of the verification
            if not connection.closed:
                with translated():
                    await connection.execute("ROLLBACK TO SAVEPOINT clean")

    return run
