"""One session with a target.

*A session in an unknown state is never used again.* If a driver's call was cancelled, or raised anything but a server's report, half an
answer may be on the wire, or a COMMIT may be unfinished: the connection is cut. The next :meth:`subscriber.interfaces.Sink.open` raises the
fence and then finds out whether the COMMIT took effect.

*ROLLBACK and the close of a connection have a time limit*, because a server behind a broken network never answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncTransaction

from subscriber.batch_times import committing
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.session.database_errors import translated
from subscriber.sinks.sqlalchemy.session.engine import BEGIN

__all__ = ["END_SECONDS", "Session", "close_when_opened"]

_log = logging.getLogger(__name__)

END_SECONDS: Final = 5.0
"""How long to wait for a ROLLBACK, or for the close of a connection."""
_ending: Final[set[asyncio.Future[None]]] = set()
"""Tasks that close connections: the event loop itself keeps only weak references to them."""


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
                await self._connection.execution_options(**{BEGIN: begin})
                transaction = await self._connection.begin()
            try:
                with translated():
                    yield self._connection
                    committing()
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
            async with asyncio.timeout(END_SECONDS):
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


def close_when_opened(opening: asyncio.Future[AsyncConnection]) -> None:
    """Close a connection in the background, when it has been opened."""

    async def work() -> None:
        await (await opening).close()

    _begun(work())


async def _ended(work: Coroutine[Any, Any, None]) -> None:
    """Close a connection, and wait for a limited time. After that time, or a cancellation, the close continues in the background."""
    await asyncio.wait({_begun(work)}, timeout=END_SECONDS)


def _begun(work: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
    task = asyncio.ensure_future(work)
    _ending.add(task)
    task.add_done_callback(_has_ended)
    return task


def _has_ended(task: asyncio.Future[None]) -> None:
    _ending.discard(task)
    if not task.cancelled() and (error := task.exception()) is not None:
        # the error does not matter: the connection is not used again
        _log.debug("a connection to the target was closed with an error: %s", type(error).__name__)
