"""Launch table synchronizations, a few at a time, and retry each one.

:class:`TableStates` says which tables have work. A table whose attempt failed waits as ``retry.py`` says, while others continue. If
more tables wait for their first copy than there are workers, a worker takes many at once as a group, provided that the target can do that
(``table_groups.py``). A table that left a group is synchronized alone from then on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from itertools import takewhile
from types import MappingProxyType
from typing import Final, Protocol

from subscriber.apply.retry import Backoff, Policy, disables, policy
from subscriber.apply.tables.parking import Parking
from subscriber.apply.tables.table_groups import GROUP_TABLES, TABLE_BYTES, GroupSynchronization, most_bytes
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.tables.table_synchronization import TableSynchronization
from subscriber.config import Settings
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces import Retry, TableName
from subscriber.log_fields import error_fields
from subscriber.repeated_errors import RepeatedErrors

__all__ = ["SyncLauncher", "SyncOwner"]

_log = logging.getLogger(__name__)

_FEW: Final = 4
"""Up to this number, tables are synchronized one by one."""
_NO_SIZES: Final[Mapping[TableName, int]] = MappingProxyType({})
_WINDOW_SECONDS: Final = 1.0
"""How often it is looked whether copies may begin, or whether the user has changed that."""
_FAILED_GROUPS: Final = 3
_ALONE_SECONDS: Final = 10.0
"""How long tables are synchronized one by one after several consecutive groups failed.

A failing apply worker closes the sink each time. Groups need an open sink; single tables do not.
"""


class SyncOwner(Protocol):
    """The run that the synchronizations belong to."""

    def make(self, table: TableName) -> TableSynchronization:
        """Make a table's synchronization. Called once per table; the object is run again after a failure."""
        ...

    def watched(self) -> AbstractAsyncContextManager[None]:
        """Wraps each synchronization."""
        ...

    def ended(self, table: TableName, error: SubscriberError | None) -> None:
        """Called after every attempt with its error, or None when the table is synchronized; for a group, with one of its tables."""
        ...

    def is_patient(self, failed: Collection[TableName]) -> bool:
        """Whether to retry after an error that waiting cannot fix. ``failed``: the tables whose last attempt failed."""
        ...


