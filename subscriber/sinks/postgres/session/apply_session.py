"""The apply session: one connection through libpq that writes, and holds the writer's lock.

It can be used in two ways, but not at the same time:

- single queries of the catalog's rows (:meth:`ApplySession.fetch`). Inside :meth:`ApplySession.transaction` they are durable at its end.
- a :meth:`ApplySession.pipeline` of prepared statements with raw parameters.

If a pipeline fails, its transaction is rolled back and the session stays usable. But if the connection is lost or the caller is cancelled
inside the pipeline, the session is broken: the next call raises an error, and the session must be closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, Final

import psycopg
from psycopg import pq

from subscriber.config import SynchronousCommit
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.sinks.postgres.session.origins import Origins
from subscriber.sinks.postgres.session.pipeline import Completed, Pipeline, PreparedStatements, StatementFailed
from subscriber.sinks.postgres.session.postgres_errors import translated
from subscriber.sinks.postgres.session.settings import apply_settings, durable_commit, end_abruptly
from subscriber.sinks.postgres.session.target import Target

__all__ = ["WAL_FUNCTIONS", "ApplySession"]


WAL_FUNCTIONS: Final = "SELECT pg_catalog.pg_current_wal_insert_lsn(), pg_catalog.pg_current_wal_flush_lsn()"
_COMMIT_TIMESTAMPS = """
SELECT pg_catalog.current_setting('track_commit_timestamp')::bool AND pg_catalog.current_setting('server_version_num')::int >= 140000
"""


class ApplySession:
    """See the module's docstring. :meth:`connect` creates it.

    Attributes:
        pid: PID of the session in the target.
        origin: id of the replication origin of its changes, or None.
        commit_timestamps: whether the server knows which origin changed a row last (track_commit_timestamp, PostgreSQL 14 or later).
    """

    def __init__(self, connection: psycopg.AsyncConnection[tuple[Any, ...]], synchronous_commit: SynchronousCommit) -> None:
        self.connection = connection
        self.pid = connection.info.backend_pid
        self.origin: int | None = None
        self.commit_timestamps = False
        self._synchronous_commit = synchronous_commit
        self._prepared = PreparedStatements()
        self._broken = False

    @classmethod
    async def connect(cls, target: Target, *, application_name: str, synchronous_commit: SynchronousCommit) -> ApplySession:
        """Connect and configure the session.

        If the server refuses the functions that tell up to where WAL is written and flushed, commits wait until they are on disk, also
        with ``synchronous_commit = off``.

        Raises:
            TargetUnavailable, TargetError
        """
        connection = await target.connect(application_name, apply_settings(synchronous_commit))
        try:
            if synchronous_commit == "off" and not await _may_ask_for_wal(connection):
                synchronous_commit = durable_commit(synchronous_commit)
                with translated():
                    await connection.execute(f"SET synchronous_commit = {synchronous_commit}".encode())
            end_abruptly(connection, True)
            session = cls(connection, synchronous_commit)
            session.commit_timestamps = (await session.fetch(_COMMIT_TIMESTAMPS))[0][0]
        except BaseException:
            await connection.close()
            raise
        return session

    async def carry_origin(self, origins: Origins, name: str) -> None:
        """Mark changes with this replication origin from now on, if it can be used.

        Raises:
            SubscriptionInUse: another session uses it.
            TargetError: or a subclass.
        """
        if self.origin is None:
            self.origin = await origins.set_up(self.fetch, name)

    async def leave_origin(self) -> None:
        """Stop using the origin, so that it can be dropped.

        Raises:
            TargetError: or a subclass.
        """
        if self.origin is not None:
            await self.fetch("SELECT pg_catalog.pg_replication_origin_session_reset()")
            self.origin = None

    @property
    def usable(self) -> bool:
        """False after the connection is lost or in an unknown state."""
        return not self._broken and self.connection.pgconn.status == pq.ConnStatus.OK

    @property
    def commits_are_durable(self) -> bool:
        """Whether COMMIT waits until its record is on disk."""
        return self._synchronous_commit != "off"

    async def fetch(self, query: str, /, *parameters: object) -> list[tuple[Any, ...]]:
        """Run one query and return its rows, if any.

        Raises:
            TargetError: or a subclass.
        """
        self._require_usable()
        with translated():
            cursor = await self.connection.execute(query.encode(), parameters or None)
            return await cursor.fetchall() if cursor.description is not None else []

    async def ping(self, seconds: float) -> None:
        """Check that the session is alive.

        Raises:
            TargetUnavailable: the session is lost, or did not answer in time. It cannot be used any more.
        """
        try:
            async with asyncio.timeout(seconds):
                await self.fetch("SELECT 1")
        except TimeoutError:
            self._broken = True
            raise TargetUnavailable(
                f"the target did not answer within {seconds:.0f} s", hint="check the network connection to the target"
            ) from None

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """A transaction for calls of :meth:`fetch`. It is on disk at the end of the block, also with ``synchronous_commit = off``."""
        self._require_usable()
        with translated():
            async with self.connection.transaction():
                if not self.commits_are_durable:
                    level = durable_commit(self._synchronous_commit)
                    await self.connection.execute(f"SET LOCAL synchronous_commit = {level}".encode())
                yield

    @contextlib.asynccontextmanager
    async def pipeline(self, completed: Completed, *, stays_open: bool = False) -> AsyncIterator[Pipeline]:
        """Open a pipeline. Its statements are executed by the end of the block.

        Args:
            completed: called for each statement that succeeded.
            stays_open: keep an open transaction open at the end, unless a statement was rejected.

        Raises:
            StatementFailed: the first statement that the server rejected. Later statements were not executed. An open transaction is
                rolled back.
            TargetUnavailable: the connection was lost.
        """
        self._require_usable()
        pipeline = Pipeline(self.connection.pgconn, self._prepared, completed)
        # until the pipeline has ended without loss of the connection
        self._broken = True
        with translated():
            pipeline.enter()
        try:
            with translated():
                yield pipeline
        except (SubscriberError, StatementFailed):
            # not after a cancellation: there is no time to read the remaining answers
            await self._finish(pipeline, stays_open=stays_open)
            raise
        await self._finish(pipeline, stays_open=stays_open)

    async def _finish(self, pipeline: Pipeline, *, stays_open: bool) -> None:
        with translated():
            await pipeline.drain()
            pipeline.leave()
            self._broken = False
            open_on_purpose = stays_open and not pipeline.failed
            if self.connection.pgconn.transaction_status != pq.TransactionStatus.IDLE and not open_on_purpose:
                await self.connection.execute("ROLLBACK")
            if pipeline.failed:
                # PREPAREs after the failing statement were not executed
                await self.connection.execute("DEALLOCATE ALL")
                self._prepared.clear()
        pipeline.raise_failure()

    def _require_usable(self) -> None:
        if not self.usable:
            raise TargetUnavailable("the session with the target was interrupted", hint="the connection is retried")

    async def close(self) -> None:
        """Disconnect. The server rolls back an open transaction and releases the locks. Idempotent."""
        if self._broken:
            # psycopg's close() would wait for the pipeline
            self.connection.pgconn.finish()
        elif not self.connection.closed:
            # so that the Terminate message is still sent
            end_abruptly(self.connection, False)
        with contextlib.suppress(psycopg.Error):
            await self.connection.close()


async def _may_ask_for_wal(connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> bool:
    try:
        with translated():
            await connection.execute(WAL_FUNCTIONS)
    except TargetUnavailable:
        raise
    except TargetError:
        return False
    return True
