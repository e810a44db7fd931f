"""Write the events of a receiver to a relay log.

A transaction is written as a publisher could have sent it: between BEGIN and COMMIT; or, if it was streamed, as a single block before
STREAM COMMIT. Small transactions that wait are written together, and one wait for the disk serves them all.

While nothing is pending, the end of the relay log follows what was received, including keepalives, as the position of a target does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from struct import Struct
from typing import Final

from subscriber.apply.receiver import Receiver
from subscriber.apply.spool_file import blocks
from subscriber.errors import ProtocolError
from subscriber.interfaces import ApplyStatistics
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import INVALID_LSN, POSTGRES_EPOCH, Lsn
from subscriber.protocol.messages import (
    BeginPrepare,
    CommitPrepared,
    LogicalMessage,
    Prepare,
    RollbackPrepared,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
)
from subscriber.recording.relay_log import RelayLog
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction

__all__ = ["RelayTracker", "RelayWriter"]

_log = logging.getLogger(__name__)

_TICK: Final = 1.0
_FIRST_PAUSE: Final = 0.05
_AT_ONCE: Final = 1024 * 1024
_EPOCH_SECONDS: Final = POSTGRES_EPOCH.timestamp()
_BEGIN: Final = Struct(">cQqI").pack
_COMMIT: Final = Struct(">cBQQq").pack


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
            transaction = event.transaction if isinstance(event, PreparedTransaction) else event
            if isinstance(transaction, Transaction) and _is_large(transaction):
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
            await changed.wait()
        if self.paused:
            self.paused = False
            _log.info("the relay log has room again: receiving continues")

    async def _write_whole(self) -> bool:
        """Write the small transactions that wait and are not streamed: most are. False: there is none."""
        transactions, held = self._receiver.pop_transactions(_AT_ONCE)
        if not transactions:
            return False
        payloads: list[bytes] = []
        for each in transactions:
            payloads.append(_BEGIN(b"B", each.final_lsn, each.commit_time, each.xid))
            if each.origin is not None:
                payloads.append(encode(each.origin))
            payloads += each.records
            payloads.append(_COMMIT(b"C", 0, each.final_lsn, each.end_lsn, each.commit_time))
        self._end = transactions[-1].end_lsn
        try:
            await self._append(payloads)
        finally:
            self._receiver.release(held)
        return True

    async def _write_small(self) -> None:
        """Write the events that wait, up to the first large transaction."""
        receiver = self._receiver
        payloads: list[bytes] = []
        size = held = 0
        late = False
        while size < _AT_ONCE or late:
            event = await self._end_of_late() if late else receiver.peek()
            if event is None:
                break
            transaction = event.transaction if isinstance(event, PreparedTransaction) else event
            if isinstance(transaction, Transaction):
                if payloads and _is_large(transaction):
                    break
                late = self._is_late(event)
                size += transaction.size
            held += receiver.pop()[1]
            first, last = _around(event)
            payloads += first
            if isinstance(transaction, Transaction):
                payloads += transaction.records
            payloads += last
            self._pass(event)
            late = late and isinstance(event, PreparedTransaction)
        try:
            if payloads:
                await self._append(payloads)
        finally:
            receiver.release(held)

    async def _write_large(self, event: Event, held: int) -> None:
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        assert isinstance(transaction, Transaction)  # nothing else is large
        payloads, last = _around(event)
        log, moment, size = self._relay_log, self._moment, 0
        try:
            async for chunk in transaction.chunks():
                for block in blocks(chunk):
                    payloads += block
                    size += sum(map(len, block))
                    if size >= _AT_ONCE:
                        await log.append(payloads, moment, None)
                        payloads, size = [], 0
            payloads += last
            if self._is_late(event):
                await log.append(payloads, moment, None)
                event = await self._end_of_late()
                held += self._receiver.pop()[1]
                payloads = _around(event)[0]
            self._pass(event)
            await self._append(payloads)
            await transaction.discard()
        finally:
            self._receiver.release(held)

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
        match event:
            case PreparedTransaction(transaction):
                self._end = max(self._end, transaction.end_lsn)
            case RollbackPrepared(rollback_end_lsn=end):
                self._end = end
            case Transaction(end_lsn=end) | CommitPrepared(end_lsn=end):
                self._end = end
            case LogicalMessage():
                pass

    async def _append(self, payloads: list[bytes]) -> None:
        await self._relay_log.append(payloads, self._moment, self._end)
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
        await self._append([])
        return _TICK


def _is_large(transaction: Transaction) -> bool:
    return transaction.spilled > 0 or transaction.size >= _AT_ONCE


def _around(event: Event) -> tuple[list[bytes], list[bytes]]:
    """The messages before and after the records of an event."""
    match event:
        case CommitPrepared() | RollbackPrepared():
            return [encode(event)], []
        case LogicalMessage():
            return [], []
        case PreparedTransaction(transaction, gid):
            lsn, end, moment, xid = transaction.final_lsn, transaction.end_lsn, transaction.commit_time, transaction.xid
            if transaction.prefixed:
                return _stream_start(transaction), [encode(StreamStop()), encode(StreamPrepare(0, lsn, end, moment, xid, gid))]
            begin = encode(BeginPrepare(lsn, end, moment, xid, gid))
            return [begin, *_origin(transaction)], [encode(Prepare(0, lsn, end, moment, xid, gid))]
        case Transaction():
            lsn, end, moment, xid = event.final_lsn, event.end_lsn, event.commit_time, event.xid
            if event.prefixed:
                return _stream_start(event), [encode(StreamStop()), encode(StreamCommit(xid, 0, lsn, end, moment))]
            return [_BEGIN(b"B", lsn, moment, xid), *_origin(event)], [_COMMIT(b"C", 0, lsn, end, moment)]


def _stream_start(transaction: Transaction) -> list[bytes]:
    return [encode(StreamStart(transaction.xid, first_segment=True)), *_origin(transaction)]


def _origin(transaction: Transaction) -> list[bytes]:
    return [] if transaction.origin is None else [encode(transaction.origin)]
