"""The sessions of parallel apply: they apply streamed transactions before their end, in addition to the apply session.

They move the subscription's position, as the apply session does. But only one session can hold the writer's lock. Two other locks give
the guarantee of :mod:`subscriber.sinks.postgres.session.locks` for these sessions:

``parallel(oid)``
    Each of these sessions holds it *shared* as long as it lives. A process that opens the subscription takes it *exclusively* for a
    moment, after the writer's lock and before it reads the position. By then, every COMMIT of a dead process has ended.
``fence(number)``
    The apply session holds it, with a new number for each ``open``. The last statement before a COMMIT checks that the lock is held. So a
    session that took the first lock too late cannot commit: its process lives, but has lost the apply session and does not know it yet.

An origin can be used by one session at a time. So each session has its own, named ``subscriber_<oid>_parallel_<k>``, if the apply session
has one. Without its own origin a session is not used, because a subscriber of the target with ``origin = none`` would send its changes
back.

Sessions are used again. A session that was interrupted is terminated, so that its locks are released at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection
from itertools import count
from typing import Any, Final

from psycopg import pq

from subscriber.config import SynchronousCommit
from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.session_name import session_name
from subscriber.sinks.postgres.apply.change_sql import control
from subscriber.sinks.postgres.session.apply_session import ApplySession
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.locks import parallel_key, take
from subscriber.sinks.postgres.session.origins import Origins, parallel_origin
from subscriber.sinks.postgres.session.settings import ANSWER_SECONDS
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.session.target import Target

__all__ = ["FENCED", "ParallelSessions", "raise_fence"]

_OID: Final = 26
_IDLE: Final = 2

_FENCED: Final = (
    "SELECT 1 / pg_catalog.count(*) FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND granted AND mode = 'ExclusiveLock' "
    "AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()) "
    "AND classid = {high} AND objid = {low} AND objsubid = 1"
)
FENCED: Final[Statement] = control(_FENCED.format(high="$1", low="$2"), (_OID, _OID), reused=True)
"""Division by zero if the apply session is gone: COMMIT is already sent and must not be executed then."""

# pg_blocking_pids gives the direct blockers of one session; the blockers of these are needed too
_HOLDING_UP: Final = """
WITH RECURSIVE waited_for(pid) AS (
    SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids($1))
  UNION
    SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) FROM waited_for AS w
)
SELECT w.pid, EXISTS (
    SELECT FROM pg_catalog.pg_locks AS l
    WHERE l.pid = w.pid AND l.locktype = 'advisory' AND l.granted AND l.mode = 'ShareLock' AND l.objsubid = 1
      AND ((l.classid::int8 << 32) | l.objid::int8) = ANY ($2::int8[])
) AS of_another
FROM waited_for AS w
"""
_TERMINATE: Final = "SELECT pg_catalog.pg_terminate_backend(pid) FROM pg_catalog.unnest($1::int4[]) AS pid"
_SUBSCRIPTIONS: Final = "SELECT oid::int8 AS oid FROM subscriber.pg_subscription"


async def raise_fence(session: ApplySession, oid: int) -> tuple[int, bool]:
    """Wait for commits of an earlier process, and take the fence lock of this one. The session must hold the writer's lock.

    Returns:
        The fence's number, and whether sessions were terminated. If so, it is unknown whether a synchronous standby has their commits.

    Raises:
        SubscriptionInUse: a session of an earlier process still lives after ten seconds.
        TargetError: or a subclass.
    """
    key, fence = parallel_key(oid), secrets.randbits(63)
    ended = await take(session.fetch, key, f"parallel apply of subscription with oid {oid}", of_the_dead=True)
    await session.fetch("SELECT pg_catalog.pg_advisory_unlock(%s), pg_catalog.pg_advisory_lock(%s)", key, fence)
    return fence, ended


class ParallelSessions:
    """The parallel apply sessions of one open sink.

    Args:
        target: the target to connect to.
        reader: session that reads the locks, and terminates other sessions.
        origins: sets up the replication origins.
        oid: oid of the subscription.
        name: name of the subscription.
        synchronous_commit: as in the apply session.
        fence: number from :func:`raise_fence`.
        origin: whether the apply session has a replication origin.
        kept: maximum number of idle sessions that are kept.
    """

    def __init__(
        self,
        target: Target,
        reader: CatalogReader,
        origins: Origins,
        *,
        oid: int,
        name: str,
        synchronous_commit: SynchronousCommit,
        fence: int,
        origin: bool,
        kept: int = _IDLE,
    ) -> None:
        self._target = target
        self._reader = reader
        self._oid = oid
        self._name = name
        self._synchronous_commit = synchronous_commit
        self._fence = fence
        self._kept = kept
        self._idle: list[ApplySession] = []
        self._used: set[ApplySession] = set()
        self._origins = origins
        self._with_origin = origin
        self._numbers: dict[ApplySession, int] = {}
        self._closed = False

    @property
    def fence(self) -> list[bytes | None]:
        """The parameters of :data:`FENCED`."""
        return [b"%d" % (self._fence >> 32), b"%d" % (self._fence & 0xFFFFFFFF)]

    @property
    def fence_query(self) -> str:
        """:data:`FENCED` with its parameters."""
        return _FENCED.format(high=self._fence >> 32, low=self._fence & 0xFFFFFFFF)

    async def take(self) -> ApplySession:
        """A session without an open transaction. The caller owns it until :meth:`give_back`.

        Raises:
            TargetUnavailable, TargetError
        """
        session = await self.take_idle() or await self._connect()
        if self._closed:
            await self._close(session)
            raise TargetUnavailable("the sink was closed", hint="it is retried")
        self._used.add(session)
        return session

    async def take_idle(self) -> ApplySession | None:
        """An open session without an open transaction, if there is one."""
        while self._idle:
            session = self._idle.pop()
            if session.usable:
                self._used.add(session)
                return session
            await self._close(session)
        return None

    async def open_idle(self) -> None:
        """Open one more session.

        Raises:
            TargetUnavailable, TargetError
        """
        session = await self._connect()
        if self._closed:
            await self._close(session)
        else:
            self._idle.append(session)

    @property
    def idle(self) -> int:
        """The number of open sessions that are not used."""
        return len(self._idle)

    @property
    def count(self) -> int:
        """The number of open sessions."""
        return len(self._idle) + len(self._used)

    async def _connect(self) -> ApplySession:
        session = await ApplySession.connect(
            self._target, application_name=session_name(self._name, "parallel apply"), synchronous_commit=self._synchronous_commit
        )
        try:
            await session.fetch("SELECT pg_catalog.pg_advisory_lock_shared(%s)", parallel_key(self._oid))
            if self._with_origin:
                await self._carry_origin(session)
        except BaseException:
            await self._close(session)
            raise
        return session

    async def _carry_origin(self, session: ApplySession) -> None:
        number = next(number for number in count(1) if number not in self._numbers.values())
        self._numbers[session] = number
        await session.carry_origin(self._origins, parallel_origin(self._oid, number))
        if session.origin is None:
            raise TargetError(
                "no replication origin for a session of parallel apply", hint="increase the target's limit of replication origins"
            )

    async def _close(self, session: ApplySession) -> None:
        await session.close()
        self._numbers.pop(session, None)

    async def _close_all(self, sessions: Collection[ApplySession]) -> None:
        async with contextlib.AsyncExitStack() as closing:
            # each session is closed even if the close of another one is cancelled
            for session in sessions:
                closing.push_async_callback(self._close, session)

    async def give_back(self, session: ApplySession) -> None:
        """Return a session. An open transaction is rolled back, and its locks are released before this call returns."""
        if await self._roll_back(session) and not self._closed and len(self._idle) < self._kept:
            self._idle.append(session)
        else:
            await self._terminate({session})
        # after the await: if that is cancelled, close() still finds the session
        self._used.discard(session)

    async def _roll_back(self, session: ApplySession) -> bool:
        if session.usable:
            if session.connection.pgconn.transaction_status == pq.TransactionStatus.IDLE:
                # no open transaction: the server would log a warning for a ROLLBACK
                return True
            with contextlib.suppress(TargetError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await session.fetch("ROLLBACK")
                return True
        return False

    async def _terminate(self, sessions: Collection[ApplySession]) -> None:
        # after the end of a connection, its PID may belong to another session
        if pids := [session.pid for session in sessions if not session.connection.closed]:
            with contextlib.suppress(TargetError, TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._reader.fetch(_TERMINATE, pids)
        await self._close_all(sessions)

    async def holding_up(self, pid: int, ours: Collection[int]) -> frozenset[int]:
        """Those of our PIDs that hold a lock for which ``pid`` waits, directly or through others.

        Returns all of ours if a session of another subscription's parallel apply is among the blockers. Its commit comes after the
        current work of that subscription's apply worker. That worker may wait for one of our sessions, and neither the server nor this
        process can see that.

        Raises:
            TargetUnavailable, TargetError
        """
        oids = {row["oid"] for row in await self._reader.fetch(_SUBSCRIPTIONS)} - {self._oid}
        keys = [parallel_key(oid) for oid in oids]
        rows: list[dict[str, Any]] = await self._reader.fetch(_HOLDING_UP, pid, keys)
        if any(row["of_another"] for row in rows):
            return frozenset(ours)
        return frozenset(ours) & {row["pid"] for row in rows}

    async def close(self) -> None:
        """Disconnect. The server rolls back open transactions. Idempotent."""
        self._closed = True
        idle, self._idle = self._idle, []
        used, self._used = self._used, set()
        try:
            await self._terminate(used)
        finally:
            # also if the target does not answer
            await self._close_all((*idle, *used))
