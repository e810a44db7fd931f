"""Relay logs for tests: what a publisher sends, and what is read again."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Collection, Sequence
from pathlib import Path

from subscriber import Settings
from subscriber.apply.receiving.receiver import Receiver
from subscriber.errors import SubscriberError
from subscriber.interfaces import ApplyStatistics
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, decode_status_update, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Insert,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    TupleData,
)
from subscriber.recording.file import RecordedSession
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_stream import RelayStream
from subscriber.recording.relay_writer import RelayTracker, RelayWriter
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction
from tests.unit.apply.memory_spool import MemorySpool

KEY = "target 1 subscription 2"
START = Lsn(1000)
SMALL = 64 * 1024


def session(start: Lsn = START, timeline: int = 1) -> RecordedSession:
    return RecordedSession(server_version=180000, system_identifier="7", timeline=timeline, slot_name="s", start_lsn=start, options={})


class ScriptedStream:
    """A publisher that sends these messages, and then nothing."""

    def __init__(self, frames: Sequence[bytes], rolled_back: Collection[int] = ()) -> None:
        self._frames = list(frames)
        self._rolled_back = rolled_back
        self.statuses: list[StandbyStatusUpdate] = []
        self.failure: SubscriberError | None = None

    async def receive(self) -> Sequence[bytes]:
        await asyncio.sleep(0)
        if not self._frames:
            if self.failure is not None:
                raise self.failure
            await asyncio.get_running_loop().create_future()
        count = random.Random(len(self._frames)).randint(1, 30)
        found, self._frames = self._frames[:count], self._frames[count:]
        return found

    async def send(self, message: bytes) -> None:
        self.statuses.append(decode_status_update(message))

    async def wal_end(self, least: Lsn) -> Lsn:
        return Lsn(2**62)

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        return [each for each in subxids if each in self._rolled_back]

    async def close(self) -> None: ...


def frame(*messages: Message) -> list[bytes]:
    return [encode_frame(XLogData(INVALID_LSN, INVALID_LSN, 0, encode(message))) for message in messages]


def row(oid: int, value: bytes, xid: int | None = None) -> Insert:
    return Insert(oid, TupleData(b"t", [value]), xid)


def relation(oid: int, name: str, xid: int | None = None) -> Relation:
    return Relation(oid, "public", name, "d", (Column("v", 25, -1, key=True),), xid)


class History:
    """Random transactions of all forms. Each table is described before its first row of the session, and sometimes again."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._lsn = int(START)
        self._described = set[int]()
        self._xid = 10
        self._late: list[tuple[int, Lsn, Lsn]] = []
        self._prepared: list[tuple[int, Lsn]] = []
        self.frames: list[bytes] = []
        for _ in range(60):
            self._random.choice(
                [self._whole, self._whole, self._stream, self._prepare, self._end_prepared, self._keepalive, self._two_late]
            )()

    def _next(self) -> tuple[Lsn, Lsn]:
        self._lsn += self._random.randint(10, 100)
        end = self._lsn + 8
        lsn, self._lsn = Lsn(self._lsn), end
        return lsn, Lsn(end)

    def _rows(self, xid: int | None = None) -> list[Message]:
        found: list[Message] = []
        large = self._random.random() < 0.1
        for number in range(40 if large else self._random.randint(0, 4)):
            oid = self._random.randint(1, 6)
            if oid not in self._described or self._random.random() < 0.1:
                self._described.add(oid)
                found.append(relation(oid, f"t{oid}_{self._random.randint(1, 3)}", xid))
            found.append(row(oid, f"{self._lsn} {number}".encode() + b"x" * (40_000 if large else 10), xid))
        return found

    def _new_xid(self) -> int:
        self._xid += 1
        return self._xid

    def _whole(self) -> None:
        (lsn, end), xid = self._next(), self._new_xid()
        origin = [Origin(Lsn(5), "elsewhere")] if self._random.random() < 0.2 else []
        self.frames += frame(Begin(lsn, 1, xid), *origin, *self._rows(), Commit(0, lsn, end, 1))

    def _stream(self) -> None:
        (lsn, end), xid = self._next(), self._new_xid()
        rows = self._rows(xid)
        if self._random.random() < 0.5:
            self.frames += frame(StreamStart(xid, True), *rows, StreamStop(), StreamCommit(xid, 0, lsn, end, 1))
        else:
            self.frames += frame(StreamStart(xid, True), *rows, StreamStop(), StreamPrepare(0, lsn, end, 1, xid, f"g{xid}"))
            self._prepared.append((xid, end))

    def _prepare(self) -> None:
        (lsn, end), xid = self._next(), self._new_xid()
        self.frames += frame(BeginPrepare(lsn, end, 1, xid, f"g{xid}"), *self._rows(), Prepare(0, lsn, end, 1, xid, f"g{xid}"))
        self._prepared.append((xid, end))

    def _end_prepared(self) -> None:
        if self._prepared:
            (xid, prepared), (lsn, end) = self._prepared.pop(), self._next()
            if self._random.random() < 0.5:
                self.frames += frame(CommitPrepared(0, lsn, end, 1, xid, f"g{xid}"))
            else:
                self.frames += frame(RollbackPrepared(0, prepared, end, 1, 1, xid, f"g{xid}"))

    def _two_late(self) -> None:
        """A transaction that was prepared before two-phase was enabled is sent with its COMMIT PREPARED, with its old LSN."""
        xid = self._new_xid()
        old, (lsn, end) = Lsn(START + xid), self._next()
        begin = BeginPrepare(old, Lsn(old + 1), 1, xid, f"g{xid}")
        self.frames += frame(begin, *self._rows(), Prepare(0, old, Lsn(old + 1), 1, xid, f"g{xid}"))
        self.frames += frame(CommitPrepared(0, lsn, end, 1, xid, f"g{xid}"))

    def _keepalive(self) -> None:
        self._lsn += 50
        self.frames.append(encode_frame(PrimaryKeepalive(Lsn(self._lsn), 1, False)))

    @property
    def end(self) -> Lsn:
        return Lsn(self._lsn)


