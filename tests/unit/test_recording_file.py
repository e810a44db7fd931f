"""Recordings with any damage are refused with an error that names the record."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import ProtocolError, SpoolError
from subscriber.protocol.frames import StandbyStatusUpdate, decode_status_update, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.recording.file import MAGIC, RecordedSession, Recorder, read_recording
from subscriber.recording.streams import RecordedStream

SESSION: dict[str, Any] = {
    "server_version": 180000,
    "system_identifier": "1",
    "timeline": 1,
    "slot_name": "slot",
    "start_lsn": "0/1",
    "options": {"proto_version": "4"},
}


@pytest.fixture
def recording(tmp_path: Any) -> bytes:
    path = tmp_path / "recording"
    recorder = Recorder(path)
    recorder.session(RecordedSession(**{**SESSION, "start_lsn": Lsn(1)}))
    recorder.received([b"k" + bytes(17)])
    recorder.close()
    return bytes(path.read_bytes())


def test_each_damaged_byte_is_an_error(recording: bytes) -> None:
    assert len(list(read_recording(io.BytesIO(recording)))) == 2
    for place in range(len(MAGIC), len(recording)):
        for bit in (0x80, 0x01):
            damaged = bytearray(recording)
            damaged[place] ^= bit
            with pytest.raises(ProtocolError, match=r"record [12] at byte"):
                list(read_recording(io.BytesIO(damaged)))


@pytest.mark.parametrize(
    "change", [{"server_version": "18"}, {"timeline": None}, {"slot_name": 1}, {"system_identifier": 1}, {"start_lsn": 5}, {"options": [1]}]
)
def test_a_session_with_values_of_other_types_is_an_error(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        RecordedSession.from_json(json.dumps(SESSION | change).encode())
    assert RecordedSession.from_json(json.dumps(SESSION).encode()).start_lsn == Lsn(1)


def test_a_deeply_nested_session_is_an_error() -> None:
    with pytest.raises(ValueError, match="recursion"):
        RecordedSession.from_json(b"[" * 100_000)


class Publisher:
    """The stream that is recorded. It notes what is sent."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    async def receive(self) -> Sequence[bytes]:
        return [b"k" + bytes(17)]

    async def send(self, message: bytes) -> None:
        self.events.append(f"sent {decode_status_update(message).flush}")

    async def wal_end(self, least: Lsn) -> Lsn:
        return least

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        return ()

    async def close(self) -> None: ...


async def test_recording_is_on_disk_before_a_position_is_confirmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, events = tmp_path / "recording", list[str]()
    recorder = Recorder(path)
    recorder.session(RecordedSession(**{**SESSION, "start_lsn": Lsn(1)}))
    stream = RecordedStream(Publisher(events), recorder)

    def fdatasync(descriptor: int) -> None:
        events.append(f"synced {len(list(read_recording(io.BytesIO(path.read_bytes()))))} records")

    monkeypatch.setattr("os.fdatasync", fdatasync)
    await stream.receive()
    for flush in (16, 16, 32):
        await stream.send(encode_frame(StandbyStatusUpdate(Lsn(flush), Lsn(flush), Lsn(flush), 0, reply_requested=False)))
    assert events == ["synced 3 records", "sent 0/10", "sent 0/10", "synced 5 records", "sent 0/20"]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fdatasync", full)
    with pytest.raises(SpoolError, match="No space left"):
        await stream.send(encode_frame(StandbyStatusUpdate(Lsn(48), Lsn(48), Lsn(48), 0, reply_requested=False)))
    assert events[-1] == "sent 0/20"
    recorder.close()
