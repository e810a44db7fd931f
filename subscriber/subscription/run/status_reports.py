"""Reports of a run to the target, about once a second. They are what pg_stat_subscription shows.

A report has a time limit and never raises an error of the target. Each reason of a failure is logged once, and the next report has
everything again. A report never overlaps with the end of the sink's sessions, because the sink is closed only inside
:meth:`StatusReports.silence`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator
from typing import Final

from subscriber.apply.progress import CopyProgress
from subscriber.errors import SubscriberError, TargetUnavailable
from subscriber.interfaces import TableName, TableState, WorkerActivity, WorkerDetails
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.target_session import TargetSession
from subscriber.threads import to_its_end

__all__ = ["KnownProgress", "StatusReports"]

_log = logging.getLogger(__name__)

_INTERVAL: Final = 1.0
_REPORT_SECONDS: Final = 3.0
_RATE_SECONDS: Final = 5.0
_LAG_SECONDS: Final = 86_400


class KnownProgress:
    """A :class:`CopyProgress` that stores the progress and forwards it.

    Attributes:
        copying: for each table that was or is being copied: the rows read so far, and the estimated total.
        copied: the tables whose rows are all in the target.
    """

    def __init__(self, other: CopyProgress) -> None:
        self._other = other
        self.copying: dict[TableName, tuple[int, int | None]] = {}
        self.copied: set[TableName] = set()

    def started(self, table: TableName, estimated_rows: int | None) -> None:
        """A copy has started."""
        self.copying[table] = 0, estimated_rows
        self.copied.discard(table)
        self._other.started(table, estimated_rows)

    def advanced(self, table: TableName, rows: int) -> None:
        """More rows were read."""
        read, estimated = self.copying.get(table, (0, None))
        self.copying[table] = read + rows, estimated
        self._other.advanced(table, rows)

    def finished(self, table: TableName) -> None:
        """All rows are in the target."""
        self.copied.add(table)
        self._other.finished(table)


class StatusReports:
    """Reports while :meth:`run` runs.

    Args:
        target: nothing is reported while it is closed.
        state: of the run.
        progress: of the copies.
    """

    def __init__(self, target: TargetSession, state: RunState, progress: KnownProgress) -> None:
        self._target = target
        self._state = state
        self._progress = progress
        self._turn = asyncio.Lock()
        self._logged_error: SubscriberError | None = None
        self._failures: set[str] = set()
        # a lag of more seconds than this is not measured
        self._ends: deque[tuple[float, Lsn]] = deque(maxlen=_LAG_SECONDS)
        self._samples: deque[tuple[float, int, int]] = deque()

    async def run(self) -> None:
        """Report at once and then every second, until cancelled."""
        while True:
            # also while the target is closed, so that the metrics have it
            self._state.lag_seconds = self._lag()
            await self.report()
            await asyncio.sleep(_INTERVAL)

    async def report(self, seconds: float = _REPORT_SECONDS) -> bool:
        """Report now, with a time limit. False if the target did not accept the report.

        A cancellation does not cut a report in progress: the last report of the run uses the same session next, and could fail.
        """
        return await to_its_end(self._reported(seconds))

    async def _reported(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds), self._turn:
                await self._report()
        except TimeoutError:
            self._failed("time", f"no answer within {seconds:.0f} s", logging.INFO)
        except SubscriberError as error:
            # the worker says more about a lost session
            level = logging.INFO if isinstance(error, TargetUnavailable) else logging.WARNING
            self._failed(f"{type(error).__name__} {error.sqlstate}", error.one_line(), level)
        else:
            return True
        return False

    @contextlib.asynccontextmanager
    async def silence(self) -> AsyncIterator[None]:
        """Send no reports inside the block. A report in progress ends first, within its time limit."""
        async with self._turn:
            yield

    def _failed(self, kind: str, reason: str, level: int) -> None:
        if kind not in self._failures:
            self._failures.add(kind)
            _log.log(level, "could not write the status to the target; subscriber status shows an older one: %s", reason)

    async def _report(self) -> None:
        if not self._target.is_open:
            return
        error = self._state.last_error
        news = error.one_line() if error is not None and error is not self._logged_error else None
        await self._target.opened.report([self._apply(), *self._synchronizations()], news)
        self._logged_error = error

    def _apply(self) -> WorkerActivity:
        state, statistics = self._state, self._target.statistics
        receiver = state.from_publisher.receiver if state.from_publisher is not None else None
        changes = statistics.changes
        per_second = self._rates(statistics.transactions, changes)
        return WorkerActivity(
            received=state.received,
            applied=state.tracker.applied,
            flushed=state.tracker.flushed,
            sent_at=receiver.sent_at if receiver else None,
            received_at=receiver.received_at if receiver else None,
            latest_end=receiver.reported if receiver else None,
            reported_at=receiver.reported_at if receiver else None,
            transactions=statistics.transactions,
            changes=changes,
            transactions_per_second=per_second[0],
            changes_per_second=per_second[1],
            details=WorkerDetails(
                state=state.state,
                retry=state.retry,
                publisher_lsn=state.publisher_lsn,
                lag_seconds=state.lag_seconds,
                left_out=state.states.left_out,
                relay_log=state.relay.details if state.relay is not None else None,
                copies_begin=state.states.copies_begin,
                limited=state.apply_rate.holds,
            ).to_json(),
        )

    def _lag(self) -> float:
        """Seconds since the publisher's WAL ended at the target's current position."""
        now, state, ends = asyncio.get_running_loop().time(), self._state, self._ends
        ends.append((now, state.publisher_lsn))
        while ends and ends[0][1] <= state.tracker.flushed:
            ends.popleft()
        return round(now - ends[0][0], 3) if ends else 0.0

    def _rates(self, transactions: int, changes: int) -> tuple[float, float]:
        now = asyncio.get_running_loop().time()
        samples = self._samples
        samples.append((now, transactions, changes))
        while len(samples) > 1 and now - samples[1][0] >= _RATE_SECONDS:
            samples.popleft()
        since, before_transactions, before_changes = samples[0]
        if now <= since:
            return 0.0, 0.0
        return (transactions - before_transactions) / (now - since), (changes - before_changes) / (now - since)

    def _synchronizations(self) -> list[WorkerActivity]:
        entries, copying = self._state.states.entries(), self._progress.copying
        found = []
        for table in self._state.states.unsynchronized:
            # skip tables that wait for their turn: there may be thousands
            retry = self._state.retry_of(table)
            if table in copying or retry is not None or entries[table].state is not TableState.INIT:
                rows, estimated = copying.get(table, (0, None))
                details = WorkerDetails(retry=retry).to_json()
                found.append(WorkerActivity(table=table, copied_rows=rows, estimated_rows=estimated, details=details))
        return found
