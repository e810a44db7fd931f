from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given

from subscriber.protocol.lsn import INVALID_LSN, Lsn, datetime_from_postgres
from tests.unit.protocol.strategies import lsns


@given(lsns)
def test_text_and_back(lsn: Lsn) -> None:
    assert Lsn.parse(str(lsn)) == lsn


@pytest.mark.parametrize(
    ("text", "value"),
    [("0/0", 0), ("16/B374D848", 0x16_B374_D848), ("ffffffff/ffffffff", 2**64 - 1), (" 1/0 ", 2**32), ("00000001/00000002", 2**32 + 2)],
)
def test_parse(text: str, value: int) -> None:
    assert Lsn.parse(text) == value


@pytest.mark.parametrize("text", ["", "0", "/", "1/", "/1", "g/0", "100000000/0", "0/100000000", "-1/0", "1/2/3", "٣/0"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="invalid input syntax for type pg_lsn"):
        Lsn.parse(text)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_range(value: int) -> None:
    with pytest.raises(ValueError, match="unsigned 64-bit"):
        Lsn(value)


def test_shown_as_postgres_does() -> None:
    lsn = Lsn.parse("16/b374d848")
    assert (str(lsn), f"{lsn}", repr(lsn)) == ("16/B374D848", "16/B374D848", "Lsn('16/B374D848')")
    assert str(INVALID_LSN) == "0/0"


def test_times() -> None:
    moment = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    assert datetime_from_postgres(757_382_400_000_000) == moment
    assert datetime_from_postgres(-1) == dt.datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC)
    with pytest.raises(OverflowError):
        datetime_from_postgres(2**63 - 1)
