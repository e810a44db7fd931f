"""Which column PostgreSQL refused a value of, where it does not say."""

from __future__ import annotations

import pytest
from sqlalchemy import Column

from subscriber.sinks.sqlalchemy.apply.rejected_column import suspect
from subscriber.sinks.sqlalchemy.schema.named_type import MODIFIER, NamedType
from subscriber.sinks.sqlalchemy.schema.target_table import ColumnPlan
from subscriber.types import PgType

RANGE = "22003"
FITS = [
    ("int2", -1, "32767", "32768"),
    ("int4", -1, "-2147483648", "-2147483649"),
    ("int8", -1, "9223372036854775807", "9223372036854775808"),
    ("int4", -1, "7", "7.5"),
    ("numeric", (5 << 16 | 2) + 4, "999.99", "1000"),
    ("numeric", (5 << 16 | 2) + 4, "NaN", "Infinity"),
    ("numeric", (5 << 16 | 2) + 4, "999.994", "999.995"),
    ("float4", -1, "3.4e38", "3.5e38"),
    ("float4", -1, "-Infinity", "1e-60"),
    ("float8", -1, "1e308", "1e309"),
    ("varchar", 3 + 4, "ab    ", "ab c"),
    ("bpchar", 3 + 4, "äöü", "äöüß"),
    ("bit", 3, "101", "10"),
    ("varbit", 3, "10", "1010"),
    ("bool", -1, "t", "perhaps"),
    ("uuid", -1, "00000000-0000-0000-0000-000000000000", "zero"),
]


def plan(name: str, target: str, modifier: int = -1, *, source: str = "text") -> ColumnPlan:
    column = Column(name, NamedType("pg_catalog", target), info={MODIFIER: modifier})
    return ColumnPlan(name, PgType(0, "pg_catalog", source), column, bytes.decode, bytes.decode)


@pytest.mark.parametrize(("target", "modifier", "fits", "does_not"), FITS)
def test_ranges_and_lengths(target: str, modifier: int, fits: str, does_not: str) -> None:
    columns = [plan("other", "int2", source="int8"), plan("it", target, modifier)]
    assert suspect(columns, [["1", does_not]], RANGE) == "it"
    # one of two, and nothing tells which
    assert suspect(columns, [["1", fits]], RANGE) is None


def test_the_only_one_of_another_type() -> None:
    columns = [plan("same", "int4", source="int4"), plan("null", "int2"), plan("unknown", "mood"), plan("gone", "text", source="text")]
    assert suspect(columns, [["1", None, "so-so", "x"]], RANGE) == "unknown"
    assert suspect(columns, [["1", "2", "so-so", "x"]], RANGE) is None
    assert suspect(columns, [["1", None, None, "x"]], RANGE) is None


def test_one_of_many_rows() -> None:
    columns = [plan("a", "int2", source="int8"), plan("b", "mood")]
    assert suspect(columns, [["1", "x"], ["2", "y"], ["70000", "z"]], RANGE) == "a"
    assert suspect(columns, [["1", "x"], ["2", "y"]], RANGE) is None
    assert suspect(columns, [[None, "x"], [None, "y"]], RANGE) == "b"


def test_characters_that_the_encoding_has_not() -> None:
    columns = [plan("a", "text", source="text"), plan("b", "text", source="text")]
    assert suspect(columns, [["x", "y"], ["x", "漢"]], "22P05") == "b"
    assert suspect(columns, [["ä", "漢"]], "22P05") is None
