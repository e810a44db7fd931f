"""Find out when commits are on disk.

With ``synchronous_commit = off`` (PostgreSQL's default for subscriptions) COMMIT returns before its record is flushed. A crash of the
target's server then loses the last commits. For each remote commit, PostgreSQL's apply worker keeps the end of its own WAL, and
acknowledges the commit to the publisher when that WAL is flushed (``get_flush_position``). This module does the same, because a commit
that the target could still lose must not be acknowledged.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.session.catalog_reader import CatalogReader

__all__ = ["Durability"]

# half the default wal_writer_delay
_POLL: Final = 0.1


class Durability:
    """Calls ``on_durable`` for commits when they are on disk, in order.

    Args:
        reader: the session that asks the server up to where its WAL is flushed.
    """

    def __init__(self, reader: CatalogReader, on_durable: Callable[[Lsn], None]) -> None:
        self._reader = reader
        self._on_durable = on_durable
        self._pending: deque[tuple[Lsn, Lsn]] = deque()
        self._watching: asyncio.Task[None] | None = None
        self._failure: TargetError | None = None

    @property
    def idle(self) -> bool:
        """Whether all commits are on disk."""
        return not self._pending

    def require_watch(self) -> None:
        """Check that commits can still be reported.

        Raises:
            TargetUnavailable: the session that asks the server was lost. The sink must be opened again.
        """
        if self._failure is not None:
            raise TargetUnavailable(
                f"durability of commits is unknown: {self._failure}", hint="the connection is retried"
            ) from self._failure

    def committed(self, lsn: Lsn, wal: Lsn | None) -> None:
        """Note a commit up to ``lsn``. ``wal``: end of the target's WAL at that time; None: this and all earlier commits are on disk."""
        if wal is None:
            self._pending.clear()
            self._on_durable(lsn)
            return
        self._pending.append((lsn, wal))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="subscriber durability")

    async def _watch(self) -> None:
        # commits that are not flushed are not acknowledged; the next require_watch() raises the error (the apply session may still live)
        try:
            while self._pending:
                await asyncio.sleep(_POLL)
                rows = await self._reader.fetch("SELECT pg_catalog.pg_current_wal_flush_lsn()::text AS lsn")
                flushed = Lsn.parse(rows[0]["lsn"])
                durable: Lsn | None = None
                while self._pending and self._pending[0][1] <= flushed:
                    durable = self._pending.popleft()[0]
                if durable is not None:
                    self._on_durable(durable)
        except TargetError as error:
            self._failure = error

    async def close(self) -> None:
        """Stop asking the server."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)  # unlike suppress(), it does not hide a cancellation of the caller
            self._watching = None
