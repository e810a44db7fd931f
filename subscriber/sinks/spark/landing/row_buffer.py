"""Collects rows of one table until they become Arrow columns: raw values, and what consecutive rows have in common."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.errors import ApplyError
from subscriber.protocol.lsn import Lsn, kept_in_years
from subscriber.sinks.spark.landing.manifest import EPOCH_MICROSECONDS
from subscriber.sinks.spark.schema.arrow_values import NotText, Specials, to_arrow
from subscriber.sinks.spark.schema.table_schema import META, LakeColumn, TableSchema
from subscriber.transaction.model import Transaction

__all__ = ["Row", "RowBuffer", "Stamp", "cast_columns", "special_column"]


Row = Sequence[bytes | None]


class Stamp(NamedTuple):
    """The transaction of rows: end LSN, finish LSN (for ALTER SUBSCRIPTION … SKIP), xid, commit time in microseconds since 2000."""

    end_lsn: Lsn
    final_lsn: Lsn
    xid: int
    time: int

    @classmethod
    def of(cls, transaction: Transaction) -> Stamp:
        return cls(transaction.end_lsn, transaction.final_lsn, transaction.xid, kept_in_years(transaction.commit_time))


_Span = tuple[int, int, int, Stamp, str, bool, list[str] | None]
"""Consecutive rows that differ only in their values: the number of the buffer's rows up to their end, their size, the difference between
their numbers in the transaction and in the buffer; and what all have: transaction, operation, whether moved, unchanged columns."""


class RowBuffer:
    """Rows of one table under one schema, in order. The size is that of their values in bytes, approximately."""

    __slots__ = ("_rows", "_spans", "schema", "size", "table_id")

    def __init__(self, table_id: int, schema: TableSchema) -> None:
        self.table_id = table_id
        self.schema = schema
        self.clear()

    def clear(self) -> None:
        self.size = 0
        self._rows: list[Row] = []
        self._spans: list[_Span] = []

    def remove(self, stamp: Stamp) -> None:
        """Remove the rows of the latest transaction, if it is this one."""
        spans = self._spans
        while spans and spans[-1][3] is stamp:
            self.size -= spans.pop()[1]
        del self._rows[spans[-1][0] if spans else 0 :]

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self, op: str, stamp: Stamp, seq: int, rows: Sequence[Row], size: int, *, moved: bool = False, unchanged: list[str] | None = None
    ) -> None:
        """Add rows of ``size`` bytes, with numbers from ``seq`` on.

        See :mod:`subscriber.sinks.spark.schema.table_schema` for the meaning of the parts.
        """
        before = len(self._rows)
        self._rows += rows
        self._spans.append((len(self._rows), size, seq - before, stamp, op, moved, unchanged))
        self.size += size

    def to_arrow(self) -> pa.RecordBatch:
        """Convert all rows.

        Raises:
            ApplyError: a text is not UTF-8. The error names the transaction.
        """
        ends, _, shifts, stamps, ops, moved, unchanged = (_column(self._spans, place) for place in range(7))
        lsns, _, xids, times = (_column(stamps, place) for place in range(4))
        numbers = pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), pa.array(range(len(ends)), pa.int32()))
        run = pc.run_end_decode(numbers)
        since_1970 = [time + EPOCH_MICROSECONDS for time in times]
        meta = (ops, lsns, shifts, xids, since_1970, moved, unchanged)
        arrays = [pa.array(values, field.type).take(run) for values, field in zip(meta, META, strict=False)]
        arrays[2] = pc.add(arrays[2], pa.array(range(len(self)), pa.int64()))
        try:
            columns, specials = cast_columns(self.schema, lambda number, column: to_arrow(_column(self._rows, number), column.type))
        except ApplyError as error:
            row = next(row for row, values in enumerate(self._rows) if not all(map(_is_text, values)))
            stamp = stamps[bisect_right(ends, row)]
            raise ApplyError(f"{error} in transaction {stamp.xid}, finished at {stamp.final_lsn}", hint=error.hint) from None
        return pa.RecordBatch.from_arrays([*arrays, special_column(specials, len(self)), *columns], schema=self.schema.landing)


def cast_columns(
    schema: TableSchema, cast: Callable[[int, LakeColumn], tuple[pa.Array, Specials]]
) -> tuple[list[pa.Array], dict[int, dict[str, str]]]:
    """Cast each column, by its number.

    Returns:
        One array for each column; and for each row the values that its columns could not hold, field to text.

    Raises:
        ApplyError: a text is not UTF-8.
    """
    arrays: list[pa.Array] = []
    specials: dict[int, dict[str, str]] = {}
    for number, column in enumerate(schema.columns):
        try:
            array, refused = cast(number, column)
        except NotText:
            raise ApplyError(
                f'column "{column.name}" of table "{schema.table}" contains bytes that are not UTF-8',
                hint="the publisher's database has encoding SQL_ASCII: fix the rows there; the lake holds UTF-8 only",
            ) from None
        arrays.append(array)
        for row, text in refused.items():
            specials.setdefault(row, {})[column.field] = text
    return arrays, specials


def _column(rows: Sequence[Sequence[Any]], place: int) -> list[Any]:
    # zip() of many rows is slower, and needs the memory of all columns
    return list(map(itemgetter(place), rows))


def _is_text(value: bytes | None) -> bool:
    try:
        (value or b"").decode()
    except UnicodeDecodeError:
        return False
    return True


def special_column(specials: Mapping[int, Mapping[str, str]], count: int) -> pa.Array:
    if not specials:
        return pa.nulls(count, pa.string())
    texts: list[str | None] = [None] * count
    for row, values in specials.items():
        texts[row] = json.dumps(values, sort_keys=True)
    return pa.array(texts, pa.string())
