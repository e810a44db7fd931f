"""One unit of work: some files of a table and the changes of a range of its keys become new files. Runs wherever it is sent.

A :class:`Unit` is plain data, and :func:`merge_unit` reads and writes files by pyarrow and does nothing else, so that an executor of Spark,
a thread, or a test may run it. It changes nothing: new files count once the commit names them.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.sinks.spark.conversion import converted
from subscriber.sinks.spark.evolve import Stretch
from subscriber.sinks.spark.failures import reckoned
from subscriber.sinks.spark.fold import fold_whole_rows, since_truncate
from subscriber.sinks.spark.keys import Bound, is_orderable, rank
from subscriber.sinks.spark.missing import Missing
from subscriber.sinks.spark.schema import TableSchema
from subscriber.sinks.spark.settle import settle
from subscriber.sinks.spark.stats import file_statistics
from subscriber.sinks.spark.storage import Storage

__all__ = ["KeyRange", "NewFile", "Unit", "UnitResult", "conformed", "merge_unit", "read_base", "read_changes", "read_range", "write_rows"]

_RANGE: Final = b"subscriber.range"


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Values of a table's first key column from ``low`` on, and below ``high``; None: without end."""

    low: Bound | None = None
    high: Bound | None = None

    def mask(self, column: pa.ChunkedArray) -> pa.ChunkedArray:
        """Which values of a column are in it."""
        inside: Any = pa.chunked_array([pa.array([True] * len(column))])
        if self.low is not None and len(self.low) == 2:
            inside = pc.fill_null(pc.greater_equal(column, pa.scalar(self.low[1], column.type)), False)
        if self.high is not None and len(self.high) == 2:
            below = pc.fill_null(pc.less(column, pa.scalar(self.high[1], column.type)), True)
            inside = pc.and_(inside, below)
        return inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """See the module.

    Attributes:
        directory: of the table, relative to the lake.
        schema: the table's now.
        base: files of the table, relative to its directory.
        stretches: of its changes, one after the other.
        after: changes up to this LSN are in the table already.
        ranges: of the keys it is about, disjoint; empty: all.
        cleared: the table's former rows are gone, whatever the changes say.
        dropped: columns that the publisher has no more: NULL in all rows.
        added: columns that came later: rows from before have NULL there, whatever the publisher has.
        target_rows: how many rows a file should have.
    """

    directory: str
    schema: TableSchema
    base: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    after: int
    ranges: tuple[KeyRange, ...] = ()
    cleared: bool = False
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    target_rows: int = 250_000


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that a unit wrote.

    Attributes:
        path: relative to the table.
        size, rows: bytes, and how many.
        stats: as Delta's log has them, JSON.
        low, high: the first key column's range; None if it has none.
    """

    path: str
    size: int
    rows: int
    stats: str
    low: Bound | None
    high: Bound | None


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What came of a unit: new files, and how many changes found no row."""

    files: list[NewFile]
    missing: Missing


def merge_unit(storage: Storage, unit: Unit) -> UnitResult:
    """Do it.

    Raises:
        TargetError: a file cannot be read or written, or is damaged; or Arrow cannot do what is asked for.
    """
    with reckoned(storage.what(unit.directory)):
        return _merged(storage, unit)


def _merged(storage: Storage, unit: Unit) -> UnitResult:
    rows = _read_base(storage, unit) if unit.base and not unit.cleared else unit.schema.current.empty_table()
    missing = Missing()
    for stretch in unit.stretches:
        schema = stretch.schema
        changes = read_changes(storage, stretch.files, schema, unit.after)
        if not changes.num_rows:
            continue  # all of it is in the table already: it may have columns that these had not
        if unit.ranges and schema.keys:
            wanted: Any = pc.equal(changes["_op"], "t")
            for range_ in unit.ranges:
                wanted = pc.or_(wanted, range_.mask(changes[schema.keys[0]]))
            changes = changes.filter(wanted)
        changes, cleared = since_truncate(changes)
        if cleared:
            rows, missing = rows.slice(0, 0), Missing()
        rows, found = _changed(_without(rows, stretch.absent), changes, schema, unit.added)
        missing.add(found)
    return UnitResult(write_rows(storage, unit, _without(rows, unit.dropped)), missing)


