"""Copied rows as landed files: a COPY stream becomes one Parquet file, whose rows have the operation ``c``.

The document ``copy.json`` of a table's copy lists these files, and makes them valid.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa

from subscriber import crash_points
from subscriber.errors import ConfigurationError, TargetError
from subscriber.interfaces import CopyFormat
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import COPY_DOCUMENT
from subscriber.sinks.spark.files.documents import parse_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.landing.row_buffer import cast_columns, special_column
from subscriber.sinks.spark.landing.zone import ParquetFile
from subscriber.sinks.spark.schema.arrow_values import to_arrow
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.threads import run_in_thread
from subscriber.types import CopyDecoder, copy_decoder

__all__ = ["TableCopy", "read_copy", "store_copy", "write_copy"]

_ROWS: Final = 50_000
"""Number of rows in a row group."""
_BYTES: Final = 16 * 1024**2
"""Maximum bytes of COPY data in a row group, for long rows."""


async def store_copy(
    storage: Storage,
    path: str,
    table_id: int,
    schema: TableSchema,
    *,
    columns: Sequence[str],
    copy_format: CopyFormat,
    data: AsyncIterator[bytes],
) -> LandedFile:
    """Store the rows of one COPY stream, with these columns in its order, as one file. If this fails, no file remains.

    Raises:
        ConfigurationError: the stream is in binary format.
        TargetError: the file cannot be written, a text is not UTF-8, or the stream has other columns than the table.
        ProtocolError: the data is not valid COPY data.
    """
    by_name = {column.name: column for column in schema.columns}
    if sorted(columns) != sorted(by_name):
        raise TargetError(f'table "{schema.table}" was not described as it is copied', hint="report this")
    if copy_format is not CopyFormat.TEXT:
        raise ConfigurationError("a lake can only receive values in text format", hint="use binary = false")
    schema = replace(schema, columns=tuple(by_name[name] for name in columns))
    decoder = copy_decoder(len(schema.columns), binary=False)
    pieces: list[bytes] = []
    gathered = 0
    made: list[ParquetFile] = []
    try:
        # what a thread returns is lost if this is cancelled meanwhile
        await run_in_thread(lambda: made.append(ParquetFile(storage, path, schema.landing)))
        (file,) = made
        async for piece in data:
            pieces.append(piece)
            gathered += len(piece)
            if gathered >= _BYTES or len(pieces) >= _ROWS:
                await run_in_thread(lambda some=pieces: _write(file, decoder, schema, some))  # type: ignore[misc]
                pieces, gathered = [], 0
        await run_in_thread(lambda: _write(file, decoder, schema, pieces))
        decoder.finish()
        size = await run_in_thread(file.commit)
    except BaseException:
        for each in made:
            each.discard()
        raise
    crash_points.reached("landing.rows_copied")
    return LandedFile(table_id=table_id, path=path, rows=file.rows, size=size, schema=schema)


def _write(file: ParquetFile, decoder: CopyDecoder, schema: TableSchema, pieces: Sequence[bytes]) -> None:
    count, columns = decoder.columns(b"".join(pieces))
    if count:
        file.write(_copied(schema, count, columns))


def _copied(schema: TableSchema, count: int, values: Sequence[Sequence[bytes | None]]) -> pa.RecordBatch:
    columns, specials = cast_columns(schema, lambda number, column: to_arrow(values[number], column.type))
    zeros = pa.array([0], pa.int64()).take(pa.array([0] * count, pa.int64()))
    meta = [
        pa.array(["c"] * count, pa.string()),
        zeros,
        zeros,
        zeros,
        pa.nulls(count, pa.timestamp("us", "UTC")),
        pa.array([False] * count, pa.bool_()),
        pa.nulls(count, pa.list_(pa.string())),
        special_column(specials, count),
    ]
    return pa.RecordBatch.from_arrays([*meta, *columns], schema=schema.landing)


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table's copy: its LSN, its schema, its files, and when it was begun, in seconds since 1970."""

    lsn: Lsn
    schema: TableSchema
    files: tuple[LandedFile, ...]
    started: float


def write_copy(storage: Storage, directory: str, copy: TableCopy) -> None:
    """Store the document of a table's copy. Durable on return, with the files in its directory."""
    document = {
        "lsn": str(copy.lsn),
        "schema": copy.schema.to_json(),
        "files": [file.to_json() for file in copy.files],
        "started": copy.started,
    }
    storage.sync([directory])
    write_document(storage, f"{directory}/{COPY_DOCUMENT}", document)


def read_copy(storage: Storage, directory: str) -> TableCopy | None:
    """Read the document of a table's copy. None if there is none."""
    return parse_document(storage, f"{directory}/{COPY_DOCUMENT}", _parsed)


def _parsed(document: dict[str, Any]) -> TableCopy:
    files = tuple(LandedFile.from_json(data) for data in document["files"])
    return TableCopy(Lsn.parse(document["lsn"]), TableSchema.from_json(document["schema"]), files, document["started"])
