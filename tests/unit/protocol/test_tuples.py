from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import Insert, Relation, StreamAbort, StreamStart, TupleData
from subscriber.protocol.tuples import peek_xid, read_tuple, relation_id
from tests.unit.protocol.strategies import tuples, uint32

HEADER = 6  # tag, relation id, 'N'


@given(tuples, st.binary(max_size=10))
def test_read_tuple_tells_where_it_ends(data: TupleData, behind: bytes) -> None:
    payload = encode(Insert(1, data))
    assert read_tuple(payload + behind, HEADER) == (data, len(payload))


def test_the_kinds_and_values_are_in_column_order() -> None:
    data, end = read_tuple(bytes.fromhex("49 00000001 4e 0004 74 00000000 6e 75 62 00000001 ff"), HEADER)
    assert (data.kinds, data.values, end) == (b"tnub", [b"", None, None, b"\xff"], 21)


def test_any_offset_gives_a_tuple_within_the_payload_or_a_protocol_error() -> None:
    payload = encode(Insert(0x4E4E4E4E, TupleData(b"tn", [b"value", None])))
    ends = []
    for offset in range(len(payload) + 3):
        try:
            ends.append(read_tuple(payload, offset)[1])
        except ProtocolError:
            continue
    assert len(payload) in ends
    assert max(ends) <= len(payload)


def test_values_are_copies_of_their_bytes_alone() -> None:
    data, _ = read_tuple(encode(Insert(1, TupleData(b"t", [b"value"]))), HEADER)
    assert type(data.values[0]) is bytes


@given(uint32, uint32, tuples)
def test_ids_are_read_without_decoding(xid: int, relation: int, data: TupleData) -> None:
    prefixed, plain = encode(Insert(relation, data, xid)), encode(Insert(relation, data))
    assert peek_xid(prefixed) == xid
    assert relation_id(prefixed, True) == relation
    assert relation_id(plain, False) == relation
    assert relation_id(encode(Relation(relation, "a", "b", "d", ())), False) == relation
    assert peek_xid(encode(StreamStart(xid, True))) == xid
    assert peek_xid(encode(StreamAbort(xid, 1))) == xid


def test_ids_of_short_payloads_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError):
        peek_xid(b"I\0\0\0")
    with pytest.raises(ProtocolError):
        relation_id(b"I\0\0\0", False)
    with pytest.raises(ProtocolError):
        relation_id(b"I\0\0\0\1\0\0\0", True)
    with pytest.raises(ProtocolError):
        peek_xid(b"")


def test_a_tuple_does_not_show_its_values() -> None:
    assert "secret" not in repr(Insert(1, TupleData(b"t", [b"secret"])))
