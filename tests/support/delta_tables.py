"""The rows of a Delta table as delta-rs reads them, and the bytes that were written to tables.

delta-rs' method ``to_pyarrow_table`` has no support for deletion vectors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

__all__ = ["delta_batches", "delta_bytes", "delta_rows"]

_VECTOR: Final = "deletionVector"


def delta_batches(table: DeltaTable, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    names = ", ".join(f'"{name}"' for name in columns) or "*"
    yield from pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(f"SELECT {names} FROM t"))


def delta_rows(table: DeltaTable, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    return [row for batch in delta_batches(table, columns) for row in batch.to_pylist()]


def delta_bytes(directory: Path) -> int:
    """Bytes that all commits of the Delta tables below a directory wrote: files, deletion vectors and the commits themselves."""
    size = 0
    for commit in directory.rglob("_delta_log/*.json"):
        if not commit.stem.isdecimal():
            continue
        text = commit.read_text()
        size += len(text)
        actions = [json.loads(line) for line in text.splitlines()]
        removed = {action["remove"]["path"] for action in actions if "remove" in action}
        for action in actions:
            added = action.get("add") or action.get("cdc")
            if added is not None and added["path"] not in removed:
                size += added["size"]
            elif added is not None and added.get(_VECTOR):
                size += added[_VECTOR]["sizeInBytes"]
    return size
