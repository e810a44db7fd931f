"""Recordings with any damage are refused with an error that names the record."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import Lsn
from subscriber.recording.file import MAGIC, RecordedSession, Recorder, read_recording

SESSION: dict[str, Any] = {
    "server_version": 180000,
    "system_identifier": "1",
    "timeline": 1,
    "slot_name": "slot",
    "start_lsn": "0/1",
    "options": {"proto_version": "4"},
    "masked": False,
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
