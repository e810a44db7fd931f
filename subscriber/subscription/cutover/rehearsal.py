"""``cutover --rehearse``: everything before the fence, and how long the rest would take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from subscriber.errors import ConfigurationError
from subscriber.subscription.cutover.clients import PooledClients
from subscriber.subscription.cutover.link import Link
from subscriber.subscription.cutover.move import Place, compare_rows
from subscriber.subscription.cutover.moved_sequences import cutover_sequences
from subscriber.subscription.cutover.options import CutoverOptions
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.fences.fence import Fence
from subscriber.walreceiver.session import Session

__all__ = ["Rehearsal"]

_SESSIONS = 12
"""About how many sessions a cutover opens one after the other while writers are stopped."""
_SLOT = "subscriber_rehearsal"


class Rehearsal:
    """Measures the steps of a move. Writers go on; with a pool, its clients wait for a moment.

    Args:
        source, destination: where the writers are, and where they will be.
        link: the subscription from source to destination.
        back: whether a way back will be made.
        clients: of the pool.
        options: of the cutover.
    """

    def __init__(
        self, source: Place, destination: Place, link: Link, *, back: bool, clients: PooledClients, options: CutoverOptions
    ) -> None:
        self._source = source
        self._destination = destination
        self._link = link
        self._back = back
        self._clients = clients
        self._options = options
        self.seconds: dict[str, float] = {}

    async def run(self) -> None:
        """Fill :attr:`seconds`, by step.

        Raises:
            ConfigurationError: the clients of the pool did not pause in time, or rows differ.
            SubscriberError: one of the two databases cannot be queried.
        """
        async with self._timed("sessions"), await self._connected():
            pass
        self.seconds["sessions"] *= _SESSIONS
        if self._options.pool:
            async with self._timed("pause"):
                await self._paused()
        async with self._timed("catch_up"):
            async with await self._connected() as session:
                end = await Fence.flushed(session)
            await self._link.wait(end)
        if self._options.verify != "none":
            async with self._timed("verify"):
                await compare_rows(self._link, self._options)
        if self._back:
            async with self._timed("way_back"):
                await self._slot()
        async with self._timed("sequences"):
            source, destination, link = self._source.conninfo, self._destination.conninfo, self._link
            await cutover_sequences(source, destination, link.publications, self._options, dry_run=True, mapping=link.mapping)

    @contextlib.asynccontextmanager
    async def _timed(self, step: str) -> AsyncIterator[None]:
        began = time.monotonic()
        yield
        self.seconds[step] = time.monotonic() - began

    async def _connected(self) -> Session:
        return await Session.connect(self._source.conninfo, application_name=f"{self._link.name} cutover")

    async def _paused(self) -> None:
        await self._clients.find(self._options.max_downtime)
        try:
            async with asyncio.timeout(self._options.max_downtime):
                await self._clients.pause()
        except TimeoutError:
            raise ConfigurationError(
                f"the clients of PgBouncer did not pause within {self._options.max_downtime:g} s",
                hint="end their transactions, or allow more with --max-downtime",
            ) from None
        finally:
            await self._clients.resume_own()

    async def _slot(self) -> None:
        """Make a slot in the destination for a moment: this waits for its transactions."""
        name = f"{self._link.name} cutover"
        async with await WalReceiverConnection.connect(self._destination.conninfo, application_name=name) as session:
            await session.create_slot(_SLOT, temporary=True)