def _changed(rows: pa.Table, changes: pa.Table, schema: TableSchema, added: Sequence[str]) -> tuple[pa.Table, Missing]:
    if schema.full:
        return fold_whole_rows(rows, changes, schema, added)
    if schema.keys:
        settled = settle(rows, changes, schema)
        return settled.rows(rows), settled.missing
    return pa.concat_tables([rows, changes.select(schema.current.names)]), Missing()


def _without(rows: pa.Table, fields: Sequence[str]) -> pa.Table:
    for name in fields:
        position = rows.schema.get_field_index(name)
        rows = rows.set_column(position, rows.schema.field(position), pa.nulls(rows.num_rows, rows.schema.field(position).type))
    return rows


def read_changes(storage: Storage, files: Sequence[str], schema: TableSchema, after: int, columns: Sequence[str] | None = None) -> pa.Table:
    """Read landed files, cast to the table's present columns.

    Args:
        storage: the lake's.
        files: relative to it, in order.
        schema: the table's.
        after: leave out what is of this LSN or before; copied rows are of none and always there.
        columns: only these; None: all of :attr:`TableSchema.landing`.

    Raises:
        TargetError: one cannot be read.
    """
    landing = schema.landing if columns is None else pa.schema([schema.landing.field(name) for name in columns])
    parts = [conformed(_read(storage, file, landing.names), landing) for file in files]
    table = pa.concat_tables(parts) if parts else landing.empty_table()
    if "_lsn" in landing.names and "_op" in landing.names and after > 0:
        table = table.filter(pc.or_(pc.greater(table["_lsn"], after), pc.equal(table["_op"], "c")))
    return table


