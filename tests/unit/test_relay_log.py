"""The relay log on its own: what is written is read again, after any position, whatever was torn, damaged or taken away."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

import pytest

from subscriber import Settings
from subscriber.apply.receiver import Receiver
from subscriber.apply.skip import Skipping
from subscriber.errors import ConfigurationError, DataLossError, ProtocolError, SpoolError
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
from subscriber.recording import relay_log, relay_segment
from subscriber.recording.file import RecordedSession, read_recording
from subscriber.recording.relay_directory import discard_relay_log, probe_relay_log
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_stream import RelayStream, is_applied
from subscriber.recording.relay_writer import RelayTracker, RelayWriter
from subscriber.sinks.memory.opened_memory_sink import OpenedMemorySink
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction

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

    async def receive(self) -> Sequence[bytes]:
        await asyncio.sleep(0)
        if not self._frames:
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


def end_of(event: Event) -> Lsn:
    match event:
        case PreparedTransaction(transaction):
            return transaction.end_lsn
        case RollbackPrepared(rollback_end_lsn=end):
            return end
        case Transaction(end_lsn=end) | CommitPrepared(end_lsn=end):
            return end
    raise AssertionError(event)


class MemorySpool:
    """For the side that receives."""

    def __init__(self) -> None:
        self._records: dict[int, list[bytes]] = {}

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        self._records.setdefault(spool_id, []).extend(records)

    async def truncate(self, spool_id: int, count: int) -> None:
        del self._records[spool_id][count:]

    async def discard(self, spool_id: int) -> None:
        self._records.pop(spool_id, None)

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        return self._records[spool_id][start:]

    def reader(self, spool_id: int) -> MemoryPart:
        return MemoryPart(self._records.pop(spool_id))


class MemoryPart:
    def __init__(self, records: list[bytes]) -> None:
        self._records = records

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        yield self._records[start:]

    async def discard(self) -> None: ...


async def write(log: RelayLog, frames: Sequence[bytes], end: Lsn, *, memory: int = SMALL, rolled_back: Collection[int] = ()) -> None:
    stream, tracker = ScriptedStream(frames, rolled_back), RelayTracker(log.end, INVALID_LSN)
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


async def read(log: RelayLog, position: Lsn, *, memory: int = SMALL) -> list[object]:
    """The events after a position. Relations that are not described there come in a transaction that the target skips."""
    stream = KeptStream(log, position, lambda _: None)
    tracker = FlushTracker(position)
    receiver = Receiver(stream, tracker, None, Settings(logical_decoding_work_mem=memory, wal_receiver_timeout=0))
    await receiver.start()
    found: list[object] = []
    known = set[int]()
    try:
        async with asyncio.timeout(20):
            while tracker.received < log.end or receiver.peek() is not None:
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


@pytest.mark.parametrize("seed", range(6))
async def test_is_read_after_any_position(seed: int, tmp_path: Path) -> None:
    history = History(seed)
    log = await made(tmp_path, 100 * 1024**2 if seed % 2 else 8 * 80_000)
    log.limit = 2**40
    await write(log, history.frames, history.end)
    events = await direct(history.frames, history.end)
    expected = [await described(event) for event in events]
    assert seed % 2 or len(log.segments) > 2
    cut, heard = 0, START
    for number, event in enumerate(events):
        if number % 7 == 0 or number == len(events) - 1:
            assert await read(log, heard) == expected[cut:]
        if end_of(event) > heard:
            # not a prepare that comes late: the position does not count it, and it comes again with its end
            cut, heard = number + 1, end_of(event)
    assert await read(log, log.end) == []
    last = max(map(end_of, events))
    assert is_applied(log, last)
    assert not is_applied(log, Lsn(last - 1))
    await log.close()
    # and by another process
    log = await made(tmp_path)
    assert log.end == history.end
    assert await read(log, START, memory=2**26) == expected
    # segments that the target does not need are removed, and what remains still describes its relations
    await log.acknowledge(events[-3].end_lsn if isinstance(events[-3], Transaction) else heard)
    assert await read(log, log.known) is not None
    await log.close()
    for path in segments(tmp_path):
        with path.open("rb") as file:
            assert all(record.kind in b"S<" for record in read_recording(file))
        assert path.stat().st_mode & 0o777 == 0o600


async def test_continues_after_a_torn_end(tmp_path: Path) -> None:
    """Wherever a crash ends the file, whole groups remain, and what the publisher sends again follows them."""
    first, second = History(1), History(2)
    log = await made(tmp_path)
    await write(log, first.frames[:40], Lsn(START + 1))
    before, end = segments(tmp_path)[-1].read_bytes(), log.end
    await write(
        log,
        [
            encode_frame(PrimaryKeepalive(Lsn(end + 100), 1, False)),
            *frame(Begin(Lsn(end + 200), 1, 9), relation(1, "t"), row(1, b"v"), Commit(0, Lsn(end + 200), Lsn(end + 208), 1)),
        ],
        Lsn(end + 208),
    )
    await log.close()
    path = segments(tmp_path)[-1]
    whole = path.read_bytes()
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        log = await made(tmp_path)
        assert end <= log.end < end + 208
        await log.rewind()
        assert path.stat().st_size == log.segments[-1].size <= size
        await log.close()
    # garbage after the end
    path.write_bytes(whole + b"\0" * 100)
    log = await made(tmp_path)
    assert log.end == end + 208
    assert second.frames
    await log.close()
    # a segment whose creation was interrupted
    (path.parent / f"{2:012d}.new").write_bytes(whole[:30])
    log = await made(tmp_path)
    assert (log.end, len(log.segments)) == (end + 208, 1)
    await log.close()
    # its beginning is written at once, so it was not a crash
    path.write_bytes(b"\0" * 100)
    log = RelayLog(str(tmp_path / "relay"), 2**20, KEY)
    await log.open()
    with pytest.raises(DataLossError, match="it does not begin with a session"):
        log.holds(START)
    # the slot may have everything
    await log.begin(session())
    assert log.holds(START)
    assert len(segments(tmp_path)) == 1
    await log.close()


async def several(directory: Path) -> RelayLog:
    """A relay log of some segments."""
    log = await made(directory, 8 * 20_000)
    log.limit = 2**40
    history = History(3)
    await write(log, history.frames, history.end)
    assert len(log.segments) > 3
    return log


async def test_missing_and_damaged_segments_are_named(tmp_path: Path) -> None:
    log = await several(tmp_path)
    middle, position = log.segments[1], log.segments[-1].base
    await log.close()
    data = bytearray(middle.path.read_bytes())
    data[len(data) // 2] ^= 1
    middle.path.write_bytes(data)
    log = await made(tmp_path)
    # what the target has is not read
    assert log.holds(position)
    await read(log, position)
    assert log.holds(START)
    with pytest.raises(DataLossError, match=f'segment "{middle.path}" of the relay log is damaged: .* checksum') as met:
        await read(log, START)
    assert "restore the file" in (met.value.hint or "")
    await log.close()
    middle.path.unlink()
    log = await made(tmp_path)
    assert log.holds(position)
    with pytest.raises(DataLossError, match=f'segment "{middle.path}" .* the file is missing'):
        log.holds(START)
    assert not log.holds(Lsn(START - 1))
    assert not log.holds(Lsn(log.end + 1))
    await log.close()


async def test_belongs_to_one_subscription_and_one_process(tmp_path: Path) -> None:
    log = await several(tmp_path)
    directory = log.directory
    with pytest.raises(ConfigurationError, match="another process uses the relay log"):
        await RelayLog(str(tmp_path / "relay"), 2**20, KEY).open()
    await log.close()
    other = RelayLog(str(tmp_path / "relay"), 2**20, "target 1 subscription 3")
    shutil.copytree(directory, other.directory)
    with pytest.raises(ConfigurationError, match="is of another subscription: target 1 subscription 2"):
        await other.open()
    await other.close()
    other.directory.chmod(0o777)
    with pytest.raises(SpoolError, match="is not private") as met:
        await other.open()
    assert "set relay_log to a directory" in (met.value.hint or "")
    await probe_relay_log(str(tmp_path / "relay"))
    assert set((tmp_path / "relay").iterdir()) == {directory, other.directory}
    with pytest.raises(SpoolError, match="could not create relay log"):
        await probe_relay_log("/proc/relay")
    discard_relay_log(str(tmp_path / "relay"), KEY)
    assert not directory.exists()
    discard_relay_log(str(tmp_path / "relay"), KEY)


async def test_removed_while_in_use(tmp_path: Path) -> None:
    """What would be written into a file without a name is not acknowledged."""
    log = await made(tmp_path)
    end = log.end
    shutil.rmtree(log.directory)
    with pytest.raises(DataLossError, match="was removed or replaced while it was in use"):
        await log.append((), 0, Lsn(end + 100))
    assert log.end == end
    await log.close()


async def test_what_the_publisher_rolled_back_is_not_stored(tmp_path: Path) -> None:
    """It is asked while it still knows: when the target applies, it may have forgotten, or be down."""
    log = await made(tmp_path)
    lsn, end = Lsn(2000), Lsn(2008)
    rows: list[Message] = [relation(1, "t", 50), row(1, b"kept", 50), row(1, b"gone", 51), row(1, b"kept, too", 52)]
    frames = frame(StreamStart(50, True), *rows, StreamStop(), StreamCommit(50, 0, lsn, end, 1))
    await write(log, frames, end, rolled_back=[51])
    (found,) = await read(log, START)
    assert found == (
        "Transaction",
        repr(Transaction(50, lsn, end, 1, True, [b""] * 3)),
        None,
        True,
        [encode(rows[0]), encode(rows[1]), encode(rows[3])],
    )
    await log.close()


async def test_relations_at_the_beginning_are_not_skipped_for_another_transaction() -> None:
    """The bug was that a skip LSN was cleared, or found, by the transaction that only describes relations."""
    skipping = Skipping(START, "s")
    event = Transaction(9, START, START, 0, False, [encode(relation(1, "t"))])
    sink = OpenedMemorySink.__new__(OpenedMemorySink)
    assert not await skipping.skips(event, sink)
    await skipping.passed(event, sink)
    assert skipping.waits


async def test_wrong_lsn_is_remembered(tmp_path: Path) -> None:
    log = await made(tmp_path)
    await log.condemn(DataLossError("the publisher sent a wrong LSN"))
    await log.close()
    log = RelayLog(str(tmp_path / "relay"), 2**20, KEY)
    with pytest.raises(DataLossError, match="the publisher sent a wrong LSN"):
        await log.open()
    await log.close()


async def test_pauses_when_full_and_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A segment is removed once the target has all of it; a transaction that is larger than all is written whole."""
    caplog.set_level("INFO")
    log = await made(tmp_path, 1024**2)
    end, frames = int(START), []
    for number in range(60):
        end += 100
        rows = [row(1, b"x" * 50_000) for _ in range(40 if number == 30 else 1)]
        frames += frame(Begin(Lsn(end), 1, number + 10), relation(1, "t"), *rows, Commit(0, Lsn(end), Lsn(end + 8), 1))
    writing = asyncio.create_task(write(log, frames, Lsn(end + 8)))
    for _ in range(20):
        async with asyncio.timeout(20):
            while not (log.full and "receiving pauses" in caplog.text) and not writing.done():
                await asyncio.sleep(0.001)
        if writing.done():
            break
        assert log.size < 1024**2 + 200_000 or log.end > START + 3000
        await log.acknowledge(log.end)
        assert not log.full
    await writing
    text = [record.message for record in caplog.records]
    assert any("the relay log is full (relay_log_size): receiving pauses" in each for each in text)
    assert any("receiving continues" in each for each in text)


