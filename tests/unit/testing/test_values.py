"""subscriber.verification.values: the same value gives the same text, and a bent one does not."""

from __future__ import annotations

import math
import struct
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.errors import TargetError
from subscriber.sinks.spark.schema.arrow_values import parse_array
from subscriber.verification.values import array_literal, normalizer

SAME: list[tuple[str, str, object]] = [
    ("boolean", "t", True),
    ("boolean", "f", 0),
    ("boolean", "t", 1),
    ("bigint", "-9223372036854775808", -(2**63)),
    ("numeric", "0.00", Decimal("0.00")),
    ("numeric", "10000000000", Decimal("1E+10")),
    ("numeric", "NaN", Decimal("NaN")),
    ("double precision", "NaN", math.nan),
    ("double precision", "-0", -0.0),
    ("double precision", "1e+100", 1e100),
    ("double precision", "-Infinity", -math.inf),
    ("real", "0.33333334", 0.3333333432674408),
    ("real", "Infinity", "Infinity"),
    ("bytea", "\\x00ff5c", b"\x00\xff\\"),
    ("uuid", "00000000-0000-0000-0000-0000000000ff", UUID(int=255)),
    ("date", "2000-01-31", date(2000, 1, 31)),
    ("time without time zone", "23:59:59.5", time(23, 59, 59, 500_000)),
    ("time without time zone", "24:00:00", timedelta(days=1)),
    ("timestamp without time zone", "1999-12-31 23:59:59.000001", datetime(1999, 12, 31, 23, 59, 59, 1)),  # noqa: DTZ001
    ("timestamp with time zone", "2000-01-01 00:00:00+00", datetime(2000, 1, 1)),  # noqa: DTZ001
    ("timestamp with time zone", "2000-01-01 00:00:00+00", datetime(2000, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))),
    ("character", "abc   ", "abc   "),
    ("jsonb", '{"a": 1}', '{"a": 1}'),
    ("bit varying", "0101", "0101"),
]
DIFFERENT: list[tuple[str, str, object]] = [
    ("boolean", "t", False),
    ("double precision", "-0", 0.0),
    ("double precision", "NaN", None),
    ("double precision", "0.1", 0.10000000000000002),
    ("real", "0.1", 0.1),  # a double that is no real
    ("real", "Infinity", 1e300),
    ("numeric", "0.00", Decimal("0")),
    ("numeric", "0.10", 0.1),
    ("character", "abc   ", "abc"),
    ("text", "", None),
    ("timestamp without time zone", "2000-01-01 00:00:00.000001", datetime(2000, 1, 1)),  # noqa: DTZ001
    ("timestamp with time zone", "2000-01-01 00:00:00+00", datetime(2000, 1, 1, 1, tzinfo=UTC)),
    ("bytea", "\\x00", b""),
]


@pytest.mark.parametrize(("kind", "publisher", "target"), SAME)
def test_equal_values(kind: str, publisher: str, target: object) -> None:
    normalized = normalizer(kind)
    assert normalized(publisher) == normalized(target)
    assert normalized(publisher) == normalized(publisher)


@pytest.mark.parametrize(("kind", "publisher", "target"), DIFFERENT)
def test_different_values(kind: str, publisher: str, target: object) -> None:
    normalized = normalizer(kind)
    assert normalized(publisher) != normalized(target)


@given(st.floats(), st.floats())
def test_doubles_by_their_bits(one: float, other: float) -> None:
    normalized = normalizer("double precision")
    same = struct.pack(">d", one) == struct.pack(">d", other) or (math.isnan(one) and math.isnan(other))
    assert (normalized(one) == normalized(repr(other))) is same


@given(st.datetimes(timezones=st.timezones()))
def test_instants_by_their_utc(moment: datetime) -> None:
    try:
        utc = moment.astimezone(UTC)
    except OverflowError:
        return
    text = normalizer("timestamp with time zone")(moment)
    assert text is not None
    assert datetime.fromisoformat(text) == utc


def test_value_of_an_unexpected_class_is_an_error() -> None:
    with pytest.raises(TargetError, match="class list"):
        normalizer("integer")([1])
    with pytest.raises(TargetError, match="lost its length"):
        normalizer("bit")(5)
    assert normalizer("bit")(None) is None


@given(st.lists(st.none() | st.text() | st.sampled_from(["NULL", "null", "", "a,b", '"', "\\", "{}", " "])))
def test_a_list_is_written_as_an_array(elements: list[str | None]) -> None:
    assert parse_array(array_literal(elements)) == elements


def test_an_array_literal_is_postgresqls_own() -> None:
    assert array_literal(["a,b", '"', None, "NULL", "\\", "plain", ""]) == '{"a,b","\\"",NULL,"NULL","\\\\",plain,""}'
    assert array_literal([1, None, -2]) == "{1,NULL,-2}"
