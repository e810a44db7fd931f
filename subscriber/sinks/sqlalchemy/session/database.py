"""A target: its URL, its engine, and the sessions with it.

Every session has its own connection, and one transaction at a time. The differences between kinds of databases are here and in
:mod:`subscriber.sinks.sqlalchemy.session.settings`:

SQLite
    A transaction that may write begins with ``BEGIN IMMEDIATE``. It takes the file's only write lock at once, so that it cannot fail later
    because another transaction has written. All writing transactions of one :class:`Database` run one after another (an ``asyncio`` lock,
    which is fair and does not poll). For those of other processes they wait (``busy_timeout``), then raise TargetUnavailable. The journal
    is a WAL with ``synchronous = FULL``: a commit that returned survives a power failure.
MariaDB and MySQL
    Isolation level READ COMMITTED: every statement sees all committed data. The locks of
    :mod:`subscriber.sinks.sqlalchemy.session.fence` need this.

*A session in an unknown state is never used again.* If a driver's call was cancelled, or raised anything but a server's report, half an
answer may be on the wire, or a COMMIT may be unfinished: the connection is cut. The next :meth:`subscriber.interfaces.Sink.open` raises the
fence and then finds out whether the COMMIT took effect.

*ROLLBACK and the close of a connection have a time limit*, because a server behind a broken network never answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, event, make_url, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SAWarning
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncTransaction, create_async_engine
from sqlalchemy.pool import NullPool

from subscriber.errors import ConfigurationError, SubscriberError, TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.catalog_tables import CatalogTables, catalog_tables
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.sinks.sqlalchemy.session.settings import connect_arguments, session_statements
from subscriber.sinks.sqlalchemy.session.statement_size import learn_limit

__all__ = ["Database", "Session"]

_log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 30.0
_END_SECONDS: Final = 5.0
"""How long to wait for a ROLLBACK, or for the close of a connection."""
_ending: Final[set[asyncio.Future[None]]] = set()
"""Tasks that close connections: the event loop itself keeps only weak references to them."""
_BEGIN: Final = "subscriber_begin"
_MYSQL_DRIVERS: Final = ("asyncmy", "aiomysql")
_PARAMETER: Final = re.compile(r"argument(?:\(s\))? '(\w+)'")
_PARAMETER_HINT: Final = "check its port, and the parameters after the question mark"
_NUMBERS: Final = {
    "mysql": "SELECT connection_id()",
    "mariadb": "SELECT connection_id()",
}
"""Queries for a session's number."""
_READ_COMMITTED: Final = frozenset({"mysql", "mariadb"})


