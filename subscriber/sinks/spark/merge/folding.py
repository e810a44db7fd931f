"""A unit of work that folds its changes for MERGE INTO instead of rewriting files. It writes the final row of each key as a file."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.zone import unique_path, write_file
from subscriber.sinks.spark.merge.fold import merge_keyed_rows
from subscriber.sinks.spark.merge.parquet import affected_rows, read_changes
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.work_unit import FoldedFile, Unit
from subscriber.sinks.spark.schema.table_schema import TableSchema, folded_name

__all__ = ["deleted_flag", "fold_unit"]


def deleted_flag(schema: TableSchema) -> str:
    """Name of the additional column of folded changes, which says whether the row is deleted."""
    flag = "_gone"
    while folded_name(flag) in map(folded_name, schema.current.names):
        flag += "_"
    return flag


def fold_unit(storage: Storage, unit: Unit, directory: str) -> tuple[FoldedFile, MissingRows]:
    """Fold the changes of a unit that has a key and one stretch, and write the result into a directory of the lake.

    Returns:
        The file, and counts of changes that found no row.
    """
    schema = unit.schema
    changes = read_changes(storage, unit.stretches[0].files, schema, unit.after, ranges=unit.ranges)
    affected = [rows for rows, _ in affected_rows(storage, unit, () if unit.cleared else unit.base, changes)]
    merged = merge_keyed_rows(pa.concat_tables([schema.current.empty_table(), *affected]), changes, schema)
    flag = deleted_flag(schema)
    parts = [(merged.puts, False), (merged.gone, True)]
    rows = pa.concat_tables([table.append_column(flag, pa.array([gone] * table.num_rows, pa.bool_())) for table, gone in parts])
    if not rows.num_rows:
        return FoldedFile(), merged.missing
    path = unique_path(directory)
    size = write_file(storage, path, rows.schema, rows.to_batches())
    file = FoldedFile(path=path, size=size, rows=rows.num_rows, memory=rows.nbytes, keys=_limits(rows, schema), known=merged.known)
    return file, merged.missing


def _limits(rows: pa.Table, schema: TableSchema) -> tuple[Any, Any] | None:
    """The minimum and maximum of the first key column. None if unknown."""
    column = rows[schema.keys[0]]
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_date(column.type)):
        return None
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]