def group(lsn: int, value: bytes = b"v") -> list[bytes]:
    messages: list[Message] = [Begin(Lsn(lsn), 1, 9), relation(1, "t"), row(1, value), Commit(0, Lsn(lsn), Lsn(lsn + 8), 1)]
    return [encode(message) for message in messages]


def failing(*_: object, **__: object) -> None:
    raise OSError(errno.EIO, "broken")


async def test_what_was_not_synced_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sync leaves pages that are not on disk, but can be read. So can a killed process."""
    log = await made(tmp_path)
    await log.append(group(1100), 0, Lsn(1108))
    (path,) = segments(tmp_path)
    before = path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(SpoolError, match="could not write the relay log"):
            await log.append(group(1200), 0, Lsn(1208))
        assert path.stat().st_size == before
    # killed between the write and its sync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        await log.append(group(1200), 0, Lsn(1208))
    await log.close()
    whole = path.read_bytes()
    log = await made(tmp_path)
    assert log.end == 1208
    written, synced = list[tuple[bytes, int]](), list[int]()
    pwrite = os.pwrite

    def write_noted(descriptor: int, data: bytes, offset: int) -> int:
        written.append((bytes(data), offset))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_noted)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    # before receiving, which acknowledges the end
    await log.rewind()
    assert (written, len(synced)) == ([(whole[before:], before)], 1)
    await log.rewind()
    assert len(synced) == 1
    assert path.read_bytes() == whole
    await log.close()


async def test_segment_that_failed_after_it_got_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed; if that fails too, the next start finds that the one before it continued."""
    for broken in ("sync_directory", "unlink"):
        directory = tmp_path / broken
        directory.mkdir()
        log = await made(directory)
        await log.append(group(1100), 0, Lsn(1108))
        log.limit = 0
        with monkeypatch.context() as patch:
            patch.setattr(relay_segment, "sync_directory", failing)
            if broken == "unlink":
                patch.setattr(Path, "unlink", failing)
            with pytest.raises(SpoolError):
                await log.acknowledge(Lsn(1108))
        assert len(segments(directory)) == (2 if broken == "unlink" else 1)
        await log.rewind()
        await log.append(group(1200), 0, Lsn(1208))
        await log.close()
        log = await made(directory)
        assert (log.end, len(log.segments), len(segments(directory))) == (1208, 1, 1)
        assert len(await read(log, START)) == 2
        await log.close()


