"""Merges the changes of one unit of work into its files. It can run in a thread or on an executor of Spark.

:func:`merge_unit` only reads and writes files with pyarrow. It does not change a table: the new files become valid when a commit of the
table names them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.change_data import changed_rows, write_change_data
from subscriber.sinks.spark.merge.fold import merge_keyed_rows, merge_whole_rows, since_truncate
from subscriber.sinks.spark.merge.folding import fold_unit
from subscriber.sinks.spark.merge.parquet import affected_rows, read_base, read_changes, write_rows
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.schema.arrow_columns import with_column
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile

__all__ = ["merge_unit"]


def merge_unit(storage: Storage, unit: Unit) -> UnitResult:
    """Merge the changes of a unit into its files."""
    began = time.monotonic()
    with arrow_errors(storage.what(unit.directory)):
        if unit.folded_into is not None:
            folded, missing = fold_unit(storage, unit, unit.folded_into)
            found = UnitResult([], missing, folded)
        elif not unit.cleared and any(file.kept for file in unit.base):
            found = _marked(storage, unit)
        else:
            found = _merged(storage, unit)
    return replace(found, seconds=time.monotonic() - began)


def _merged(storage: Storage, unit: Unit) -> UnitResult:
    current = unit.schema.current
    base = current.empty_table()
    if unit.base and (unit.feed or not unit.cleared):
        base = _rewritten(storage, unit)
    rows, missing = base.slice(0, 0) if unit.cleared else base, MissingRows()
    for stretch in unit.stretches:
        schema = stretch.schema
        changes = read_changes(storage, stretch.files, schema, unit.after, ranges=unit.ranges)
        changes, cleared = since_truncate(changes)
        if cleared:
            rows, missing = rows.slice(0, 0), MissingRows()
        rows = _without(rows, stretch.absent)  # even if none of these keys has a change
        if not changes.num_rows:
            continue
        rows, found = _changed(rows, changes, schema)
        missing.add(found)
    rows = _without(rows, unit.dropped)
    return UnitResult(write_rows(storage, unit, rows), missing, feed=_feed(storage, unit, base, rows) if unit.feed else ())


def _marked(storage: Storage, unit: Unit) -> UnitResult:
    """Write the new rows beside the files that are kept, and mark the rows that they replace, or that are deleted."""
    schema, current = unit.stretches[0].schema, unit.schema.current
    changes = read_changes(storage, unit.stretches[0].files, schema, unit.after, ranges=unit.ranges)
    kept = [file for file in unit.base if file.kept]
    parts = [_rewritten(storage, unit)]
    places = []
    for rows, found in affected_rows(storage, unit, kept, changes):
        parts.append(rows)
        places.append(found)
    merged = merge_keyed_rows(pa.concat_tables(parts), changes, schema)
    start = parts[0].num_rows
    deleted: dict[str, bytes] = {}
    for file, found in zip(kept, places, strict=True):
        replaced = found.filter(pc.invert(merged.untouched.slice(start, len(found))))
        start += len(found)
        if len(replaced):
            deleted[file.path] = BitMap(replaced.to_pylist()).serialize()
    left = parts[0].select(current.names).filter(merged.untouched.slice(0, parts[0].num_rows))
    rows = _without(pa.concat_tables([left, merged.puts]), unit.dropped)
    feed: Sequence[DataFile] = ()
    if unit.feed:
        replaced_rows = pa.concat_tables([part.select(current.names) for part in parts]).filter(pc.invert(merged.untouched))
        feed = _feed(storage, unit, replaced_rows, _without(merged.puts, unit.dropped))
    return UnitResult(write_rows(storage, unit, rows), merged.missing, deleted=deleted, feed=feed)


def _feed(storage: Storage, unit: Unit, before: pa.Table, after: pa.Table) -> list[DataFile]:
    # even without rows: otherwise readers would take those of the other files
    return [write_change_data(storage, unit.directory, changed_rows(before, after, unit.schema))]


def _rewritten(storage: Storage, unit: Unit) -> pa.Table:
    """The rows of the files that are rewritten."""
    parts = [unit.schema.current.empty_table()]
    for file in unit.base:
        if not file.kept:
            rows = read_base(storage, unit.directory, [file], unit.schema, unit.schema.current.names)
            if file.shared and unit.ranges:
                masks = [range_.mask(rows[unit.schema.keys[0]]) for range_ in unit.ranges]
                rows = rows.filter(functools.reduce(pc.or_, masks))
            parts.append(rows)
    return pa.concat_tables(parts)


def _changed(rows: pa.Table, changes: pa.Table, schema: TableSchema) -> tuple[pa.Table, MissingRows]:
    if schema.full:
        return merge_whole_rows(rows, changes, schema)
    if schema.keys:
        settled = merge_keyed_rows(rows, changes, schema)
        return settled.rows(rows), settled.missing
    return pa.concat_tables([rows, changes.select(schema.current.names)]), MissingRows()


def _without(rows: pa.Table, fields: Sequence[str]) -> pa.Table:
    for name in fields:
        rows = with_column(rows, name, pa.nulls(rows.num_rows, rows.schema.field(name).type))
    return rows
