"""Keeps the table synchronizations going: a few at a time, each tried again by itself.

Which tables have work is read from :class:`TableStates`; a table whose attempt failed waits for its turn as ``retry.py`` says, while
others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from subscriber.abc import Retry, TableName
from subscriber.apply.retry import Backoff, Policy, disables, policy
from subscriber.apply.table_state import TableStates
from subscriber.apply.tablesync import TableSynchronization
from subscriber.config import Settings
from subscriber.errors import SubscriberError

__all__ = ["SyncLauncher"]

_log = logging.getLogger(__name__)


class SyncLauncher:
    """Runs until cancelled.

    Args:
        make: gives a table's synchronization; called once per table, the object is run again after a failure.
        patient: asked when an attempt failed, with the tables whose last attempt did: False lets an error that time alone does not mend
            end it all.
        disable_on_error: the first error that this is about ends it all.
        ended: told of the end of every attempt: with its error, or None when the table is synchronized.
    """

    def __init__(
        self,
        states: TableStates,
        settings: Settings,
        make: Callable[[TableName], TableSynchronization],
        ended: Callable[[TableName, SubscriberError | None], None],
        *,
        patient: Callable[[Collection[TableName]], bool],
        disable_on_error: bool = False,
    ) -> None:
        self._states = states
        self._settings = settings
        self._make = make
        self._tell = ended
        self._patient = patient
        self._disable_on_error = disable_on_error
        self._work: dict[TableName, TableSynchronization] = {}
        self._backoff: dict[TableName, Backoff] = {}
        self._not_before: dict[TableName, float] = {}
        self._running: dict[TableName, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve the tables.

        Raises:
            SubscriberError: an attempt failed with an error that is not to be tried again.
        """
        running = self._running
        try:
            while True:
                self._start_due(running)
                changed = asyncio.create_task(self._states.changed.wait(lambda: self._has_due(running)))
                try:
                    await asyncio.wait({*running.values(), changed}, timeout=self._pause(running), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                for table, task in list(running.items()):
                    if task.done():
                        del running[table]
                        self._ended(table, task)
        finally:
            for task in running.values():
                task.cancel()
            await asyncio.gather(*running.values(), return_exceptions=True)
            running.clear()

    async def leave(self, timeout: float) -> None:
        """Before a cancellation that is not urgent: give synchronized tables the time to drop their slots.

        A slot left behind would keep the publisher's WAL until the next start, which drops it.
        """
        unsynchronized = set(self._states.unsynchronized)
        leaving = [task for table, task in self._running.items() if table not in unsynchronized]
        if not leaving:
            return
        _, late = await asyncio.wait(leaving, timeout=timeout)
        if late:
            _log.warning("slots of %d synchronized tables were not dropped within %.0f s: the next start drops them", len(late), timeout)

    def _due(self, running: dict[TableName, asyncio.Task[None]]) -> list[TableName]:
        now = asyncio.get_running_loop().time()
        waiting = {*self._states.unsynchronized, *self._backoff}
        due = (table for table in waiting if table not in running and self._not_before.get(table, 0.0) <= now)
        # those that failed come last: they must not keep the others from their first turn
        return sorted(due, key=lambda table: (table in self._not_before, table))

    def _has_due(self, running: dict[TableName, asyncio.Task[None]]) -> bool:
        return len(running) < self._settings.max_sync_workers_per_subscription and bool(self._due(running))

    def _start_due(self, running: dict[TableName, asyncio.Task[None]]) -> None:
        for table in self._due(running):
            if len(running) >= self._settings.max_sync_workers_per_subscription:
                return
            work = self._work.get(table)
            if work is None:
                work = self._work[table] = self._make(table)
            running[table] = asyncio.create_task(work.run(), name=f"synchronization of {table}")

    def _pause(self, running: dict[TableName, asyncio.Task[None]]) -> float | None:
        if len(running) >= self._settings.max_sync_workers_per_subscription:
            return None
        now = asyncio.get_running_loop().time()
        later = [moment - now for table, moment in self._not_before.items() if table not in running and moment > now]
        return max(min(later), 0.001) if later else None

    def _ended(self, table: TableName, task: asyncio.Task[None]) -> None:
        try:
            task.result()
        except SubscriberError as error:
            self._tell(table, error)
            answer = policy(error)
            pause = self._backoff.setdefault(table, Backoff(self._settings)).pause(answer)
            if answer.policy is Policy.NEVER or (answer.policy is Policy.INTERVAL and not self._patient(self._backoff.keys())):
                raise
            if self._disable_on_error and disables(error):
                raise
            self._not_before[table] = asyncio.get_running_loop().time() + pause
            before = self._states.retries.get(table)
            self._states.retries[table] = Retry(error.one_line(), before.attempt + 1 if before else 1, time.time() + pause)
            level = logging.WARNING if answer.policy is Policy.SOON else logging.ERROR
            _log.log(level, 'synchronization of table "%s" failed, next attempt in %.1f s: %s', table, pause, error.one_line())
        else:
            for forget in (self._work, self._backoff, self._not_before, self._states.retries):
                forget.pop(table, None)
            self._tell(table, None)
