"""A target: its URL, its engine, and the sessions with it.

Every session has a connection of its own, and one transaction at a time. What is special to a kind of database is here and in
:mod:`subscriber.sinks.sqlalchemy.session_settings`:

SQLite
    A transaction that may write begins with ``BEGIN IMMEDIATE``: it has the file's one write lock from its first statement on, so that
    it is never refused halfway because another one wrote meanwhile. All transactions of one :class:`Database` that write take turns
    (an ``asyncio`` lock, which is fair and does not poll); those of other processes are waited for (``busy_timeout``), then
    TargetUnavailable. The journal is a WAL with ``synchronous = FULL``: a commit that returned survives a power failure.
others
    Isolation level READ COMMITTED: every statement sees what is committed, which the locking of
    :mod:`subscriber.sinks.sqlalchemy.fencing` relies on.

*A session that failed in an unknown state is never used again.* A driver whose call was cancelled, or that raised something else than a
server's report, may have left half an answer on the wire, or a COMMIT under way: the connection is cut. Whether that COMMIT took effect
the next :meth:`subscriber.abc.Sink.open` finds out, behind the fence.

*No end waits for ever.* ROLLBACK and the close of a connection have a time limit each: a server behind a broken network answers nothing.
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
from subscriber.sinks.sqlalchemy.errors import translated
from subscriber.sinks.sqlalchemy.session_settings import connect_arguments, session_statements
from subscriber.sinks.sqlalchemy.statement_size import learn_limit
from subscriber.sinks.sqlalchemy.tables import CatalogTables, catalog_tables

__all__ = ["Database", "Session"]

_log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 30.0
_END_SECONDS: Final = 5.0
"""How long the end of a transaction or of a connection is waited for."""
_ending: Final[set[asyncio.Future[None]]] = set()
"""Connections that are being closed: the event loop keeps weak references only."""
_BEGIN: Final = "subscriber_begin"
_SCHEMES: Final = {"sqlite": "sqlite+aiosqlite", "postgres": "postgresql+asyncpg", "postgresql": "postgresql+asyncpg"}
_MYSQL_DRIVERS: Final = ("asyncmy", "aiomysql")
_PARAMETER: Final = re.compile(r"argument(?:\(s\))? '(\w+)'")
_PARAMETER_HINT: Final = "look at its port, and at the parameters behind the question mark"
_NUMBERS: Final = {
    "postgresql": "SELECT pg_catalog.pg_backend_pid()",
    "mysql": "SELECT connection_id()",
    "mariadb": "SELECT connection_id()",
}
"""What gives a session's number."""
_READ_COMMITTED: Final = frozenset({"mysql", "mariadb", "postgresql"})


