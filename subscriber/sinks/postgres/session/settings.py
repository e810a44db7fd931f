"""Further settings of sessions that write to the target, after those that every session gets.

They are those of PostgreSQL's apply worker: ``session_replication_role = replica``, and plans that use an index if one fits: the tables
grow while the plans stay cached.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final

import psycopg

from subscriber.config import SynchronousCommit
from subscriber.errors import TargetError

__all__ = ["ANSWER_SECONDS", "CATALOG_SETTINGS", "CHECK_CLIENT", "apply_settings", "durable_commit", "end_abruptly", "no_replica"]

ANSWER_SECONDS: Final = 5.0
"""How long the end of a session waits for an answer of the target."""
_RELEASE_ROWS_SOON: Final = {"idle_in_transaction_session_timeout": "10s"}
"""A report, or a change by a verb, consists of several statements. If the network breaks between two of them, the server may not notice it
for hours, and would keep the locks on the catalog's rows."""
CATALOG_SETTINGS: Final = {"synchronous_commit": "local", **_RELEASE_ROWS_SOON}
"""Settings of a session that changes the catalog, and no tables."""
CHECK_CLIENT: Final = "SET client_connection_check_interval = '1s'"
"""Soon ends the backend of a killed process, which releases its locks. Since PostgreSQL 14; some platforms do not support it."""


def durable_commit(synchronous_commit: SynchronousCommit) -> SynchronousCommit:
    """The setting for commits that must be on disk when they return: at least ``local``."""
    return "local" if synchronous_commit == "off" else synchronous_commit


def apply_settings(synchronous_commit: SynchronousCommit, *, catalog: bool = False) -> Mapping[str, str]:
    """Settings of a session that changes tables.

    Args:
        synchronous_commit: of its transactions.
        catalog: it also changes the catalog.
    """
    settings = {"session_replication_role": "replica", "enable_seqscan": "off", "synchronous_commit": synchronous_commit}
    return {**settings, **_RELEASE_ROWS_SOON} if catalog else settings


def no_replica(user: str) -> TargetError:
    """The error for a role that may not have the settings of :func:`apply_settings`."""
    return TargetError(
        'permission denied to set parameter "session_replication_role"',
        sqlstate="42501",
        hint="connect to the target as a superuser, or on PostgreSQL 15 or later: "
        f'GRANT SET ON PARAMETER session_replication_role TO "{user}"',
    )


def end_abruptly(connection: psycopg.AsyncConnection[tuple[Any, ...]], abruptly: bool) -> None:
    """Set whether the end of our process, or a close, discards unsent data (SO_LINGER).

    Normally the operating system sends all written data before the end of a connection. But a backend that waits for a lock reads nothing.
    If its buffers are full, it would not notice that its client is dead, and would keep all its locks.
    """
    # without the option on a platform that does not support it
    with contextlib.suppress(OSError), contextlib.closing(socket.socket(fileno=os.dup(connection.fileno()))) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", abruptly, 0))
