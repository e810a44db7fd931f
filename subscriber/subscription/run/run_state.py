"""State that the workers of one run share: positions, the LSNs that callers wait for, and whether the run is to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from subscriber.apply.hold import AppliedTransactions, Hold
from subscriber.apply.tables.table_state import TableStates, Watchers
from subscriber.apply.tables.table_synchronization import ReconciledRows
from subscriber.apply.tasks import unless_set
from subscriber.catalog.verifications import TableVerification
from subscriber.config.copy_window import CopyWindow
from subscriber.errors import SubscriberError
from subscriber.interfaces import Retry, TableName, TableState, WorkerState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.rate_limit import RateLimit
from subscriber.stream_session import StreamSession
from subscriber.transaction.feedback import FlushTracker

if TYPE_CHECKING:
    from subscriber.subscription.run.relay import Relay

__all__ = ["RunState"]

T = TypeVar("T")


class RunState:
    """The state that the workers of a run share, and that its caller sees. It is reset when the next run begins.

    Attributes:
        active: whether a run is in progress.
        ended: whether a run has ended, and no other one has begun.
        states: of the tables.
        tracker: of the current stream, or of the last one.
        session: the current stream, or None.
        relay: receives into the relay log, from which the stream comes; None: there is none.
        stop: set to end the run.
        prepared: whether the setup is done, so that ``states`` and ``tracker`` are valid.
        until: the LSN at which the run ends.
        patient: whether an error that the user must fix is retried.
        awaited: LSNs that callers wait for.
        last_error: the latest error of this run.
        latest_error: the latest error of any run.
        last_error_time: when it occurred, in seconds since 1970.
        lag_seconds: how long ago the publisher's WAL ended where the target is durable now; None: nothing has measured it yet.
        failed: the failed attempt to follow the stream, until the next attempt makes progress.
        disabled_by: the error that ended the run because of ``on_error = disable``, or None.
        applied: the transactions that were applied last.
        hold: where apply is to be held; None: nowhere.
        verifications: the last verification of each table, as far as this run has read it.
        reconciled: what was done to tables that were reconciled in this run.
        copy_rate: limits the copies of this subscription, also in the next run.
        apply_rate: limits the changes that are applied.
        window: the hours in which copies may begin; None: all.
        watchers: are notified of changes to everything here.
    """

    def __init__(self) -> None:
        self.active = self.ended = False
        self.states = TableStates()
        self.tracker = FlushTracker(INVALID_LSN)
        self.session: StreamSession | None = None
        self.relay: Relay | None = None
        self.stop = asyncio.Event()
        self.prepared = False
        self.until: Lsn | None = None
        self.patient = True
        self.awaited: list[Lsn] = []
        self._last_error: SubscriberError | None = None
        self.latest_error: SubscriberError | None = None
        self.last_error_time: float | None = None
        self.lag_seconds: float | None = None
        self.failed: Retry | None = None
        self.disabled_by: SubscriberError | None = None
        self.applied = AppliedTransactions()
        self.hold: Hold | None = None
        self.verifications: dict[TableName, TableVerification] = {}
        self.reconciled: dict[TableName, ReconciledRows] = {}
        self.copy_rate, self.apply_rate = RateLimit(), RateLimit()
        self.window: CopyWindow | None = None
        self.watchers = Watchers()
        self._caught_up: StreamSession | None = None

    def begin(self) -> None:
        """Reset the state of the previous run.

        Raises:
            RuntimeError: there is a run already.
        """
        if self.active:
            raise RuntimeError("the subscription is running already")
        self.active, self.ended = True, False
        self.states = TableStates()
        self.prepared = False
        self.relay = None
        self.verifications, self.reconciled = {}, {}
        # a failed attempt before the last run ended is known until the setup of this one is done
        self.last_error = self.disabled_by = None
        self.lag_seconds = None

    def end(self) -> None:
        """Mark the run as ended."""
        self.active, self.ended = False, True
        self.until = None
        # an event belongs to the event loop that has waited for it, and the next run may be in another loop
        self.stop = asyncio.Event()
        self.watchers.notify()

    def reached(self, lsn: Lsn) -> bool:
        """Whether all tables are synchronized, and everything up to this LSN is durable in all of them, as of one moment."""
        return self.prepared and self.states.all_synchronized and self.tracker.flushed >= max(lsn, self.states.synchronized_to)

    def finished(self) -> bool:
        """Whether the run is to end."""
        return self.stop.is_set() or (self.until is not None and self.reached(self.until))

    @property
    def last_error(self) -> SubscriberError | None:
        """See the class."""
        return self._last_error

    @last_error.setter
    def last_error(self, error: SubscriberError | None) -> None:
        if error is not None and error is not self._last_error:
            self.latest_error, self.last_error_time = error, time.time()
        self._last_error = error

    @property
    def publisher_lsn(self) -> Lsn:
        """The end of the publisher's WAL, as far as known. INVALID_LSN if unknown."""
        return max(self.received, self.session.publisher_lsn if self.session is not None else INVALID_LSN)

    @property
    def received(self) -> Lsn:
        """Everything up to there has arrived from the publisher."""
        return max(self.tracker.received, self.relay.received if self.relay is not None else INVALID_LSN)

    @property
    def from_publisher(self) -> StreamSession | None:
        """The stream that comes from the publisher, if there is one now."""
        return self.session if self.relay is None else self.relay.session

    @property
    def retry(self) -> Retry | None:
        """The failed attempt that holds up the run: of the stream, of receiving, or of a table if each one left fails."""
        if self.failed is not None:
            return self.failed
        if self.relay is not None and self.relay.details.retry is not None:
            return self.relay.details.retry
        waiting = [self.retry_of(table) for table in self.states.unsynchronized]
        return waiting[0] if waiting and all(waiting) else None

    @property
    def is_copying(self) -> bool:
        """Whether the run has a table to synchronize whose latest attempt did not fail."""
        return self.active and any(self.retry_of(table) is None for table in self.states.unsynchronized)

    def window_opens(self) -> float | None:
        """When copies may begin, in seconds since 1970. None: now."""
        return self.window.opens(time.time()) if self.window is not None else None

    def end_retries(self) -> None:
        """No retry follows in this run."""
        self.failed = None
        self.states.retries.clear()

    def retry_of(self, table: TableName) -> Retry | None:
        """The failed synchronization of a table, if the next attempt is still to come or has just begun."""
        found = self.states.retries.get(table)
        return found if found is not None and found.waits(time.time()) else None

    @property
    def state(self) -> WorkerState:
        """What the run does now. Once RUNNING, it stays RUNNING while the stream lasts, even if the stream falls behind."""
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
        """Whether a caller waits for something up to this LSN that is not durable yet."""
        goals = [*self.awaited, *([self.until] if self.until is not None else [])]
        ahead = self.states.synchronized_to
        return any(self.tracker.flushed < max(goal, ahead) <= lsn for goal in goals)

    def durable(self, lsn: Lsn) -> None:
        """Called by the sink: everything up to this LSN is durable. The LSN may be beyond this stream; then the sink skips what it has."""
        before = self.tracker.flushed
        self.tracker.flush(min(lsn, self.tracker.received))
        if self.tracker.flushed == before:
            return
        self.applied.times.durable(self.tracker.flushed)
        if self.session is not None:
            self.session.receiver.report()
            # the idle position may be stored now
            self.session.receiver.wake()
        self.watchers.notify()

    def wake(self) -> None:
        """Something changed: all waiting tasks check their conditions again."""
        if self.session is not None:
            self.session.receiver.wake()
        self.states.changed.notify()
        self.watchers.notify()

    async def unless_stopped(self, work: Coroutine[Any, Any, T], *, grace: float = 0.0, abort: Callable[[], None] | None = None) -> T:
        """Await work until the run is to stop. See :func:`subscriber.apply.tasks.unless_set`."""
        return await unless_set(self.stop, work, grace=grace, abort=abort)
