"""Copied rows as landed files: a COPY stream becomes one Parquet file, whose rows have the operation ``c``.

The document ``copy.json`` of a table's copy lists these files, and makes them valid.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow as pa
from pyarrow import csv

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
from subscriber.sinks.spark.schema.arrow_values import Specials, cast_text, to_arrow
from subscriber.sinks.spark.schema.table_schema import LakeColumn, TableSchema
from subscriber.threads import run_in_thread
from subscriber.types import copy_decoder

__all__ = ["TableCopy", "read_copy", "store_copy", "write_copy"]

_ROWS: Final = 50_000
"""Number of rows in a row group."""
_MARK: Final = "\ufeff".encode()
"""Arrow removes it from the start of a file."""
_PLAIN_BYTES: Final = 2**30
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
    rows = _CopiedRows(schema)
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
                await run_in_thread(lambda some=pieces: rows.write(file, some))  # type: ignore[misc]
                pieces, gathered = [], 0
        await run_in_thread(lambda: rows.write(file, pieces))
        rows.finish()
        size = await run_in_thread(file.commit)
    except BaseException:
        for each in made:
            each.discard()
        raise
    crash_points.reached("landing.rows_copied")
    return LandedFile(table_id=table_id, path=path, rows=file.rows, size=size, schema=schema)


class _CopiedRows:
    """Makes record batches of the pieces of one COPY stream."""

    def __init__(self, schema: TableSchema) -> None:
        self._schema = schema
        self._decoder = copy_decoder(len(schema.columns), binary=False)
        self._in_row = False

    def write(self, file: ParquetFile, pieces: Sequence[bytes]) -> None:
        """Write the rows that these pieces complete."""
        data = b"".join(pieces)
        texts = None if self._in_row else read_plain(data, len(self._schema.columns))
        if texts is not None:
            file.write(_copied(self._schema, len(texts[0]), lambda number, column: cast_text(texts[number], column.type)))
        elif data:
            self._in_row = not data.endswith(b"\n")
            count, columns = self._decoder.columns(data)
            if count:
                file.write(_copied(self._schema, count, lambda number, column: to_arrow(columns[number], column.type)))

    def finish(self) -> None:
        """End the stream."""
        self._decoder.finish()


def read_plain(data: bytes, columns: int) -> list[pa.Array] | None:
    r"""Read whole rows of COPY in text format whose only backslashes are those of ``\N``, much faster than value by value.

    Returns:
        The texts of each column. None: the data is of another kind, empty, or so long that Arrow may not read it as one block.
    """
    escapes, rows = data.count(b"\\"), data.count(b"\n")
    # Arrow reads a carriage return, which the server does not send, as the end of a row
    is_table = columns > 0 and data.endswith(b"\n") and b"\r" not in data
    if not is_table or (escapes and escapes != data.count(b"\\N")) or data.startswith(_MARK) or len(data) > _PLAIN_BYTES:
        return None
    names = [str(number) for number in range(columns)]
    try:
        table = csv.read_csv(
            pa.BufferReader(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=names),
            csv.ParseOptions(delimiter="\t", quote_char=False, double_quote=False, escape_char=False, ignore_empty_lines=columns > 1),
            csv.ConvertOptions(
                check_utf8=False, column_types=dict.fromkeys(names, pa.string()), null_values=["\\N"], strings_can_be_null=True
            ),
        )
    except pa.ArrowInvalid:
        # the decoder finds what is wrong
        return None
    # an empty line, or a backslash that is not of a NULL
    if table.num_rows != rows or escapes != sum(column.null_count for column in table.columns):
        return None
    return [column.combine_chunks() for column in table.columns]


def _copied(schema: TableSchema, count: int, cast: Callable[[int, LakeColumn], tuple[pa.Array, Specials]]) -> pa.RecordBatch:
    columns, specials = cast_columns(schema, cast)
    zeros = pa.repeat(pa.scalar(0, pa.int64()), count)
    meta = [
        pa.repeat(pa.scalar("c"), count),
        zeros,
        zeros,
        zeros,
        pa.nulls(count, pa.timestamp("us", "UTC")),
        pa.repeat(pa.scalar(False), count),
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