class SyncLauncher:
    """Runs until cancelled.

    Args:
        states: of the subscription's tables.
        settings: of the process.
        owner: the run.
        disable_on_error: end at the first error to which this option applies.
        parking: parks tables that cannot be synchronized.
        groups: synchronizes many tables at once; None: the target cannot.
        sizes: bytes of tables, as far as known. The largest are copied first, so that no single one is left at the end.
        opens: returns when copies may begin, in seconds since 1970; None: now. A copy that has begun is not paused: it would keep its
            snapshot, and with it all dead rows on the publisher.
    """

    def __init__(
        self,
        states: TableStates,
        settings: Settings,
        owner: SyncOwner,
        *,
        disable_on_error: bool = False,
        parking: Parking | None = None,
        groups: GroupSynchronization | None = None,
        sizes: Mapping[TableName, int] = _NO_SIZES,
        opens: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._states = states
        self._settings = settings
        self._owner = owner
        self._disable_on_error = disable_on_error
        self._parking = parking or Parking(states)
        self._groups = groups
        self._sizes = sizes
        self._opens = opens
        self._is_closed = False
        self._work: dict[TableName, TableSynchronization] = {}
        self._backoff: dict[TableName, Backoff] = {}
        self._not_before: dict[TableName, float] = {}
        self._running: dict[asyncio.Task[None], tuple[TableName, ...]] = {}
        self._busy: set[TableName] = set()
        self._alone: set[TableName] = set()
        self._group_backoff = Backoff(settings)
        self._no_group_before = 0.0
        self._failed_groups = 0
        self._alone_until = 0.0
        self._turns = deque[TableName]()
        self._errors = RepeatedErrors(_log)

    async def run(self) -> None:
        """Run synchronizations.

        Raises:
            SubscriberError: an attempt failed with an error that is not retried.
        """
        running = self._running
        try:
            while True:
                self._look_at_window()
                self._start_due()
                changed = asyncio.create_task(self._states.changed.wait(self._has_due))
                try:
                    await asyncio.wait({*running, changed}, timeout=self._pause(), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                for task in [task for task in running if task.done()]:
                    tables = running.pop(task)
                    self._busy.difference_update(tables)
                    self._ended(tables, task)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            running.clear()
            self._busy.clear()

    async def leave(self, timeout: float) -> None:
        """Give synchronized tables time to drop their slots. Call it before a cancellation that is not urgent.

        This includes tables whose last attempt failed: their retry does not wait. A slot left behind would retain the publisher's WAL until
        the next start, which drops it.
        """
        unsynchronized = set(self._states.unsynchronized)
        leaving = {task for task, tables in self._running.items() if unsynchronized.isdisjoint(tables)}
        failed = self._backoff.keys() - unsynchronized - self._busy
        self._busy.update(failed)
        retries = asyncio.create_task(self._retry(failed))
        try:
            ended, late = await asyncio.wait({retries, *leaving}, timeout=timeout)
        finally:
            retries.cancel()
            await asyncio.gather(retries, return_exceptions=True)
        errors = [error for task in ended & leaving if not task.cancelled() and isinstance(error := task.exception(), SubscriberError)]
        errors += retries.result() if retries in ended else []
        if late or errors:
            reason = errors[0].one_line() if errors else f"they were not dropped within {timeout:.0f} s"
            _log.warning("slots of synchronized tables are left on the publisher; the next start drops them: %s", reason)

    async def _retry(self, tables: Collection[TableName]) -> list[SubscriberError]:
        errors = []
        for table in tables:
            try:
                await self._run_watched(self._synchronization(table).run())
            except SubscriberError as error:
                errors.append(error)
        return errors

    def _look_at_window(self) -> None:
        opens, states = self._opens(), self._states
        self._is_closed = opens is not None
        waits = self._is_closed and states.any_unsynchronized(lambda table: table not in self._busy and states.needs_copy(table))
        states.copies_begin = opens if waits else None

    def _is_due(self, table: TableName) -> bool:
        if self._is_closed and self._states.needs_copy(table):
            return False
        if table in self._busy or table in self._states.parking or not (self._states.is_unsynchronized(table) or table in self._backoff):
            return False
        return self._begins(table) <= asyncio.get_running_loop().time()

    def _begins(self, table: TableName) -> float:
        """The time before which the table must not be tried."""
        return self._not_before.get(table, self._no_group_before if self._is_fresh(table) else 0.0)

    @property
    def _is_full(self) -> bool:
        return len(self._running) >= self._settings.max_sync_workers_per_subscription

    def _has_due(self) -> bool:
        return not self._is_full and (any(map(self._is_due, self._backoff)) or self._states.any_unsynchronized(self._is_due))

    def _due(self) -> deque[TableName]:
        """The tables that are due, in the order of their turns: the next one is first, others may have been started since.

        They are sorted again when all of them had their turn: with thousands of tables, each start would take longer than a copy.
        """
        # the apply worker waits for these
        if urgent := [table for table in self._states.storing_tables if self._is_due(table)]:
            return deque(urgent)
        while self._turns and not self._is_due(self._turns[0]):
            self._turns.popleft()
        if not self._turns:
            # failed ones come last, so that all others get their first turn
            found = filter(self._is_due, {*self._states.unsynchronized, *self._backoff})
            self._turns.extend(sorted(found, key=self._turn))
        return self._turns

    def _turn(self, table: TableName) -> tuple[bool, int, bool, TableName]:
        size = self._sizes.get(table, 0)
        return table in self._not_before, -size if size > TABLE_BYTES else 0, not self._is_fresh(table), table

    def _start_due(self) -> None:
        while not self._is_full:
            due = self._due()
            if not due:
                return
            tables = () if self._states.is_storing(due[0]) else self._next_group(due)
            if self._groups is not None and tables:
                work, name = self._groups.run(tables, self._alone.add), f"synchronization of {len(tables)} tables"
            else:
                tables = (due[0],)
                work, name = self._synchronization(due[0]).run(), f"synchronization of {due[0]}"
            self._running[asyncio.create_task(self._run_watched(work), name=name)] = tables
            self._busy.update(tables)

    async def _run_watched(self, work: Coroutine[None, None, None]) -> None:
        async with self._owner.watched():
            await work

    def _next_group(self, due: Iterable[TableName]) -> tuple[TableName, ...]:
        """The tables for a worker's group: its share of those that wait for their first copy. Empty: take a single table."""
        workers = self._settings.max_sync_workers_per_subscription
        fresh = [table for table in takewhile(self._is_fresh, due) if self._is_due(table)]
        if len(fresh) <= max(workers, _FEW):
            return ()
        share = -(-len(fresh) // (workers - len(self._running)))
        return tuple(fresh[: min(share, GROUP_TABLES)])

    def _is_fresh(self, table: TableName) -> bool:
        """Whether a group may take it, because its synchronization has not begun."""
        if (
            self._groups is None
            or table in self._alone
            or table in self._work
            or self._sizes.get(table, 0) > most_bytes(self._states.mode(table))
        ):
            return False
        if asyncio.get_running_loop().time() < self._alone_until:
            return False
        return self._states.may_join_group(table)

    def _synchronization(self, table: TableName) -> TableSynchronization:
        work = self._work.get(table)
        if work is None:
            work = self._work[table] = self._owner.make(table)
        return work

    def _pause(self) -> float | None:
        if self._is_closed:
            return _WINDOW_SECONDS
        if self._is_full:
            return None
        now = asyncio.get_running_loop().time()
        moments = [moment for table, moment in self._not_before.items() if table not in self._busy]
        later = [moment - now for moment in (*moments, self._no_group_before) if moment > now]
        return max(min(later), 0.001) if later else None

    def _ended(self, tables: tuple[TableName, ...], task: asyncio.Task[None]) -> None:
        try:
            task.result()
        except SubscriberError as error:
            self._failed(tables, error)
        else:
            for table in tables:
                self._states.retries.pop(table, None)
                self._parking.copied(table)
            for table in tables if len(tables) == 1 else ():
                for forget in (self._work, self._backoff, self._not_before):
                    forget.pop(table, None)
            self._group_backoff.reset()
            if len(tables) > 1:
                self._failed_groups = 0
            self._owner.ended(tables[0], None)

    def _failed(self, tables: tuple[TableName, ...], error: SubscriberError) -> None:
        self._owner.ended(tables[0], error)
        reaction = policy(error)
        grouped = len(tables) > 1
        backoff = self._group_backoff if grouped else self._backoff.setdefault(tables[0], Backoff(self._settings))
        failed = {*self._states.retries, *tables}
        pause = backoff.pause(reaction)
        parks = not grouped and self._parking.takes(error, copying=tables[0])
        if reaction is Policy.NEVER or (reaction is Policy.INTERVAL and not parks and not self._owner.is_patient(failed)):
            raise error
        if self._disable_on_error and disables(error):
            raise error
        moment = asyncio.get_running_loop().time() + pause
        if grouped:
            self._no_group_before = moment
            self._failed_groups += 1
            if self._failed_groups >= _FAILED_GROUPS and isinstance(error, TargetError):
                self._failed_groups, self._alone_until = 0, moment + _ALONE_SECONDS
            what = f"{len(tables)} tables"
        else:
            self._not_before[tables[0]] = moment
            if isinstance(error, TargetUnavailable):
                # an error of the target, which the other tables would get too
                self._alone_until = 0.0
            what = f'table "{tables[0]}"'
        for table in tables:
            before = self._states.retries.get(table)
            self._states.retries[table] = Retry(error.one_line(), before.attempt + 1 if before else 1, time.time() + pause)
        if parks:
            self._parking.copy_failed(tables[0], error)
        text = f"{what}: {error.one_line()}"
        line = f"synchronization of {what} failed, next attempt in {pause:.1f} s: {error.one_line()}"
        attempt = self._states.retries[tables[0]].attempt
        self._errors.tell(reaction.level, text, line, error_fields(error, attempt=attempt, table=None if grouped else tables[0]))
