"""COPY data to fields."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.types import copy_decoder

Row = tuple[bytes | None, ...]

ESCAPED = {b"\b": b"\\b", b"\f": b"\\f", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t", b"\v": b"\\v", b"\\": b"\\\\"}

rows_of_two = st.lists(st.tuples(st.none() | st.binary(), st.none() | st.binary()))


def as_text(rows: list[Row]) -> bytes:
    def field(value: bytes | None) -> bytes:
        if value is None:
            return b"\\N"
        return b"".join(ESCAPED.get(bytes([byte]), bytes([byte])) for byte in value)

    return b"".join(b"\t".join(map(field, row)) + b"\n" for row in rows)


def as_binary(rows: list[Row]) -> bytes:
    def field(value: bytes | None) -> bytes:
        return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value

    body = b"".join(struct.pack(">h", len(row)) + b"".join(map(field, row)) for row in rows)
    return b"PGCOPY\n\xff\r\n\x00" + bytes(8) + body + struct.pack(">h", -1)


@given(rows_of_two, st.booleans(), st.integers(1, 40))
def test_rows_from_pieces_of_any_size(rows: list[Row], binary: bool, size: int) -> None:
    data = as_binary(rows) if binary else as_text(rows)
    decoder = copy_decoder(2, binary=binary)
    found: list[Row] = []
    for start in range(0, len(data), size):
        found += decoder.feed(data[start : start + size])
    decoder.finish()
    assert found == rows


@given(rows_of_two, st.booleans(), st.integers(1, 40) | st.just(2**30))
def test_columns_are_those_of_the_rows(rows: list[Row], binary: bool, size: int) -> None:
    data = as_binary(rows) if binary else as_text(rows)
    decoder = copy_decoder(2, binary=binary)
    found: list[Row] = []
    for start in range(0, len(data), size):
        count, columns = decoder.columns(data[start : start + size])
        assert [len(column) for column in columns] == [count, count]
        found += zip(*columns, strict=True)
    decoder.finish()
    assert found == rows


@given(st.text("ab\t\n\\N"), st.integers(0, 3))
def test_columns_are_refused_as_rows_are(text: str, width: int) -> None:
    def read(*, columns: bool) -> object:
        decoder = copy_decoder(width, binary=False)
        try:
            if columns:
                count, values = decoder.columns(text.encode())
                found = [*zip(*values, strict=True)] if width else [()] * count
            else:
                found = decoder.feed(text.encode())
            decoder.finish()
        except ProtocolError as error:
            return str(error)
        return found

    assert read(columns=True) == read(columns=False)


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_rows_or_refused(data: bytes, binary: bool) -> None:
    decoder = copy_decoder(1, binary=binary)
    try:
        rows = decoder.feed(data)
        decoder.finish()
    except ProtocolError:
        return
    assert all(len(row) == 1 for row in rows)


def test_escapes_of_the_text_format() -> None:
    decoder = copy_decoder(3, binary=False)
    assert decoder.feed(b"\\x41\\x4\\101\t\\N\t\\\\N\\q\n") == [(b"A\x04A", None, b"\\Nq")]


def test_tables_without_columns() -> None:
    text = copy_decoder(0, binary=False)
    assert text.feed(b"\n\n") == [(), ()]
    text.finish()
    binary = copy_decoder(0, binary=True)
    assert binary.feed(as_binary([(), ()])) == [(), ()]
    binary.finish()


@pytest.mark.parametrize("binary", [False, True])
def test_truncated_data_and_wrong_column_counts(binary: bool) -> None:
    make = as_binary if binary else as_text
    data = make([(b"a", b"b"), (b"c", b"d")])
    cut = copy_decoder(2, binary=binary)
    cut.feed(data[:-1])
    with pytest.raises(ProtocolError, match="COPY data ends"):
        cut.finish()
    with pytest.raises(ProtocolError, match="row 1 of COPY data has 2 columns, not 3"):
        copy_decoder(3, binary=binary).feed(data)


def test_invalid_binary_copy_data() -> None:
    with pytest.raises(ProtocolError, match="does not begin with the signature"):
        copy_decoder(1, binary=True).feed(b"a\tb\n")
    with pytest.raises(ProtocolError, match="continues after its trailer"):
        copy_decoder(1, binary=True).feed(as_binary([(b"a",)]) + b"x")
    flags = b"PGCOPY\n\xff\r\n\x00" + struct.pack(">Ii", 1 << 16, 0)
    with pytest.raises(ProtocolError, match="unknown"):
        copy_decoder(1, binary=True).feed(flags)


def test_a_header_with_an_extension() -> None:
    data = as_binary([(b"a",)])
    extended = data[:11] + struct.pack(">ii", 0, 3) + b"xyz" + data[19:]
    assert copy_decoder(1, binary=True).feed(extended) == [(b"a",)]
