"""Receive a replication stream: reading, reassembly, spilling, and the feedback that keeps the connection alive.

Two tasks run beside the caller, who takes events with :meth:`Receiver.wait`, :meth:`Receiver.peek` and :meth:`Receiver.pop`:

* *receive* drains the stream, feeds reassembly and queues events. It stops reading while the queued events, and those being applied,
  hold half of ``logical_decoding_work_mem``. It spills the largest open transaction when the open ones hold the other half. So memory is
  bounded, and a slow sink slows down the socket.
* *feedback* sends standby status updates (:mod:`subscriber.apply.receiving.feedback`). It never waits for the sink.

Source: PostgreSQL manual, Streaming Replication Protocol; worker.c (LogicalRepApplyLoop).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence

from subscriber.apply.apply_times import ApplyTimes
from subscriber.apply.receiving.event_queue import EventQueue, memory_of
from subscriber.apply.receiving.feedback import Feedback
from subscriber.apply.receiving.plausible_end import PlausibleEnd
from subscriber.apply.receiving.rolled_back import leave_out_rolled_back
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable, SubscriberError, UndecidedTransaction
from subscriber.interfaces import EventStream, ReceivedEvents, ReplicationStream, Spool
from subscriber.protocol.frames import (
    PrimaryKeepalive,
    XLogData,
    decode_frame,
    header,
)
from subscriber.protocol.lsn import INVALID_LSN, POSTGRES_EPOCH, Lsn, kept_in_years
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, RollbackPrepared, StreamCommit
from subscriber.transaction.blocks import BlockReassembly
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, SpooledRecords, StreamedPart, Transaction, end_of
from subscriber.transaction.reassembly import RECORD_OVERHEAD, Reassembly, SpoolDiscard, SpoolTruncate
from subscriber.transaction.unfinished import UnfinishedTransaction
from subscriber.waits import moved, unwatched

__all__ = ["Receiver"]

_log = logging.getLogger(__name__)

_READ_RECORDS = 1000
_BEHIND_SECONDS = 1.0
"""How long reading waits for parallel apply of the open transaction, before records that it has not applied yet are spilled."""
_ORDERS = (SpoolTruncate, SpoolDiscard)
_EPOCH_SECONDS = POSTGRES_EPOCH.timestamp()


class _Watched:
    """The spilled records of a transaction. Reading them counts as progress for the watchdog."""

    def __init__(self, part: SpooledRecords) -> None:
        self._part = part

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        async for chunk in self._part.chunks(start):
            moved()
            yield chunk
            del chunk

    async def discard(self) -> None:
        await self._part.discard()


class Receiver(EventQueue):
    """Reads one replication stream. Each connection has its own instance.

    Args:
        stream: to read.
        tracker: of the positions.
        spool: for large transactions. A stream of events needs none.
        settings: of the process.
        blocks: whether streamed transactions are given in blocks, before their end.

    Attributes:
        tracker: the positions of the stream.
        settings: of the process.
        sent_at: when the publisher sent the last message, by its clock; seconds since 1970, or None.
        received_at: when that message arrived.
        times: gets the times of receiving.
    """

    def __init__(
        self,
        stream: ReplicationStream | EventStream,
        tracker: FlushTracker,
        spool: Spool | None,
        settings: Settings,
        *,
        blocks: bool = False,
    ) -> None:
        self._stream = stream
        self.tracker = tracker
        self._given_spool = spool
        self.settings = settings
        self._plausible_end = PlausibleEnd(stream, tracker)
        super().__init__(max(settings.logical_decoding_work_mem // 2, 1))
        self._reassembly = BlockReassembly() if blocks else Reassembly()
        self._activity = asyncio.Event()
        self._feedback = Feedback(stream, tracker, settings)
        self._asked = False
        self._news = False
        self._lsn_awaited = 0
        self._task: asyncio.Task[None] | None = None
        self._spool_turn = asyncio.Lock()
        self._watcher: Callable[[], None] | None = None
        self._applied = asyncio.Event()
        self._stalled: tuple[int, int | None] | None = None
        self._left_out = 0
        self.sent_at: float | None = None
        self.received_at: float | None = None
        self.times = ApplyTimes()

    @property
    def reported(self) -> Lsn | None:
        """The ``flush`` position in the last status that was sent; None before the first."""
        return self._feedback.reported

    @property
    def reported_at(self) -> float | None:
        """When it was sent; seconds since 1970."""
        return self._feedback.reported_at

    @property
    def _frames(self) -> ReplicationStream:
        assert not isinstance(self._stream, EventStream)  # whose events are whole and were checked
        return self._stream

    @property
    def _spool(self) -> Spool:
        assert self._given_spool is not None  # nothing of a stream of events is spilled
        return self._given_spool

    async def start(self) -> None:
        """Start reading and reporting."""
        self._feedback.begin_reading()
        # what is received does not show that anything is applied
        self._task = asyncio.create_task(self._run(), name="receiver", context=unwatched())
        self._task.add_done_callback(lambda _: self._activity.set())

    async def close(self) -> None:
        """Stop reading and delete the spooled records. The stream stays open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.exception()  # reported to the caller of wait(); retrieved, so that asyncio does not log it
        for order in self._reassembly.reset():
            async with self._spool_turn:
                await self._spool.discard(order.spool_id)
        while self._queue:
            event, _ = self._queue.popleft()
            if isinstance(event, PreparedTransaction):
                event = event.transaction
            if isinstance(event, Transaction):
                await event.discard()

    # --- for the apply worker

    def wake(self) -> None:
        """End a :meth:`wait` early."""
        self._activity.set()

    async def wait(self, timeout: float) -> None:
        """Return when there is an event, when a keepalive was received, when woken, or after ``timeout`` seconds.

        Raises:
            PublisherUnavailable, PublisherError, DataLossError, ProtocolError, SpoolError: reading failed, and all earlier events were
                taken.
        """
        if not self._queue:
            await self.rest(timeout)
        self._activity.clear()

    async def rest(self, timeout: float) -> None:
        """Return when a keepalive or an event was received, when woken, or after ``timeout`` seconds, even if an event waits.

        Raises:
            PublisherUnavailable: the stream has ended. It is made again at once, and brings again what was not taken.
            SubscriberError: as :meth:`wait`.
        """
        try:
            self.check()
        except PublisherUnavailable:
            raise
        except SubscriberError:
            if not self._queue:
                raise
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._activity.wait()
        self._activity.clear()

    def check(self) -> None:
        """Raise the error that has ended reading, if there is one, whatever was not taken yet. See :meth:`wait`."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def wait_received(self, lsn: Lsn, timeout: float) -> bool:
        """Wait until everything up to an LSN was received. False: not within ``timeout`` seconds, or there is no memory for it.

        Raises:
            SubscriberError: see :meth:`wait`.
        """
        self._lsn_awaited += 1
        try:
            async with asyncio.timeout(timeout):
                while self.tracker.received < lsn:
                    if self._held >= self._budget:
                        return False
                    self.check()
                    self._activity.clear()
                    await self._activity.wait()
        except TimeoutError:
            return False
        finally:
            self._lsn_awaited -= 1
        return True

    def take_left_out(self) -> int:
        """Return how many changes were left out since the last call, because the publisher had rolled them back."""
        count, self._left_out = self._left_out, 0
        return count

    @property
    def reply_requested(self) -> bool:
        """Whether the server has asked for a reply since the last call. It may be waiting for our flush position to shut down."""
        asked, self._asked = self._asked, False
        return asked

    def report(self) -> None:
        """Send the status soon, if it changed."""
        self._feedback.wake()

    async def report_now(self) -> None:
        """Send the status now, even if it did not change."""
        await self._feedback.send()

    # --- transactions before their end

    @property
    def streams(self) -> Collection[UnfinishedTransaction]:
        """See :attr:`Reassembly.streams`."""
        return self._reassembly.streams

    def watch(self, watcher: Callable[[], None] | None) -> None:
        """Call ``watcher`` whenever something was received; None ends that."""
        self._watcher = watcher

    async def read(self, stream: UnfinishedTransaction, start: int, stop: int) -> Sequence[bytes]:
        """Read records of an unfinished transaction from number ``start`` to before ``stop``, from memory or from the spool.

        They are valid only if :meth:`UnfinishedTransaction.take_cut` returns None afterwards. Empty if the transaction has ended.

        Raises:
            SpoolError: they cannot be read.
        """
        async with self._spool_turn:
            if stream.finished or stream.dropped:
                return ()
            if start >= stream.spilled:
                return stream.held(start, min(stop, start + _READ_RECORDS))
            return (await self._spool.read(stream.spool_id, start))[: stop - start]

    def note_applied(self, stream: UnfinishedTransaction, count: int | None) -> None:
        """Note that parallel apply has applied the first ``count`` records. None: the attempt has ended."""
        stream.applied = count
        self._applied.set()

    def is_large(self, records: Sequence[bytes]) -> bool:
        """Whether a record is larger than the memory limit for transactions."""
        return any(len(record) > self._budget for record in records)

    # --- receive

    async def _run(self) -> None:
        tasks = {asyncio.create_task(self._receive(), name="receive"), asyncio.create_task(self._feedback.run(), name="feedback")}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _receive(self) -> None:
        stream, feedback, clock = self._stream, self._feedback, asyncio.get_running_loop().time
        # asked for once: the answer takes as long as a small read
        receive, events = (None, stream.events) if isinstance(stream, EventStream) else (stream.receive, None)
        while True:
            feedback.begin_reading()
            began = clock()
            if receive is not None:
                frames = list(await receive())
                feedback.reading, read = False, clock()
                await self._take_frames(frames)
                frames.clear()
            else:
                assert events is not None
                given = await events()
                feedback.reading, read = False, clock()
                self._news = True
                self._take_events(given)
                del given
            self.times.phases["receive"] += read - began
            self.times.phases["decode"] += (decoded := clock()) - read
            self._note_arrival(read, decoded)
            # the caller can do nothing with a part of a transaction
            if self._news or self._queue or self._lsn_awaited:
                self._news = False
                self._activity.set()
            if self._watcher is not None:
                self._watcher()
            if self._queue:
                # apply first, and look for more then
                feedback.begin_reading()
                await asyncio.sleep(0)
                feedback.reading = False
            while self._reassembly.memory > self._budget:
                await self._spill()
            if self._held >= self._budget:
                self._room.clear()
                await self._room.wait()

    async def _spill(self) -> None:
        followed = self._reassembly.open
        if followed is not None and followed.applied is not None and followed.applied <= followed.spilled:
            # the target is slower than the publisher; an attempt that waits for a lock is waited for only once
            self._applied.clear()
            if self._stalled != (followed.spool_id, followed.applied):
                try:
                    async with asyncio.timeout(_BEHIND_SECONDS):
                        await self._applied.wait()
                except TimeoutError:
                    self._stalled = followed.spool_id, followed.applied
        async with self._spool_turn:
            if (spill := self._reassembly.spill()) is not None:
                await self._spool.append(*spill)

    def _take_events(self, given: ReceivedEvents) -> None:
        queue, total = self._queue, 0
        for event in given.events:
            if type(event) is Transaction and not event.spilled:
                held = memory_of(event)
            elif isinstance(event, Transaction | PreparedTransaction):
                held = RECORD_OVERHEAD + self._attach(event.transaction if isinstance(event, PreparedTransaction) else event)
            else:
                held = RECORD_OVERHEAD
            total += held
            queue.append((event, held))
        self._held += total
        if given.events:
            # their order was checked when they were received
            self.tracker.pend(end_of(given.events[-1]))
        self.tracker.receive(given.end)
        if given.moment is not None:
            self._note_moment(given.moment)
        self._feedback.wake()

    def _note_moment(self, sent: int) -> None:
        self.sent_at, self.received_at = kept_in_years(sent) / 1_000_000 + _EPOCH_SECONDS, time.time()

    async def _take_frames(self, frames: list[bytes]) -> None:
        reassembly, plausible = self._reassembly, self._plausible_end
        place, count = 0, len(frames)
        frame: XLogData | PrimaryKeepalive | None = None
        while place < count:
            whole, place = reassembly.feed_frames(frames, place)
            for transaction, lsn in self._take_whole(whole):
                if transaction.end_lsn > plausible.lsn:
                    await plausible.check(transaction.end_lsn)
                self.tracker.pend(transaction.end_lsn, in_order=True)
                self._held += (held := memory_of(transaction))
                self._queue.append((transaction, held))
                if lsn > plausible.lsn:
                    await plausible.check(lsn)
                self.tracker.receive(lsn)
            if place == count:
                # rows end nothing, and count as received with the last frame
                frame = header(frames[-1])
                break
            frame = decode_frame(frames[place])
            place += 1
            if isinstance(frame, XLogData):
                outputs = reassembly.feed(frame.payload)
                if outputs:
                    for output in outputs:
                        if isinstance(output, _ORDERS):
                            await self._order(output)
                        else:
                            await self._put(output)
                    # after the events, so that the end of an event is pending before it counts as received
                    await self._heard(max(frame.start_lsn, frame.end_lsn))
            else:
                self._news = True
                await self._heard(frame.end_lsn)
                if frame.reply_requested:
                    self._asked = True
                # else after what is pending: that status has this position too, and to send it would delay the changes
                if frame.reply_requested or self.tracker.idle:
                    self._feedback.wake(reply=frame.reply_requested)
        if frame is not None:
            if isinstance(frame, XLogData):
                await self._heard(max(frame.start_lsn, frame.end_lsn))
            self._note_moment(frame.send_time)

    def _take_whole(self, whole: Sequence[tuple[Transaction, Lsn]]) -> Sequence[tuple[Transaction, Lsn]]:
        """Queue transactions whose LSNs are plausible and in order. Return those from the first other one on.

        There may be a hundred thousand of them in a second, each with one row.
        """
        tracker, limit, add = self.tracker, self._plausible_end.lsn, self._queue.append
        heard, total, end_lsn = tracker.heard, 0, INVALID_LSN
        done = 0
        for transaction, lsn in whole:
            if not heard < transaction.end_lsn <= limit or lsn > limit:
                break
            end_lsn = transaction.end_lsn
            heard = lsn if lsn > end_lsn else end_lsn
            held = memory_of(transaction)
            total += held
            add((transaction, held))
            done += 1
        if done:
            tracker.pend(end_lsn, in_order=True)
            tracker.receive(heard)
            self._held += total
        return whole[done:]

    async def _order(self, order: SpoolTruncate | SpoolDiscard) -> None:
        async with self._spool_turn:
            if isinstance(order, SpoolTruncate):
                await self._spool.truncate(order.spool_id, order.count)
            else:
                await self._spool.discard(order.spool_id)

    async def _heard(self, lsn: Lsn) -> None:
        if lsn > self._plausible_end.lsn:
            await self._plausible_end.check(lsn)
        self.tracker.receive(lsn)

    async def _pend(self, end_lsn: Lsn, *, in_order: bool) -> None:
        if end_lsn > self._plausible_end.lsn:
            await self._plausible_end.check(end_lsn)
        self.tracker.pend(end_lsn, in_order=in_order)

    async def _judge(self, transaction: Transaction) -> None:
        """Leave out what the publisher rolled back. If that is not certain, blocks that were given are taken back."""
        try:
            await leave_out_rolled_back(transaction, self._frames, self._spool, self._spool_turn)
        except UndecidedTransaction:
            if isinstance(self._reassembly, BlockReassembly):
                self._queue += [(part, 0) for part in self._reassembly.take_back(transaction.xid)]
            raise
        self._left_out += transaction.left_out

    async def _put(self, event: Event) -> None:
        held = RECORD_OVERHEAD
        if isinstance(event, Transaction | PreparedTransaction):
            await self._judge(event.transaction if isinstance(event, PreparedTransaction) else event)
        match event:
            case StreamedPart():
                if event.end_lsn:
                    await self._pend(event.end_lsn, in_order=isinstance(event.message, StreamCommit))
                held += self._attach(event)
            case Transaction():
                await self._pend(event.end_lsn, in_order=True)
                held += self._attach(event)
            case PreparedTransaction(transaction):
                # a late prepare ends below the received position (see FlushTracker)
                await self._pend(transaction.end_lsn, in_order=False)
                held += self._attach(transaction)
            case CommitPrepared(end_lsn=end_lsn) | RollbackPrepared(rollback_end_lsn=end_lsn):
                await self._pend(end_lsn, in_order=True)
            case LogicalMessage(content=content):
                held += len(content)
        self._held += held
        self._queue.append((event, held))

    def _attach(self, transaction: Transaction) -> int:
        records = transaction.records
        if not transaction.spilled:
            return transaction.size + RECORD_OVERHEAD * len(records)
        transaction.spool = _Watched(transaction.spool or self._spool.reader(transaction.spool_id))
        # spilled records are read back one by one; the largest counts, so that little is received beside it
        return max(sum(map(len, records)), transaction.largest) + RECORD_OVERHEAD * len(records)
