"""Statistics of a file as Delta's log has them: readers skip files by them. Source: Delta protocol, Per-file Statistics."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["file_statistics"]

_TEXT_LIMIT: Final = 32
"""Characters of a text's minimum and maximum; longer ones are left out rather than cut."""


def file_statistics(rows: pa.Table) -> str:
    """JSON: how many rows, and of each column how many NULLs, and its least and greatest value where these are exact."""
    nulls, low, high = {}, {}, {}
    for field in rows.schema:
        column = rows[field.name]
        if pa.types.is_nested(field.type):
            continue
        nulls[field.name] = column.null_count
        if not _is_bounded(field.type) or column.null_count == len(column):
            continue
        found = pc.min_max(column).as_py()
        least, greatest = _json(found["min"]), _json(found["max"])
        if least is not None and greatest is not None:
            low[field.name], high[field.name] = least, greatest
    return json.dumps({"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls})


def _is_bounded(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_date(type_) or pa.types.is_timestamp(type_) or pa.types.is_string(type_))


def _json(value: Any) -> Any:
    match value:
        case str():
            return value if len(value) <= _TEXT_LIMIT else None
        case datetime():
            # readers know milliseconds only
            if value.microsecond % 1000:
                return None
            text = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
            return text.isoformat(timespec="milliseconds") + ("Z" if value.tzinfo is not None else "")
        case date():
            return value.isoformat()
        case Decimal():
            return None
        case _:
            return value
