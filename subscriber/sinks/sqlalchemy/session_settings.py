"""What a session is told first, by kind of database: nothing may be bent, and replicated changes are applied as they are."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["RollingBack", "connect_arguments", "session_statements", "short_waits"]

_BUSY_SECONDS: Final = 10.0
_YEAR: Final = 31_536_000

_SQLITE: Final = (
    # a commit that returned is on disk; a reader never waits for a writer
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
)
_SQLITE_ALWAYS: Final = (
    "PRAGMA foreign_keys = OFF",
    "PRAGMA cache_size = -65536",
)
# a value that does not fit is an error, and a zero in an AUTO_INCREMENT column is a zero
_MYSQL_MODE: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ZERO_DATE,NO_ZERO_IN_DATE,"
    "NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO'"
)
_MYSQL: Final = (
    "SET SESSION time_zone = '+00:00'",
    "SET SESSION innodb_lock_wait_timeout = 10",
    "SET SESSION lock_wait_timeout = 30",
    # a lock is held by a session that may be silent for long
    f"SET SESSION wait_timeout = {_YEAR}",
    "SET SESSION sql_safe_updates = 0",
)
_MYSQL_REPLICATES: Final = ("SET SESSION foreign_key_checks = 0",)
_POSTGRESQL: Final = (
    # names in texts of types like regclass are qualified then
    "SELECT pg_catalog.set_config('search_path', '', false)",
    "SET statement_timeout = 0",
    "SET idle_in_transaction_session_timeout = 0",
    "SET lock_timeout = '10s'",
    "SET synchronous_commit = on",
    "SET client_encoding = 'UTF8'",
    "SET extra_float_digits = 3",
    "SET datestyle = 'ISO, MDY'",
    "SET intervalstyle = 'postgres'",
    "SET timezone = 'UTC'",
)
_POSTGRESQL_REPLICATES: Final = ("SET session_replication_role = 'replica'",)


class RollingBack(sqlite3.Connection):
    """Rolls back before it closes.

    A statement that was cancelled halfway keeps what SQLite calls a zombie connection alive, and the write lock with it, until the garbage
    collector comes by.
    """

    def close(self) -> None:
        """Roll back and disconnect."""
        # a closed one says so, and so be it
        with contextlib.suppress(sqlite3.Error):
            self.rollback()
        super().close()


def connect_arguments(kind: str, driver: str) -> Mapping[str, Any]:
    """Arguments of the driver's ``connect``."""
    match kind:
        case "sqlite":
            # no transactions but ours
            return {"timeout": _BUSY_SECONDS, "isolation_level": None, "factory": RollingBack}
        case "mysql" | "mariadb":
            # first of all: SQLAlchemy quotes names as the mode says that it finds (ANSI_QUOTES)
            return {"connect_timeout": 10, "charset": "utf8mb4", "init_command": _MYSQL_MODE}
        case "postgresql" if driver == "asyncpg":
            return {"timeout": 10.0}
        case _:
            return {}


def session_statements(dialect_name: str, application_name: str, *, writes: bool, replicates: bool) -> Sequence[str]:
    """What to execute first.

    Args:
        dialect_name: SQLAlchemy's.
        application_name: what the server shows of the session, if it can.
        writes: it may change something.
        replicates: it applies replicated changes.
    """
    match dialect_name:
        case "sqlite":
            return (*_SQLITE, *_SQLITE_ALWAYS) if writes else _SQLITE_ALWAYS
        case "mysql" | "mariadb":
            return (*_MYSQL, *_MYSQL_REPLICATES) if replicates else _MYSQL
        case "postgresql":
            name = application_name.encode("utf-8", "replace")[:63].decode("utf-8", "ignore").replace("'", "''").replace("\0", "")
            named = (f"SET application_name = '{name}'",)
            return (*_POSTGRESQL, *named, *_POSTGRESQL_REPLICATES) if replicates else (*_POSTGRESQL, *named)
        case _:
            return ()


def short_waits(dialect_name: str) -> Sequence[str]:
    """What makes a session wait for a lock only a moment. SQLite has one lock, which everybody gets after a moment."""
    match dialect_name:
        case "mysql" | "mariadb":
            return ("SET SESSION innodb_lock_wait_timeout = 1", "SET SESSION lock_wait_timeout = 1")
        case "postgresql":
            return ("SET lock_timeout = '1s'",)
        case _:
            return ()