async def described(event: Event) -> object:
    """An event, as it can be compared."""
    transaction = event.transaction if isinstance(event, PreparedTransaction) else event
    if not isinstance(transaction, Transaction):
        return event
    records = [record async for chunk in transaction.chunks() for record in chunk]
    return type(event).__name__, repr(transaction), transaction.origin, transaction.prefixed, records


async def write(
    log: RelayLog, frames: Sequence[bytes] | ScriptedStream, end: Lsn, *, memory: int = SMALL, rolled_back: Collection[int] = ()
) -> None:
    stream = frames if isinstance(frames, ScriptedStream) else ScriptedStream(frames, rolled_back)
    tracker = RelayTracker(log.end, INVALID_LSN)
    receiver = Receiver(stream, tracker, MemorySpool(), Settings(logical_decoding_work_mem=memory))
    await receiver.start()
    writing = asyncio.create_task(RelayWriter(receiver, log, ApplyStatistics(), lambda _: True).run())
    try:
        async with asyncio.timeout(20):
            while log.end < end:
                if writing.done():
                    writing.result()
                await asyncio.sleep(0.001)
        assert all(status.flush <= log.end and status.apply == INVALID_LSN for status in stream.statuses)
    finally:
        writing.cancel()
        await asyncio.wait({writing})
        await receiver.close()


class KeptStream(RelayStream):
    """It removes nothing."""

    async def send(self, message: bytes) -> None: ...


async def read(log: RelayLog, position: Lsn, *, memory: int = SMALL, end: Lsn | None = None) -> list[object]:
    """The events after a position. Relations that are not described there come in a transaction that the target skips."""
    stream = KeptStream(log, position, lambda _: None)
    tracker = FlushTracker(position)
    receiver = Receiver(stream, tracker, None, Settings(logical_decoding_work_mem=memory, wal_receiver_timeout=0))
    await receiver.start()
    found: list[object] = []
    known = set[int]()
    try:
        async with asyncio.timeout(20):
            while tracker.received < (end or log.end) or receiver.peek() is not None:
                if receiver.peek() is None:
                    await receiver.wait(1)
                    continue
                event, held = receiver.pop()
                transaction = event.transaction if isinstance(event, PreparedTransaction) else event
                if isinstance(transaction, Transaction):
                    start = 5 if transaction.prefixed else 1
                    async for chunk in transaction.chunks():
                        for record in chunk:
                            oid = int.from_bytes(record[start : start + 4])
                            if record[0] == ord("R"):
                                known.add(oid)
                            else:
                                assert oid in known
                if found or not (isinstance(event, Transaction) and event.end_lsn <= position):
                    found.append(await described(event))
                receiver.release(held)
    finally:
        await receiver.close()
    return found


async def direct(frames: Sequence[bytes], end: Lsn) -> list[Event]:
    """The events without a relay log."""
    tracker = FlushTracker(START)
    receiver = Receiver(ScriptedStream(frames), tracker, MemorySpool(), Settings())
    await receiver.start()
    found = []
    async with asyncio.timeout(20):
        while tracker.received < end or receiver.peek() is not None:
            if receiver.peek() is None:
                await receiver.wait(1)
            else:
                event, held = receiver.pop()
                receiver.release(held)
                found.append(event)
    await receiver.close()
    return found


async def made(directory: Path, size: int = 1024**2) -> RelayLog:
    log = RelayLog(str(directory / "relay"), size, KEY)
    await log.open()
    if not log.segments:
        await log.begin(session())
    return log


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "relay").rglob("*.relay"))


async def several(directory: Path) -> RelayLog:
    """A relay log of some segments."""
    log = await made(directory, 8 * 20_000)
    log.limit = 2**40
    history = History(3)
    await write(log, history.frames, history.end)
    assert len(log.segments) > 3
    return log


def group(lsn: int, value: bytes = b"v") -> list[bytes]:
    messages: list[Message] = [Begin(Lsn(lsn), 1, 9), relation(1, "t"), row(1, value), Commit(0, Lsn(lsn), Lsn(lsn + 8), 1)]
    return [encode(message) for message in messages]


def failing(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "broken")
