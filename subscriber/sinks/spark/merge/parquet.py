"""Reads landed files and files of a table into Arrow tables, and writes rows as files of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.errors import TargetUnavailable
from subscriber.sinks.spark.files.file_errors import DamagedFile
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.key_ranges import RANGE, KeyRange, packed_range, row_groups
from subscriber.sinks.spark.merge.keys import is_orderable, rank
from subscriber.sinks.spark.merge.work_unit import Unit, UnitFile
from subscriber.sinks.spark.schema.arrow_columns import nullable, sorted_by
from subscriber.sinks.spark.schema.table_schema import SPECIAL, TableSchema
from subscriber.sinks.spark.schema.type_widening import converted, with_specials_converted
from subscriber.sinks.spark.tables.data_file import DataFile, write_data_file
from subscriber.sinks.spark.tables.deletion_vectors import live_rows, read_vector

__all__ = ["affected_rows", "conformed", "part_name", "read_base", "read_changes", "read_file", "read_table_files", "write_rows"]


def read_changes(
    storage: Storage,
    files: Sequence[str],
    schema: TableSchema,
    after: int,
    columns: Sequence[str] | None = None,
    *,
    ranges: Sequence[KeyRange] = (),
) -> pa.Table:
    """Read landed files, cast to the table's current columns.

    Besides the result, only one file at a time is in memory.

    Args:
        storage: of the lake.
        files: relative to the lake, in order.
        schema: of the table.
        after: leave out changes up to this LSN. Copied rows have no LSN and are always included.
        columns: only these columns. None: all of :attr:`TableSchema.landing`.
        ranges: only changes of these keys, and TRUNCATE. Empty: all. Not to be combined with ``columns``.
    """
    landing = schema.landing if columns is None else pa.schema([schema.landing.field(name) for name in columns])
    ranges = ranges if schema.keys else ()
    names = [*dict.fromkeys([*landing.names, SPECIAL])]  # a value in _special may move into its column
    parts = []
    for file in files:
        part = conformed(_read(storage, file, names, schema if ranges else None, ranges), landing)
        if "_lsn" in landing.names and "_op" in landing.names and after > 0:
            part = part.filter(pc.or_(pc.greater(part["_lsn"], after), pc.equal(part["_op"], "c")))
        if ranges:
            wanted: Any = pc.equal(part["_op"], "t")
            for range_ in ranges:
                wanted = pc.or_(wanted, range_.mask(part[schema.keys[0]]))
            part = part.filter(wanted)
        parts.append(part)
    return pa.concat_tables(parts) if parts else landing.empty_table()


def conformed(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """Convert a table to another schema: missing columns are NULL, types are converted, other columns are left out."""
    columns = [
        converted(table[field.name], field.type) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
        for field in wanted
    ]
    return with_specials_converted(pa.table(columns, schema=nullable(wanted)), table)


def _read(
    storage: Storage, path: str, names: Sequence[str], schema: TableSchema | None = None, ranges: Sequence[KeyRange] = ()
) -> pa.Table:
    def read(source: Any) -> pa.Table:
        with source, pq.ParquetFile(source, page_checksum_verification=True) as file:
            columns = file.schema_arrow
            there = [name for name in names if name in columns.names]
            if schema is None:
                return file.read(columns=there, use_threads=False)
            field = schema.current.field(schema.keys[0])
            return file.read_row_groups(row_groups(columns, file.metadata, field, ranges), columns=there, use_threads=False)

    try:
        with storage.reading(path):
            return read(storage.filesystem.open_input_file(path))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowIndexError) as error:
        raise DamagedFile(storage.what(path), path) from error
    except TargetUnavailable as error:
        # Arrow raises this, without an errno, for a page with a wrong checksum, and for an object store that fails
        if not isinstance(error.__cause__, OSError) or error.__cause__.errno is not None:
            raise
        with storage.reading(path), storage.filesystem.open_input_file(path) as file:
            content = file.read()
        try:
            return read(pa.BufferReader(content))
        except (OSError, pa.ArrowException):
            raise DamagedFile(storage.what(path), path) from error


def read_base(storage: Storage, directory: str, files: Sequence[UnitFile], schema: TableSchema, names: Sequence[str]) -> pa.Table:
    """Read the rows of a table's files in its current-state columns. Columns that are not in ``names`` are NULL."""
    parts = [read_file(storage, directory, file, schema, names)[0] for file in files]
    return pa.concat_tables(parts) if parts else schema.current.empty_table()


