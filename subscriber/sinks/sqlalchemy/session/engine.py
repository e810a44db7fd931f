"""The engine of a target: what its URL says, and whether a driver for it is there."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, event, make_url
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SAWarning
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from subscriber.errors import ConfigurationError
from subscriber.sinks.sqlalchemy.session.settings import connect_arguments

__all__ = ["BEGIN", "complete_url", "make_engine", "sqlite_path", "url_understood"]

BEGIN: Final = "subscriber_begin"
"""The execution option with the statement that begins a transaction of SQLite."""
_MYSQL_DRIVERS: Final = ("asyncmy", "aiomysql")
_PARAMETER: Final = re.compile(r"argument(?:\(s\))? '(\w+)'")
_PARAMETER_HINT: Final = "check its port, and the parameters after the question mark"
_READ_COMMITTED: Final = frozenset({"mysql", "mariadb"})


def complete_url(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigurationError("the target is not a URL", hint="as in sqlite:///replica.db or mariadb://user@host/database") from None
    if url.drivername in {"mysql", "mariadb"}:
        return url.set(drivername=f"{url.drivername}+{_mysql_driver()}")
    return url.set(drivername="sqlite+aiosqlite") if url.drivername == "sqlite" else url


def _mysql_driver() -> str:
    for name in _MYSQL_DRIVERS:
        with contextlib.suppress(ModuleNotFoundError):
            __import__(name)
            return name
    return _MYSQL_DRIVERS[0]


def make_engine(url: URL) -> AsyncEngine:
    kind = url.get_backend_name()
    if kind == "postgresql":
        raise ConfigurationError(f'a PostgreSQL target is postgresql://, not "{url.drivername}://"', hint="leave the driver out of the URL")
    arguments: dict[str, Any] = {"isolation_level": "READ COMMITTED"} if kind in _READ_COMMITTED else {}
    try:
        dialect = url.get_dialect()
    except NoSuchModuleError:
        raise ConfigurationError(
            f'there is no sink for targets of kind "{url.drivername}"',
            hint="use postgresql://, sqlite:///, spark:///, mariadb://, mysql://, or another dialect of SQLAlchemy with an async driver",
        ) from None
    if not dialect.is_async:
        raise ConfigurationError(
            f'the driver of "{url.drivername}" is not asynchronous', hint=f"use an asynchronous one, for example {_example(kind)}"
        )
    if kind == "sqlite":
        sqlite_path(url)
    try:
        with url_understood(), warnings.catch_warnings():
            # the warning about a parameter that would not reach the driver
            warnings.filterwarnings("error", "Query string argument", SAWarning)
            engine = create_async_engine(
                url,
                poolclass=NullPool,
                # a returned session is closed, which rolls back; the pool would log a traceback for a lost session
                pool_reset_on_return=None,
                hide_parameters=True,
                connect_args=connect_arguments(kind),
                **arguments,
            )
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f'a target of kind "{kind}" needs {error.name}, which is not installed', hint=f"pip install {error.name}"
        ) from error
    if kind == "sqlite":
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


@contextlib.contextmanager
def url_understood() -> Iterator[None]:
    """Convert errors of drivers about the URL: each driver checks parameters and port in its own way, and some messages show the values.

    Raises:
        ConfigurationError
    """
    try:
        yield
    except (ArgumentError, TypeError, SAWarning) as error:
        name = _PARAMETER.search(str(error))
        which = f'the parameter "{name[1]}"' if name else "a parameter"
        raise ConfigurationError(f"the target's driver does not know {which} of its URL", hint=_PARAMETER_HINT) from None
    except (ValueError, OverflowError):
        raise ConfigurationError("a parameter of the target's URL has a value that its driver rejects", hint=_PARAMETER_HINT) from None


def _example(kind: str) -> str:
    return {"sqlite": "sqlite+aiosqlite", "mysql": "mysql+asyncmy", "mariadb": "mariadb+asyncmy"}.get(kind, f"{kind}+asyncpg") + "://"


def sqlite_path(url: URL) -> Path:
    name = url.database
    if not name or name == ":memory:" or name.startswith("file:") or "mode" in url.query:
        raise ConfigurationError(
            "an SQLite database in memory cannot be a target: it would be lost when this program ends",
            hint="use a file: sqlite:///replica.db",
        )
    return Path(name).absolute()


def _begin_sqlite(connection: Connection) -> None:
    begin = connection.get_execution_options().get(BEGIN)
    if begin is not None:
        connection.exec_driver_sql(begin)
