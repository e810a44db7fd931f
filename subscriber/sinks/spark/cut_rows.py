"""Rows of one cut as Spark SQL gives them, for who compares a lake with its publisher."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from subscriber.abc import TableName
from subscriber.sinks.spark.catalog.snapshots import Cut
from subscriber.sinks.spark.reading import read_table
from subscriber.sinks.spark.schema.table_schema import SPECIAL

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["CutRows"]

_ROWS: Final = 10_000
_VIEW: Final = "subscriber_cut"


class CutRows:
    """Tables of one cut. Everything here blocks.

    Args:
        spark: a session that reaches the lake.
        target: the subscription's.
        cut: which.
    """

    def __init__(self, spark: SparkSession, target: str, cut: Cut) -> None:
        self._spark = spark
        self._target = target
        self._cut = cut

    def columns(self, table: TableName) -> list[str]:
        """Of a table; none if the cut has no such table."""
        if table not in self._cut.tables:
            return []
        return list(read_table(self._spark, self._target, str(table), cut=self._cut).columns)

    def batches(self, table: TableName, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
        """All rows, some at a time; what a column cannot hold, as the text that is kept beside it."""
        read_table(self._spark, self._target, str(table), cut=self._cut).createOrReplaceTempView(_VIEW)
        names = ", ".join(f"`{name.replace('`', '``')}`" for name in [*columns, SPECIAL])
        query = f"SELECT {names} FROM {_VIEW}"  # noqa: S608 -- names, quoted
        for batch in self._spark.sql(query).toArrow().to_batches(max_chunksize=_ROWS):
            yield [_row(row, columns) for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)]


def _row(row: tuple[Any, ...], columns: Sequence[str]) -> list[Any]:
    *values, special = row
    if not special:
        return values
    kept = json.loads(special)
    return [kept.get(column, value) for column, value in zip(columns, values, strict=True)]
