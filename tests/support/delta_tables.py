"""The rows of a Delta table as delta-rs reads them. Its method ``to_pyarrow_table`` has no support for deletion vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

__all__ = ["delta_batches", "delta_rows"]


def delta_batches(table: DeltaTable, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    names = ", ".join(f'"{name}"' for name in columns) or "*"
    yield from pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(f"SELECT {names} FROM t"))


def delta_rows(table: DeltaTable, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    return [row for batch in delta_batches(table, columns) for row in batch.to_pylist()]
