"""One unit of work of a history table: some of its files, and the changes of a range of keys. It runs in a thread or on an executor."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import read_changes, read_table_files, write_rows
from subscriber.sinks.spark.merge.versions import changed_versions, history_schema
from subscriber.sinks.spark.merge.work_unit import Unit
from subscriber.sinks.spark.tables.data_file import DataFile

__all__ = ["changes_between", "write_history_unit"]


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