def read_table_files(storage: Storage, directory: str, files: Sequence[str], columns: pa.Schema) -> pa.Table:
    """Read files of a table that never has deletion vectors, cast to these columns."""
    names = [*dict.fromkeys([*columns.names, SPECIAL])]
    parts = [conformed(_read(storage, f"{directory}/{path}", names), columns) for path in files]
    return pa.concat_tables(parts) if parts else columns.empty_table()


def read_file(
    storage: Storage, directory: str, file: UnitFile, schema: TableSchema, names: Sequence[str]
) -> tuple[pa.Table, pa.Array | None]:
    """Read one file as :func:`read_base`. Also return the positions of its rows. None: no row is deleted."""
    rows = conformed(_read(storage, f"{directory}/{file.path}", names), schema.current)
    if file.vector is None:
        return rows, None
    live = live_rows(read_vector(storage, directory, file.vector), rows.num_rows)
    return rows.take(live), live


def affected_rows(storage: Storage, unit: Unit, files: Sequence[UnitFile], changes: pa.Table) -> Iterator[tuple[pa.Table, pa.Array]]:
    """The rows of each file that changes may affect, and their positions in the file.

    The rows have their keys, and the columns whose values some change did not send. Other columns are NULL, unless the unit needs the
    whole rows for the Change Data Feed. Only one file at a time is in memory, because all keys of a table may not fit.
    """
    schema = unit.schema
    unsent = set(pc.unique(pc.list_flatten(changes["_un"])).to_pylist())
    names = [name for name in schema.current.names if unit.feed or name in unsent or name in schema.keys or name == SPECIAL]
    first = schema.keys[0]
    keys = pc.unique(changes[first]) if is_orderable(schema.current.field(first).type) else None
    for file in files:
        rows, live = read_file(storage, unit.directory, file, schema, names)
        places = live if live is not None else pa.array(range(rows.num_rows), pa.uint32())
        if keys is not None:
            wanted = pc.is_in(rows[first], value_set=keys)
            rows, places = rows.filter(wanted), places.filter(wanted.combine_chunks())
        yield rows, places


def part_name() -> str:
    """A new name for a file of a table."""
    return f"part-{uuid4().hex}.parquet"


def write_rows(storage: Storage, unit: Unit, rows: pa.Table) -> list[DataFile]:
    """Write rows of the current-state table as files of the unit's table, sorted by the key."""
    keys = [key for key in unit.schema.keys if not pa.types.is_nested(unit.schema.current.field(key).type)]
    if keys and not (len(keys) == 1 and _is_sorted(rows[keys[0]])):
        rows = sorted_by(rows, keys)
    rows = rows.combine_chunks()
    return [_write_file(storage, unit, rows.slice(start, count), part_name()) for start, count in _pieces(rows, unit)]


def _is_sorted(column: pa.ChunkedArray) -> bool:
    """Whether the rows are already sorted, as they often are. Sorting would move all columns; this reads one."""
    if column.null_count or not pa.types.is_integer(column.type):
        return False
    array = column.combine_chunks()
    return len(array) < 2 or bool(pc.all(pc.less_equal(array[:-1], array[1:])).as_py())


def _pieces(rows: pa.Table, unit: Unit) -> list[tuple[int, int]]:
    total, target = rows.num_rows, unit.target_rows
    if total <= target * 1.5:
        return [(0, total)] if total else []
    count = -(-total // target)
    cuts = [_clean_cut(rows, unit.schema, total * number // count, target // 2) for number in range(1, count)]
    starts = sorted({0, *cuts})
    return [(start, end - start) for start, end in zip(starts, [*starts[1:], total], strict=True) if end > start]


def _clean_cut(rows: pa.Table, schema: TableSchema, cut: int, room: int) -> int:
    """A cut that does not divide rows with the same first key, if their end is near. Otherwise the files would stay in one cluster."""
    if not schema.keys:
        return cut
    column = rows[schema.keys[0]]
    last = column[cut - 1].as_py()
    for place in range(cut, min(cut + room, rows.num_rows)):
        if column[place].as_py() != last:
            return place
    return cut


def _write_file(storage: Storage, unit: Unit, rows: pa.Table, path: str) -> DataFile:
    low = high = metadata = None
    if unit.schema.keys and is_orderable(rows.schema.field(unit.schema.keys[0]).type):
        column = rows[unit.schema.keys[0]]
        low = rank(None) if column.null_count else rank(pc.min(column).as_py())
        high = rank(pc.max(column).as_py())
        metadata = {RANGE: packed_range(unit.schema.keys[0], column, low, high)}
    rows = rows.replace_schema_metadata(metadata)
    return replace(write_data_file(storage, unit.directory, path, rows, row_group_size=unit.target_rows), low=low, high=high)
