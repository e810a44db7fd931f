"""Watch the sink's sessions through a separate session: see :class:`subscriber.interfaces.WatchedSink`."""

from __future__ import annotations

import asyncio
import math
from typing import Final

from subscriber.errors import TargetUnavailable
from subscriber.interfaces import TargetActivity
from subscriber.protocol.session_name import session_name
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader
from subscriber.sinks.postgres.session.target import Target
from subscriber.waits import sessions_query, wait_text, waits_query

__all__ = ["Watcher"]

_OWN_PID: Final = "SELECT pg_catalog.pg_backend_pid() AS pid"


class Watcher:
    """Reports the activity of the sink's sessions. The first call of :meth:`activity` opens its own session.

    Args:
        name: name of the subscription.
        target: the target object whose sessions apply.
        tables: the target object whose sessions copy.
    """

    def __init__(self, name: str, target: Target, tables: Target) -> None:
        self._name = name
        self._target = target
        self._tables = tables
        self._reader: CatalogReader | None = None
        self._closed = False

    async def activity(self) -> TargetActivity:
        sessions = self._target.sessions() or self._tables.sessions()
        if self._closed or not sessions:
            return TargetActivity(math.inf)
        try:
            if self._reader is None:
                like = sessions[0]
                self._reader = CatalogReader(await self._target.connect_asyncpg(like, session_name(self._name, "watch")))
            # a local reference, because close() may run during the queries
            reader = self._reader
            if (await reader.fetch(_OWN_PID))[0]["pid"] != reader.connection.get_server_pid():
                # a pooler gives PIDs of its own: nothing is known of the sessions
                return TargetActivity(0.0, 0.0)
            applying = [session.info.backend_pid for session in self._target.sessions()]
            copying = [*self._tables.reader_pids(), *(session.info.backend_pid for session in self._tables.sessions())]
            found = await reader.fetch(sessions_query([*applying, *copying]))
            waits = await reader.fetch(waits_query([*applying, *copying, *self._target.reader_pids()]))
        except TargetUnavailable:
            await self._disconnect()
            raise
        except asyncio.CancelledError:
            # it did not answer in time: the next look is through another session
            if self._reader is not None:
                self._reader.connection.terminate()
                self._reader = None
            raise
        idle, tables_idle = (
            min((row["idle"] for row in found if row["pid"] in pids), default=math.inf) for pids in (set(applying), set(copying))
        )
        return TargetActivity(idle, tables_idle, tuple(wait_text(row) for row in waits))

    async def close(self) -> None:
        """Observe nothing any more. Idempotent."""
        self._closed = True
        await self._disconnect()

    async def _disconnect(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
