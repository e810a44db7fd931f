"""Writes the files of change logs and history tables. Its functions read and write files only, in a thread or on an executor of Spark.

A file of a change log states the replica identity of its rows in its metadata, because a DELETE has only the columns of the identity. So
a reader of the log knows which columns identify a row, even after ALTER TABLE. A file has rows of one identity.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import part_name, read_changes, read_table_files
from subscriber.sinks.spark.schema.arrow_columns import sorted_by, with_column
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile, write_data_file

__all__ = [
    "Copied",
    "LogPart",
    "RewrittenFiles",
    "Workers",
    "identity_metadata",
    "read_identity",
    "rewrite_files",
    "runs_of_small_files",
    "with_identity",
    "write_log_part",
]

_IDENTITY: Final = b"subscriber.identity"
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Workers(Protocol):
    """Runs functions like those of this module: in threads, or on executors."""

    def each(
        self, function: Callable[[Storage, _Item], _Result], items: Sequence[_Item], weights: Sequence[int], what: str
    ) -> list[_Result]:
        """Call a function that can be imported for each item, and return the results in order. ``weights``: the rows of each."""
        ...


def identity_metadata(schema: TableSchema) -> dict[bytes, bytes]:
    """The metadata of a file, which state the replica identity of its rows."""
    return {_IDENTITY: json.dumps([schema.identity, schema.keys]).encode()}


def read_identity(storage: Storage, path: str) -> dict[bytes, bytes]:
    """The metadata of a file of a change log that state the identity. Empty: another program has written it."""
    with storage.parquet(path) as file:
        return {name: value for name, value in (file.schema_arrow.metadata or {}).items() if name == _IDENTITY}


def with_identity(schema: TableSchema, metadata: Mapping[bytes, bytes]) -> TableSchema:
    """A schema with the identity that metadata state."""
    return schema.with_identity(*json.loads(metadata[_IDENTITY]))


@dataclass(frozen=True, slots=True)
class Copied:
    """The LSN of a copy's snapshot, and when the copy was begun, in microseconds since 1970."""

    lsn: Lsn
    started: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """Changes that become one file of a change log: landed files, in order, or files of a copy.

    Attributes:
        schema: the log's columns, with the identity of these changes.
        clears: whether the copy replaces earlier rows. Then it begins with a ``t``.
        after: changes up to this LSN are already in the log.
        rows: number of rows, at most.
    """

    directory: str
    schema: TableSchema
    files: tuple[str, ...]
    copied: Copied | None = None
    clears: bool = False
    after: int = 0
    rows: int = 0


def write_log_part(storage: Storage, part: LogPart) -> DataFile | None:
    """Write a part. None if no change is after ``after``."""
    with arrow_errors(storage.what(part.directory)):
        rows = read_changes(storage, part.files, part.schema, part.after)
        if part.copied is not None:
            rows = _copied(rows, part.copied)
            if part.clears:
                rows = pa.concat_tables([_truncate(rows.schema, part.copied), rows])
        return _write(storage, part.directory, rows, identity_metadata(part.schema)) if rows.num_rows else None


def _copied(rows: pa.Table, copied: Copied) -> pa.Table:
    """Set the metadata of copied rows. Base files lack the metadata columns that landed files have."""
    values = {"_op": "c", "_lsn": int(copied.lsn), "_seq": 0, "_xid": 0, "_ts": copied.started, "_moved": False}
    for name, value in values.items():
        rows = with_column(rows, name, pa.repeat(pa.scalar(value, rows.schema.field(name).type), rows.num_rows))
    return rows


def _truncate(schema: pa.Schema, copied: Copied) -> pa.Table:
    values: dict[str, Any] = {"_op": "t", "_lsn": int(copied.lsn), "_seq": -1, "_xid": 0, "_ts": copied.started, "_moved": False}
    return pa.table([pa.array([values.get(one.name)], one.type) for one in schema], schema=schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewrittenFiles:
    """Files of a table that are written again as one, with these columns.

    Attributes:
        order: columns by which the rows are sorted. Empty: they keep their order.
        metadata: of the new file.
    """

    directory: str
    files: tuple[str, ...]
    schema: pa.Schema
    order: tuple[str, ...] = ()
    metadata: Mapping[bytes, bytes] = field(default_factory=dict)
    rows: int = 0


def rewrite_files(storage: Storage, work: RewrittenFiles) -> DataFile:
    """Write files again."""
    with arrow_errors(storage.what(work.directory)):
        rows = read_table_files(storage, work.directory, work.files, work.schema)
        if work.order:
            rows = sorted_by(rows, work.order)
        return _write(storage, work.directory, rows, work.metadata)


def _write(storage: Storage, directory: str, rows: pa.Table, metadata: Mapping[bytes, bytes]) -> DataFile:
    rows = rows.replace_schema_metadata(dict(metadata))
    dictionary = ["_op"] if "_op" in rows.schema.names else True
    return write_data_file(storage, directory, part_name(), rows, dictionary=dictionary)


def runs_of_small_files(files: Sequence[tuple[str, int]], target_rows: int) -> Iterator[list[str]]:
    """Neighbouring small files that together make one file of about the target. ``files``: path and rows of each, in order.

    A file with less than a quarter of the target is small.
    """
    run: list[str] = []
    rows = 0
    for path, count in files:
        if count >= target_rows // 4 or rows >= target_rows:
            yield run
            run, rows = [], 0
        if count < target_rows // 4:
            run.append(path)
            rows += count
    yield run
