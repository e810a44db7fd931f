"""Settings of all sessions that write to the target.

They are those of PostgreSQL's apply worker: ``session_replication_role = replica``, an empty ``search_path`` (names in statements are
qualified), and formats that read texts as the publisher wrote them. Timeouts that an administrator set for interactive users are disabled,
because they must not end a replication session. Plans use an index if one fits, as PostgreSQL's apply worker does: the tables grow while
the plans stay cached.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from typing import Any, Final

import asyncpg
import psycopg

from subscriber.config import SynchronousCommit
from subscriber.errors import TargetError
from subscriber.sinks.postgres.session.errors import translated

__all__ = ["configure_asyncpg", "configure_psycopg", "durable_commit", "end_abruptly"]

_SETTINGS: Final = {
    "search_path": "",
    "datestyle": "ISO, YMD",
    "intervalstyle": "postgres",
    "extra_float_digits": "3",
    "statement_timeout": "0",
    "lock_timeout": "0",
    "transaction_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0",
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    # a policy must raise an error, and not hide rows silently
    "row_security": "off",
    "enable_seqscan": "off",
    "jit": "off",
    "xmloption": "content",
    "bytea_output": "hex",
}

# apply only the settings that this server version has
_APPLY: Final = """
SELECT pg_catalog.set_config(s.name, given.value, false)
FROM ROWS FROM (pg_catalog.unnest({names}::text[]), pg_catalog.unnest({settings}::text[])) AS given(name, value)
JOIN pg_catalog.pg_settings s ON pg_catalog.lower(s.name) = given.name
"""

_REPLICA: Final = "SET session_replication_role = replica"
_IDLE_IN_TRANSACTION: Final = "10s"
_CONNECTION_CHECK: Final = "SET client_connection_check_interval = '1s'"


def durable_commit(synchronous_commit: SynchronousCommit) -> SynchronousCommit:
    """The setting for commits that must be on disk when they return: at least ``local``."""
    return "local" if synchronous_commit == "off" else synchronous_commit


def _values(synchronous_commit: SynchronousCommit) -> tuple[list[str], list[str]]:
    settings = {**_SETTINGS, "synchronous_commit": synchronous_commit}
    return list(settings), list(settings.values())


def _no_replica(user: str) -> TargetError:
    return TargetError(
        'permission denied to set parameter "session_replication_role"',
        sqlstate="42501",
        hint="connect to the target as a superuser, or on PostgreSQL 15 or later: "
        f'GRANT SET ON PARAMETER session_replication_role TO "{user}"',
    )


async def configure_psycopg(connection: psycopg.AsyncConnection[tuple[Any, ...]], synchronous_commit: SynchronousCommit) -> None:
    """Configure a session of psycopg.

    Raises:
        TargetError: the role may not set session_replication_role.
    """
    with translated():
        await connection.execute(_APPLY.format(names="%s", settings="%s").encode(), _values(synchronous_commit))
        try:
            await connection.execute(_REPLICA)
        except psycopg.errors.InsufficientPrivilege:
            raise _no_replica(connection.info.user) from None
        if connection.info.server_version >= 140000:
            try:
                # soon ends the backend of a killed process, which releases its locks; some platforms do not support it
                await connection.execute(_CONNECTION_CHECK)
            except psycopg.errors.InvalidParameterValue:
                return


def end_abruptly(connection: psycopg.AsyncConnection[tuple[Any, ...]], abruptly: bool) -> None:
    """Set whether the end of our process, or a close, discards unsent data (SO_LINGER).

    Normally the operating system sends all written data before the end of a connection. But a backend that waits for a lock reads nothing.
    If its buffers are full, it would not notice that its client is dead, and would keep all its locks.
    """
    # without the option on a platform that does not support it
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(fileno=os.dup(connection.fileno()))) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", abruptly, 0))


async def configure_asyncpg(connection: asyncpg.Connection[asyncpg.Record], synchronous_commit: SynchronousCommit) -> None:
    """Configure a session of asyncpg.

    Raises:
        TargetError: the role may not set session_replication_role.
    """
    with translated():
        await connection.execute(_APPLY.format(names="$1", settings="$2"), *_values(synchronous_commit))
        try:
            await connection.execute(_REPLICA)
        except asyncpg.InsufficientPrivilegeError:
            raise _no_replica(await connection.fetchval("SELECT session_user::text")) from None
        if connection.get_server_version().major >= 14:
            try:
                await connection.execute(_CONNECTION_CHECK)
            except asyncpg.InvalidParameterValueError:
                return


async def release_rows_soon(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Let the server terminate the session after ten seconds idle in a transaction.

    A report, or a change by a verb, consists of several statements. If the network breaks between two of them, the server may not notice it
    for hours, and keeps the locks on the catalog's rows.
    """
    with translated():
        await connection.execute(f"SET idle_in_transaction_session_timeout = '{_IDLE_IN_TRANSACTION}'")
