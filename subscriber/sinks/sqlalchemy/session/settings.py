"""Settings of a new session, by kind of database. The database must not alter values, and must apply replicated changes unchanged."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["RollingBack", "connect_arguments", "session_statements", "short_waits", "usual_waits"]

_BUSY_SECONDS: Final = 10.0
_YEAR: Final = 31_536_000
_SILENCE: Final = 3_600
"""How many seconds the server waits for the rest of a message, or until the client reads."""

_SQLITE: Final = (
    # a commit that returned is on disk; readers never wait for writers
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
)
_SQLITE_ALWAYS: Final = (
    "PRAGMA foreign_keys = OFF",
    "PRAGMA cache_size = -65536",
)
# one statement, for before the first query of SQLAlchemy. A comment that begins with M! is for MariaDB alone; MariaDB ignores one for
# MySQL 5.7.8 and later
_MYSQL_FIRST: Final = (
    # a value that does not fit is an error, and a zero in an AUTO_INCREMENT column stays a zero
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,STRICT_TRANS_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ZERO_DATE,NO_ZERO_IN_DATE,"
    "NO_ENGINE_SUBSTITUTION,NO_AUTO_VALUE_ON_ZERO',"
    # COMMIT neither begins a transaction nor ends the session; queries return all rows, whatever max_join_size is. SQLAlchemy
    # reads SHOW CREATE TABLE
    " completion_type = 0, sql_select_limit = 18446744073709551615, sql_big_selects = 1, sql_safe_updates = 0, sql_auto_is_null = 0,"
    " sql_quote_show_create = 1, unique_checks = 1, default_storage_engine = InnoDB, time_zone = '+00:00', lc_time_names = en_US,"
    # a session that holds a lock may be idle for a long time
    f" net_read_timeout = {_SILENCE}, net_write_timeout = {_SILENCE}, wait_timeout = {_YEAR}"
    " /*M!100508 , max_statement_time = 0, idle_transaction_timeout = 0, idle_write_transaction_timeout = 0,"
    " idle_readonly_transaction_timeout = 0 */ /*!50708 , max_execution_time = 0 */"
)
_MYSQL_WAITS: Final = ("SET SESSION innodb_lock_wait_timeout = 10", "SET SESSION lock_wait_timeout = 30")
_MYSQL: Final = ("SET SESSION TRANSACTION READ WRITE", *_MYSQL_WAITS)
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
            # SQLAlchemy reads the mode to choose how to quote names (ANSI_QUOTES)
            return {"connect_timeout": 10, "charset": "utf8mb4", "init_command": _MYSQL_FIRST}
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
