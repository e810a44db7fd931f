"""Settings of a new session, by kind of database. The database must not alter values, and must apply replicated changes unchanged."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["RollingBack", "connect_arguments", "session_statements", "short_waits", "usual_waits"]

_BUSY_SECONDS: Final = 10.0
_YEAR: Final = 31_536_000

_SQLITE: Final = (
    # a commit that returned is on disk; readers never wait for writers
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
)
_SQLITE_ALWAYS: Final = (
    "PRAGMA foreign_keys = OFF",
    "PRAGMA cache_size = -65536",
)
# a value that does not fit is an error, and a zero in an AUTO_INCREMENT column stays a zero
_MYSQL_MODE: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ZERO_DATE,NO_ZERO_IN_DATE,"
    "NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO'"
)
_MYSQL_WAITS: Final = ("SET SESSION innodb_lock_wait_timeout = 10", "SET SESSION lock_wait_timeout = 30")
_MYSQL: Final = (
    "SET SESSION time_zone = '+00:00'",
    *_MYSQL_WAITS,
    # a session that holds a lock may be idle for a long time
    f"SET SESSION wait_timeout = {_YEAR}",
    "SET SESSION sql_safe_updates = 0",
)
_MYSQL_REPLICATES: Final = ("SET SESSION foreign_key_checks = 0",)


class RollingBack(sqlite3.Connection):
    """A connection that rolls back before it closes.

    Otherwise a cancelled statement would keep the closed connection alive (SQLite calls it a zombie), and its write lock, until the garbage
    collector runs.
    """

    def close(self) -> None:
        # the connection may be closed already
        with contextlib.suppress(sqlite3.Error):
            self.rollback()
        super().close()


def connect_arguments(kind: str) -> Mapping[str, Any]:
    match kind:
        case "sqlite":
            # the driver itself must not begin transactions
            return {"timeout": _BUSY_SECONDS, "isolation_level": None, "factory": RollingBack}
        case "mysql" | "mariadb":
            # set the mode before SQLAlchemy reads it to choose how to quote names (ANSI_QUOTES)
            return {"connect_timeout": 10, "charset": "utf8mb4", "init_command": _MYSQL_MODE}
        case _:
            return {}


def session_statements(dialect_name: str, *, writes: bool, replicates: bool) -> Sequence[str]:
    """Return the statements to execute first in a session.

    Args:
        dialect_name: SQLAlchemy's name of the kind of database.
        writes: the session may change something.
        replicates: the session applies replicated changes.
    """
    match dialect_name:
        case "sqlite":
            return (*_SQLITE, *_SQLITE_ALWAYS) if writes else _SQLITE_ALWAYS
        case "mysql" | "mariadb":
            return (*_MYSQL, *_MYSQL_REPLICATES) if replicates else _MYSQL
        case _:
            return ()


def short_waits(dialect_name: str) -> Sequence[str]:
    """What makes a session wait for a lock only a moment. SQLite has one lock, which everybody gets after a moment."""
    match dialect_name:
        case "mysql" | "mariadb":
            return ("SET SESSION innodb_lock_wait_timeout = 1", "SET SESSION lock_wait_timeout = 1")
        case _:
            return ()


def usual_waits(dialect_name: str) -> Sequence[str]:
    """What undoes :func:`short_waits`."""
    return _MYSQL_WAITS if short_waits(dialect_name) else ()
