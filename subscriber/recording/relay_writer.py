"""Write the events of a receiver to a relay log.

A transaction is written as a publisher could have sent it: between BEGIN and COMMIT; or, if it was streamed, as a single block before
STREAM COMMIT. Small transactions that wait are written together, and one wait for the disk serves them all.

While nothing is pending, the end of the relay log follows what was received, including keepalives, as the position of a target does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.receiving.spool_file import blocks
from subscriber.errors import ProtocolError
from subscriber.interfaces import ApplyStatistics
from subscriber.protocol.lsn import INVALID_LSN, POSTGRES_EPOCH, Lsn
from subscriber.protocol.messages import CommitPrepared
from subscriber.recording.relay_events import around, transaction_of, whole_messages
from subscriber.recording.relay_log import RelayLog
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction, end_of

__all__ = ["RelayTracker", "RelayWriter"]

_log = logging.getLogger(__name__)

_TICK: Final = 1.0
_FIRST_PAUSE: Final = 0.05
_AT_ONCE: Final = 1024 * 1024
_EPOCH_SECONDS: Final = POSTGRES_EPOCH.timestamp()


class RelayTracker(FlushTracker):
    """Positions of a stream whose changes are durable in a relay log. *apply* is still what is visible in the target.

    Args:
        position: the end of the relay log.
        in_target: everything up to there is visible in the target.
    """

    __slots__ = ("in_target",)

    def __init__(self, position: Lsn, in_target: Lsn) -> None:
        super().__init__(position)
        self.in_target = in_target

    def status(self) -> tuple[Lsn, Lsn, Lsn]:
        """See :meth:`FlushTracker.status`."""
        write, flush, apply = super().status()
        return write, flush, min(apply, self.in_target)


class RelayWriter:
    """Writes the events of one stream.

    Args:
        receiver: of the stream; started.
        log: open.
        statistics: count the changes that were left out.
        is_awaited: whether a caller waits for an LSN. Then the end of the relay log follows at once, not once a second.

    Attributes:
        paused: whether receiving waits, because the relay log is full.
    """

    def __init__(self, receiver: Receiver, log: RelayLog, statistics: ApplyStatistics, is_awaited: Callable[[Lsn], bool]) -> None:
        self._receiver = receiver
        self._tracker = receiver.tracker
        self._relay_log = log
        self._statistics = statistics
        self._is_awaited = is_awaited
        self._end = log.end
        self._advance_due = 0.0
        self._advance_pause = _FIRST_PAUSE
        self.paused = False

    async def run(self) -> None:
        """Write until cancelled.

        Raises:
            SubscriberError: of the stream or the relay log. Everything up to the log's end is durable.
        """
        while True:
            event = self._receiver.peek()
            self._statistics.rolled_back_changes += self._receiver.take_left_out()
            if event is None:
                await self._receiver.wait(await self._idle())
                continue
            await self._room()
            if _is_large(transaction_of(event)):
                await self._write_large(*self._receiver.pop())
            elif not await self._write_whole():
                await self._write_small()

    async def _room(self) -> None:
        """Wait until the relay log is not full. A transaction that has begun is always written."""
        log = self._relay_log
        while True:
            changed = log.changed
            if not log.full:
                break
            await log.acknowledge(INVALID_LSN)
            if changed.is_set():
                continue
            if not self.paused:
                self.paused = True
                _log.warning(
                    "the relay log is full (relay_log_size): receiving pauses, and the publisher keeps its WAL, until the target has"
                    " applied a segment"
                )
            # a lost connection is told, although what it sent waits here
            self._receiver.check()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK):
                    await changed.wait()
        if self.paused:
            self.paused = False
            _log.info("the relay log has room again: receiving continues")

    async def _write_whole(self) -> bool:
        """Write the small transactions that wait and are not streamed: most are. False: there is none."""
        transactions, held = self._receiver.pop_transactions(_AT_ONCE)
        if not transactions:
            return False
        self._end = transactions[-1].end_lsn
        await self._append(whole_messages(transactions), transactions, held)
        return True

    async def _write_small(self) -> None:
        """Write the events that wait, up to the first large transaction."""
        receiver = self._receiver
        payloads: list[bytes] = []
        events: list[Event] = []
        size = held = 0
        late = False
        while size < _AT_ONCE or late:
            event = await self._end_of_late() if late else receiver.peek()
            if event is None:
                break
            transaction = transaction_of(event)
            if events and _is_large(transaction):
                break
            late = self._is_late(event)
            events.append(event)
            held += receiver.pop()[1]
            first, last = around(event)
            payloads += first
            if transaction is not None:
                payloads += transaction.records
                size += transaction.size
            payloads += last
            self._pass(event)
        await self._append(payloads, events, held)

    async def _write_large(self, event: Event, held: int) -> None:
        transaction = transaction_of(event)
        assert transaction is not None  # nothing else is large
        log, moment = self._relay_log, self._moment
        events = [event]
        try:
            first, last = around(event)
            await log.append(first, moment)
            records: list[bytes] = []
            size = 0
            async for chunk in transaction.chunks():
                for block in blocks(chunk):
                    records += block
                    size += sum(map(len, block))
                    if size >= _AT_ONCE:
                        await log.append(records, moment)
                        records, size = [], 0
            if records:
                await log.append(records, moment)
            if self._is_late(event):
                events.append(await self._end_of_late())
                held += self._receiver.pop()[1]
                last += around(events[-1])[0]
        except BaseException:
            self._receiver.release(held)
            raise
        for each in events:
            self._pass(each)
        await self._append(last, None if transaction.spilled else events, held)
        await transaction.discard()

    def _is_late(self, event: Event) -> bool:
        """Whether it was prepared before two-phase was enabled. It has an old LSN, and belongs to its COMMIT PREPARED, which is next."""
        return isinstance(event, PreparedTransaction) and event.transaction.end_lsn <= self._end

    async def _end_of_late(self) -> CommitPrepared:
        while (event := self._receiver.peek()) is None:
            await self._receiver.wait(_TICK)
        if not isinstance(event, CommitPrepared):
            raise ProtocolError("expected COMMIT PREPARED after a transaction that was prepared before two-phase was enabled")
        return event

    def _pass(self, event: Event) -> None:
        """Note the end of an event. A prepare that comes late has an old LSN."""
        self._end = max(self._end, end_of(event))

    async def _append(self, payloads: Sequence[bytes], events: Sequence[Event] | None = (), held: int = 0) -> None:
        try:
            await self._relay_log.append(payloads, self._moment, self._end, events, held)
        finally:
            self._receiver.release(held)
        self._tracker.flush(self._end)
        self._receiver.report()

    @property
    def _moment(self) -> int:
        return int(((self._receiver.sent_at or time.time()) - _EPOCH_SECONDS) * 1_000_000)

    async def _idle(self) -> float:
        """Let the end follow what was received. Return the seconds until this must be called again."""
        lsn = self._tracker.idle_lsn()
        if lsn is None:
            return _TICK
        now = asyncio.get_running_loop().time()
        if not (self._receiver.reply_requested or now >= self._advance_due or self._is_awaited(lsn)):
            return self._advance_due - now
        rested = now - self._advance_due >= _TICK
        self._advance_pause = _FIRST_PAUSE if rested else min(self._advance_pause * 2, _TICK)
        self._advance_due = now + self._advance_pause
        self._end = lsn
        await self._append(())
        return _TICK


def _is_large(transaction: Transaction | None) -> bool:
    return transaction is not None and (transaction.spilled > 0 or transaction.size >= _AT_ONCE)
