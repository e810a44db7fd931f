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
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, Self

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.sinks.sqlalchemy.session.engine import BEGIN, complete_url, make_engine, sqlite_path, url_understood
from subscriber.sinks.sqlalchemy.session.session import END_SECONDS, Session, close_when_opened
from subscriber.sinks.sqlalchemy.session.settings import session_statements
from subscriber.sinks.sqlalchemy.session.statement_size import learn_limit

__all__ = ["Database"]

_log = logging.getLogger(__name__)

_CONNECT_SECONDS: Final = 30.0
_NUMBERS: Final = {
    "mysql": "SELECT connection_id()",
    "mariadb": "SELECT connection_id()",
}
"""Queries for a session's number."""


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

    Raises:
        ConfigurationError: the text is not a URL; there is no dialect for this kind of database; its driver is missing or not
            asynchronous; or it is SQLite in memory.
    """

    def __init__(self, url: str, *, create: bool = True, replicates: bool = False) -> None:
        self.url = complete_url(url)
        self._create = create
        self._replicates = replicates
        self._engine = make_engine(self.url)
        self.dialect_name = self._engine.dialect.name
        self.path = sqlite_path(self.url) if self.dialect_name == "sqlite" else None
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
            with translated(), url_understood():
                try:
                    async with asyncio.timeout(_CONNECT_SECONDS):
                        connection = await self._connected()
                except TimeoutError:
                    raise TargetUnavailable("the target does not answer", hint="check that the target runs, and host and port") from None
        except RuntimeError as error:
            # a driver that lacks a package for the server's authentication method reports that only here
            said = " ".join(str(error).split())
            raise TargetError(f"the target's driver cannot log in: {said}", hint="install the package that it names") from None
        session = Session(connection, self._turn)
        try:
            with translated():
                await connection.execution_options(**{BEGIN: None})
                for statement in session_statements(self.dialect_name, writes=self._create, replicates=self._replicates):
                    await connection.exec_driver_sql(statement)
                await learn_limit(connection)
                if (query := _NUMBERS.get(self.dialect_name)) is not None:
                    session.number = (await connection.exec_driver_sql(query)).scalar_one()
                await connection.commit()
        except BaseException as error:
            await session.close()
            if isinstance(error, asyncio.CancelledError):
                # an SQLite file is open as long as a cursor exists. The frames of the traceback refer to it for as long as the task is kept
                traceback.clear_frames(error.__traceback__)
            raise
        self._sessions = [*self.sessions(), session]
        return session

    async def _connected(self) -> AsyncConnection:
        if self.path is None:
            return await self._engine.connect()
        opening = asyncio.ensure_future(self._engine.connect())
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            # if the driver were cancelled, it would leave the file open
            close_when_opened(opening)
            raise

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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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
        async with asyncio.timeout(END_SECONDS):
            taken = await turn.acquire()
    except TimeoutError:
        _log.warning("closing a session with the target that is still in use after %.0f s", END_SECONDS)
    try:
        yield
    finally:
        if taken:
            turn.release()


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
