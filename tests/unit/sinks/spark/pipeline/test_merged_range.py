"""The limits of keys that engine ``spark`` gives to MERGE INTO, so that it need not look into all files."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from subscriber.protocol.messages import Column, Relation
from subscriber.sinks.spark.pipeline.engines.merge_sql import key_limits
from subscriber.sinks.spark.schema.table_schema import TableSchema

INT2, INT4, INT8, DATE = 21, 23, 20, 1082


def found(type_oid: int, *parts: list[Any]) -> tuple[Any, Any] | None:
    schema = TableSchema.of_relation(Relation(5, "public", "t", "d", (Column("id", type_oid, -1, True),)))
    return key_limits(schema, [(min(part), max(part)) for part in parts])


@pytest.mark.parametrize(("type_oid", "bits"), [(INT2, 16), (INT4, 32), (INT8, 64)])
@pytest.mark.parametrize(
    "keys",
    [[0], [-1], [1023, 1024], [-5, 5], [-(1 << 15)], [(1 << 15) - 1], [-(1 << 15), (1 << 15) - 1], [17, 20_000], [-20_000, -19_999]],
    ids=str,
)
def test_all_keys_are_within_and_the_limits_are_of_their_type(type_oid: int, bits: int, keys: list[int]) -> None:
    limits = found(type_oid, keys[:1], keys)
    assert limits is not None
    low, high = limits
    assert -(1 << bits - 1) <= low <= min(keys) <= max(keys) <= high < 1 << bits - 1
    assert high - low < 4 * max(max(keys) - min(keys), 1024)


@pytest.mark.parametrize(("type_oid", "bits"), [(INT4, 32), (INT8, 64)])
def test_the_least_and_the_greatest_key_of_all(type_oid: int, bits: int) -> None:
    least, greatest = -(1 << bits - 1), (1 << bits - 1) - 1
    assert found(type_oid, [least, greatest]) == (least, greatest)
    assert found(type_oid, [least]) == (least, least + 1023)
    assert found(type_oid, [greatest]) == (greatest - 1023, greatest)


def test_keys_that_follow_have_the_same_limits_mostly() -> None:
    limits = {found(INT8, list(range(start, start + 1000))) for start in range(1_000_000, 1_050_000, 100)}
    assert len(limits) < 120


def test_limits_of_several_files_and_none_if_those_of_one_are_unknown() -> None:
    schema = TableSchema.of_relation(Relation(5, "public", "t", "d", (Column("id", INT8, -1, True),)))
    assert key_limits(schema, [(0, 1), None]) is None
    assert key_limits(schema, []) is None
    assert found(DATE, [date(2024, 1, 1)], [date(2023, 5, 6)]) == (date(2023, 5, 6), date(2024, 1, 1))
