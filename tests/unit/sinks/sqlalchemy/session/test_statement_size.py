"""What a statement may hold, and which rows are refused before they are sent."""

from __future__ import annotations

from decimal import Decimal

import pytest

from subscriber.errors import ApplyError
from subscriber.sinks.sqlalchemy.session.statement_size import StatementLimit

SQL = "INSERT INTO t (id, v) VALUES (%s, %s)"
MB = 1024**2


def pieces(limit: StatementLimit, *rows: tuple[object, ...], largest: int | None = None) -> list[int]:
    found = list(limit.pieces(SQL, rows, largest))
    assert [row for piece in found for row in piece] == list(rows)
    return [len(piece) for piece in found]


def test_no_limit_takes_all_rows_at_once() -> None:
    assert pieces(StatementLimit(), (1, "x" * 1000), (2, None)) == [2]


def test_the_drivers_divide_what_exceeds_their_own_limit() -> None:
    limit = StatementLimit(16 * MB, "max_allowed_packet")
    assert pieces(limit, *[(number, "x" * MB) for number in range(20)]) == [20]


def test_a_small_packet_divides_rows_in_order() -> None:
    limit = StatementLimit(64 * 1024, "max_allowed_packet")
    assert pieces(limit, *[(number, "x" * 20_000) for number in range(7)]) == [3, 3, 1]
    assert pieces(limit, (1, "'" * 20_000), (2, b"\0" * 20_000), (3, "ü" * 20_000)) == [1, 1, 1]
    assert pieces(limit, *[(number, Decimal("1.5")) for number in range(3)]) == [3]
    assert pieces(limit) == [0]


@pytest.mark.parametrize("value", ["'" * 550_000, "ü" * 550_000, b"\n" * 550_000, "x" * 1_100_000])
def test_a_row_that_does_not_fit_is_refused_with_its_size(value: object) -> None:
    limit = StatementLimit(MB, "max_allowed_packet")
    with pytest.raises(ApplyError, match=r"needs a statement of 1,100,1\d\d bytes, .* is 1,048,576") as caught:
        limit.require(SQL, (1, value))
    assert caught.value.hint == "SET GLOBAL max_allowed_packet = 2097152 in the target, and set it in the server's configuration"
    limit.require(SQL, {"id": 1, "v": "x"})


def test_a_row_that_fits_in_no_packet() -> None:
    class Long(str):
        def isascii(self) -> bool:
            return True

        def __len__(self) -> int:
            return 1024**3

    with pytest.raises(ApplyError) as caught:
        StatementLimit(MB, "max_allowed_packet").require(SQL, (1, Long("x")))
    assert "1 GB" in str(caught.value.hint)
    with pytest.raises(ApplyError, match="larger than the target allows"):
        StatementLimit(1024**3 - 2).require(SQL, (1, Long("x")))


def test_small_rows_are_not_measured() -> None:
    class Unmeasured(str):
        def isascii(self) -> bool:
            raise AssertionError("it was looked at")

    assert pieces(StatementLimit(16 * MB, "max_allowed_packet"), (1, Unmeasured("x")), largest=MB) == [1]
    with pytest.raises(AssertionError):
        pieces(StatementLimit(16 * MB, "max_allowed_packet"), (1, Unmeasured("x")), largest=8 * MB)


@pytest.mark.parametrize(("packet", "chunk"), [(1024, 64), (64 * 1024, 32_224), (1024**3, 536_870_368)])
def test_chunks_fit_with_all_their_bytes_escaped(packet: int, chunk: int) -> None:
    limit = StatementLimit(packet, "max_allowed_packet")
    assert limit.chunk == chunk
