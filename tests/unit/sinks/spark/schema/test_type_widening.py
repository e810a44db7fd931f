"""A column whose type changed: its values become what PostgreSQL would write."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from subscriber.sinks.spark.merge.parquet import conformed
from subscriber.sinks.spark.schema.arrow_types import widened
from subscriber.sinks.spark.schema.type_widening import converted

_TEXT = pa.string()
_INSTANT = pa.timestamp("us", "UTC")


@pytest.mark.parametrize(
    ("type_", "value", "text"),
    [
        (pa.bool_(), True, "true"),
        (pa.int64(), -5, "-5"),
        (pa.float64(), 0.1, "0.1"),
        (pa.float64(), 5.0, "5"),
        (pa.float64(), -1200.0, "-1200"),
        (pa.float64(), 1e14, "100000000000000"),
        (pa.float64(), 1e15, "1e+15"),
        (pa.float64(), -1.25e-7, "-1.25e-07"),
        (pa.float64(), 0.00012, "0.00012"),
        (pa.float64(), 1.7976931348623157e308, "1.7976931348623157e+308"),
        (pa.float64(), 0.0, "0"),
        (pa.float64(), -0.0, "-0"),
        (pa.float64(), float("nan"), "NaN"),
        (pa.float64(), float("-inf"), "-Infinity"),
        (pa.float32(), 0.1, "0.1"),
        (pa.float32(), 1e6, "1e+06"),
        (pa.float32(), 123456.0, "123456"),
        (pa.decimal128(5, 2), Decimal("1.50"), "1.50"),
        (pa.decimal128(20, 10), Decimal("0"), "0.0000000000"),
        (pa.date32(), date(44, 3, 15), "0044-03-15"),
        (pa.timestamp("us"), datetime(2024, 1, 2, 3, 4, 5), "2024-01-02 03:04:05"),  # noqa: DTZ001
        (pa.timestamp("us"), datetime(2024, 1, 2, 3, 4, 5, 120_000), "2024-01-02 03:04:05.12"),  # noqa: DTZ001
        (_INSTANT, datetime(2024, 1, 2, 3, 4, 0, tzinfo=UTC), "2024-01-02 03:04:00+00"),
        (_INSTANT, datetime(2024, 1, 2, 3, 4, 5, 1, tzinfo=UTC), "2024-01-02 03:04:05.000001+00"),
        (pa.binary(), b"\x00a\xff", "\\x0061ff"),
        (pa.list_(_TEXT), [], "{}"),
        (pa.list_(_TEXT), ["a", None, "", "null", "b c", 'q"', "\\", "ä"], r'{a,NULL,"","null","b c","q\"","\\",ä}'),
        (pa.list_(pa.bool_()), [True, False], "{t,f}"),
        (pa.list_(pa.binary()), [b"a"], r'{"\\x61"}'),
        (pa.list_(pa.float64()), [1.0, None], "{1,NULL}"),
        (pa.list_(_INSTANT), [datetime(2024, 1, 2, tzinfo=UTC)], '{"2024-01-02 00:00:00+00"}'),
    ],
)
def test_text_is_postgresqls(type_: pa.DataType, value: Any, text: str) -> None:
    column = pa.chunked_array([pa.array([value, None], type_), pa.array([value], type_)], type_)
    assert converted(column, _TEXT).to_pylist() == [text, None, text]
    empty = pa.chunked_array([], type_)
    assert converted(empty, _TEXT).type == _TEXT


def test_lists_are_converted_element_by_element() -> None:
    ints = pa.chunked_array([pa.array([[9], [1, None], None, [], [3]], pa.list_(pa.int32())).slice(1)])
    assert converted(ints, pa.list_(pa.int64())).to_pylist() == [[1, None], None, [], [3]]
    assert converted(ints, pa.list_(_TEXT)).to_pylist() == [["1", None], None, [], ["3"]]
    blobs = pa.chunked_array([pa.array([[b"a"]], pa.list_(pa.binary()))])
    assert converted(blobs, pa.list_(_TEXT)).to_pylist() == [["\\x61"]]


_ALL = [
    pa.bool_(),
    pa.int16(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(5, 2),
    pa.decimal128(38, 2),
    pa.date32(),
    pa.timestamp("us"),
    _INSTANT,
    pa.binary(),
    _TEXT,
    pa.list_(_TEXT),
    pa.list_(pa.int32()),
    pa.list_(_INSTANT),
]


@pytest.mark.parametrize("one", _ALL, ids=str)
def test_every_type_becomes_what_holds_it_and_another(one: pa.DataType) -> None:
    column = pa.chunked_array([pa.array([None, None], one)])
    for other in _ALL:
        wide = widened(one, other)
        assert widened(other, one) == wide, other
        assert converted(column, wide).type == wide, other


def test_special_values_move_into_a_column_whose_new_type_can_hold_them() -> None:
    before = pa.table(
        {
            "n": pa.array([None, Decimal("1.50"), None, None], pa.decimal128(5, 2)),
            "day": pa.array([None, date(2024, 1, 2), None, None], pa.date32()),
            "other": pa.array([None, None, None, None], pa.date32()),
            "_special": pa.array(
                ['{"day": "infinity", "n": "NaN"}', None, '{"n": "Infinity", "other": "infinity"}', '{"day": "0044-03-15 BC"}']
            ),
        }
    )
    wanted = pa.schema([("n", _TEXT), ("day", pa.timestamp("us")), ("other", pa.date32()), ("_special", _TEXT)])
    after = conformed(before, wanted)
    assert after.schema.types == wanted.types
    assert after["n"].to_pylist() == ["NaN", "1.50", "Infinity", None]
    assert after["day"].cast(_TEXT).to_pylist() == [None, "2024-01-02 00:00:00.000000", None, None]
    assert after["_special"].to_pylist() == ['{"day": "infinity"}', None, '{"other": "infinity"}', '{"day": "0044-03-15 00:00:00 BC"}']
    # and where no filter asks for the other columns
    assert conformed(before, pa.schema([("n", _TEXT)])).to_pydict() == {"n": ["NaN", "1.50", "Infinity", None]}
