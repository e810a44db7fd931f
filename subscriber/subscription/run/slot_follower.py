"""Following the slot: one attempt after another, until the run is finished or an error must not be retried.

If the publisher ends an attempt, the sink stays open: the applied changes are made durable, and the next stream starts right after them. If
the target or the watchdog ends an attempt, the sink is closed. The next attempt opens it again and reads the target's position. So no
stream sends what the target already has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import Final

from subscriber.abc import Retry, Sink, TwoPhaseState
from subscriber.apply.parallel import ParallelApply
from subscriber.apply.retry import Backoff, Policy, disables, is_coming_up, policy
from subscriber.apply.skip import Skipping
from subscriber.apply.worker import ApplyWorker
from subscriber.config import Settings
from subscriber.errors import DataLossError, SlotInUse, SubscriberError, SubscriptionChanged, TargetError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.session_name import session_name
from subscriber.stream_session import FollowedSlot, StreamSession, undecodable
from subscriber.subscription.run.run_state import Running
from subscriber.subscription.run.status_reports import Reporting
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.setup.setup import Prepared
from subscriber.waits import LastingWait, moved
from subscriber.walreceiver.errors import is_undecodable
from subscriber.walreceiver.transaction_outcome import was_rolled_back

__all__ = ["Following"]

_log = logging.getLogger(__name__)

_SLOT_SECONDS: Final = 10.0
"""How long the first attempt waits for a slot in use. The walsender of a killed process takes a moment to notice."""

_CAUTIOUS_SECONDS: Final = 60.0
"""Minimum duration of a cautious stream. A transaction that cannot be decoded may still be running, and would fail again at once."""
_OUTCOME_SECONDS: Final = 5.0
"""Time limit for asking the publisher about the outcome of a transaction that the target refuses."""


class Following:
    """The attempts of one run.

    Args:
        slot: the slot to follow. This class decides about its ``options.two_phase``.
        prepared: where the run starts. The sink is open.
        sink: the target.
        settings: batches and pauses.
        running: shared with the rest of the run.
        reporting: reports an error to the target while the sink is open.
        watchdog: ends an attempt that makes no progress.
        patient: if False, the first error that is not transient ends the run.
    """

    def __init__(
        self,
        slot: FollowedSlot,
        prepared: Prepared,
        sink: Sink,
        settings: Settings,
        running: Running,
        *,
        patient: bool,
        reporting: Reporting,
        watchdog: Watchdog,
    ) -> None:
        self._slot = slot
        self._name = prepared.state.name
        self._generation = prepared.state.generation
        self._two_phase = prepared.state.two_phase
        self._skipping = Skipping(prepared.state.skip_lsn, self._name)
        self._position = prepared.position
        self._sink = sink
        self._settings = settings
        self._running = running
        self._patient = patient
        self._reporting = reporting
        self._watchdog = watchdog
        self._backoff = Backoff(settings)
        self._sink_is_open = self._is_settled = True
        self._began = asyncio.get_running_loop().time()
        self._first = LastingWait(_log, f'subscription "{self._name}"', self._began)
        self._was_streaming = self._is_streaming = False
        self._undecodable_at: Lsn | None = None
        self._cautiously = False
        self._attempt_began = self._began
        self._failures, self._failed_at = 0, INVALID_LSN

    async def run(self) -> None:
        """Follow until the run is finished.

        Raises:
            SubscriberError: an error that must not be retried.
            Stopped: the run is to stop, and no attempt was in progress.
        """
        while not self._running.finished():
            self._is_streaming = False
            self._attempt_began = asyncio.get_running_loop().time()
            try:
                async with self._watchdog.watched():
                    if not self._sink_is_open:
                        await self._running.unless_stopped(self._open_sink())
                    await self._attempt()
            except SubscriberError as met:
                error = self._undecodable(met) if is_undecodable(met) else met
                self._running.last_error = error
                pause = self._judge(error)
                self._running.failed = self._failed(error, pause)
                # after an error of the target, or without a settled position, the position is logged when the sink is opened again
                start = "" if isinstance(error, TargetError) or not self._is_settled else f", from {self._position.lsn}"
                _log.log(self._level(error), 'subscription "%s": %s; next attempt in %.1f s%s', self._name, error.one_line(), pause, start)
                self._tell_of_wait(error)
                await self._reporting.report()
                # an attempt that the watchdog ended did not settle: only the target knows its position
                if isinstance(error, TargetError) or not self._is_settled:
                    await self._close_sink()
                await self._running.unless_stopped(asyncio.sleep(pause))

    def _undecodable(self, error: SubscriberError) -> SubscriberError:
        """Let the next attempt ask cautiously. If the failed attempt was already cautious, return the final error."""
        self._undecodable_at = self._position.lsn
        return undecodable(error, self._position.lsn) if self._cautiously else error

    def _judge(self, error: SubscriberError) -> float:
        """Return the seconds until the next attempt. Raise the error if there is no next attempt."""
        answer = policy(error)
        if self._slot.options.disable_on_error and self._is_streaming and disables(error) and not is_undecodable(error):
            self._running.disabled_by = error
            raise error
        if answer.policy is Policy.NEVER or (answer.policy is Policy.INTERVAL and not self._patient):
            raise error
        if not self._was_streaming:
            waited = asyncio.get_running_loop().time() - self._began
            if not (isinstance(error, SlotInUse) and waited < _SLOT_SECONDS) and not is_coming_up(error):
                raise error
        return self._backoff.pause(answer)

    def _failed(self, error: SubscriberError, pause: float) -> Retry:
        """Describe the failed attempt. The count restarts at 1 if the attempt lasted for a while or moved the position."""
        flushed = self._running.tracker.flushed
        lasted = asyncio.get_running_loop().time() - self._attempt_began
        if flushed > self._failed_at or lasted > self._settings.wal_retrieve_retry_interval:
            self._failures = 0
        self._failures += 1
        self._failed_at = flushed
        return Retry(error.one_line(), self._failures, time.time() + pause)

    def _level(self, error: SubscriberError) -> int:
        if policy(error).policy is not Policy.SOON:
            return logging.ERROR
        # before the first stream we only wait for a slot or for a server that is starting up; if that fails, the error is raised
        return logging.WARNING if self._was_streaming else logging.INFO

    def _tell_of_wait(self, error: SubscriberError) -> None:
        now = asyncio.get_running_loop().time()
        if not self._was_streaming and now >= self._first.due:
            self._first.tell(error.one_line(), now)

    async def _open_sink(self) -> None:
        state = await self._sink.open(self._name, self._running.durable)
        self._sink_is_open = True
        if state.position is None:
            raise DataLossError(
                f'the target has no position of subscription "{self._name}"',
                hint="if the subscription was dropped, start over with another name",
            )
        if state.generation != self._generation:
            raise SubscriptionChanged(f'subscription "{self._name}" was altered while it was not connected', hint="start it again")
        self._position = state.position
        _log.info('subscription "%s": the target has everything up to %s', self._name, state.position.lsn)
        self._two_phase = state.two_phase
        self._skipping = Skipping(state.skip_lsn, self._name)

    async def _close_sink(self) -> None:
        self._sink_is_open, self._is_settled = False, True
        async with self._reporting.silence():
            await self._sink.close()

    async def _attempt(self) -> None:
        states = self._running.states
        enabled = self._two_phase is TwoPhaseState.ENABLED
        # not before every table is ready: a table's synchronization cannot handle prepared transactions
        enabling = self._two_phase is TwoPhaseState.PENDING and states.all_ready and bool(states.entries())
        options = replace(self._slot.options, two_phase=enabled or enabling)
        self._cautiously = self._position.lsn == self._undecodable_at
        if self._cautiously:
            _log.warning(
                "asking the publisher to send only complete transactions, and to decode with more memory, until it has passed this place"
            )
        slot = replace(self._slot, options=options, cautiously=self._cautiously)
        session = await self._running.unless_stopped(StreamSession.open(slot, self._position))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(session.close)
            if session.position != self._position:
                await self._sink.set_position(session.position)
                self._position = session.position
            if enabling and session.capabilities.two_phase:
                await self._sink.set_two_phase(TwoPhaseState.ENABLED)
                self._two_phase = TwoPhaseState.ENABLED
                _log.info("two_phase is enabled: transactions are received at PREPARE TRANSACTION")
            await self._apply(session)

    async def _apply(self, session: StreamSession) -> None:
        running = self._running
        running.tracker, running.session = session.tracker, session
        self._was_streaming = self._is_streaming = True
        self._is_settled = False
        skipping, clock = self._skipping, asyncio.get_running_loop().time
        began, cautious_until = session.position.lsn, clock() + _CAUTIOUS_SECONDS

        def is_behind() -> bool:
            # whether the stream has passed the transaction that the publisher could not decode; once true, it stays true
            flushed = session.tracker.flushed
            return flushed > began and flushed >= session.publisher_lsn and clock() >= cautious_until

        def finished() -> bool:
            return running.finished() or (self._cautiously and is_behind())

        parallel = ParallelApply(session.receiver, self._sink, running.states, self._parallel_limit, paused=lambda: skipping.waits)
        worker = ApplyWorker(
            receiver=session.receiver,
            sink=self._sink,
            tracker=session.tracker,
            tables=running.states,
            settings=self._settings,
            two_phase=self._two_phase if session.capabilities.two_phase else TwoPhaseState.DISABLED,
            skipping=skipping,
            rolled_back=self._was_rolled_back,
            # a promoted standby of PostgreSQL 17 may send COMMIT PREPARED without the PREPARE of a transaction that has changes
            empty_prepares=session.capabilities.empty_prepares or self._slot.options.failover,
            finished=finished,
            awaited=running.is_awaited,
            progressed=self._progressed,
            parallel=parallel,
        )
        try:
            async with parallel:
                await worker.run()
        except TargetError:
            self._sink.statistics.apply_error_count += 1
            raise
        except SubscriberError:
            self._sink.statistics.apply_error_count += 1
            await self._settle(session)
            raise
        else:
            await self._settle(session)
        finally:
            running.session = None

    async def _settle(self, session: StreamSession) -> None:
        """Make all applied changes durable. The next stream starts after them."""
        lsn = session.tracker.applied
        if session.tracker.contradicted and lsn < session.tracker.flushed:
            # idle progress stored a WAL end that was wrong: changes below it are missing here
            await self._sink.set_position(replace(self._position, lsn=lsn))
        else:
            await self._sink.advance(lsn)
            session.tracker.flush(lsn)
        self._position = replace(self._position, lsn=lsn)
        self._is_settled = True
        self._running.watchers.notify()

    async def _was_rolled_back(self, xid: int) -> bool:
        try:
            async with asyncio.timeout(_OUTCOME_SECONDS):
                return await was_rolled_back(
                    self._slot.conninfo,
                    xid,
                    system_identifier=self._position.system_identifier,
                    timeline=self._position.timeline,
                    application_name=session_name(self._name, "outcome"),
                )
        except (SubscriberError, TimeoutError) as error:
            # the target's refusal stands; the publisher is asked again if the transaction fails again
            _log.info("could not find out whether the publisher has rolled back transaction %d: %s", xid, str(error) or "no answer")
            return False

    @property
    def _parallel_limit(self) -> int:
        wanted = self._slot.options.streaming == "parallel" and self._sink.capabilities.parallel_apply
        return self._settings.max_parallel_apply_workers_per_subscription if wanted else 0

    def _progressed(self) -> None:
        self._backoff.reset()
        moved()
        self._running.failed = None
        self._running.watchers.notify()
