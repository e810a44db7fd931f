"""Finds out whether an error of reading a table is one of its files. Then only that table is stopped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from subscriber.errors import TargetError
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta_reader import DeltaReader
from subscriber.sinks.spark.tables.table_errors import CommitConflict, DamagedTable, TableStopped

__all__ = ["checking_files", "require_files"]


@contextlib.contextmanager
def checking_files(storage: Storage, *tables: DeltaReader) -> Iterator[None]:
    """If the block raises a TargetError, find out whether it is one of files of these tables. If not, it is raised again.

    Raises:
        DamagedTable: a file is missing or damaged.
    """
    try:
        yield
    except (TableStopped, CommitConflict):
        raise
    except TargetError:
        for table in tables:
            if table.is_there:
                require_files(storage, table)
        raise


def require_files(storage: Storage, delta: DeltaReader) -> None:
    """Check that all files of the loaded version of a table exist, and that Parquet can read their footers.

    Raises:
        DamagedTable: a file is missing or damaged.
        TargetError: the file system cannot be read.
    """
    files = delta.table_files()
    vectors = {file.vector.file for file in files.values() if file.vector is not None} - {None}
    names = [f"{delta.directory}/{path}" for path in (*files, *vectors)]
    with storage.reading(delta.directory):
        missing = next((info.path for info in storage.filesystem.get_file_info(names) if info.type is not fs.FileType.File), None)
    if missing is not None:
        raise DamagedTable(delta.uri, delta.directory, f"file {storage.what(missing)} is missing")
    for name in names[: len(files)]:
        with storage.reading(name):
            try:
                pq.read_metadata(name, filesystem=storage.filesystem)
            except pa.ArrowInvalid:
                raise DamagedTable(delta.uri, delta.directory, f"file {storage.what(name)} is not a Parquet file") from None