class Session:
    """One connection to the target; one transaction at a time.

    Attributes:
        number: the server's number for this session, if the server numbers its sessions.
        busy: whether a transaction is open.
        locking_since: when it began to wait for the write lock of an SQLite file, by the event loop's clock; None: it does not wait.
    """

    def __init__(self, connection: AsyncConnection, turn: Callable[[], contextlib.AbstractAsyncContextManager[object]]) -> None:
        self._connection = connection
        self._turn = turn
        self._broken = False
        self.number: int | None = None
        self.busy = False
        self.locking_since: float | None = None

    @property
    def connection(self) -> AsyncConnection:
        """SQLAlchemy's connection, for use while a transaction is open."""
        return self._connection

    @property
    def usable(self) -> bool:
        """Whether another transaction can be begun."""
        return not self._broken

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that may write. It is committed at the end of the block, or rolled back after an error. Durable on return.

        Raises:
            TargetUnavailable: if the commit raised it, the transaction may have taken effect.
            TargetError: or another subclass; the transaction is rolled back.
        """
        async with self._turn(), self._begun("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that only reads.

        Raises:
            TargetError: or a subclass.
        """
        async with self._begun("BEGIN") as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def _begun(self, begin: str) -> AsyncIterator[AsyncConnection]:
        if self._broken:
            raise TargetUnavailable("the session with the target was lost", hint="the connection is retried")
        known, self.busy = False, True
        try:
            with translated(), self._locking():
                await self._connection.execution_options(**{_BEGIN: begin})
                transaction = await self._connection.begin()
            try:
                with translated():
                    yield self._connection
                    await transaction.commit()
                known = True
            except SubscriberError as error:
                # no ROLLBACK after a cancellation: the answer to the cancelled call may never come, and ROLLBACK would wait for it
                known = await self._rolled_back(transaction) and not isinstance(error, TargetUnavailable)
                raise
        finally:
            try:
                if not known:
                    await self._cut()
            finally:
                self.busy = False

    @contextlib.contextmanager
    def _locking(self) -> Iterator[None]:
        self.locking_since = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            self.locking_since = None

    async def ping(self, seconds: float) -> None:
        """Check that the session is alive.

        Raises:
            TargetUnavailable: it is not, or did not answer within this time. It cannot be used any more.
        """
        try:
            async with asyncio.timeout(seconds), self.snapshot() as connection:
                await connection.execute(select(1))
        except TimeoutError:
            raise TargetUnavailable(
                f"the target did not answer within {seconds:.0f} s", hint="check the network connection to the target"
            ) from None

    async def _rolled_back(self, transaction: AsyncTransaction) -> bool:
        """Roll back. False: the state of the session is unknown."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                with translated():
                    await transaction.rollback()
        except (TargetError, TimeoutError):
            return False
        return not self._connection.invalidated

    async def _cut(self) -> None:
        """Cut the connection at once, even during a call."""
        self._broken = True
        await _ended(self._connection.invalidate())

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        self._broken = True
        await _ended(self._connection.close())


async def _ended(work: Coroutine[Any, Any, None]) -> None:
    """Close a connection, and wait for a limited time. After that time, or a cancellation, the close continues in the background."""
    task = asyncio.ensure_future(work)
    _ending.add(task)
    task.add_done_callback(_has_ended)
    await asyncio.wait({task}, timeout=_END_SECONDS)


def _has_ended(task: asyncio.Future[None]) -> None:
    _ending.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        # the error does not matter: the connection is not used again
        _log.debug("a connection to the target was closed with an error: %s", type(error).__name__)


class Database:
    """One target.

    Args:
        url: a URL of SQLAlchemy, with or without an async driver.
        create: create the file of an SQLite database if it is missing, and set its journal mode; if False, connecting changes nothing.
        replicates: its sessions apply replicated changes: they do not check foreign keys, and do not fire triggers where that is possible.

    Attributes:
        url: the URL with its driver.
        dialect_name: SQLAlchemy's name of the kind of database.
        path: the SQLite file, or None.
        tables: the tables of this program's catalog in the target.

    Raises:
        ConfigurationError: the text is not a URL; there is no dialect for this kind of database; its driver is missing or not
            asynchronous; or it is SQLite in memory.
    """

    def __init__(self, url: str, *, create: bool = True, replicates: bool = False) -> None:
        self.url = _complete(url)
        self._create = create
        self._replicates = replicates
        self._engine = _engine(self.url)
        self.dialect_name = self._engine.dialect.name
        self.path = _sqlite_path(self.url) if self.dialect_name == "sqlite" else None
        self.tables: CatalogTables = catalog_tables()
        self._writer_turn = asyncio.Lock()
        self._writing_turn, self._reading_turn = asyncio.Lock(), asyncio.Lock()
        self._writing: Session | None = None
        self._reading: Session | None = None
        self._sessions: list[Session] = []

    @property
    def engine(self) -> AsyncEngine:
        """SQLAlchemy's engine."""
        return self._engine

    def _turn(self) -> contextlib.AbstractAsyncContextManager[object]:
        return self._writer_turn if self.path is not None else contextlib.nullcontext()

    async def connect(self) -> Session:
        """Open a session.

        Raises:
            ConfigurationError: the driver rejects a parameter of the URL, or its port.
            TargetUnavailable: the target cannot be reached.
            TargetError: the target rejects the login, or the file or database does not exist.
        """
        if self.path is not None:
            _prepare_file(self.path, create=self._create)
        try:
            with translated(), _url_understood():
                async with asyncio.timeout(_CONNECT_SECONDS):
                    connection = await self._engine.connect()
        except TimeoutError:
            raise TargetUnavailable("the target does not answer", hint="check that the target runs, and host and port") from None
        except RuntimeError as error:
            # a driver that lacks a package for the server's authentication method reports that only here
            said = " ".join(str(error).split())
            raise TargetError(f"the target's driver cannot log in: {said}", hint="install the package that it names") from None
        session = Session(connection, self._turn)
        try:
            with translated():
                await connection.execution_options(**{_BEGIN: None})
                for statement in session_statements(self.dialect_name, writes=self._create, replicates=self._replicates):
                    await connection.exec_driver_sql(statement)
                await learn_limit(connection)
                if (query := _NUMBERS.get(self.dialect_name)) is not None:
                    session.number = (await connection.exec_driver_sql(query)).scalar_one()
                await connection.commit()
        except BaseException:
            await session.close()
            raise
        self._sessions = [*self.sessions(), session]
        return session

    def sessions(self) -> list[Session]:
        """The sessions that can be used."""
        return [session for session in self._sessions if session.usable]

    @property
    def kept(self) -> list[Session]:
        """The sessions of :meth:`writing` and :meth:`reading`."""
        return [session for session in (self._writing, self._reading) if session is not None]

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that may write, in a session kept for this purpose. See :meth:`Session.transaction`.

        Raises:
            TargetError: or a subclass.
        """
        async with self._writing_turn:
            if self._writing is None or not self._writing.usable:
                self._writing = await self.connect()
            async with self._writing.transaction() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that only reads, in a session kept for this purpose.

        Raises:
            TargetError: or a subclass.
        """
        async with self._reading_turn:
            if self._reading is None or not self._reading.usable:
                self._reading = await self.connect()
            async with self._reading.snapshot() as connection:
                yield connection

    async def close(self) -> None:
        """Disconnect the sessions of :meth:`writing` and :meth:`reading`. Idempotent; the database can be used again.

        Wait some seconds for a session that is in use: if its connection is closed while its driver waits for an answer, the driver may
        wait for ever.
        """
        async with contextlib.AsyncExitStack() as closing:
            # each callback runs even if another one is cancelled
            closing.push_async_callback(self._engine.dispose)
            closing.push_async_callback(self._close_reading)
            closing.push_async_callback(self._close_writing)

    async def _close_writing(self) -> None:
        async with _turn_or_time(self._writing_turn):
            session, self._writing = self._writing, None
            if session is not None:
                await session.close()

    async def _close_reading(self) -> None:
        async with _turn_or_time(self._reading_turn):
            session, self._reading = self._reading, None
            if session is not None:
                await session.close()


