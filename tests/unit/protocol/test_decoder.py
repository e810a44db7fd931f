from __future__ import annotations

import tracemalloc

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import Decoder, decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Insert, LogicalMessage, Message, StreamStop, Tag, TupleData
from tests.unit.protocol.literal_messages import INSIDE, LSN, LSN_BYTES, OUTSIDE

PREFIXED_TAGS = b"RYIUDTM"


def names(cases: list[tuple[Message, str]]) -> list[str]:
    return [type(message).__name__ for message, _ in cases]


@pytest.mark.parametrize(("message", "wire"), OUTSIDE, ids=names(OUTSIDE))
def test_every_message_outside_a_stream(message: Message, wire: str) -> None:
    assert decode(bytes.fromhex(wire)) == message


@pytest.mark.parametrize(("message", "wire"), INSIDE, ids=names(INSIDE))
def test_messages_with_xid_inside_a_stream(message: Message, wire: str) -> None:
    assert decode(bytes.fromhex(wire), in_stream=True) == message


@pytest.mark.parametrize(("message", "wire"), OUTSIDE, ids=names(OUTSIDE))
def test_messages_without_xid_are_the_same_inside_a_stream(message: Message, wire: str) -> None:
    payload = bytes.fromhex(wire)
    if payload[:1] not in PREFIXED_TAGS:
        assert decode(payload, in_stream=True) == message


def test_every_tag_has_a_decoder() -> None:
    assert {bytes.fromhex(wire)[0] for _, wire in OUTSIDE} == set(Tag)
    assert {bytes.fromhex(wire)[0] for _, wire in INSIDE} == set(PREFIXED_TAGS)


@pytest.mark.parametrize(("message", "wire"), OUTSIDE + INSIDE, ids=names(OUTSIDE + INSIDE))
def test_every_truncation_is_refused(message: Message, wire: str) -> None:
    payload = bytes.fromhex(wire)
    in_stream = getattr(message, "xid", None) is not None and payload[:1] in PREFIXED_TAGS
    # a parallel Stream Abort cut to nine bytes is the other legal form of it
    legal = {9} if payload[:1] == b"A" else set[int]()
    for length in set(range(len(payload))) - legal:
        with pytest.raises(ProtocolError) as caught:
            decode(payload[:length], in_stream=in_stream)
        assert caught.value.offset is not None
        assert caught.value.offset <= length
        assert caught.value.tag == (chr(payload[0]) if length else None)


@pytest.mark.parametrize(("message", "wire"), OUTSIDE + INSIDE, ids=names(OUTSIDE + INSIDE))
def test_trailing_bytes_are_refused(message: Message, wire: str) -> None:
    payload = bytes.fromhex(wire)
    in_stream = getattr(message, "xid", None) is not None and payload[:1] in PREFIXED_TAGS
    with pytest.raises(ProtocolError, match=r"trailing|ends before") as caught:
        decode(payload + b"\0", in_stream=in_stream)
    assert caught.value.tag == chr(payload[0])


@pytest.mark.parametrize(
    ("wire", "what", "tag", "offset"),
    [
        ("", "empty message", None, 0),
        ("00", r"unknown message type in message '\\x00' at offset 0", r"\x00", 0),
        ("58 00", "unknown message type in message 'X'", "X", 0),
        ("e9", "unknown message type", r"\xe9", 0),
        ("52 00000001 6100 6200 78 0000", "unknown replica identity", "R", 9),
        ("52 00000001 6100 6200 64 ffff", "negative number of columns", "R", 10),
        ("52 00000001 6100 6200 64 0001 02 6100 00000017 ffffffff", "unknown column flags", "R", 12),
        ("52 00000001 6161", "string without its terminating null", "R", 5),
        ("49 00000001 4b 0000", r"expected a new tuple \(N\)", "I", 5),
        ("49 00000001 4e ffff", "negative number of columns", "I", 6),
        ("49 00000001 4e 0001 78", "unknown kind of column", "I", 8),
        ("49 00000001 4e 0001 74 ffffffff", "ends before its last field", "I", 13),
        ("55 00000001 58 0000", "expected an old key, an old or a new tuple", "U", 5),
        ("55 00000001 4b 0000 4f 0000", r"expected a new tuple \(N\)", "U", 8),
        ("44 00000001 4e 0000", "expected an old key or an old tuple", "D", 5),
        ("54 ffffffff 00", "negative number of relations", "T", 1),
        (f"4d 02 {LSN_BYTES} 00 00000000", "unknown message flags", "M", 1),
        ("53 00000001 02", "unknown segment flag", "S", 5),
        ("41 00000001 00000002 00", "ends before its last field", "A", 10),
    ],
)
def test_errors_name_tag_and_offset(wire: str, what: str, tag: str | None, offset: int) -> None:
    with pytest.raises(ProtocolError, match=what) as caught:
        decode(bytes.fromhex(wire))
    assert (caught.value.tag, caught.value.offset) == (tag, offset)


@pytest.mark.parametrize(
    "wire",
    [
        "49 00000001 4e 7fff 6e 6e",  # 32767 columns
        "49 00000001 4e 0001 74 7fffffff",  # a value of 2 GB
        "49 00000001 4e 0001 74 ffffffff",  # of 4 GB, or of -1
        "52 00000001 00 00 64 7fff",
        "54 7fffffff 00",
        f"4d 00 {LSN_BYTES} 00 ffffffff",
    ],
)
def test_claimed_sizes_are_checked_before_anything_is_allocated(wire: str) -> None:
    payload = bytes.fromhex(wire)
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            decode(payload)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024


def test_an_error_never_holds_a_value() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(encode(Insert(1, TupleData(b"t", [b"secret"]))) + b"secret")
    assert "secret" not in str(caught.value)


def test_namespace_pg_catalog_equals_the_empty_one() -> None:
    assert decode(bytes.fromhex("59 00000019") + b"pg_catalog\0text\0") == decode(bytes.fromhex("59 00000019") + b"\0text\0")


def test_decoder_tracks_streamed_blocks() -> None:
    outside = Insert(1, TupleData(b"n", [None]))
    inside = Insert(1, TupleData(b"n", [None]), xid=7)
    message = LogicalMessage(True, LSN, "p", b"", xid=8)
    decoder = Decoder()
    stream = [b"S\0\0\0\7\1", encode(inside), encode(message), b"E", encode(outside), b"S\0\0\0\7\0", encode(inside), b"E"]
    decoded = [decoder.decode(payload) for payload in stream]
    assert decoded[1:5] == [inside, message, StreamStop(), outside]
    assert decoded[6] == inside
    assert not decoder.in_stream


def test_decoder_refuses_a_start_within_a_block() -> None:
    decoder = Decoder()
    decoder.decode(b"S\0\0\0\7\1")
    with pytest.raises(ProtocolError, match="STREAM START while a streamed block is open in message 'S'"):
        decoder.decode(b"S\0\0\0\x08\1")
    assert decoder.in_stream


def test_decoder_refuses_a_stop_without_a_start() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError, match="STREAM STOP without STREAM START"):
        decoder.decode(b"E")
    assert not decoder.in_stream


def test_error_does_not_change_the_decoder_state() -> None:
    decoder = Decoder()
    decoder.decode(b"S\0\0\0\7\1")
    with pytest.raises(ProtocolError):
        decoder.decode(b"I")
    assert decoder.in_stream
