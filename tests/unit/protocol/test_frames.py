from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol.frames import (
    PrimaryKeepalive,
    StandbyStatusUpdate,
    XLogData,
    decode_frame,
    decode_status_update,
    encode_frame,
    payloads,
)
from subscriber.protocol.lsn import Lsn
from tests.unit.protocol.strategies import lsns, times

LSN = Lsn.parse("16/B374D848")
END = Lsn.parse("16/B374D878")

XLOG = (XLogData(LSN, END, 757_382_400_000_000, b"payload"), "77 00000016b374d848 00000016b374d878 0002b0d5d4e94000 7061796c6f6164")
EMPTY = (XLogData(Lsn(0), Lsn(0), -1, b""), "77 0000000000000000 0000000000000000 ffffffffffffffff")
KEEPALIVE = (PrimaryKeepalive(END, 757_382_400_000_000, True), "6b 00000016b374d878 0002b0d5d4e94000 01")
QUIET = (PrimaryKeepalive(Lsn(2**64 - 1), -(2**63), False), "6b ffffffffffffffff 8000000000000000 00")
STATUS = (
    StandbyStatusUpdate(END, LSN, Lsn(1), 757_382_400_000_000, False),
    "72 00000016b374d878 00000016b374d848 0000000000000001 0002b0d5d4e94000 00",
)


@pytest.mark.parametrize(("frame", "wire"), [XLOG, EMPTY, KEEPALIVE, QUIET])
def test_frames_of_the_walsender(frame: XLogData | PrimaryKeepalive, wire: str) -> None:
    assert decode_frame(bytes.fromhex(wire)) == frame
    assert encode_frame(frame) == bytes.fromhex(wire)


def test_status_update_has_34_bytes() -> None:
    frame, wire = STATUS
    assert len(encode_frame(frame)) == 34
    assert encode_frame(frame) == bytes.fromhex(wire)
    assert decode_status_update(bytes.fromhex(wire)) == frame


@given(st.builds(XLogData, lsns, lsns, times, st.binary(max_size=40)) | st.builds(PrimaryKeepalive, lsns, times, st.booleans()))
def test_round_trip(frame: XLogData | PrimaryKeepalive) -> None:
    assert decode_frame(encode_frame(frame)) == frame


@given(st.builds(StandbyStatusUpdate, lsns, lsns, lsns, times, st.booleans()))
def test_round_trip_of_the_status_update(frame: StandbyStatusUpdate) -> None:
    assert decode_status_update(encode_frame(frame)) == frame


def test_positions_are_lsns() -> None:
    frame = decode_frame(bytes.fromhex(XLOG[1]))
    assert isinstance(frame, XLogData)
    assert (str(frame.start_lsn), str(frame.end_lsn)) == ("16/B374D848", "16/B374D878")


@pytest.mark.parametrize(
    ("wire", "what"),
    [
        ("", "empty CopyData"),
        ("72", "unknown CopyData from the walsender in message 'r'"),
        ("70", "unknown CopyData"),
        (EMPTY[1][:-2], "ends before its last field"),
        (KEEPALIVE[1][:-2], "ends before its last field"),
        (KEEPALIVE[1] + "00", "1 trailing bytes"),
        (KEEPALIVE[1][:-2] + "02", "unknown reply flag"),
    ],
)
def test_other_bytes_are_protocol_errors(wire: str, what: str) -> None:
    with pytest.raises(ProtocolError, match=what):
        decode_frame(bytes.fromhex(wire))


@pytest.mark.parametrize("wire", ["", "77", STATUS[1][:-2], STATUS[1] + "00", STATUS[1][:-2] + "02"])
def test_other_bytes_from_the_standby_are_protocol_errors(wire: str) -> None:
    with pytest.raises(ProtocolError):
        decode_status_update(bytes.fromhex(wire))


def test_a_time_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="PrimaryKeepalive has a field that is out of range"):
        encode_frame(PrimaryKeepalive(LSN, 2**63, False))


def test_a_frame_does_not_show_its_payload() -> None:
    assert "secret" not in repr(XLogData(LSN, LSN, 0, b"secret"))


def test_payloads_of_consecutive_frames() -> None:
    frames = [encode_frame(XLogData(LSN, END, 0, payload)) for payload in (b"B", b"I1", b"U2", b"I3", b"C")]
    tags = frozenset(b"IU")
    assert payloads(frames, 0, tags) == []
    assert payloads(frames, 1, tags) == [b"I1", b"U2", b"I3"]
    assert payloads(frames, 3, tags) == [b"I3"]
    assert payloads(frames[:3], 1, tags) == [b"I1", b"U2"]
    keepalive = encode_frame(PrimaryKeepalive(END, 0, False))
    for other in (b"", b"w", frames[1][:25], keepalive, keepalive + b"I" * 20, b"x" + frames[1][1:]):
        assert payloads([frames[1], other, frames[3]], 0, tags) == [b"I1"]