@contextlib.asynccontextmanager
async def _turn_or_time(turn: asyncio.Lock) -> AsyncIterator[None]:
    """Take the turn. Continue without it after some seconds."""
    taken = False
    try:
        async with asyncio.timeout(_END_SECONDS):
            taken = await turn.acquire()
    except TimeoutError:
        _log.warning("closing a session with the target that is still in use after %.0f s", _END_SECONDS)
    try:
        yield
    finally:
        if taken:
            turn.release()


def _complete(text: str) -> URL:
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


def _engine(url: URL) -> AsyncEngine:
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
        _sqlite_path(url)
    try:
        with _url_understood(), warnings.catch_warnings():
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
def _url_understood() -> Iterator[None]:
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


def _sqlite_path(url: URL) -> Path:
    name = url.database
    if not name or name == ":memory:" or name.startswith("file:") or "mode" in url.query:
        raise ConfigurationError(
            "an SQLite database in memory cannot be a target: it would be lost when this program ends",
            hint="use a file: sqlite:///replica.db",
        )
    return Path(name).absolute()


def _prepare_file(path: Path, *, create: bool) -> None:
    """Ensure that the file exists. Only its owner may read a new file: the catalog may hold the publisher's password."""
    if path.exists():
        return
    if not create:
        raise TargetError(f'file "{path}" does not exist', hint="`subscriber create` or `subscriber run` creates a target")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise TargetError(
            f'the file "{path}" cannot be created: {error.strerror}', hint="check that its directory exists and is writable"
        ) from error


def _begin_sqlite(connection: Connection) -> None:
    begin = connection.get_execution_options().get(_BEGIN)
    if begin is not None:
        connection.exec_driver_sql(begin)
