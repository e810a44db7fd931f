"""COPY data that Arrow reads is what the decoder reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.sinks.spark.copy.copied_rows import read_plain
from subscriber.types import copy_decoder

_ESCAPES = {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}
_CHARACTERS = st.sampled_from("ab,;\"'N.\\ \t\n\r\v\f\b\ufeffé€\U0001f600\x01\x7f0-")
_PLAIN = st.text(st.sampled_from("ab,;\"'N. \ufeffé€\U0001f600\x01\x7f0-"), max_size=6)


def escaped(value: str | None) -> str:
    return "\\N" if value is None else "".join(_ESCAPES.get(character, character) for character in value)


def written(rows: list[list[str | None]]) -> bytes:
    return "".join("\t".join(map(escaped, row)) + "\n" for row in rows).encode()


def decoded(data: bytes, width: int) -> list[list[bytes | None]] | None:
    """What the decoder reads; None: an error."""
    decoder = copy_decoder(width, binary=False)
    try:
        _, columns = decoder.columns(data)
        decoder.finish()
    except ProtocolError:
        return None
    return [list(column) for column in columns]


def plain(data: bytes, width: int) -> list[list[bytes | None]] | None:
    found = read_plain(data, width)
    return None if found is None else [array.cast("binary").to_pylist() for array in found]


def tables(values: st.SearchStrategy[str]) -> st.SearchStrategy[list[list[str | None]]]:
    return st.integers(1, 4).flatmap(
        lambda width: st.lists(st.lists(st.none() | values, min_size=width, max_size=width), min_size=1, max_size=6)
    )


@given(tables(st.text(_CHARACTERS, max_size=6)))
def test_rows(rows: list[list[str | None]]) -> None:
    data, width = written(rows), len(rows[0])
    found = plain(data, width)
    assert found is None or found == decoded(data, width)


@given(tables(_PLAIN))
def test_rows_without_backslashes_are_read(rows: list[list[str | None]]) -> None:
    data, width = written(rows), len(rows[0])
    found = plain(data, width)
    assert found == (None if data.startswith("\ufeff".encode()) else decoded(data, width))


@given(
    st.lists(st.sampled_from([b"a", b"\t", b"\n", b"\\N", b"\\", b"N", b"\r", b'"', b",", b"\xff", b"\xef\xbb\xbf", b"\0"])),
    st.integers(0, 3),
)
def test_other_bytes(parts: list[bytes], width: int) -> None:
    data = b"".join(parts)
    found = plain(data, width)
    assert found is None or found == decoded(data, width)


@pytest.mark.parametrize("value", ["", "\\N", "N", ".", "\\."])
def test_single_column(value: str) -> None:
    data = written([[value], [None], [value]])
    assert decoded(data, 1) == [[value.encode(), None, value.encode()]]
    assert plain(data, 1) in (None, decoded(data, 1))
