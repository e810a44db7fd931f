"""The watchdog: no run waits silently, and no attempt stands still for ever.

While something may be waiting (the setup, a table's synchronization, a step of the apply worker that lasts), the target is asked every few
seconds what it does for the sink's sessions. Locks that they wait for are logged, with who holds them.

An attempt to follow the slot is given up, and made again, if all of this is so:

* for ``watchdog_timeout`` the worker has not ended a step, and has read nothing of a spilled transaction: one whose rows are not for the
  target, or are passed over, takes time without it. With nothing to apply it ends one each second; a pause between attempts is no
  part of an attempt. Before there is a stream it has ten minutes: to connect to a host that does not answer takes more than two, and then
  comes the next host of the connection string.
* no table is being handed over to the worker.
* the target shows no session that waits for a lock.
* the target has done nothing for the sessions that apply for half of that time, or has no such session. So a large transaction, which is a
  single step, may take as long as it needs. A target that does not answer the question at all, twice, counts as one that does nothing.

This should never be needed: it is there for unknown faults, ours or a driver's. A false alarm does no harm: the attempt is cancelled, as
for a stop; the sink is closed and opened again; what was not acknowledged comes again, and what is in the target is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

from subscriber.abc import Sink, TargetActivity, WatchedSink
from subscriber.errors import SubscriberError, TargetUnavailable
from subscriber.subscription.running import Running
from subscriber.waits import FIRST_SECONDS, WaitLog

__all__ = ["Watchdog"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
_CONNECT_SECONDS: Final = 600.0
_UNANSWERED: Final = 2


class Watchdog:
    """Watches one run.

    Args:
        name: of the subscription.
        running: the run.
        sink: its target; one that cannot be watched is not.
        timeout: ``watchdog_timeout``.
    """

    def __init__(self, name: str, running: Running, sink: Sink, timeout: float) -> None:
        self._running = running
        self._sink = sink if isinstance(sink, WatchedSink) else None
        self._timeout = timeout
        self._waits = WaitLog(_log, f'subscription "{name}"')
        self._attempt: asyncio.Timeout | None = None
        self._moved_at = 0.0
        self._unanswered = 0
        self._pieces = 0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch while the block lasts."""
        task = asyncio.create_task(self._watch(self._sink), name="watchdog") if self._sink is not None else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _watch(self, sink: WatchedSink) -> None:
        while True:
            await asyncio.sleep(FIRST_SECONDS)
            if not self._may_wait():
                self._waits.note((), asyncio.get_running_loop().time())
                continue
            found = await self._look(sink)
            self._waits.note(found.waits if found is not None else (), asyncio.get_running_loop().time())
            # one that is being cancelled may take its time
            if self._attempt is not None and not self._attempt.expired() and self._stands_still(found):
                self._attempt.reschedule(asyncio.get_running_loop().time())

    @contextlib.asynccontextmanager
    async def attempt(self) -> AsyncIterator[None]:
        """Around one attempt to follow the slot, the opening of the sink included.

        Raises:
            TargetUnavailable: it stood still.
        """
        self.moved()
        try:
            async with asyncio.timeout(None) as self._attempt:
                yield
        except TimeoutError:
            if self._attempt is None or not self._attempt.expired():
                raise
            raise TargetUnavailable(
                f"no progress for {self._still():.0f} s, although the target does nothing for this subscription",
                hint="the attempt is made again; if this comes often, report it",
            ) from None
        finally:
            self._attempt = None

    def moved(self) -> None:
        """The worker has ended a step."""
        self._moved_at = asyncio.get_running_loop().time()
        self._unanswered = 0

    def _still(self) -> float:
        return asyncio.get_running_loop().time() - self._moved_at

    def _may_wait(self) -> bool:
        running = self._running
        if not running.prepared or running.states.unsynchronized:
            return True
        return self._attempt is not None and self._still() >= FIRST_SECONDS

    async def _look(self, sink: WatchedSink) -> TargetActivity | None:
        """None: it cannot be found out."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                found = await sink.activity()
        except TimeoutError:
            self._unanswered += 1
            return None
        except SubscriberError as error:
            _log.debug("the target's sessions cannot be looked at: %s", error)
            return None
        self._unanswered = 0
        return found

    def _stands_still(self, found: TargetActivity | None) -> bool:
        patience = self._timeout if self._running.session is not None else max(self._timeout, _CONNECT_SECONDS)
        pieces = self._running.session.receiver.pieces if self._running.session is not None else 0
        if pieces != self._pieces:
            self._pieces = pieces
            self.moved()
        if not self._timeout or self._still() < patience or self._running.states.handing_over:
            return False
        if found is None:
            return self._unanswered >= _UNANSWERED
        return not found.waits and found.idle >= self._timeout / 2
