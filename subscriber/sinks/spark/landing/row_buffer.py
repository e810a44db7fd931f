"""Collects rows of one table until they become Arrow columns: lists of raw values, one for each row, with its operation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from subscriber.errors import ApplyError
from subscriber.protocol.lsn import Lsn, kept_in_years
from subscriber.sinks.spark.schema.arrow_values import NotText, to_arrow
from subscriber.sinks.spark.schema.table_schema import META, TableSchema
from subscriber.transaction.model import Transaction

__all__ = ["RowBuffer", "special_column", "typed_columns"]

_EPOCH_OFFSET: Final = 946_684_800_000_000
"""Microseconds from 1970 to 2000."""


class RowBuffer:
    """Rows of one table under one schema, in order.

    Attributes:
        table_id: the lake's number of the table.
        schema: of the rows.
        size: approximate size of their values in bytes.
    """

    __slots__ = ("_finals", "_lsns", "_moved", "_ops", "_rows", "_seqs", "_times", "_unchanged", "_xids", "schema", "size", "table_id")

    def __init__(self, table_id: int, schema: TableSchema) -> None:
        self.table_id = table_id
        self.schema = schema
        self.clear()

    def clear(self) -> None:
        self.size = 0
        self._rows: list[Sequence[bytes | None]] = []
        self._ops: list[str] = []
        self._lsns: list[int] = []
        self._seqs: list[int] = []
        self._xids: list[int] = []
        self._times: list[int] = []
        self._moved: list[bool] = []
        self._unchanged: list[list[str] | None] = []
        # end LSN to finish LSN of transactions; ALTER SUBSCRIPTION … SKIP takes the latter
        self._finals: dict[int, Lsn] = {}

    def truncate(self, count: int, size: int) -> None:
        """Keep only the first ``count`` rows, of ``size`` bytes."""
        self.size = size
        columns: tuple[list[Any], ...] = (
            self._rows, self._ops, self._lsns, self._seqs, self._xids, self._times, self._moved, self._unchanged
        )  # fmt: skip
        for column in columns:
            del column[count:]

    def __len__(self) -> int:
        return len(self._rows)

    def append(
        self,
        op: str,
        transaction: Transaction,
        seq: int,
        values: Sequence[bytes | None],
        *,
        moved: bool = False,
        unchanged: list[str] | None = None,
    ) -> None:
        """Add a row. See :mod:`subscriber.sinks.spark.schema.table_schema` for the meaning of the parts."""
        self._ops.append(op)
        self._rows.append(values)
        self._lsns.append(transaction.end_lsn)
        self._finals[transaction.end_lsn] = transaction.final_lsn
        self._seqs.append(seq)
        self._xids.append(transaction.xid)
        self._times.append(kept_in_years(transaction.commit_time) + _EPOCH_OFFSET)
        self._moved.append(moved)
        self._unchanged.append(unchanged)

    def to_arrow(self) -> pa.RecordBatch:
        """Convert all rows.

        Raises:
            ApplyError: a text is not UTF-8. The error names the transaction.
        """
        meta = [
            self._ops,
            pa.array(self._lsns, pa.int64()),
            pa.array(self._seqs, pa.int64()),
            pa.array(self._xids, pa.int64()),
            pa.array(self._times, pa.timestamp("us", "UTC")),
            self._moved,
            self._unchanged,
        ]
        arrays = [pa.array(values, field.type) for values, field in zip(meta, META, strict=False)]
        try:
            columns, specials = typed_columns(self.schema, self._rows)
        except ApplyError as error:
            row = next(row for row, values in enumerate(self._rows) if not all(map(_is_text, values)))
            where = f"in transaction {self._xids[row]}, finished at {self._finals[self._lsns[row]]}"
            raise ApplyError(f"{error} {where}", hint=error.hint) from None
        return pa.RecordBatch.from_arrays([*arrays, special_column(specials, len(self)), *columns], schema=self.schema.landing)


def typed_columns(schema: TableSchema, rows: Sequence[Sequence[bytes | None]]) -> tuple[list[pa.Array], dict[int, dict[str, str]]]:
    """Cast the columns of rows.

    Returns:
        One array for each column; and for each row the values that its columns could not hold, field to text.

    Raises:
        ApplyError: a text is not UTF-8.
    """
    values: Sequence[Sequence[bytes | None]] = list(zip(*rows, strict=True)) if rows else [()] * len(schema.columns)
    arrays: list[pa.Array] = []
    specials: dict[int, dict[str, str]] = {}
    for column, texts in zip(schema.columns, values, strict=True):
        try:
            array, refused = to_arrow(texts, column.type)
        except NotText:
            raise ApplyError(
                f'column "{column.name}" of table "{schema.table}" contains bytes that are not UTF-8',
                hint="the publisher's database has encoding SQL_ASCII: fix the rows there; the lake holds UTF-8 only",
            ) from None
        arrays.append(array)
        for row, text in refused.items():
            specials.setdefault(row, {})[column.field] = text
    return arrays, specials


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
