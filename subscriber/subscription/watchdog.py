"""The watchdog: no run waits silently, and nothing of it stands still for ever.

It watches each attempt to follow the slot, and each synchronization of a table or of a group of tables. While something may be waiting, the
target is asked every few seconds what it does for the sink's sessions. Locks that they wait for are logged, with who holds them.

Work is given up, and made again, if all of this is so:

* for ``watchdog_timeout`` it has made no progress: no step of the apply worker ended, nothing of a spilled transaction was read, no answer
  or row came from the publisher, nothing was sent to a PostgreSQL target. With nothing to apply, a step ends each second. A pause between
  attempts is no part of an attempt.
* it does not connect to a server: that has a limit of its own, and then comes the next host of the connection string.
* the target shows no session that waits for a lock.
* the target has done nothing for the sessions in question for half of that time, or has no such session. So a large transaction, which is a
  single step, may take as long as it needs. A target that does not answer the question at all, twice, counts as one that does nothing.
  Behind a pooler, which has PIDs of its own, all sessions count as busy.
* if it waits for an answer of the publisher, another session with the publisher tells that it does nothing for that, or does not answer.

While a table is handed over, the apply worker waits for the table's synchronization: then the progress of either counts.

This should never be needed: it is there for unknown faults, ours or a driver's. A false alarm does no harm: the work is cancelled, as
for a stop, and begins again; what was not acknowledged comes again, and what is in the target is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from subscriber.abc import Sink, TargetActivity, WatchedSink
from subscriber.errors import PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.subscription.running import Running
from subscriber.waits import FIRST_SECONDS, WaitLog, Watch

__all__ = ["Watchdog"]

_log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 5.0
_ASK_SECONDS: Final = 10.0
_UNANSWERED: Final = 2
_HINT: Final = "it is made again; if this comes often, report it"


class _Work:
    """What is watched."""

    def __init__(self, tables: bool, timeout: asyncio.Timeout) -> None:
        self.tables = tables
        self.timeout = timeout
        self.watch = Watch()
        self.error: SubscriberError | None = None


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
        self._work: list[_Work] = []
        self._unanswered = 0

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

    @contextlib.asynccontextmanager
    async def watched(self, *, tables: bool = False) -> AsyncIterator[None]:
        """Around one attempt to follow the slot, the opening of the sink included; or around a synchronization of tables.

        Raises:
            TargetUnavailable: it stood still.
            PublisherUnavailable: it stood still, and waited for an answer of the publisher.
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
                # the apply worker may have waited for these tables, and goes on now
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
                # one that is being cancelled may take its time
                if work.error is not None or not self._timeout or not self._stands_still(work, found) or await self._is_answered(work):
                    continue
                # it may have ended while the publisher was asked
                if work in self._work:
                    self._give_up(work)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _may_wait(self) -> bool:
        running = self._running
        if not running.prepared or running.states.unsynchronized:
            return True
        return any(self._now() - work.watch.moved_at >= FIRST_SECONDS for work in self._work)

    def _handing_over(self) -> Sequence[str]:
        """What the apply worker waits for, if it waits for tables."""
        if not any(not work.tables and self._now() - work.watch.moved_at >= FIRST_SECONDS for work in self._work):
            return ()
        return [f'the apply worker waits until table "{table}" is handed over to it' for table in self._running.states.handing_over]

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

    def _concerned(self, work: _Work) -> Sequence[_Work]:
        """It, and what it waits for."""
        return self._work if self._running.states.handing_over and not work.tables else [work]

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
        """Whether the publisher is at work on an answer that is waited for."""
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
        # one that came meanwhile is progress
        return self._now() - work.watch.moved_at < self._timeout

    def _give_up(self, work: _Work) -> None:
        still = self._now() - work.watch.moved_at
        if work.watch.asked:
            work.error = PublisherUnavailable(f"the publisher does not answer: nothing has come for {still:.0f} s", hint=_HINT)
        else:
            work.error = TargetUnavailable(
                f"no progress for {still:.0f} s, although the target does nothing for this subscription", hint=_HINT
            )
        work.timeout.reschedule(self._now())
