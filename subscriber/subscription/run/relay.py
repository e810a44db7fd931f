"""Receiving into the relay log, beside the apply worker, which reads from there.

The two fail separately. While the target cannot be reached, or is slow, this continues. While the publisher cannot be reached, the apply
worker continues with what is in the relay log. An error that must not be retried ends the run, after everything before it is applied;
at once, if the publisher does not have those changes any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace
from typing import Final

from subscriber.apply.retry import Backoff, Policy, disables, is_coming_up, policy
from subscriber.config import Settings
from subscriber.errors import DataLossError, SlotInUse, SubscriberError
from subscriber.interfaces import OpenedSink, Position, RelayLogDetails, Retry
from subscriber.protocol.frames import StandbyStatusUpdate
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.recording.file import RecordedSession
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_stream import RelayStream
from subscriber.recording.relay_writer import RelayTracker, RelayWriter
from subscriber.repeated_errors import RepeatedErrors
from subscriber.stream_session import CAUTIOUSLY, SLOT_SECONDS, FollowedSlot, StreamSession, undecodable
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.setup.relay_position import position_of
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver.position_check import Diverged
from subscriber.walreceiver.publisher_errors import is_undecodable

__all__ = ["Relay"]

_log = logging.getLogger(__name__)

_CAUTIOUS_SECONDS: Final = 60.0
_LEAST_MEMORY: Final = 64 * 1024


class Relay:
    """The relay log of one run, and the task that fills it.

    Args:
        spec: the subscription.
        state: of the run.
        log: open; closed by the caller.
        two_phase: whether prepared transactions are received at PREPARE TRANSACTION.
        spool_key: names the spool of what arrives.

    Attributes:
        two_phase: whether prepared transactions have been received at PREPARE TRANSACTION. The target must know it before it gets one.
    """

    def __init__(self, spec: RunSpec, state: RunState, log: RelayLog, *, two_phase: bool, spool_key: str) -> None:
        self._spec = spec
        self._state = state
        self._relay_log = log
        self._two_phase = two_phase
        self._spool_key = f"{spool_key} relay log"
        self._restart = asyncio.Event()
        self.two_phase = False
        self._tracker = RelayTracker(log.end, INVALID_LSN)
        self._session: StreamSession | None = None
        self._writer: RelayWriter | None = None
        self._in_target = self._publisher_lsn = INVALID_LSN
        self._stream: RelayStream | None = None
        self._streamed = False
        self._undecodable_at: Lsn | None = None
        self._retry: Retry | None = None
        self._errors = RepeatedErrors(_log)
        # what arrives and what is applied have half of the memory each; what is applied was complete when it arrived, so half of its half
        # is free for what is on disk and waits
        memory = max(spec.settings.logical_decoding_work_mem // 2, _LEAST_MEMORY)
        self._settings = replace(spec.settings, logical_decoding_work_mem=memory)
        log.recent.limit = memory // 2

    # --- for the apply side

    async def open_session(self, position: Position) -> StreamSession:
        """Open the stream of everything after the target's position.

        Raises:
            DataLossError: the relay log does not have it, because the target was restored to an earlier time meanwhile.
        """
        log = self._relay_log
        if not log.holds(position.lsn):
            raise DataLossError(
                f"the target's position is {position.lsn}, but the relay log has changes from {log.segments[0].base} to {log.end}",
                hint="start again: the start says whether changes are missing, and what to do",
            )
        self._acknowledge(position.lsn)
        stream = RelayStream(log, position.lsn, self._acknowledged)
        self._stream = stream
        # the publisher's silence is not that of the relay log, and segments are removed whatever the publisher is told
        settings = replace(self._settings, wal_receiver_timeout=0, wal_receiver_status_interval=Settings().wal_receiver_status_interval)
        return await StreamSession.of_relay_log(
            stream,
            replace(position, timeline=stream.session.timeline),
            publisher_lsn=max(self.received, self._publisher_lsn),
            settings=settings,
        )

    @property
    def at_another_server(self) -> bool:
        """Whether the apply side has everything of a server, and what follows is of another one."""
        return self._stream is not None and self._stream.ended

    def enable_two_phase(self) -> None:
        """Receive prepared transactions at PREPARE TRANSACTION, as soon as the publisher can be asked for that."""
        if not self._two_phase:
            self._two_phase = True
            self._restart.set()

    @property
    def failure(self) -> SubscriberError | None:
        """The error that ended receiving."""
        return self._relay_log.failure

    def _acknowledged(self, status: StandbyStatusUpdate) -> None:
        self._acknowledge(status.apply)

    def _acknowledge(self, applied: Lsn) -> None:
        self._in_target = max(self._in_target, applied)
        self._tracker.in_target = self._in_target
        if self._session is not None:
            self._session.receiver.report()

    async def settle(self, sink: OpenedSink) -> None:
        """At the end of a run, move the target's position over what was received since without changes: then no relay log is needed.

        Raises:
            SubscriberError: of the target.
        """
        log, position = self._relay_log, self._state.tracker.flushed
        if log.holds(position) and log.end > position >= log.last_change:
            await sink.advance(log.end)

    # --- for the status

    @property
    def received(self) -> Lsn:
        """Everything up to there has arrived."""
        return self._tracker.received

    @property
    def session(self) -> StreamSession | None:
        """The stream of the publisher; None while it is not connected."""
        return self._session

    @property
    def details(self) -> RelayLogDetails:
        """For the status."""
        log = self._relay_log
        return RelayLogDetails(
            received=self._tracker.received,
            flushed=log.end,
            size=log.size,
            limit=log.limit,
            paused=self._writer is not None and self._writer.paused,
            retry=self._retry,
            failure=None if self.failure is None else self.failure.one_line(),
            oldest=next((segment.session.start_lsn for segment in log.segments), None),
        )

    # --- receiving

    async def run(self) -> None:
        """Receive until cancelled, or until an error must not be retried. That error then ends the reading, see :attr:`failure`."""
        loop = asyncio.get_running_loop()
        backoff, began, failures = Backoff(self._spec.settings), loop.time(), 0
        while True:
            attempt, end = loop.time(), self._relay_log.end
            try:
                await self._attempt()
            except SubscriberError as met:
                error = self._judged(met)
                if self._relay_log.end > end or loop.time() - attempt > self._spec.settings.wal_retrieve_retry_interval:
                    backoff.reset()
                    failures = 0
                failures += 1
                reaction = policy(error)
                if self._is_final(error, reaction, loop.time() - began):
                    if self._tracker.contradicted:
                        await self._relay_log.condemn(error)
                    self._retry, self._state.last_error = None, error
                    _log.error('subscription "%s": receiving into the relay log has ended: %s', self._spec.name, error.one_line())
                    self._relay_log.failure, self._relay_log.diverged = error, isinstance(error, Diverged)
                    self._relay_log.notify()
                    return
                pause = backoff.pause(reaction)
                self._retry = Retry(error.one_line(), failures, time.time() + pause)
                self._state.last_error = error
                text = error.one_line()
                line = f'subscription "{self._spec.name}": {text}; next attempt in {pause:.1f} s, from {self._relay_log.end}'
                self._errors.tell(reaction.level, text, line)
                await asyncio.sleep(pause)

    def _judged(self, met: SubscriberError) -> SubscriberError:
        """Let the next attempt ask cautiously for what cannot be decoded. If it was cautious already, return the final error."""
        if not is_undecodable(met):
            return met
        before, self._undecodable_at = self._undecodable_at, self._relay_log.end
        return undecodable(met, self._relay_log.end) if before == self._relay_log.end else met

    def _is_final(self, error: SubscriberError, found: Policy, waited: float) -> bool:
        if found is Policy.NEVER or (found is Policy.INTERVAL and not self._state.patient):
            return True
        if self._spec.options.on_error == "disable" and self._streamed and disables(error) and not is_undecodable(error):
            self._state.disabled_by = error
            return True
        return not (self._streamed or is_coming_up(error) or (isinstance(error, SlotInUse) and waited < SLOT_SECONDS))

    async def _attempt(self) -> None:
        """Receive until the stream ends, or must be restarted."""
        self._restart.clear()
        log, spec = self._relay_log, self._spec
        cautiously = log.end == self._undecodable_at
        slot = FollowedSlot(
            conninfo=spec.conninfo,
            name=log.session.slot_name,
            temporary=False,
            publications=spec.publications,
            options=replace(spec.options, two_phase=self._two_phase),
            settings=self._settings,
            application_name=spec.name,
            spool_key=self._spool_key,
            cautiously=cautiously,
            holder="the relay log",
        )
        if cautiously:
            _log.warning(CAUTIOUSLY)
        await log.rewind()
        # after an error it may need the room of what the target has
        await log.acknowledge(INVALID_LSN)
        began = asyncio.get_running_loop().time()
        session = await StreamSession.open(slot, position_of(log), tracker=RelayTracker(log.end, self._in_target))
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(session.close)
            assert isinstance(session.tracker, RelayTracker)
            self._tracker = session.tracker
            await log.follow(
                RecordedSession(
                    server_version=session.capabilities.server_version,
                    system_identifier=session.position.system_identifier,
                    timeline=session.position.timeline,
                    slot_name=slot.name,
                    start_lsn=log.end,
                    options={},
                )
            )
            self._session, self._streamed, self._retry = session, True, None
            self._publisher_lsn = session.publisher_lsn
            if slot.options.two_phase:
                self.two_phase = True
                self._state.wake()
            stack.callback(self._ended)
            self._writer = RelayWriter(session.receiver, log, spec.sink.statistics, self._state.is_awaited)
            writing = asyncio.create_task(self._writer.run(), name="relay log")
            stack.push_async_callback(_cancelled, writing)
            restart = asyncio.create_task(self._restart.wait())
            stack.push_async_callback(_cancelled, restart)
            while not writing.done() and not self._restart.is_set():
                left = began + _CAUTIOUS_SECONDS - asyncio.get_running_loop().time()
                await asyncio.wait({writing, restart}, timeout=max(left, 1.0) if cautiously else None, return_when=asyncio.FIRST_COMPLETED)
                if cautiously and left <= 0 and log.end > session.position.lsn and log.end >= session.publisher_lsn:
                    # it has passed the transaction that the publisher could not decode
                    return
            if writing.done():
                writing.result()

    def _ended(self) -> None:
        self._session = None


async def _cancelled(task: asyncio.Task[object]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # retrieved, so that asyncio does not log it
