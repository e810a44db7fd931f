"""Units of work: the changes of some keys, merged into files of a table. They can run in a thread or on an executor of Spark.

The functions only read and write files with pyarrow. They do not change a table: the new files become valid when a commit names them.

* :func:`merge_unit` merges changes into files of a table, or folds them for MERGE INTO: then it writes the final row of each key.
* :func:`write_history_unit` does the same for a history table.

If a table has a Change Data Feed, a unit also writes its rows, for Delta's ``table_changes``. If a commit has ``cdc`` files, readers of the
feed take these, and not the rows of the files that the commit adds and removes. So a file that is written again for some changed rows does
not appear as deleted and inserted. A feed has the net changes of a commit. Source: Delta protocol, Add CDC File.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.zone import unique_path, write_file
from subscriber.sinks.spark.merge.fold import merge_keyed_rows, merge_whole_rows, since_truncate
from subscriber.sinks.spark.merge.keys import group_ids, key_columns
from subscriber.sinks.spark.merge.parquet import affected_rows, read_base, read_changes, read_table_files, write_rows
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.versions import changed_versions, history_schema
from subscriber.sinks.spark.merge.work_unit import FoldedFile, Unit, UnitResult
from subscriber.sinks.spark.schema.arrow_columns import with_column
from subscriber.sinks.spark.schema.table_schema import TableSchema, folded_name
from subscriber.sinks.spark.tables.data_file import DataFile, write_data_file

__all__ = ["changed_rows", "changes_between", "deleted_flag", "merge_unit", "write_history_unit"]

_CHANGE_DATA: Final = "_change_data"
"""Directory of the files, in that of the table."""
_TYPE: Final = "_change_type"


def merge_unit(storage: Storage, unit: Unit) -> UnitResult:
    """Merge the changes of a unit into its files."""
    began = time.monotonic()
    with arrow_errors(storage.what(unit.directory)):
        if unit.folded_into is not None:
            folded, missing = _folded(storage, unit, unit.folded_into)
            found = UnitResult([], missing, folded)
        elif not unit.cleared and any(file.kept for file in unit.base):
            found = _marked(storage, unit)
        else:
            found = _merged(storage, unit)
    return replace(found, seconds=time.monotonic() - began)


def _merged(storage: Storage, unit: Unit) -> UnitResult:
    base = _rewritten(storage, unit) if unit.feed or not unit.cleared else unit.schema.current.empty_table()
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
    """Write the rows of the feed. Even without rows: otherwise readers would take those of the other files."""
    directory = f"{unit.directory}/{_CHANGE_DATA}"
    storage.make_directory(directory)
    rows = changed_rows(before, after, unit.schema)
    file = write_data_file(storage, unit.directory, f"{_CHANGE_DATA}/cdc-{uuid4().hex}.parquet", rows)
    storage.sync([directory])
    return [file]


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
    if not rows.num_rows and pc.all(pc.equal(changes["_op"], "c")).as_py():
        return changes.select(schema.current.names), MissingRows()  # of one snapshot, so no key occurs twice
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


def deleted_flag(schema: TableSchema) -> str:
    """Name of the additional column of folded changes, which says whether the row is deleted."""
    flag = "_gone"
    while folded_name(flag) in map(folded_name, schema.current.names):
        flag += "_"
    return flag


def _folded(storage: Storage, unit: Unit, directory: str) -> tuple[FoldedFile, MissingRows]:
    """Fold the changes of a unit that has a key and one stretch into a file. Also return counts of changes that found no row."""
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
    size, keys = write_file(storage, path, rows.schema, rows.to_batches()), _limits(rows[schema.keys[0]])
    file = FoldedFile(path=path, size=size, rows=rows.num_rows, memory=rows.nbytes, keys=keys, known=merged.known)
    return file, merged.missing


def _limits(column: pa.ChunkedArray) -> tuple[Any, Any] | None:
    """The minimum and maximum of the first key column. None if unknown."""
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_date(column.type)):
        return None
    found = pc.min_max(column).as_py()
    return found["min"], found["max"]


def changed_rows(before: pa.Table, after: pa.Table, schema: TableSchema) -> pa.Table:
    """The changes from one set of rows to another, with their types. ``before``: at least all rows that are deleted or replaced."""
    names = schema.current.names
    both = pa.concat_tables([before.select(names), after.select(names)])
    if not both.num_rows:
        return _typed(both, "insert")
    places = _unpaired(group_ids([both[name] for name in names]), before.num_rows)
    old, new = places.filter(pc.less(places, before.num_rows)), places.filter(pc.greater_equal(places, before.num_rows))
    if not schema.keys or schema.full:
        return pa.concat_tables([_typed(both.take(old), "delete"), _typed(both.take(new), "insert")])
    keys = group_ids(key_columns(both, schema.keys))
    old_keys, new_keys = keys.take(old), keys.take(new)
    was, remains = pc.is_in(new_keys, value_set=old_keys), pc.is_in(old_keys, value_set=new_keys)
    parts = [
        (old.filter(pc.invert(remains)), "delete"),
        (new.filter(pc.invert(was)), "insert"),
        (old.filter(remains), "update_preimage"),
        (new.filter(was), "update_postimage"),
    ]
    return pa.concat_tables([_typed(both.take(rows), type_) for rows, type_ in parts])


def _unpaired(ids: pa.Array, first: int) -> pa.Array:
    """The places of rows before ``first`` and after it, without pairs of equal rows from both sides."""
    numbers = ids.to_pylist()
    pairs = Counter(numbers[:first]) & Counter(numbers[first:])
    left = pairs.copy(), pairs
    found: list[int] = []
    for place, number in enumerate(numbers):
        side = left[place >= first]
        if side[number]:
            side[number] -= 1
        else:
            found.append(place)
    return pa.array(found, pa.int64())


def _typed(rows: pa.Table, type_: str) -> pa.Table:
    return rows.append_column(_TYPE, pa.array([type_] * rows.num_rows, pa.string()))


def changes_between(changes: pa.Table, after: int, until: int) -> pa.Table:
    """The changes after an LSN, up to another one, in order. In a log that another program has optimized, rows have any order."""
    lsns = changes["_lsn"]
    found = changes.filter(pc.and_(pc.greater(lsns, after), pc.less_equal(lsns, until)))
    return found.sort_by([("_lsn", "ascending"), ("_seq", "ascending")])


def write_history_unit(storage: Storage, unit: Unit) -> list[DataFile]:
    """Apply the changes of a unit to its rows, and write them as new files. The unit has files of the change log.

    Versions that have ended never change again, so they get files of their own, which no later round rewrites.
    """
    with arrow_errors(storage.what(unit.directory)):
        rows = read_table_files(storage, unit.directory, [file.path for file in unit.base], history_schema(unit.schema))
        for stretch in unit.stretches:
            changes = read_changes(storage, stretch.files, stretch.schema, 0, ranges=unit.ranges)
            changes = changes_between(changes, unit.after, unit.until)
            rows = changed_versions(rows, changes, stretch.schema)
        current = rows["_is_current"]
        return [*write_rows(storage, unit, rows.filter(current)), *write_rows(storage, unit, rows.filter(pc.invert(current)))]
