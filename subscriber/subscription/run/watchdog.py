"""The watchdog: logs what a run waits for, and restarts work that makes no progress.

It watches each attempt to follow the slot, and each synchronization of a table or of a group of tables. While something may be waiting, it
asks the target every few seconds what the sink's sessions do. It logs the locks that they wait for, and the holders of these locks.

The watchdog cancels and restarts work if all of the following are true:

* The work has made no progress for ``watchdog_timeout``: no step of the apply worker ended, no part of a spilled transaction was read, no
  answer or row came from the publisher, no target table was read, nothing was sent to a PostgreSQL target. With nothing to apply, a step
  ends each second. A pause between attempts is not part of an attempt.
* The work is not connecting to a server. That has its own time limit, after which the next host of the connection string is tried.
* The target shows no session that waits for a lock.
* The target has done nothing for the work's sessions for half of that time, or has no such session. So a large transaction, which is a
  single step, may take as long as it needs. A target that does not answer this question twice counts as one that does nothing. Behind a
  pooler, which has its own PIDs, all sessions count as busy.
* If the work waits for an answer of the publisher: another session with the publisher shows that it is not working on the answer, or gets
  no answer.

While a table is handed over, the apply worker waits for the table's synchronization. Then the progress of either counts.

The watchdog should never be needed. It is there for unknown bugs, in this project or in a driver. A false alarm does no harm: the work is
cancelled, as for a stop, and starts again. The publisher sends again what was not acknowledged, and what is already in the target is
skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from subscriber.errors import PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.interfaces import TargetActivity, WatchedSink
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.spec import RunSpec
from subscriber.waits import FIRST_SECONDS, WaitLog, Watch

__all__ = ["Watchdog"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
_ASK_SECONDS: Final = 10.0
_UNANSWERED: Final = 2
_HINT: Final = "the connection is retried; if this happens often, report it"


class _Work:
    """One attempt or synchronization that is watched."""

    def __init__(self, tables: bool, timeout: asyncio.Timeout) -> None:
        self.tables = tables
        self.timeout = timeout
        self.watch = Watch()
        self.error: SubscriberError | None = None


class Watchdog:
    """Watches one run.

    Args:
        spec: the subscription. If its sink is not a :class:`WatchedSink`, the run is not watched.
        state: of the run.
    """

    def __init__(self, spec: RunSpec, state: RunState) -> None:
        self._state = state
        self._sink = spec.sink if isinstance(spec.sink, WatchedSink) else None
        self._timeout = spec.settings.watchdog_timeout
        self._waits = WaitLog(_log, f'subscription "{spec.name}"')
        self._work: list[_Work] = []
        self._unanswered = 0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Watch the run inside the block."""
        task = asyncio.create_task(self._watch(self._sink), name="watchdog") if self._sink is not None else None
        try:
            yield
        finally:
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def watched(self, *, tables: bool = False) -> AsyncIterator[None]:
        """Wrap one attempt to follow the slot, including the opening of the sink, or one synchronization of tables.

        Raises:
            TargetUnavailable: the work made no progress.
            PublisherUnavailable: the work made no progress while it waited for an answer of the publisher.
        """
        work = _Work(tables, asyncio.timeout(None))
        self._work.append(work)
        try:
            with work.watch.current():
                async with work.timeout:
                    yield
        except TimeoutError:
            if work.error is None:
                raise
            raise work.error from None
        finally:
            self._work.remove(work)
            if tables:
                # the apply worker may have waited for these tables, and can continue now
                for other in self._work:
                    if not other.tables:
                        other.watch.moved()

    async def _watch(self, sink: WatchedSink) -> None:
        while True:
            await asyncio.sleep(FIRST_SECONDS)
            if not self._may_wait():
                self._waits.note((), self._now())
                continue
            found = await self._look(sink)
            self._waits.note([*(found.waits if found is not None else ()), *self._handing_over()], self._now())
            for work in tuple(self._work):
                # work that is being cancelled may take some time
                if work.error is not None or not self._timeout or not self._stands_still(work, found) or await self._is_answered(work):
                    continue
                # the work may have ended while the publisher was asked
                if work in self._work:
                    self._give_up(work)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _may_wait(self) -> bool:
        state = self._state
        if not state.prepared or state.states.unsynchronized:
            return True
        return any(self._now() - work.watch.moved_at >= FIRST_SECONDS for work in self._work)

    def _handing_over(self) -> Sequence[str]:
        """A sentence for each table that the apply worker waits for."""
        if not any(not work.tables and self._now() - work.watch.moved_at >= FIRST_SECONDS for work in self._work):
            return ()
        return [f'the apply worker waits until table "{table}" is handed over to it' for table in self._state.states.handing_over]

    async def _look(self, sink: WatchedSink) -> TargetActivity | None:
        """Ask the target. None if it cannot be asked."""
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                found = await sink.activity()
        except TimeoutError:
            self._unanswered += 1
            return None
        except SubscriberError as error:
            _log.debug("could not inspect the target's sessions: %s", error)
            return None
        self._unanswered = 0
        return found

    def _concerned(self, work: _Work) -> Sequence[_Work]:
        """The work, and the work that it waits for."""
        return self._work if self._state.states.handing_over and not work.tables else [work]

    def _stands_still(self, work: _Work, found: TargetActivity | None) -> bool:
        concerned = self._concerned(work)
        if self._now() - max(one.watch.moved_at for one in concerned) < self._timeout:
            return False
        if any(None in one.watch.asked for one in concerned):
            return False
        if found is None:
            return self._unanswered >= _UNANSWERED
        idle = min(found.tables_idle if one.tables else found.idle for one in concerned)
        return not found.waits and idle >= self._timeout / 2

    async def _is_answered(self, work: _Work) -> bool:
        """Whether the publisher is still working on an answer that the work waits for."""
        for one in tuple(self._concerned(work)):
            for session in tuple(one.watch.asked):
                if session is None:
                    return True
                try:
                    async with asyncio.timeout(_ASK_SECONDS):
                        working = await session.is_working()
                except TimeoutError:
                    working = False
                except SubscriberError as error:
                    # a server that refuses another session is alive, and nothing is known of this one
                    working = error.sqlstate is not None
                if working:
                    one.watch.moved()
                    return True
        # an answer that came in the meantime is progress
        return self._now() - work.watch.moved_at < self._timeout

    def _give_up(self, work: _Work) -> None:
        still = self._now() - work.watch.moved_at
        if work.watch.asked:
            work.error = PublisherUnavailable(f"the publisher does not answer: nothing was received for {still:.0f} s", hint=_HINT)
        else:
            work.error = TargetUnavailable(
                f"no progress for {still:.0f} s, although the target does nothing for this subscription", hint=_HINT
            )
        work.timeout.reschedule(self._now())
