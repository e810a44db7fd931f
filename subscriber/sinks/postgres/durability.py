"""When commits are on disk.

With ``synchronous_commit = off`` (native's default for subscriptions) COMMIT returns before its record is flushed, and a crash of the
target's server loses the last moments. Native keeps, for each remote commit, the end of its own WAL, and acknowledges it to the
publisher once the WAL writer has flushed that far (``get_flush_position``). So does this: nothing may be acknowledged that the target
could still lose.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.reading import CatalogReader

__all__ = ["Durability"]

# half the default wal_writer_delay
_POLL: Final = 0.1


class Durability:
    """Tells ``on_durable`` of each commit once it is on disk, in order.

    Args:
        reader: asks the server how far its WAL is flushed.
    """

    def __init__(self, reader: CatalogReader, on_durable: Callable[[Lsn], None]) -> None:
        self._reader = reader
        self._on_durable = on_durable
        self._pending: deque[tuple[Lsn, Lsn]] = deque()
        self._watching: asyncio.Task[None] | None = None
        self._failure: TargetError | None = None

    @property
    def idle(self) -> bool:
        """Everything committed is on disk."""
        return not self._pending

    def require_watch(self) -> None:
        """See that commits will be reported.

        Raises:
            TargetUnavailable: the session that asks for it was lost, and only a new one can go on.
        """
        if self._failure is not None:
            raise TargetUnavailable(f"durability of commits is unknown: {self._failure}", hint="open the sink again") from self._failure

    def committed(self, lsn: Lsn, wal: Lsn | None) -> None:
        """A commit up to ``lsn`` returned. ``wal``: where the target's WAL ended then; None: it is on disk, and everything before it."""
        if wal is None:
            self._pending.clear()
            self._on_durable(lsn)
            return
        self._pending.append((lsn, wal))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(), name="subscriber durability")

    async def _watch(self) -> None:
        # what was not flushed is not acknowledged; the next call learns why (the session that applies may live on)
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
        """Stop watching."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)  # unlike suppress(), it lets a cancellation of ours through
            self._watching = None