class Session:
    """One connection to the target; one transaction at a time.

    Attributes:
        number: the server's of this session, if it is a server that gives numbers.
        busy: whether a transaction is under way.
        locking_since: when it began to wait for the write lock of an SQLite file, by the loop's clock; None: it does not.
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
        """SQLAlchemy's, while a transaction is open."""
        return self._connection

    @property
    def usable(self) -> bool:
        """Whether another transaction can be begun."""
        return not self._broken

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """One that may write: committed at the end, rolled back if anything is raised inside. Durable on return.

        Raises:
            TargetUnavailable: if it was raised by the commit, it is open whether that took effect.
            TargetError: or another subclass; nothing of it stays.
        """
        async with self._turn(), self._begun("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[AsyncConnection]:
        """One that only reads.

        Raises:
            TargetError: or a subclass.
        """
        async with self._begun("BEGIN") as connection:
            yield connection

    @contextlib.asynccontextmanager
    async def _begun(self, begin: str) -> AsyncIterator[AsyncConnection]:
        if self._broken:
            raise TargetUnavailable("the session with the target was lost", hint="it is opened again")
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
                # not after a cancellation: the answer to what was cancelled may never come, and ROLLBACK would wait behind it
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
        """See that the session is alive.

        Raises:
            TargetUnavailable: it is not, or did not answer within this time; then it cannot be used any more.
        """
        try:
            async with asyncio.timeout(seconds), self.snapshot() as connection:
                await connection.execute(select(1))
        except TimeoutError:
            raise TargetUnavailable(f"the target did not answer within {seconds:.0f} s", hint="look at the network to it") from None

    async def _rolled_back(self, transaction: AsyncTransaction) -> bool:
        """Roll back; False: the state of the session is not known."""
        try:
            async with asyncio.timeout(_END_SECONDS):
                with translated():
                    await transaction.rollback()
        except (TargetError, TimeoutError):
            return False
        return not self._connection.invalidated

    async def _cut(self) -> None:
        """Cut the connection, at once and whatever it is doing."""
        self._broken = True
        await _ended(self._connection.invalidate())

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        self._broken = True
        await _ended(self._connection.close())


async def _ended(work: Coroutine[Any, Any, None]) -> None:
    """Wait until a connection is closed, but not for ever: what takes longer, or is cancelled here, ends by itself."""
    task = asyncio.ensure_future(work)
    _ending.add(task)
    task.add_done_callback(_has_ended)
    await asyncio.wait({task}, timeout=_END_SECONDS)


def _has_ended(task: asyncio.Future[None]) -> None:
    _ending.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        # whatever it is, the connection is not used again
        _log.debug("a connection to the target was closed with an error: %s", type(error).__name__)


class Database:
    """One target.

    Args:
        url: SQLAlchemy's, with or without an async driver.
        application_name: what the target shows of its sessions, where it can.
        create: make the file of an SQLite database if it is missing, and set its journal; else nothing is changed by connecting.
        replicates: its sessions apply replicated changes: foreign keys, and triggers where that is possible, are switched off.

    Attributes:
        url: with its driver.
        dialect_name: SQLAlchemy's name of the kind of database.
        path: of an SQLite file, or None.
        tables: our catalog there.

    Raises:
        ConfigurationError: the text is no URL; nothing serves this kind; its driver is missing or not asynchronous; or SQLite in memory.
    """

    def __init__(self, url: str, application_name: str = "", *, create: bool = True, replicates: bool = False) -> None:
        self.url = _complete(url)
        self._create = create
        self._replicates = replicates
        self._application_name = application_name
        self._engine = _engine(self.url)
        self.dialect_name = self._engine.dialect.name
        self.path = _sqlite_path(self.url) if self.dialect_name == "sqlite" else None
        self.tables: CatalogTables = catalog_tables(self.dialect_name)
        self._writer_turn = asyncio.Lock()
        self._writing_turn, self._reading_turn = asyncio.Lock(), asyncio.Lock()
        self._writing: Session | None = None
        self._reading: Session | None = None
        self._sessions: list[Session] = []

    @property
    def engine(self) -> AsyncEngine:
        """SQLAlchemy's."""
        return self._engine

    def _turn(self) -> contextlib.AbstractAsyncContextManager[object]:
        return self._writer_turn if self.path is not None else contextlib.nullcontext()

    async def connect(self) -> Session:
        """Open a session.

        Raises:
            ConfigurationError: the driver does not take a parameter of the URL, or its port.
            TargetUnavailable: the target cannot be reached.
            TargetError: it refuses us; there is no such file or database.
        """
        if self.path is not None:
            _prepare_file(self.path, create=self._create)
        try:
            with translated(), _url_understood():
                async with asyncio.timeout(_CONNECT_SECONDS):
                    connection = await self._engine.connect()
        except TimeoutError:
            raise TargetUnavailable("the target does not answer", hint="look at its host and port, and whether it runs") from None
        except RuntimeError as error:
            # a driver that lacks a package for the server's way to log in says so only then
            said = " ".join(str(error).split())
            raise TargetError(f"the target's driver cannot log in: {said}", hint="install what it names") from None
        session = Session(connection, self._turn)
        try:
            with translated():
                await connection.execution_options(**{_BEGIN: None})
                for statement in session_statements(
                    self.dialect_name, self._application_name, writes=self._create, replicates=self._replicates
                ):
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
        """Those that can be used."""
        return [session for session in self._sessions if session.usable]

    @property
    def kept(self) -> list[Session]:
        """Those of :meth:`writing` and :meth:`reading`."""
        return [session for session in (self._writing, self._reading) if session is not None]

    @contextlib.asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """A transaction that may write, in a session that is kept for such. See :meth:`Session.transaction`.

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
        """A transaction that only reads, in a session that is kept for such.

        Raises:
            TargetError: or a subclass.
        """
        async with self._reading_turn:
            if self._reading is None or not self._reading.usable:
                self._reading = await self.connect()
            async with self._reading.snapshot() as connection:
                yield connection

    async def close(self) -> None:
        """Disconnect the sessions kept here. Idempotent; it can be used again.

        A session that is in use is waited for, for some seconds: a driver whose connection is closed while it waits for an answer may wait
        for ever.
        """
        async with contextlib.AsyncExitStack() as closing:
            # each of them also when another one's end is cancelled
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
    """Take the turn; without it after some seconds."""
    taken = False
    try:
        async with asyncio.timeout(_END_SECONDS):
            taken = await turn.acquire()
    except TimeoutError:
        _log.warning("a session with the target is closed although it is in use: it did not end within %.0f s", _END_SECONDS)
    try:
        yield
    finally:
        if taken:
            turn.release()


def _complete(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise ConfigurationError("the target is no URL", hint="as in sqlite:///replica.db or mariadb://user@host/database") from None
    if url.drivername in {"mysql", "mariadb"}:
        return url.set(drivername=f"{url.drivername}+{_mysql_driver()}")
    return url.set(drivername=_SCHEMES.get(url.drivername, url.drivername))


def _mysql_driver() -> str:
    for name in _MYSQL_DRIVERS:
        with contextlib.suppress(ModuleNotFoundError):
            __import__(name)
            return name
    return _MYSQL_DRIVERS[0]


def _engine(url: URL) -> AsyncEngine:
    kind = url.get_backend_name()
    arguments: dict[str, Any] = {"isolation_level": "READ COMMITTED"} if kind in _READ_COMMITTED else {}
    try:
        dialect = url.get_dialect()
    except NoSuchModuleError:
        raise ConfigurationError(
            f'there is no sink for targets of kind "{url.drivername}"',
            hint="postgresql://, sqlite:///, mariadb://, mysql://, or another dialect of SQLAlchemy with an async driver",
        ) from None
    if not dialect.is_async:
        raise ConfigurationError(f'the driver of "{url.drivername}" is not asynchronous', hint=f"name one that is, as in {_example(kind)}")
    if kind == "sqlite":
        _sqlite_path(url)
    try:
        with _url_understood(), warnings.catch_warnings():
            # a parameter that the driver would not get
            warnings.filterwarnings("error", "Query string argument", SAWarning)
            engine = create_async_engine(
                url,
                poolclass=NullPool,
                # a session that is given back is closed, which rolls back; of one that was lost the pool would log a traceback
                pool_reset_on_return=None,
                hide_parameters=True,
                connect_args=connect_arguments(kind, url.get_driver_name()),
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
    """Around what hands the URL to a driver: it judges parameters and port each in its own way, and some texts show them.

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
        raise ConfigurationError("a value in the target's URL is none that its driver takes", hint=_PARAMETER_HINT) from None


def _example(kind: str) -> str:
    return {"sqlite": "sqlite+aiosqlite", "mysql": "mysql+asyncmy", "mariadb": "mariadb+asyncmy"}.get(kind, f"{kind}+asyncpg") + "://"


def _sqlite_path(url: URL) -> Path:
    name = url.database
    if not name or name == ":memory:" or name.startswith("file:") or "mode" in url.query:
        raise ConfigurationError(
            "an SQLite database in memory cannot be a target: it would not survive us", hint="name a file: sqlite:///replica.db"
        )
    return Path(name).absolute()


def _prepare_file(path: Path, *, create: bool) -> None:
    """See that the file is there. A new one is for its owner alone: the catalog may hold the publisher's password."""
    if path.exists():
        return
    if not create:
        raise TargetError(f'there is no file "{path}"', hint="a target is made by create or run")
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise TargetError(
            f'the file "{path}" cannot be made: {error.strerror}', hint="look at its directory's existence and rights"
        ) from error


def _begin_sqlite(connection: Connection) -> None:
    begin = connection.get_execution_options().get(_BEGIN)
    if begin is not None:
        connection.exec_driver_sql(begin)
