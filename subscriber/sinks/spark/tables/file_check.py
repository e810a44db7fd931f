"""Finds out whether an error of reading a table is one of its files, or of its copy. Then only that table is stopped."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Final, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from subscriber.errors import DataLossError, SubscriberError, TargetError
from subscriber.sinks.spark.files.file_errors import AccessDenied, DamagedFile, UnsupportedValues
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta_reader import DeltaReader
from subscriber.sinks.spark.tables.table_errors import CommitConflict, DamagedCopy, DamagedTable, TableStopped

__all__ = ["again_later", "checking_files", "is_due", "require_copy", "require_files", "require_no_own_error"]


_AGAIN_SECONDS: Final = 60.0

_Stop = TypeVar("_Stop", bound=TableStopped)


@contextlib.contextmanager
def checking_files(storage: Storage, *tables: DeltaReader, copy: str | None = None) -> Iterator[None]:
    """If the block raises an error, find out whether it is one of files of these tables, or of a copy. If not, it is raised again.

    Raises:
        TableStopped: a file is missing or damaged.
    """
    try:
        yield
    except (TableStopped, CommitConflict):
        raise
    except (TargetError, DataLossError) as error:
        require_copy(storage, copy, error)
        for table in tables:
            require_files(storage, table, error)
        raise


def require_copy(storage: Storage, copy: str | None, error: SubscriberError) -> None:
    """If an error is that of a file of the copy in a directory, raise DamagedCopy. None: there is no copy."""
    if copy is None:
        return
    if isinstance(error, DataLossError) or (isinstance(error, DamagedFile) and error.path.startswith(f"{copy}/")):
        raise again_later(DamagedCopy(error)) from error


def require_no_own_error(delta: DeltaReader, error: SubscriberError) -> None:
    """If an error is a missing permission for a table's directory, or one of Arrow about its values, raise TableStopped."""
    if isinstance(error, AccessDenied | UnsupportedValues) and re.search(rf"{re.escape(delta.uri)}[/:]", str(error)):
        raise again_later(TableStopped(str(error), hint=error.hint)) from error


def require_files(storage: Storage, delta: DeltaReader, error: SubscriberError | None = None) -> None:
    """Check that all files of the loaded version of a table exist, and that Parquet can read their footers, or raise TableStopped.

    ``error`` was raised when files were read. It may name a file of the table, or be that of :func:`require_no_own_error`.
    """
    if isinstance(error, AccessDenied):
        require_no_own_error(delta, error)
    if isinstance(error, DamagedFile) and error.path.startswith(f"{delta.directory}/"):
        raise _damaged(storage, delta, error.path, "is damaged") from error
    files = delta.table_files() if delta.is_there else {}
    vectors = {file.vector.file for file in files.values() if file.vector is not None} - {None}
    names = [f"{delta.directory}/{path}" for path in (*files, *vectors)]
    with storage.reading(delta.directory):
        missing = next((info.path for info in storage.filesystem.get_file_info(names) if info.type is not fs.FileType.File), None)
    if missing is not None:
        raise _damaged(storage, delta, missing, "is missing")
    for name in names[: len(files)]:
        with storage.reading(name):
            try:
                pq.read_metadata(name, filesystem=storage.filesystem)
            except pa.ArrowInvalid:
                raise _damaged(storage, delta, name, "is damaged") from None
    # a damaged footer may look like this
    if isinstance(error, UnsupportedValues):
        require_no_own_error(delta, error)


def _damaged(storage: Storage, delta: DeltaReader, path: str, problem: str) -> DamagedTable:
    return again_later(DamagedTable(delta.uri, delta.directory, f"file {storage.what(path)} {problem}"))


def again_later(stop: _Stop, seconds: float = _AGAIN_SECONDS) -> _Stop:
    """Let a table be tried again after some time: nothing tells when the reason of an error about files has gone."""
    stop.again = time.monotonic() + seconds
    return stop


def is_due(stop: TableStopped) -> bool:
    """Whether it is time to try again what an error about files has stopped."""
    return stop.again is not None and time.monotonic() >= stop.again