async def test_rotation_of_empty_segments(tmp_path: Path) -> None:
    """The reader stays where it is while segments after it come and go."""
    log = await made(tmp_path)
    await log.append(group(1100), 0, Lsn(1108))
    stream = RelayStream(log, START, lambda _: None)
    await stream.events()
    log.limit = 0
    for _ in range(3):
        await log.acknowledge(Lsn(1108))
    assert [segment.number for segment in log.segments] == [2]
    for timeline in (2, 1):
        await log.follow(session(timeline=timeline))
        await log.acknowledge(Lsn(1108))
    assert [segment.number for segment in log.segments] == [4]
    log.limit = 2**20
    await log.append(group(1200), 0, Lsn(1208))
    assert len((await stream.events()).events) == 1
    await log.close()


async def test_disk_is_full_while_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not needed is removed first, which may be what gives a new segment its room. The apply side does not end."""
    log = await several(tmp_path)
    log.limit = 0
    stream = RelayStream(log, START, lambda _: None)
    status = encode_frame(StandbyStatusUpdate(log.end, log.end, log.end, 0, False))
    with monkeypatch.context() as patch:
        patch.setattr(relay_log, "create_file", failing)
        await stream.send(status)
        assert len(segments(tmp_path)) == len(log.segments) == 1
    await stream.send(status)
    assert log.segments[0].base == log.end
    await log.close()


@pytest.mark.parametrize("large", [False, True])
async def test_late_prepare_without_its_end(large: bool, tmp_path: Path) -> None:
    """It would be stored with something that does not belong to it."""
    log = await made(tmp_path)
    rows: list[Message] = [relation(1, "t"), *(row(1, b"x" * 40_000) for _ in range(40 if large else 1))]
    prepare = frame(BeginPrepare(Lsn(500), Lsn(508), 1, 9, "g"), *rows, Prepare(0, Lsn(500), Lsn(508), 1, 9, "g"))
    other = frame(Begin(Lsn(2000), 1, 10), row(1, b"v"), Commit(0, Lsn(2000), Lsn(2008), 1))
    with pytest.raises(ProtocolError, match="COMMIT PREPARED"):
        await write(log, [*prepare, *other], Lsn(2008))
    assert log.end == START
    await log.close()


async def test_what_the_publisher_has_lost_is_not_applied(tmp_path: Path) -> None:
    log = await made(tmp_path)
    await log.append(group(1100), 0, Lsn(1108))
    stream = RelayStream(log, START, lambda _: None)
    log.failure, log.diverged = DataLossError("another server was promoted"), True
    with pytest.raises(DataLossError, match="promoted"):
        await stream.events()
    await log.close()
