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
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from subscriber.apply.hold import AppliedTransactions, Hold
from subscriber.apply.parallel import ParallelApply
from subscriber.apply.retry import Backoff, Policy, disables, is_coming_up, policy
from subscriber.apply.skip import Skipping
from subscriber.apply.tables.parking import Parking
from subscriber.apply.worker import ApplyWorker
from subscriber.errors import DataLossError, MissingColumns, SlotInUse, SubscriberError, SubscriptionChanged, TargetError
from subscriber.interfaces import FillingSink, FollowingSink, ParallelSink, Retry, SchemaGapSink, TableName, TwoPhaseState
from subscriber.log_fields import error_fields
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.session_name import session_name
from subscriber.repeated_errors import RepeatedErrors
from subscriber.stream_session import CAUTIOUSLY, SLOT_SECONDS, FollowedSlot, StreamSession, undecodable
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.status_reports import StatusReports
from subscriber.subscription.run.tables.added_columns import add_columns, adds_columns, new_column_values, schema_gap
from subscriber.subscription.run.tables.followed_columns import FollowedColumns, follows, learn_columns
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.setup.setup import Prepared
from subscriber.subscription.target_session import TargetSession
from subscriber.waits import LastingWait, moved
from subscriber.walreceiver.publisher_errors import is_undecodable
from subscriber.walreceiver.transaction_outcome import is_dropped, was_rolled_back

if TYPE_CHECKING:
    from subscriber.subscription.run.relay import Relay

__all__ = ["SlotFollower"]

_log = logging.getLogger(__name__)

_CAUTIOUS_SECONDS: Final = 60.0
"""Minimum duration of a cautious stream. A transaction that cannot be decoded may still be running, and would fail again at once."""
_OUTCOME_SECONDS: Final = 5.0
"""Time limit for asking the publisher about the outcome of a transaction that the target refuses."""


