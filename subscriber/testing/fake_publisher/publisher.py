"""The fake publisher: the server, its tables and its slots.

Everything runs in the event loop of the test. No method of the test's side blocks, and only those that wait are coroutines.
"""

from __future__ import annotations

import asyncio
import itertools
import ssl
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from subscriber.errors import ConfigurationError
from subscriber.protocol.lsn import Lsn
from subscriber.testing.fake_publisher.backend.session import Session
from subscriber.testing.fake_publisher.database import FakeDatabase
from subscriber.testing.fake_publisher.faults import Faults
from subscriber.testing.fake_publisher.replication.feedback import Feedback
from subscriber.testing.fake_publisher.replication.walsender import WalSender

__all__ = ["FakePublisher"]

_MEGABYTE: Final = 1024**2
_PATIENCE: Final = 10.0
_START: Final = Lsn(0x1500028)


class FakePublisher(FakeDatabase):
    """A publisher without a server. As an asynchronous context manager it listens, and at the end checks what subscribers have reported.

    Args:
        version: the PostgreSQL version to be, for example 17 or ``"18.4"``: 13 to 19.
        socket: ``tcp`` on 127.0.0.1, or ``unix`` in a private directory.
        database: the name of its only database.
        password: of every role, by SCRAM-SHA-256; None: everybody is trusted.
        tls: offer TLS with this context (:func:`subscriber.testing.fake_publisher.backend.certificates.server_context`).
        require_tls: refuse connections without it.
        logical_decoding_work_mem: in bytes.
        toast_threshold: a value that is longer counts as stored out of line: an UPDATE that does not set it does not send it.
        keepalive_seconds: a keepalive that asks for a reply is sent after this time without news.
        start: the LSN where the WAL begins.

    Attributes:
        feedback: what subscribers reported.
        faults: what is to go wrong.
        slots: by name. A test may delete or change them.
        system_identifier, timeline, timelines: of the cluster; a failover changes them. ``timelines`` are the ended ones.
        logical_decoding_work_mem: may be changed; new streams use it.
    """

    def __init__(
        self,
        version: int | str = 18,
        *,
        socket: str = "tcp",
        database: str = "postgres",
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        require_tls: bool = False,
        logical_decoding_work_mem: int = 64 * _MEGABYTE,
        toast_threshold: int = 2000,
        keepalive_seconds: float = 30.0,
        start: Lsn = _START,
    ) -> None:
        if socket not in {"tcp", "unix"}:
            raise ConfigurationError(f'"{socket}" is not a kind of socket', hint="choose tcp or unix")
        super().__init__(
            version, database, logical_decoding_work_mem=logical_decoding_work_mem, toast_threshold=toast_threshold, start=start
        )
        self.password = password
        self.tls = tls
        self.require_tls = require_tls
        self.keepalive_seconds = keepalive_seconds
        self.feedback = Feedback()
        self.faults = Faults(self.changed)
        self.streaming: set[WalSender] = set()
        self.stopping = False
        self._kind = socket
        self._server: asyncio.Server | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        self._pids = itertools.count(10_001)
        self._port = 0

    # --- the server

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None
        if kind is None:
            self.feedback.check()

    async def start(self) -> None:
        """Listen. After :meth:`close` or :meth:`shutdown`, listen at the same address again."""
        self.stopping = False
        if self._kind == "unix":
            self._directory = self._directory or tempfile.TemporaryDirectory(prefix="fakepub-")
            self._port = 5432
            self._server = await asyncio.start_unix_server(self._accept, Path(self._directory.name) / f".s.PGSQL.{self._port}")
        else:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]

    @property
    def listening(self) -> bool:
        """Whether clients can connect."""
        return self._server is not None

    def dsn(self, **more: str) -> str:
        """A connection string."""
        host = "127.0.0.1" if self._directory is None else self._directory.name
        params = {"host": host, "port": str(self._port), "dbname": self.database, "user": "postgres"}
        if self.password is not None:
            params["password"] = self.password
        return " ".join(f"{name}={value}" for name, value in (params | more).items())

    async def close(self) -> None:
        """End all connections at once, as an immediate shutdown does. The rows and slots stay."""
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._broken is not None:
            # a mistake of the fake publisher itself
            error, self._broken = self._broken, None
            raise error

    async def shutdown(self, timeout: float = _PATIENCE) -> None:
        """A fast shutdown: walsenders go on until their clients have confirmed everything.

        Raises:
            TimeoutError: a client has not.
        """
        if self._server is not None:
            self._server.close()
            self._server = None
        self.stopping = True
        for session in list(self.sessions.values()):
            if all(sender.session is not session for sender in self.streaming):
                session.writer.close()
        self.changed()
        try:
            await self.until(lambda: not self.streaming, timeout)
        finally:
            await self.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        session = Session(self, next(self._pids), reader, writer)
        self.sessions[session.pid] = session
        task = asyncio.create_task(session.run())
        self._tasks.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = self._broken or error

    def session_ended(self, session: Session) -> None:
        """Forget a session, its temporary slots and its snapshot."""
        self.sessions.pop(session.pid, None)
        for name, slot in list(self.slots.items()):
            if slot.temporary and slot.owner_pid == session.pid:
                del self.slots[name]
        self.changed()

    def cancel(self, pid: int, key: bytes) -> None:
        """A cancel request."""
        session = self.sessions.get(pid)
        if session is not None and session.key == key:
            session.cancelled.set()
            self.changed()

    # --- waiting

    async def until(self, condition: Callable[[], bool], timeout: float = _PATIENCE) -> None:
        """Wait until a condition of the publisher holds.

        Raises:
            TimeoutError: it does not.
        """
        async with asyncio.timeout(timeout):
            while not condition():
                await self.until_changed()

    async def until_confirmed(self, slot: str, lsn: Lsn | None = None, timeout: float = _PATIENCE) -> None:
        """Wait until a slot's client has confirmed ``lsn``, by default everything.

        Raises:
            TimeoutError: it has not.
        """
        wanted = self.wal.end if lsn is None else lsn
        await self.until(lambda: slot in self.slots and self.slots[slot].confirmed_flush_lsn >= wanted, timeout)

    async def until_active(self, slot: str, timeout: float = _PATIENCE) -> None:
        """Wait until a client streams from a slot.

        Raises:
            TimeoutError: none does.
        """
        await self.until(lambda: slot in self.slots and self.slots[slot].active_pid is not None, timeout)
