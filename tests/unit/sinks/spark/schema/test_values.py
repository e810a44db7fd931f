"""PostgreSQL's texts to Arrow columns, and what those cannot hold."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from subscriber.sinks.spark.schema.arrow_types import arrow_type, parse_type, type_name, widened
from subscriber.sinks.spark.schema.arrow_values import NotText, parse_array, to_arrow


def numeric(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


@pytest.mark.parametrize(
    ("oid", "modifier", "expected"),
    [
        (16, -1, pa.bool_()),
        (21, -1, pa.int16()),
        (26, -1, pa.int64()),
        (1700, numeric(18, 2), pa.decimal128(18, 2)),
        (1700, numeric(38, 38), pa.decimal128(38, 38)),
        (1700, numeric(39, 2), pa.string()),
        (1700, numeric(5, -2), pa.string()),
        (1700, numeric(2, 5), pa.string()),
        (1700, -1, pa.string()),
        (1043, 24, pa.string()),
        (1083, -1, pa.string()),
        (1114, -1, pa.timestamp("us")),
        (1184, 7, pa.timestamp("us", "UTC")),
        (1231, numeric(10, 3), pa.list_(pa.decimal128(10, 3))),
        (1009, -1, pa.list_(pa.string())),
        (98765, -1, pa.string()),
    ],
)
def test_each_type_has_its_place(oid: int, modifier: int, expected: pa.DataType) -> None:
    found = arrow_type(oid, modifier)
    assert found == expected
    assert parse_type(type_name(found)) == found


@pytest.mark.parametrize(
    ("type_", "texts", "values", "special"),
    [
        (pa.bool_(), ["t", None, "f"], [True, None, False], {}),
        (pa.int64(), ["-9223372036854775808", "9223372036854775807"], [-(2**63), 2**63 - 1], {}),
        (
            pa.decimal128(10, 3),
            ["1.500", "NaN", None, "-Infinity", "7"],
            [Decimal("1.500"), None, None, None, Decimal(7)],
            {1: "NaN", 3: "-Infinity"},
        ),
        (
            pa.date32(),
            ["2024-02-29", "infinity", "0044-03-15 BC", "10000-01-01"],
            [date(2024, 2, 29), None, None, None],
            {1: "infinity", 2: "0044-03-15 BC", 3: "10000-01-01"},
        ),
        (
            pa.timestamp("us", "UTC"),
            ["2024-01-01 12:00:00.5+02", "-infinity", "1800-01-01 00:00:00+00:53:28", "2024-01-01 00:00:00-03:30"],
            [
                datetime(2024, 1, 1, 10, 0, 0, 500000, UTC),
                None,
                datetime(1799, 12, 31, 23, 6, 32, tzinfo=UTC),
                datetime(2024, 1, 1, 3, 30, tzinfo=UTC),
            ],
            {1: "-infinity"},
        ),
        (pa.timestamp("us"), ["2024-01-01 12:00:00", "0001-01-01 00:00:00"], [datetime(2024, 1, 1, 12), datetime(1, 1, 1)], {}),  # noqa: DTZ001
        (pa.binary(), ["\\x00ff", None, "\\000a\\\\"], [b"\0\xff", None, b"\0a\\"], {}),
        (
            pa.list_(pa.int32()),
            ["{1,NULL,3}", "{}", None, "{{1,2},{3,4}}", "[0:1]={5,6}"],
            [[1, None, 3], [], None, None, None],
            {3: "{{1,2},{3,4}}", 4: "[0:1]={5,6}"},
        ),
        (pa.list_(pa.decimal128(4, 1)), ["{1.5,NaN}", "{2.5}"], [None, [Decimal("2.5")]], {0: "{1.5,NaN}"}),
        (pa.list_(pa.bool_()), ["{t,f,NULL}"], [[True, False, None]], {}),
    ],
)
def test_a_value_is_held_or_kept_as_text(
    type_: pa.DataType, texts: list[str | None], values: list[object], special: dict[int, str]
) -> None:
    array, found = to_arrow([None if text is None else text.encode() for text in texts], type_)
    assert array.type == type_
    assert array.to_pylist() == values
    assert found == special


def test_infinities_and_nan_of_floats_are_values() -> None:
    array, special = to_arrow([b"NaN", b"Infinity", b"-Infinity", b"1e-300"], pa.float64())
    assert str(array.to_pylist()) == "[nan, inf, -inf, 1e-300]"
    assert special == {}


def test_no_rows_and_only_nulls_have_the_type() -> None:
    for type_ in (pa.date32(), pa.bool_(), pa.list_(pa.int64()), pa.binary(), pa.string(), pa.decimal128(5, 2)):
        assert to_arrow([], type_)[0].type == type_
        assert to_arrow([None, None], type_)[0].to_pylist() == [None, None]


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(NotText):
        to_arrow([b"\xff"], pa.string())


@given(
    st.lists(
        st.one_of(st.none(), st.decimals(allow_nan=True, allow_infinity=False, places=2, min_value=-99999, max_value=99999)), max_size=40
    )
)
def test_any_mix_of_numbers_and_what_is_none_comes_back(numbers: list[Decimal | None]) -> None:
    texts = [None if number is None else str(number) if number.is_finite() else "NaN" for number in numbers]
    array, special = to_arrow([None if text is None else text.encode() for text in texts], pa.decimal128(10, 2))
    back = [special.get(row, None if value is None else str(value)) for row, value in enumerate(array.to_pylist())]
    assert back == texts


@given(st.lists(st.one_of(st.none(), st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8))))
def test_array_literals_are_read_as_postgres_writes_them(elements: list[str | None]) -> None:
    def quoted(element: str | None) -> str:
        return "NULL" if element is None else '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'

    assert parse_array("{" + ",".join(map(quoted, elements)) + "}") == elements


@pytest.mark.parametrize("text", ["", "1,2", "{1", '{"a}', "{1}}", "{a{b}"])
def test_malformed_array_literals_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="array literal"):
        parse_array(text)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("int16", "int64", "int64"),
        ("int32", "int32", "int32"),
        ("float", "double", "double"),
        ("decimal(10,2)", "decimal(8,4)", "decimal(12,4)"),
        ("decimal(38,0)", "decimal(38,10)", "string"),
        ("int32", "double", "double"),
        ("int32", "float", "double"),
        ("float", "int16", "float"),
        ("int64", "double", "string"),
        ("int32", "decimal(8,2)", "decimal(12,2)"),
        ("decimal(38,20)", "int64", "string"),
        ("date", "timestamp", "timestamp"),
        ("date", "timestamptz", "string"),
        ("timestamp", "timestamptz", "string"),
        ("list<int16>", "list<int32>", "list<int32>"),
    ],
)
def test_two_types_have_a_third_that_holds_both(one: str, other: str, expected: str) -> None:
    assert type_name(widened(parse_type(one), parse_type(other))) == expected
    assert type_name(widened(parse_type(other), parse_type(one))) == expected


def test_manifest_names_are_json() -> None:
    assert json.loads(json.dumps(type_name(pa.list_(pa.decimal128(3, 1))))) == "list<decimal(3,1)>"