def conformed(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """A table in other columns: missing ones are NULL, types are converted, what is not wanted is left out."""
    columns = [
        converted(table[field.name], field.type) if field.name in table.schema.names else pa.nulls(table.num_rows, field.type)
        for field in wanted
    ]
    return pa.table(columns, schema=pa.schema([field.with_nullable(True) for field in wanted]))


def _read(storage: Storage, path: str, names: Sequence[str]) -> pa.Table:
    try:
        with storage.reading(path), pq.ParquetFile(path, filesystem=storage.filesystem, page_checksum_verification=True) as file:
            there = [name for name in names if name in file.schema_arrow.names]
            return file.read(columns=there, use_threads=False)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise _damaged(storage, path) from error
    except TargetUnavailable as error:
        # Arrow says so of a page whose checksum is wrong, without an errno
        if storage.root is not None and isinstance(error.__cause__, OSError) and error.__cause__.errno is None:
            raise _damaged(storage, path) from error
        raise


def _damaged(storage: Storage, path: str) -> TargetError:
    return TargetError(f"{storage.what(path)} is damaged", hint="restore it from a backup, or start over in a new directory")


def _read_base(storage: Storage, unit: Unit) -> pa.Table:
    return read_base(storage, unit.directory, unit.base, unit.schema, unit.schema.current.names)


def read_base(storage: Storage, directory: str, files: Sequence[str], schema: TableSchema, names: Sequence[str]) -> pa.Table:
    """Rows of a table's files in its current-state columns; those that are not among ``names`` are NULL.

    Raises:
        TargetError: one cannot be read.
    """
    parts = [conformed(_read(storage, f"{directory}/{path}", names), schema.current) for path in files]
    return pa.concat_tables(parts) if parts else schema.current.empty_table()


# --- writing


def _part_name() -> str:
    return f"part-{uuid4().hex}.parquet"


def write_rows(storage: Storage, unit: Unit, rows: pa.Table, name: Callable[[], str] = _part_name) -> list[NewFile]:
    """Write rows of the current-state table as files of it, in the order of the key.

    Args:
        storage: the lake's.
        unit: says where, and how many rows a file should have.
        rows: all in memory.
        name: gives each file its name.

    Raises:
        TargetError: a file cannot be written.
    """
    keys = [key for key in unit.schema.keys if not pa.types.is_nested(unit.schema.current.field(key).type)]
    if keys and not (len(keys) == 1 and _is_sorted(rows[keys[0]])):
        # under names of no meaning: Arrow takes one that begins with a dot or a bracket for a path into a struct
        named = {str(number): rows[key] for number, key in enumerate(keys)}
        rows = rows.take(pc.sort_indices(pa.table(named), sort_keys=[(name, "ascending") for name in named]))
    rows = rows.combine_chunks()
    return [_write_file(storage, unit, rows.slice(start, count), name()) for start, count in _pieces(rows, unit)]


def _is_sorted(column: pa.ChunkedArray) -> bool:
    """As the rows of a table often lie on disk already. Sorting takes all columns along; this looks at one."""
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
    """Not amid rows with the same first key, if their end is near: files whose ranges overlap are merged together for ever."""
    if not schema.keys:
        return cut
    column = rows[schema.keys[0]]
    last = column[cut - 1].as_py()
    for place in range(cut, min(cut + room, rows.num_rows)):
        if column[place].as_py() != last:
            return place
    return cut


def _write_file(storage: Storage, unit: Unit, rows: pa.Table, path: str) -> NewFile:
    low = high = None
    schema = rows.schema
    if unit.schema.keys and is_orderable(rows.schema.field(unit.schema.keys[0]).type):
        column = rows[unit.schema.keys[0]]
        first = rank(None) if column.null_count else rank(pc.min(column).as_py())
        low, high = first, rank(pc.max(column).as_py())
        schema = rows.schema.with_metadata({_RANGE: _packed(unit.schema.keys[0], column, low, high)})
    pending = storage.create(f"{unit.directory}/{path}")
    try:
        with storage.reading(path), pq.ParquetWriter(pending.stream, schema, compression="zstd", compression_level=1) as writer:
            writer.write_table(rows.replace_schema_metadata(schema.metadata), row_group_size=unit.target_rows)
        with storage.reading(path):
            size = pending.commit()
    except BaseException:
        pending.discard()
        raise
    return NewFile(path=path, size=size, rows=rows.num_rows, stats=file_statistics(rows), low=low, high=high)


def _packed(key: str, column: pa.ChunkedArray, low: Bound, high: Bound) -> bytes:
    """A range in a file's metadata: exact for every type, as an Arrow stream."""
    sink = pa.BufferOutputStream()
    values = [bound[1] if len(bound) == 2 else None for bound in (low, high)]
    batch = pa.record_batch([pa.array(values, column.type)], names=[key])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue().to_pybytes())


def read_range(storage: Storage, path: str, key: str | None) -> tuple[Bound, Bound] | None:
    """The range of the first key column that a file has; None: unknown.

    A file of ours says it. Of one that Spark wrote it is what Parquet's statistics say, of the types whose statistics are exact.
    """
    try:
        with storage.reading(path), pq.ParquetFile(path, filesystem=storage.filesystem) as file:
            schema, metadata = file.schema_arrow, file.metadata
    except pa.ArrowInvalid as error:
        raise _damaged(storage, path) from error
    packed = (schema.metadata or {}).get(_RANGE)
    if packed is None:
        return _stated_range(schema, metadata, key)
    with pa.ipc.open_stream(base64.b64decode(packed)) as reader:
        stated = reader.read_all()
    if stated.column_names != [key]:
        return None  # of another key, that the table had before
    low, high = stated.column(0).to_pylist()
    return rank(low), rank(high)


def _stated_range(schema: pa.Schema, metadata: pq.FileMetaData, key: str | None) -> tuple[Bound, Bound] | None:
    position = -1 if key is None else schema.get_field_index(key)
    if position < 0 or not _is_stated(schema.field(position).type):
        return None
    lows, highs = [], []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        column = next(column for index in range(group.num_columns) if (column := group.column(index)).path_in_schema == key)
        stated = column.statistics
        if stated is None or not stated.has_min_max or not stated.has_null_count:
            return None
        lows.append(rank(None) if stated.null_count else rank(stated.min))
        highs.append(rank(stated.max))
    return (min(lows), max(highs)) if lows else None


def _is_stated(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_date(type_) or pa.types.is_string(type_))