class SlotFollower:
    """The attempts of one run. It is the :class:`subscriber.apply.worker.ApplyOwner` of each stream.

    Args:
        target: open. This class decides about ``two_phase``.
        prepared: where the run starts.
        state: shared with the rest of the run.
        reports: reports an error to the target while the sink is open.
        watchdog: ends an attempt that makes no progress.
        parking: parks tables.
        relay: the relay log to read from; None: the stream comes from the publisher.
    """

    def __init__(
        self,
        target: TargetSession,
        prepared: Prepared,
        state: RunState,
        reports: StatusReports,
        watchdog: Watchdog,
        *,
        parking: Parking,
        relay: Relay | None = None,
    ) -> None:
        spec = self._spec = target.spec
        self._name = spec.name
        self._target = target
        self._prepared = prepared
        self._state = state
        self._reports = reports
        self._watchdog = watchdog
        self._parking = parking
        self._relay = relay
        self._two_phase = prepared.state.two_phase
        self._skipping = Skipping(prepared.state.skip_lsn, self._name)
        self._position = prepared.position
        self._backoff = Backoff(spec.settings)
        self._is_settled = True
        self._began = asyncio.get_running_loop().time()
        self._first = LastingWait(_log, f'subscription "{self._name}"', self._began)
        self._errors = RepeatedErrors(_log)
        self._was_streaming = self._is_streaming = False
        self._undecodable_at: Lsn | None = None
        self._cautiously = False
        self._attempt_began = self._began
        self._failures, self._failed_at, self._is_temporary = 0, INVALID_LSN, True
        self._cautious_until = self._began
        self._has_forgotten = False
        self._columns = FollowedColumns(spec)
        self.empty_prepares = True

    async def run(self) -> None:
        """Follow until the run is finished.

        Raises:
            SubscriberError: an error that must not be retried.
            Stopped: the run is to stop, and no attempt was in progress.
        """
        while not self._state.finished():
            self._is_streaming = False
            self._attempt_began = asyncio.get_running_loop().time()
            try:
                async with self._watchdog.watched():
                    if not self._target.is_open:
                        await self._state.unless_stopped(self._open_sink())
                    await self._attempt()
            except SubscriberError as met:
                error = self._undecodable(met) if is_undecodable(met) else met
                self._state.last_error = error
                pause = self._judge(error)
                self._state.failed = self._failed(error, pause)
                # after an error of the target, or without a settled position, the position is logged when the sink is opened again
                start = "" if isinstance(error, TargetError) or not self._is_settled else f", from {self._position.lsn}"
                text = error.one_line()
                line = f'subscription "{self._name}": {text}; next attempt in {pause:.1f} s{start}'
                self._errors.tell(self._level(error), text, line, error_fields(error, attempt=self._state.failed.attempt))
                self._tell_of_wait(error)
                await self._reports.report()
                # an attempt that the watchdog ended did not settle: only the target knows its position
                if isinstance(error, TargetError) or not self._is_settled:
                    await self._close_sink()
                await self._state.unless_stopped(asyncio.sleep(pause))

    def _undecodable(self, error: SubscriberError) -> SubscriberError:
        """Let the next attempt ask cautiously. If the failed attempt was already cautious, return the final error."""
        self._undecodable_at = self._position.lsn
        return undecodable(error, self._position.lsn) if self._cautiously else error

    def _judge(self, error: SubscriberError) -> float:
        """Return the seconds until the next attempt. Raise the error if there is no next attempt."""
        reaction = policy(error)
        if self._relay is not None and error is self._relay.failure:
            raise error
        if self._spec.options.on_error == "disable" and self._is_streaming and disables(error) and not is_undecodable(error):
            self._state.disabled_by = error
            raise error
        if self._is_streaming and self._parking.takes(error):
            return 0.0 if self._parking.refused(error) else self._backoff.pause(reaction)
        if reaction is Policy.NEVER or (reaction is Policy.INTERVAL and not self._state.patient):
            raise error
        if not self._was_streaming:
            waited = asyncio.get_running_loop().time() - self._began
            if not (isinstance(error, SlotInUse) and waited < SLOT_SECONDS) and not is_coming_up(error):
                raise error
        return self._backoff.pause(reaction)

    def _failed(self, error: SubscriberError, pause: float) -> Retry:
        """Describe the failed attempt. The count restarts at 1 if the attempt lasted for a while or moved the position."""
        if self._has_got_further():
            self._failures = 0
        self._failures += 1
        self._failed_at = self._state.tracker.flushed
        self._is_temporary = policy(error) is Policy.SOON
        return Retry(error.one_line(), self._failures, time.time() + pause)

    def _has_got_further(self) -> bool:
        """Whether the attempt got further than the one that failed before, or lasts for a while."""
        lasted = asyncio.get_running_loop().time() - self._attempt_began
        return self._state.tracker.flushed > self._failed_at or lasted > self._spec.settings.wal_retrieve_retry_interval

    def _level(self, error: SubscriberError) -> int:
        # before the first stream we only wait for a slot or for a server that is starting up; if that fails, the error is raised
        return policy(error).level if self._was_streaming or policy(error) is not Policy.SOON else logging.INFO

    def _tell_of_wait(self, error: SubscriberError) -> None:
        now = asyncio.get_running_loop().time()
        if not self._was_streaming and now >= self._first.due:
            self._first.tell(error.one_line(), now)

    async def _open_sink(self) -> None:
        state = (await self._target.open(self._state.durable)).state
        if state.position is None:
            raise DataLossError(
                f'the target has no position of subscription "{self._name}"',
                hint="if the subscription was dropped, start over with another name",
            )
        if state.generation != self._prepared.state.generation:
            raise SubscriptionChanged(f'subscription "{self._name}" was altered while it was not connected', hint="start it again")
        self._position = state.position
        _log.info('subscription "%s": the target has everything up to %s', self._name, state.position.lsn)
        self._two_phase = state.two_phase
        self._skipping = Skipping(state.skip_lsn, self._name)

    async def _close_sink(self) -> None:
        self._is_settled = True
        async with self._reports.silence():
            await self._target.close()

    async def _attempt(self) -> None:
        enabled = self._two_phase is TwoPhaseState.ENABLED
        # not before every table is ready: a table's synchronization cannot handle prepared transactions
        enabling = self._two_phase is TwoPhaseState.PENDING and self._state.states.may_prepare
        async with contextlib.AsyncExitStack() as stack:
            if self._relay is not None:
                session = await self._relay.open_session(self._position)
                stack.push_async_callback(session.close)
                enabling = enabling and self._relay.two_phase
            else:
                session = await self._state.unless_stopped(self._open_stream(stack, two_phase=enabled or enabling))
            if session.position != self._position:
                await self._target.opened.set_position(session.position)
                self._position = session.position
            if enabling and session.capabilities.two_phase:
                await self._enable_two_phase()
            await self._apply(session)

    async def _open_stream(self, stack: contextlib.AsyncExitStack, *, two_phase: bool) -> StreamSession:
        """Open the publisher's stream. ``stack`` closes it: what a task returns is lost if its caller is cancelled at that moment."""
        self._cautiously = self._position.lsn == self._undecodable_at
        if self._cautiously:
            _log.warning(CAUTIOUSLY)
        slot = FollowedSlot(
            conninfo=self._spec.conninfo,
            name=self._prepared.position.slot_name,
            temporary=False,
            publications=self._spec.publications,
            options=replace(self._spec.options, two_phase=two_phase),
            settings=self._spec.settings,
            application_name=self._name,
            spool_key=self._prepared.spool_key,
            cautiously=self._cautiously,
        )
        session = await StreamSession.open(slot, self._position)
        stack.push_async_callback(session.close)
        return session

    async def _enable_two_phase(self) -> None:
        await self._target.opened.set_two_phase(TwoPhaseState.ENABLED)
        self._two_phase = TwoPhaseState.ENABLED
        _log.info("two_phase is enabled: transactions are received at PREPARE TRANSACTION")

    async def _apply(self, session: StreamSession) -> None:
        state = self._state
        state.tracker, state.session = session.tracker, session
        state.applied.times.restart()
        session.receiver.times = state.applied.times
        self._was_streaming = self._is_streaming = True
        self._is_settled = False
        self._cautious_until = asyncio.get_running_loop().time() + _CAUTIOUS_SECONDS
        # a promoted standby of PostgreSQL 17 may send COMMIT PREPARED without the PREPARE of a transaction that has changes
        self.empty_prepares = session.capabilities.empty_prepares or self._spec.options.failover
        skipping, sink = self._skipping, self._target.opened
        if isinstance(sink, FillingSink) and not (self._spec.options.columns or self._spec.options.rename):
            sink.fill(partial(new_column_values, self._spec))
        if isinstance(sink, FollowingSink):
            if follows(self._spec):
                sink.follow(self._columns.plan)
            elif not self._has_forgotten:
                await sink.forget_columns()
                self._has_forgotten = True
        # a transaction that still runs may have changed columns, and the publisher's catalog does not tell
        workers = 0 if follows(self._spec) else self._spec.settings.max_parallel_apply_workers_per_subscription
        parallel = ParallelApply(
            session.receiver,
            sink if isinstance(sink, ParallelSink) else None,
            state.states,
            workers if self._spec.options.streaming == "parallel" else 0,
            # with any value of streaming: a native worker applies them while they arrive as well
            whole=workers > 0,
            paused=lambda: skipping.waits,
        )
        self._parking.two_phase = self._two_phase is TwoPhaseState.ENABLED or (self._relay is not None and self._relay.two_phase)
        worker = ApplyWorker(
            session.receiver,
            sink,
            state.states,
            self,
            two_phase=self._two_phase if session.capabilities.two_phase and self._relay is None else TwoPhaseState.DISABLED,
            skipping=skipping,
            parallel=parallel,
            parking=self._parking,
            rate=state.apply_rate,
        )
        try:
            async with parallel, self._columns:
                await worker.run()
        except TargetError:
            self._spec.sink.statistics.apply_error_count += 1
            raise
        except SubscriberError:
            self._spec.sink.statistics.apply_error_count += 1
            await self._settle(session)
            raise
        else:
            await self._settle(session)
        finally:
            state.session = None

    async def _settle(self, session: StreamSession) -> None:
        """Make all applied changes durable. The next stream starts after them."""
        lsn = session.tracker.applied
        if session.tracker.contradicted and lsn < session.tracker.flushed:
            # idle progress stored a WAL end that was wrong: changes below it are missing here
            await self._target.opened.set_position(replace(self._position, lsn=lsn))
        else:
            await self._target.opened.advance(lsn)
            session.tracker.flush(lsn)
            self._state.applied.times.durable(lsn)
        self._position = replace(self._position, lsn=lsn)
        self._is_settled = True
        self._state.watchers.notify()

    # --- for the apply worker

    def finished(self) -> bool:
        """Whether the stream is to end."""
        session = self._state.session
        if self._relay is not None and session is not None:
            if self._relay.at_another_server and session.receiver.peek() is None:
                return True
            if self._two_phase is TwoPhaseState.PENDING and session.capabilities.two_phase and self._state.states.may_prepare:
                self._relay.enable_two_phase()
                # before anything is applied that was received with it
                return self._relay.two_phase or self._state.finished()
        return self._state.finished() or (self._cautiously and self._has_passed())

    def _has_passed(self) -> bool:
        """Whether a cautious stream has passed the transaction that the publisher could not decode. Once true, it stays true."""
        session = self._state.session
        if session is None or asyncio.get_running_loop().time() < self._cautious_until:
            return False
        flushed = session.tracker.flushed
        return flushed > session.position.lsn and flushed >= session.publisher_lsn

    def progressed(self) -> None:
        """Note that a step was done."""
        self._backoff.reset()
        moved()
        # an attempt that has not reached the row that the target refuses has not succeeded
        if self._state.failed is not None and (self._is_temporary or self._has_got_further()):
            self._state.failed = None
        self._state.watchers.notify()

    def is_awaited(self, lsn: Lsn) -> bool:
        """Whether a caller waits for this LSN."""
        return self._state.is_awaited(lsn)

    @property
    def applied(self) -> AppliedTransactions:
        """The transactions that this run has applied last."""
        return self._state.applied

    @property
    def hold(self) -> Hold | None:
        """Where apply is to be held."""
        return self._state.hold

    async def was_rolled_back(self, xid: int) -> bool:
        """Ask the publisher whether it has rolled back a transaction. False if it does not say."""
        return await self._asked(was_rolled_back, xid, what=f"whether the publisher has rolled back transaction {xid}")

    async def learn_columns(self) -> None:
        """Learn the columns of tables that are synchronized now, if they are to be followed."""
        sink = self._target.opened
        if follows(self._spec) and isinstance(sink, FollowingSink):
            await learn_columns(self._spec, sink)

    async def add_columns(self, missing: MissingColumns) -> bool:
        """Add columns that a table of the target lacks. False: they are not to be added."""
        opened = self._target.opened
        if isinstance(opened, SchemaGapSink):
            entry = await opened.take_columns(missing, await schema_gap(self._spec, missing))
            if entry is not None:
                self._state.states.set(TableName(missing.namespace, missing.name), entry)
            return True
        if not adds_columns(self._spec):
            return False
        await add_columns(self._spec, missing, synchronized=True)
        return True

    async def is_dropped(self, relation_id: int, xids: Collection[int]) -> bool:
        """Ask the publisher whether it has dropped a table, which one of these transactions has changed. False if it does not say."""
        return await self._asked(is_dropped, relation_id, xids, what=f"whether the publisher has dropped table {relation_id}")

    async def _asked(self, question: Callable[..., Awaitable[bool]], *about: object, what: str) -> bool:
        try:
            async with asyncio.timeout(_OUTCOME_SECONDS):
                return await question(
                    self._spec.conninfo,
                    *about,
                    system_identifier=self._position.system_identifier,
                    timeline=self._position.timeline,
                    application_name=session_name(self._name, "outcome"),
                )
        except (SubscriberError, TimeoutError) as error:
            # the target's refusal stands; the publisher is asked again if it is repeated
            _log.info("could not find out %s: %s", what, str(error) or "no answer")
            return False
