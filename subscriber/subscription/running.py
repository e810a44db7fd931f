"""What the parts of one run share: how far it is, who waits for what, and whether it is to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from subscriber.abc import Retry, TableName, TableState, WorkerState
from subscriber.apply.table_state import TableStates, Watchers
from subscriber.errors import SubscriberError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.subscription.session import StreamSession
from subscriber.transaction.feedback import FlushTracker

__all__ = ["Running", "Stopped"]

T = TypeVar("T")


class Stopped(Exception):
    """The run was asked to stop."""


class Running:
    """See the module.

    Attributes:
        states: of the tables.
        tracker: of the present stream, or of the last one.
        session: the present stream; None while there is none.
        stop: set to end the run.
        prepared: whether the setup is done, so that ``states`` and ``tracker`` mean something.
        until: the LSN at which the run ends by itself.
        awaited: LSNs that somebody waits for.
        last_error: the latest.
        failed: the attempt to follow the stream that failed, until the next one makes progress.
        disabled_by: the error that ended the run because of ``disable_on_error``, or None.
        watchers: of everything here.
    """

    def __init__(self) -> None:
        self.states = TableStates()
        self.tracker = FlushTracker(INVALID_LSN)
        self.session: StreamSession | None = None
        self.stop = asyncio.Event()
        self.prepared = False
        self.until: Lsn | None = None
        self.awaited: list[Lsn] = []
        self.last_error: SubscriberError | None = None
        self.failed: Retry | None = None
        self.disabled_by: SubscriberError | None = None
        self.watchers = Watchers()
        self._caught_up: StreamSession | None = None

    def begin(self) -> None:
        """Forget the run before this one."""
        self.states = TableStates()
        self.prepared = False
        self.last_error = self.failed = self.disabled_by = None

    def end(self) -> None:
        """No run is under way."""
        self.until = None
        self.stop.clear()
        self.watchers.notify()

    def reached(self, lsn: Lsn) -> bool:
        """Whether all tables are synchronized, and all of them, as of one moment, have everything up to there durably."""
        return self.prepared and self.states.all_synchronized and self.tracker.flushed >= max(lsn, self.states.synchronized_to)

    def finished(self) -> bool:
        """Whether the run is to end."""
        return self.stop.is_set() or (self.until is not None and self.reached(self.until))

    @property
    def publisher_lsn(self) -> Lsn:
        """Where the publisher's WAL ends, as far as it is known; INVALID_LSN: not yet."""
        return max(self.tracker.received, self.session.publisher_lsn if self.session is not None else INVALID_LSN)

    @property
    def retry(self) -> Retry | None:
        """The failed attempt because of which nothing goes on but the rest of what was replicated before; None: there is none."""
        if self.failed is not None:
            return self.failed
        waiting = [self.retry_of(table) for table in self.states.unsynchronized]
        return waiting[0] if waiting and all(waiting) else None

    def end_retries(self) -> None:
        """No attempt follows in this run."""
        self.failed = None
        self.states.retries.clear()

    def retry_of(self, table: TableName) -> Retry | None:
        """The failed synchronization of a table, if the next attempt lies ahead or has just begun."""
        found = self.states.retries.get(table)
        return found if found is not None and found.waits(time.time()) else None

    @property
    def state(self) -> WorkerState:
        """What it does now. RUNNING lasts as long as the stream, however far that falls behind later."""
        session = self.session
        if self.retry is not None:
            return WorkerState.RETRYING
        if session is None:
            return WorkerState.CONNECTING
        if any(entry.state in {TableState.INIT, TableState.DATASYNC} for entry in self.states.entries().values()):
            return WorkerState.COPYING
        if self._caught_up is not session and self.reached(session.publisher_lsn):
            self._caught_up = session
        return WorkerState.RUNNING if self._caught_up is session else WorkerState.CATCHING_UP

    def is_awaited(self, lsn: Lsn) -> bool:
        """Whether somebody waits for something up to there that is not durable yet."""
        goals = [*self.awaited, *([self.until] if self.until is not None else [])]
        ahead = self.states.synchronized_to
        return any(self.tracker.flushed < max(goal, ahead) <= lsn for goal in goals)

    def durable(self, lsn: Lsn) -> None:
        """The sink reports: everything up to there is. It may have more than came of this stream, which it passes over when it comes."""
        before = self.tracker.flushed
        self.tracker.flush(min(lsn, self.tracker.received))
        if self.tracker.flushed == before:
            return
        if self.session is not None:
            self.session.receiver.report()
        self.watchers.notify()

    def wake(self) -> None:
        """Something changed: whoever waits looks again."""
        if self.session is not None:
            self.session.receiver.wake()
        self.states.changed.notify()
        self.watchers.notify()

    async def unless_stopped(self, work: Coroutine[Any, Any, T], *, grace: float = 0.0) -> T:
        """Await what may be given up at any moment.

        Args:
            work: is cancelled when the run is to stop.
            grace: seconds that it has from then on to end by itself.

        Raises:
            Stopped: it was given up, because the run is to stop.
        """
        task, stop = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
            if grace and not task.done():
                await asyncio.wait({task}, timeout=grace)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if task.cancelled() or task.exception() is not None:
                    raise Stopped
                # the cancellation came too late, or was swallowed (wait_for of Python 3.11 does): what was opened must not be lost
            return task.result()
        finally:
            task.cancel()
            stop.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)
