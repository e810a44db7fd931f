"""Files of a Delta table, with the statistics for Delta's log. Readers skip files by these.

Source: Delta protocol, Per-file Statistics.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.sinks.spark.files.storage import Storage

__all__ = ["Bound", "DataFile", "file_statistics", "write_data_file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a Delta table, written by a unit of work or by a copy. ``path`` is relative to the table, ``stats`` JSON as in Delta's log.

    ``low`` and ``high`` are the range of the first key column. None if there is none.
    """

    path: str
    size: int
    rows: int
    stats: str
    low: Bound | None = None
    high: Bound | None = None


def write_data_file(
    storage: Storage,
    directory: str,
    path: str,
    rows: pa.Table,
    *,
    dictionary: bool | list[str] = True,
    row_group_size: int | None = None,
) -> DataFile:
    """Write rows as a file of a table. Its name is durable once the directory is synced.

    The path is relative to the directory of the table. The metadata of the rows' schema is stored in the file. ``dictionary``: the columns
    that are encoded with one; True: all.
    """
    name = f"{directory}/{path}"
    pending = storage.create(name)
    try:
        with storage.reading(name):
            pq.write_table(
                rows,
                pending.stream,
                compression="zstd",
                use_dictionary=dictionary,
                row_group_size=row_group_size,
                write_page_checksum=True,
            )
            size = pending.commit()
    except BaseException:
        pending.discard()
        raise
    return DataFile(path=path, size=size, rows=rows.num_rows, stats=file_statistics(rows))


_TEXT_LIMIT: Final = 32
"""Maximum length of a text's minimum and maximum. Longer texts are left out, not cut."""


def file_statistics(rows: pa.Table) -> str:
    """Statistics as JSON: the count of rows, and for each column the count of NULLs and, where exact, the minimum and maximum."""
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
            # readers support only milliseconds
            if value.microsecond % 1000:
                return None
            text = value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo is not None else value
            return text.isoformat(timespec="milliseconds") + ("Z" if value.tzinfo is not None else "")
        case date():
            return value.isoformat()
        case _:
            return value


Bound = tuple[Any, ...]
"""A result of :func:`rank`. Results of the same column can be compared."""
