"""What a copy by executors selects, and which columns it takes for what."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from subscriber.errors import ConfigurationError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.sinks.spark.copy.select_list import current_rows, select_list
from subscriber.sinks.spark.schema.table_schema import TableSchema


def published(oids: list[int], modifier: int = -1) -> PublishedTable:
    names = tuple(f"c{number}" for number in range(len(oids)))
    return PublishedTable(
        name=TableName("public", "t"),
        relation_id=5,
        kind="r",
        columns=names,
        key_columns=names[:1],
        replica_identity="d",
        column_types=tuple(oids),
        column_modifiers=(modifier,) * len(oids),
    )


def test_dates_and_timestamps_come_with_a_text_for_what_the_lake_cannot_hold() -> None:
    table = published([23, 1082, 1114, 25])
    schema = TableSchema.of_published(table)
    assert select_list(table.columns, table.column_types, schema).count(" END") == 4
    columns = [
        pa.array([1, 2, 3], pa.int32()),
        pa.array([date(2024, 1, 1), None, None], pa.date32()),
        pa.array([None, "infinity", None], pa.string()),
        pa.array([None, None, datetime(2024, 1, 1)], pa.timestamp("us")),  # noqa: DTZ001
        pa.array(["0044-03-15 00:00:00 BC", None, None], pa.string()),
        pa.array(["a", "b", None], pa.string()),
    ]
    rows = current_rows(schema, columns).to_pylist()
    assert [row["c1"] for row in rows] == [date(2024, 1, 1), None, None]
    assert [row["c2"] for row in rows] == [None, None, datetime(2024, 1, 1)]  # noqa: DTZ001
    assert [row["_special"] for row in rows] == ['{"c2": "0044-03-15 00:00:00 BC"}', '{"c1": "infinity"}', None]
    assert [row["c3"] for row in rows] == ["a", "b", None]


@pytest.mark.parametrize("change", ["too few", "half a pair", "too many"])
def test_other_columns_than_those_are_refused(change: str) -> None:
    table = published([23, 1184])
    schema = TableSchema.of_published(table)
    moments = pa.array([None], pa.timestamp("us", "UTC"))
    columns = [pa.array([1], pa.int32())]
    columns += {"too few": [], "half a pair": [moments], "too many": [moments, *[pa.array(["x"])] * 2]}[change]
    with pytest.raises(ConfigurationError, match="do not match those of the copy") as caught:
        current_rows(schema, columns)
    assert "the same version of" in caught.value.one_line()


@pytest.mark.parametrize(("count", "pairs"), [(832, True), (833, False)])
def test_no_more_expressions_than_a_select_may_have(count: int, pairs: bool) -> None:
    """1664. A table of so many columns comes as texts."""
    table = published([1114] * count)
    schema = TableSchema.of_published(table)
    assert select_list(table.columns, table.column_types, schema).count(" END") == count * (1 + pairs)
    texts = [pa.array(["2024-01-01 00:00:00"])] * count
    assert current_rows(schema, texts).to_pylist()[0]["c0"] == datetime(2024, 1, 1)  # noqa: DTZ001


def test_others_come_as_text() -> None:
    table = published([1700], modifier=(5 << 16 | 2) + 4)
    schema = TableSchema.of_published(table)
    assert current_rows(schema, [pa.array(["1.50", "NaN"])]).to_pylist() == [
        {"c0": Decimal("1.50"), "_special": None},
        {"c0": None, "_special": '{"c0": "NaN"}'},
    ]
