from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.messages import (
    Delete,
    Insert,
    Relation,
    Tag,
    Truncate,
    TruncateOption,
    TupleData,
)
from subscriber.protocol.tuples import places_by_header, read_rows, read_tuple, relation_id
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
    assert relation_id(prefixed, True) == relation
    assert relation_id(plain, False) == relation
    assert relation_id(encode(Relation(relation, "a", "b", "d", ())), False) == relation


def test_ids_of_short_payloads_are_protocol_errors() -> None:
    with pytest.raises(ProtocolError):
        relation_id(b"I\0\0\0", False)
    with pytest.raises(ProtocolError):
        relation_id(b"I\0\0\0\1\0\0\0", True)


def test_a_tuple_does_not_show_its_values() -> None:
    assert "secret" not in repr(Insert(1, TupleData(b"t", [b"secret"])))


def _rows(records: list[bytes], kinds: bytes = b"tt", offset: int = 1, size: int = 10**6) -> list[tuple[bytes | None, ...]]:
    parts = ((bytes.fromhex("00000007 4e 0002"), kinds),)
    return read_rows(records, range(len(records)), tag=Tag.INSERT, offset=offset, parts=parts, size=size)


def test_rows_of_one_form_are_read_as_bytes() -> None:
    records = [encode(Insert(7, TupleData(b"tb", [b"%d" % number, b"x" * number]))) for number in range(4)]
    records[2] = encode(Insert(7, TupleData(b"nn", [None, None])))
    assert _rows(records, b"tb") == [(b"0", b""), (b"1", b"x"), (None, None), (b"3", b"xxx")]
    assert _rows([encode(Insert(7, TupleData(b"ut", [None, b"x"]), xid)) for xid in (8, 9)], b"ut", offset=5) == [(None, b"x")] * 2
    assert len(_rows(records, b"tb", size=len(records[0]) + 1)) == 2
    # a message larger than the size is read alone
    assert len(_rows(records[2:], b"tb", size=len(records[3]) - 1)) == 1
    assert len(_rows(records[3:] + records, b"tb", size=len(records[3]) - 1)) == 1


def test_changes_are_grouped_by_header() -> None:
    row = TupleData(b"t", [b"x"])
    records = [
        encode(Insert(7, row)),
        encode(Delete(8, row, None)),
        encode(Insert(7, row)),
        encode(Delete(7, row, None)),
        encode(Truncate(TruncateOption(0), (7,))),
        encode(Insert(7, row)),
    ]
    insert, eight, delete = (record[:8] for record in (records[0], records[1], records[3]))
    assert places_by_header(records, 0, 6, 1, 999) == ({insert: [0, 2], eight: [1], delete: [3]}, 4)
    assert places_by_header(records, 0, 2, 1, 999) == ({insert: [0], eight: [1]}, 2)
    for most in (1, 2 * len(records[0]) + 1):
        # up to the one that reaches the limit
        count = 1 + most // len(records[0])
        assert places_by_header(records[:1] * 6, 0, 6, 1, most) == ({insert: list(range(count))}, count)
    assert places_by_header(records, 4, 6, 1, 999) == ({}, 4)
    assert places_by_header(records, 5, 6, 1, 999) == ({insert: [5]}, 6)
    assert places_by_header([encode(Insert(7, row, 9)), encode(Insert(7, row, 10))], 0, 2, 5, 999) == ({insert: [0, 1]}, 2)
    for short in (b"", b"I", records[0][:7]):
        assert places_by_header([records[0], short, records[0]], 0, 3, 1, 999) == ({insert: [0]}, 1)


@pytest.mark.parametrize(
    "other",
    [
        encode(Insert(8, TupleData(b"ut", [None, b"x"]))),
        encode(Insert(7, TupleData(b"utt", [None, b"x", b"y"]))),
        encode(Insert(7, TupleData(b"uu", [None, None]))),
        encode(Insert(7, TupleData(b"nt", [None, b"x"]))),
        encode(Insert(7, TupleData(b"tt", [b"1", b"x"]))),
        encode(Insert(7, TupleData(b"ub", [None, b"x"]))),
        b"U" + encode(Insert(7, TupleData(b"ut", [None, b"x"])))[1:],
        encode(Insert(7, TupleData(b"ut", [None, b"x"]))) + b"!",
        encode(Insert(7, TupleData(b"ut", [None, b"x"])))[:-1],
        encode(Insert(7, TupleData(b"ut", [None, b"x"])))[:-3],
        b"I",
        b"",
    ],
)
def test_reading_rows_ends_at_another_form(other: bytes) -> None:
    one = encode(Insert(7, TupleData(b"ut", [None, b"x"])))
    assert _rows([one, other, one], b"ut") == [(None, b"x")]


FULL_HEADER = struct.pack(">IcH", 7, b"O", 2)


def full_update(old: tuple[bytes | None, ...], new: tuple[bytes | None, ...]) -> bytes:
    return b"U" + FULL_HEADER + b"".join(map(_column, old)) + b"N\0\2" + b"".join(map(_column, new))


def _column(value: bytes | None) -> bytes:
    return b"n" if value is None else b"u" if value == b"u" else b"t" + struct.pack(">I", len(value)) + value


def read_full(records: list[bytes], kinds: bytes = b"tt") -> list[tuple[bytes | None, ...]]:
    parts = ((FULL_HEADER, b"tt"), (b"N\0\2", kinds))
    return read_rows(records, range(len(records)), tag=Tag.UPDATE, offset=1, parts=parts, size=10**6)


def test_full_updates() -> None:
    good = full_update((b"1", b"a"), (b"1", b"bc"))
    assert read_full([good, full_update((b"2", None), (b"3", None))]) == [(b"1", b"a", b"1", b"bc"), (b"2", None, b"3", None)]
    assert read_full([full_update((b"1", b"a"), (b"1", b"u"))], b"tu") == [(b"1", b"a", b"1", None)]
    for other in (
        full_update((b"1", b"u"), (b"1", b"a")),
        full_update((b"1", b"a"), (b"1", b"u")),
        good + b"x",
        good[:-1],
        good.replace(b"N", b"K"),
        good.replace(b"t", b"x", 1),
        good.replace(b"O", b"K"),
    ):
        assert read_full([good, other, good]) == [(b"1", b"a", b"1", b"bc")]
    assert not any(read_full([good[:length]]) for length in range(len(good)))
