"""Locks between processes, by name: one writer of a subscription, one verb that changes it, one launcher.

==============  ===========================================================  ======================================================
 database        lock                                                         released
==============  ===========================================================  ======================================================
 SQLite          ``flock`` on a file in ``<database>-locks/``                 at once when the process ends
 MariaDB, MySQL  ``GET_LOCK`` of a session                                    with the session; after a kill, the server needs a moment
 others          none                                                         –
==============  ===========================================================  ======================================================

These locks show an operator early that another process is running. *Correctness does not depend on them*: a process may lose its session
without noticing, and some databases have no locks. :mod:`subscriber.sinks.sqlalchemy.session.fence` prevents writes of an earlier writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from typing import Final, Protocol

from sqlalchemy import text

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.sinks.sqlalchemy.session.database import Database
from subscriber.sinks.sqlalchemy.session.file_locks import FileLocks
from subscriber.sinks.sqlalchemy.session.session import Session
from subscriber.waits import take_lock

__all__ = ["Locks"]

_log = logging.getLogger(__name__)

_WAIT: Final = 10.0


class _Backend(Protocol):
    async def try_take(self, key: str) -> bool: ...

    async def release(self, key: str) -> None: ...

    async def held(self, key: str) -> bool: ...

    async def holder(self, key: str) -> str | None: ...

    async def end(self, number: int) -> None: ...

    async def close(self) -> None: ...


class Locks:
    """The locks that one owner takes in a target.

    Args:
        database: the target.
        session: takes the locks, on databases where locks belong to a session; None: a new session, connected by the first call.
    """

    def __init__(self, database: Database, session: Session | None = None) -> None:
        self._backend = _backend(database, session)
        self._turn = asyncio.Lock()

    @property
    def exist(self) -> bool:
        """Whether the database has locks."""
        return not isinstance(self._backend, _NoLocks)

    @property
    def number(self) -> int | None:
        """The number of the session that takes the locks; None if no session does."""
        return self._backend.session.number if isinstance(self._backend, _MysqlLocks) and self._backend.session is not None else None

    async def take(self, key: str, what: str, wait: float | None = None, *, lost: int | None = None) -> None:
        """Take a lock.

        Args:
            key: the key of the lock.
            what: names the locked object in the error: "<what> is active for PID …".
            wait: how many seconds to wait, because the session of a killed process may still exist for a while; None: ten.
            lost: the number of a session that this process has lost. A server behind a broken network may not notice that for a long time:
                if the session has the lock, it is terminated.

        Raises:
            SubscriptionInUse: another session still has the lock after that time.
            TargetUnavailable, TargetError
        """

        async def try_take() -> bool:
            async with self._turn:
                if await self._backend.try_take(key):
                    return True
                if lost is not None and await self._backend.holder(key) == str(lost):
                    await self._backend.end(lost)
                return False

        async def holder() -> str | None:
            async with self._turn:
                return await self._backend.holder(key)

        await take_lock(_log, what, try_take, holder, _WAIT if wait is None else wait)

    async def release(self, key: str) -> None:
        """Release a lock. Does nothing if this owner does not have it.

        Raises:
            TargetUnavailable: the session was lost, and the lock with it.
        """
        async with self._turn:
            await self._backend.release(key)

    async def held(self, key: str) -> bool:
        """Whether any process holds a lock, including this one. False if the database has no locks.

        Raises:
            TargetUnavailable, TargetError
        """
        async with self._turn:
            return await self._backend.held(key)

    async def close(self) -> None:
        """Release all locks. Idempotent."""
        async with self._turn:
            await self._backend.close()


def _backend(database: Database, session: Session | None) -> _Backend:
    if database.path is not None:
        return FileLocks(database.path.with_name(f"{database.path.name}-locks"))
    match database.dialect_name:
        case "mysql" | "mariadb":
            return _MysqlLocks(database, session)
        case _:
            return _NoLocks()


class _MysqlLocks:
    """Locks that belong to a session."""

    def __init__(self, database: Database, session: Session | None) -> None:
        self._database = database
        self._given = session
        self.session = session
        self._mine: set[str] = set()

    async def _scalar(self, query: str, **parameters: object) -> object:
        if self.session is None:
            self.session = await self._database.connect()
        elif not self.session.usable:
            self._mine.clear()
            if self._given is not None:
                raise TargetUnavailable("the session with the target was lost, and its locks with it", hint="the connection is retried")
            self.session = await self._database.connect()
        async with self.session.snapshot() as connection:
            return (await connection.execute(text(query), parameters)).scalar()

    async def close(self) -> None:
        session, self.session = self.session, None
        if session is None:
            return
        if session is not self._given:
            await session.close()
            return
        with contextlib.suppress(TargetUnavailable):
            for key in tuple(self._mine):
                self.session = session
                await self.release(key)
        self.session = None

    async def try_take(self, key: str) -> bool:
        # GET_LOCK succeeds again in the same session
        if key in self._mine and self.session is not None and self.session.usable:
            return True
        taken = await self._scalar("SELECT GET_LOCK(:name, 0)", name=await self._name(key)) == 1
        if taken:
            self._mine.add(key)
        return taken

    async def release(self, key: str) -> None:
        if key in self._mine:
            self._mine.discard(key)
            await self._scalar("SELECT RELEASE_LOCK(:name)", name=await self._name(key))

    async def held(self, key: str) -> bool:
        return await self.holder(key) is not None

    async def holder(self, key: str) -> str | None:
        found = await self._scalar("SELECT IS_USED_LOCK(:name)", name=await self._name(key))
        return None if found is None else str(found)

    async def end(self, number: int) -> None:
        # self.session exists: it has just tried to take the lock. The statement fails if the session to be ended has gone already
        assert self.session is not None
        with contextlib.suppress(TargetError):
            async with self.session.snapshot() as connection:
                await connection.exec_driver_sql(f"KILL {number}")

    async def _name(self, key: str) -> str:
        # names of locks are global to the server, and have at most 64 characters
        database = str(self._database.url.database)
        return f"subscriber-{hashlib.blake2b(database.encode(), digest_size=8).hexdigest()}-{key}"


class _NoLocks:
    async def try_take(self, _key: str) -> bool:
        return True

    async def release(self, _key: str) -> None:
        pass

    async def held(self, _key: str) -> bool:
        return False

    async def holder(self, _key: str) -> str | None:
        return None

    async def end(self, number: int) -> None:
        pass

    async def close(self) -> None:
        pass
