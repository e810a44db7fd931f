"""The rows of a Delta table as delta-rs reads them. Its method ``to_pyarrow_table`` has no support for deletion vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

__all__ = ["delta_rows"]


def delta_rows(table: DeltaTable, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    names = ", ".join(f'"{name}"' for name in columns) or "*"
    found: list[dict[str, Any]] = pa.table(QueryBuilder().register("t", table).execute(f"SELECT {names} FROM t").read_all()).to_pylist()
    return found
