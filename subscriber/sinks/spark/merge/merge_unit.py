"""Merges the changes of one unit of work into its files. It can run in a thread or on an executor of Spark.

:func:`merge_unit` only reads and writes files with pyarrow. It does not change a table: the new files become valid when a commit of the
table names them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa

from subscriber.sinks.spark.files.errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.fold import merge_keyed_rows, merge_whole_rows, since_truncate
from subscriber.sinks.spark.merge.folding import fold_unit
from subscriber.sinks.spark.merge.parquet import read_base, read_changes, write_rows
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["merge_unit"]


def merge_unit(storage: Storage, unit: Unit) -> UnitResult:
    """Merge the changes of a unit into its files.

    Raises:
        TargetError: a file cannot be read or written, or is damaged; or Arrow does not support an operation.
    """
    began = time.monotonic()
    with arrow_errors(storage.what(unit.directory)):
        if unit.folded_into is not None:
            folded, missing = fold_unit(storage, unit, unit.folded_into)
            found = UnitResult([], missing, folded)
        else:
            found = _merged(storage, unit)
    return replace(found, seconds=time.monotonic() - began)


def _merged(storage: Storage, unit: Unit) -> UnitResult:
    current = unit.schema.current
    if unit.base and not unit.cleared:
        rows = read_base(storage, unit.directory, unit.base, unit.schema, current.names)
    else:
        rows = current.empty_table()
    missing = MissingRows()
    for stretch in unit.stretches:
        schema = stretch.schema
        changes = read_changes(storage, stretch.files, schema, unit.after, ranges=unit.ranges)
        changes, cleared = since_truncate(changes)
        if cleared:
            rows, missing = rows.slice(0, 0), MissingRows()
        rows = _without(rows, stretch.absent)  # even if none of these keys has a change
        if not changes.num_rows:
            continue
        rows, found = _changed(rows, changes, schema, unit.added)
        missing.add(found)
    return UnitResult(write_rows(storage, unit, _without(rows, unit.dropped)), missing)


def _changed(rows: pa.Table, changes: pa.Table, schema: TableSchema, added: Sequence[str]) -> tuple[pa.Table, MissingRows]:
    if schema.full:
        return merge_whole_rows(rows, changes, schema, added)
    if schema.keys:
        settled = merge_keyed_rows(rows, changes, schema)
        return settled.rows(rows), settled.missing
    return pa.concat_tables([rows, changes.select(schema.current.names)]), MissingRows()


def _without(rows: pa.Table, fields: Sequence[str]) -> pa.Table:
    for name in fields:
        position = rows.schema.get_field_index(name)
        rows = rows.set_column(position, rows.schema.field(position), pa.nulls(rows.num_rows, rows.schema.field(position).type))
    return rows
