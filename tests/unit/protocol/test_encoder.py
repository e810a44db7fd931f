from __future__ import annotations

import pytest
from hypothesis import given

from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    Column,
    Commit,
    Delete,
    Insert,
    Message,
    Origin,
    Relation,
    StreamAbort,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from tests.unit.protocol.literal_messages import INSIDE, OUTSIDE
from tests.unit.protocol.strategies import inside_streams, outside_streams

ROW = TupleData(b"n", [None])


@pytest.mark.parametrize(("message", "wire"), OUTSIDE + INSIDE, ids=lambda value: type(value).__name__)
def test_every_message(message: Message, wire: str) -> None:
    assert encode(message) == bytes.fromhex(wire)


@given(outside_streams)
def test_round_trip_outside_a_stream(message: Message) -> None:
    assert decode(encode(message)) == message


@given(inside_streams)
def test_round_trip_inside_a_stream(message: Message) -> None:
    assert decode(encode(message), in_stream=True) == message


@pytest.mark.parametrize(
    "message",
    [
        Origin(Lsn(1), "null\0inside"),
        Type(1, "", "empty namespace"),
        Begin(Lsn(1), 2**63, 1),
        Begin(Lsn(1), 0, -1),
        Commit(256, Lsn(1), Lsn(1), 0),
        Relation(1, "a", "b", "d", (Column("c", 2**32, -1, False),)),
        Relation(1, "a", "b", "d", (Column("c", 1, -1, False),) * 32768),
        Insert(1, TupleData(b"t", [None])),
        Insert(1, TupleData(b"n", [b"value"])),
        Insert(1, TupleData(b"x", [None])),
        Insert(1, TupleData(b"nn", [None])),
        Insert(1, TupleData(b"n" * 32768, [None] * 32768)),
        Insert(1, ROW, xid=-1),
        Update(1, ROW, ROW, ROW),
        Delete(1, None, None),
        Delete(1, ROW, ROW),
        Truncate(TruncateOption(256), ()),
        StreamAbort(1, 1, Lsn(1), None),
        StreamAbort(1, 1, None, 1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_values_out_of_range_are_rejected(message: Message) -> None:
    with pytest.raises(ValueError, match=r"."):
        encode(message)


def test_in_stream_is_checked_against_the_message() -> None:
    inside, outside = Insert(1, ROW, xid=7), Insert(1, ROW)
    assert encode(inside, in_stream=True) == encode(inside)
    assert encode(outside, in_stream=False) == encode(outside)
    for message, in_stream in ((inside, False), (outside, True)):
        with pytest.raises(ValueError, match="Insert needs an xid inside a streamed block"):
            encode(message, in_stream=in_stream)
    assert encode(StreamStop(), in_stream=True) == encode(StreamStop(), in_stream=False) == b"E"
