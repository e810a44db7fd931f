"""Replication streams around a recording: one writes it, one reads it."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.interfaces import ReplicationStream
from subscriber.protocol.frames import decode_status_update
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.recording.file import ANSWERED, RECEIVED, SESSION, RecordedSession, Recorder, RecordingRecord

__all__ = ["RecordedStream", "ReplayedStream", "sessions"]

_ANY_LSN: Final = Lsn(2**63)
_AT_ONCE: Final = 1024 * 1024


class RecordedStream:
    """A replication stream that stores what it receives and sends. Before a status update moves *flush*, the recording is on disk up to it.

    Args:
        stream: the stream. This object owns it.
        recorder: stores it. It belongs to the caller.
    """

    def __init__(self, stream: ReplicationStream, recorder: Recorder) -> None:
        self._stream = stream
        self._recorder = recorder
        self._flush = INVALID_LSN
        self._sending = asyncio.Lock()

    async def receive(self) -> Sequence[bytes]:
        """See :meth:`subscriber.interfaces.ReplicationStream.receive`."""
        frames = await self._stream.receive()
        self._recorder.received(frames)
        return frames

    async def send(self, message: bytes) -> None:
        """See :meth:`subscriber.interfaces.ReplicationStream.send`."""
        async with self._sending:
            self._recorder.sent(message)
            flush = decode_status_update(message).flush
            if flush > self._flush:
                await asyncio.to_thread(self._recorder.sync)
                self._flush = flush
            await self._stream.send(message)

    async def wal_end(self, least: Lsn) -> Lsn:
        """See :meth:`subscriber.interfaces.ReplicationStream.wal_end`."""
        return await self._stream.wal_end(least)

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        """See :meth:`subscriber.interfaces.ReplicationStream.rolled_back`."""
        found = await self._stream.rolled_back(xid, subxids)
        self._recorder.answered(xid, found)
        return found

    async def close(self) -> None:
        """See :meth:`subscriber.interfaces.ReplicationStream.close`."""
        await self._stream.close()


class ReplayedStream:
    """A replication stream that comes from a recording. It discards what is sent.

    Args:
        records: the received messages of one session.
        speed: as a multiple of the recorded speed. None: as fast as possible.

    Attributes:
        ended: set once all messages were given out, and the receiver has processed them.
        failure: the error that ended the recording, if any. It is not raised by ``receive``, so that everything before it is applied.
        unanswered: a streamed transaction for which there is no answer of the publisher. The session ends there.
    """

    def __init__(self, records: Iterator[RecordingRecord], speed: float | None) -> None:
        self._records = records
        self._speed = speed
        self._waiting: RecordingRecord | None = None
        self._clock: tuple[float, float] | None = None
        self.ended = asyncio.Event()
        self.failure: ProtocolError | None = None
        self.unanswered: int | None = None
        # messages that were read on the way to an answer
        self._ahead: deque[RecordingRecord] = deque()
        self._answers: dict[int, Collection[int]] = {}

    async def receive(self) -> Sequence[bytes]:
        """Return the messages that were received by now, according to the speed. After the last one it never returns."""
        await asyncio.sleep(0)
        frames: list[bytes] = []
        size = 0
        while size < _AT_ONCE and (record := self._next()) is not None:
            wait = self._wait(record)
            if wait > 0:
                self._waiting = record
                if frames:
                    break
                await asyncio.sleep(wait)
                continue
            frames.append(record.content)
            size += len(record.content)
        if not frames:
            self.ended.set()
            await asyncio.get_running_loop().create_future()
        return frames

    def _next(self) -> RecordingRecord | None:
        record, self._waiting = self._waiting, None
        if record is None and self._ahead:
            record = self._ahead.popleft()
        return self._read() if record is None else record

    def _read(self) -> RecordingRecord | None:
        """Take the answers that come next. Return the message after them; None at the end."""
        if self.failure is not None:
            return None
        try:
            while (record := next(self._records, None)) is not None and record.kind == ANSWERED:
                xid, rolled_back = _answer(record)
                self._answers[xid] = rolled_back
        except ProtocolError as error:
            self.failure, record = error, None
        return record

    def _wait(self, record: RecordingRecord) -> float:
        if self._speed is None:
            return 0
        now = asyncio.get_running_loop().time()
        if self._clock is None:
            self._clock = now, record.seconds
        began, first = self._clock
        return began + (record.seconds - first) / self._speed - now

    async def send(self, message: bytes) -> None:
        """Discard the message. A recording has no receiver."""

    async def wal_end(self, least: Lsn) -> Lsn:
        """Every LSN of a recording is accepted."""
        return _ANY_LSN

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        """What the publisher answered when this was recorded."""
        while xid not in self._answers:
            record = self._read()
            if record is not None:
                self._ahead.append(record)
            elif xid not in self._answers:
                # the program that recorded was ended before it got the answer, or it was received again in the next session
                self.unanswered = xid
                self.ended.set()
                await asyncio.get_running_loop().create_future()
        return self._answers.pop(xid)

    async def close(self) -> None:
        """Nothing is open."""


def _answer(record: RecordingRecord) -> tuple[int, Collection[int]]:
    try:
        xid, rolled_back = json.loads(record.content)
        return int(xid), frozenset(map(int, rolled_back))
    except (ValueError, TypeError, RecursionError):
        raise ProtocolError(f"{record.place} of the recording is damaged: it is not an answer about a transaction") from None


def sessions(records: Iterator[RecordingRecord]) -> Iterator[tuple[RecordedSession, Iterator[RecordingRecord]]]:
    """Divide the records of a recording into sessions, each with its messages and answers. Read each to its end before the next.

    Raises:
        ProtocolError: a record is damaged.
    """
    record = next(records, None)
    following: list[RecordingRecord | None] = []

    def received() -> Iterator[RecordingRecord]:
        for one in records:
            if one.kind == SESSION:
                following.append(one)
                return
            if one.kind in {RECEIVED, ANSWERED}:
                yield one
        following.append(None)

    while record is not None:
        if record.kind != SESSION:
            raise ProtocolError(f"{record.place} of the recording is of no session")
        try:
            session = RecordedSession.from_json(record.content)
        except ValueError:
            raise ProtocolError(f"{record.place} of the recording is damaged: it does not describe a session") from None
        following.clear()
        yield session, received()
        record = following[0] if following else None
