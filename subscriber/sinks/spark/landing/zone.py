"""The landing zone: batches of committed transactions as Parquet files, one for each table, and a manifest that makes them valid.

The order of writes makes a crash at any moment leave the state before or after the batch:

1. Files are written under temporary names, fsynced and renamed. The directory is fsynced.
2. The manifest is written the same way. From then on the batch is durable, and its end may be acknowledged.

:meth:`LandingZone.recover` removes what a crash before step 2 leaves: files with temporary names, and files that no manifest names. A batch
whose end is already in the zone is never landed again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Final
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from subscriber import crash_points
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.storage import TEMPORARY, PendingFile, Storage
from subscriber.sinks.spark.landing.manifest import (
    BatchTransactions,
    LandedFile,
    Manifest,
    check_files,
    clock,
    manifest_name,
    read_manifests,
)
from subscriber.sinks.spark.landing.row_buffer import RowBuffer, Stamp
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["SPILL_BYTES", "LandingZone", "OpenBatch", "ParquetFile", "batch_of", "unique_path", "write_file"]

_BATCH: Final = re.compile(r"\d+[-.].*parquet$")
"""Names of a batch's files. A table's copy is in the same directory, and does not match."""
_LANDED: Final = re.compile(r"(\d{20})-(\d+)-\d+\.parquet")
SPILL_BYTES: Final = 32 * 1024**2
"""Size of the rows in memory above which they are written to disk as row groups."""


class ParquetFile:
    """A Parquet file that is being written, in row groups."""

    def __init__(self, storage: Storage, name: str, schema: pa.Schema) -> None:
        self._storage = storage
        self.pending: PendingFile = storage.create(name)
        try:
            with storage.reading(name):
                # the constructor already writes
                self._writer = pq.ParquetWriter(
                    self.pending.stream, schema, compression="zstd", compression_level=1, use_dictionary=["_op"], write_page_checksum=True
                )
        except BaseException:
            self.pending.discard()
            raise
        self.rows = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Add a row group."""
        with self._storage.reading(self.pending.name):
            self._writer.write_batch(batch)
        self.rows += batch.num_rows

    def commit(self, name: str | None = None) -> int:
        """Finish the file under its name. Return its size."""
        with self._storage.reading(self.pending.name):
            self._writer.close()
            return self.pending.commit(name)

    def discard(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._writer.close()  # otherwise the garbage collector would make it write into a closed file
        self.pending.discard()


def write_file(storage: Storage, path: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> int:
    """Write rows as a new file in an existing directory. Return its size."""
    file = ParquetFile(storage, path, schema)
    try:
        for batch in batches:
            file.write(batch)
        return file.commit()
    except BaseException:
        file.discard()
        raise


def unique_path(directory: str) -> str:
    """The path of a new file."""
    return f"{directory}/{uuid4().hex}.parquet"


@dataclass(slots=True)
class _Part:
    """Rows of one table under one schema, in memory and in a file."""

    buffer: RowBuffer
    file: ParquetFile | None = None


class OpenBatch:
    """A batch that is being written. ``spilled`` says how often rows were written."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self._parts: dict[int, list[_Part]] = {}
        self._made = 0
        self.spilled = 0

    def buffer(self, table_id: int, schema: TableSchema) -> RowBuffer:
        """The buffer for the next rows of a table. A new schema begins a new file, so that rows stay in order over a table's files."""
        parts = self._parts.setdefault(table_id, [])
        if not parts or parts[-1].buffer.schema is not schema:
            parts.append(_Part(RowBuffer(table_id, schema)))
        return parts[-1].buffer

    @property
    def size(self) -> int:
        """Approximate size of the rows in memory, in bytes."""
        return sum(part.buffer.size for parts in self._parts.values() for part in parts)

    @property
    def is_empty(self) -> bool:
        """Whether there is no row."""
        return not any(part.file is not None or len(part.buffer) for parts in self._parts.values() for part in parts)

    def roll_back(self, stamp: Stamp, spilled: int) -> bool:
        """Remove the rows of the latest transaction. ``spilled`` is from before it. False if some were written, which cannot be undone."""
        if self.spilled != spilled:
            return False
        for parts in self._parts.values():
            for part in parts:
                part.buffer.remove(stamp)
        return True

    def spill(self) -> None:
        """Write the rows in memory to files, if they are more than :data:`SPILL_BYTES`.

        Raises:
            ApplyError: a text is not UTF-8.
        """
        if self.size > SPILL_BYTES:
            for parts in self._parts.values():
                for part in parts:
                    self._write(part)

    def _write(self, part: _Part) -> None:
        if not len(part.buffer):
            return
        rows = part.buffer.to_arrow()
        if part.file is None:
            self._made += 1
            part.file = ParquetFile(self._storage, f"{self._directory}/{self._made}.parquet", part.buffer.schema.landing)
        part.file.write(rows)
        part.buffer.clear()
        self.spilled += 1

    def finish(self, prefix: str) -> list[LandedFile]:
        """Write everything, and rename the files to names that begin with ``prefix``. They are durable once the directory is synced.

        Raises:
            TargetError, ApplyError: as :meth:`spill`. Then the batch is discarded.
        """
        found: list[LandedFile] = []
        try:
            for table_id, parts in self._parts.items():
                for part in parts:
                    self._write(part)
                    if part.file is not None:
                        path = f"{self._directory}/{prefix}-{table_id}-{len(found)}.parquet"
                        size = part.file.commit(path)
                        found.append(LandedFile(table_id=table_id, path=path, rows=part.file.rows, size=size, schema=part.buffer.schema))
                        part.file = None
        finally:
            self.discard()  # after an error
        return found

    def discard(self) -> None:
        for parts in self._parts.values():
            for part in parts:
                if part.file is not None:
                    part.file.discard()
        self._parts.clear()


class LandingZone:
    """A directory of batches, and the chain of their manifests, which begins at ``anchor``. :meth:`recover` creates the directory.

    ``last`` is the end of the last manifest, or the anchor.
    """

    def __init__(self, storage: Storage, directory: str, anchor: Lsn = INVALID_LSN) -> None:
        self._storage = storage
        self.directory = directory
        self.last = anchor

    def recover(self) -> None:
        """Read the manifests, make them durable, and remove what a crash left of unfinished batches.

        Raises:
            TargetError: a manifest or one of its files is damaged, incomplete or missing; or the directory cannot be made durable.
            DataLossError: a manifest is missing.
        """
        storage, directory = self._storage, self.directory
        storage.make_directory(directory)
        manifests = read_manifests(storage, directory)
        # a file name from before the crash may be in memory only. From here on it counts and is acknowledged, so it must be durable
        storage.sync([directory, *map(str, PurePosixPath(directory).parents)])
        # the applier removes what it has applied, and checks the files that it still has to read: check only the last manifest here
        if manifests:
            check_files(storage, directory, manifests[-1].files)
            self.last = manifests[-1].end
        named = {file.path for manifest in manifests for file in manifest.files}
        left = [
            f"{directory}/{file.name}"
            for file in storage.files(directory)
            if file.name.startswith(TEMPORARY)
            # a file that no manifest names never belonged to one, or the applier was killed after it had removed the manifest
            or (_BATCH.match(file.name) and f"{directory}/{file.name}" not in named)
        ]
        storage.delete(left)

    def begin(self) -> OpenBatch:
        return OpenBatch(self._storage, self.directory)

    def land(self, batch: OpenBatch, begin: Lsn, end: Lsn, transactions: BatchTransactions) -> Manifest | None:
        """Make a batch durable. None if it ends no later than the last one, which already has its content.

        The batch cannot be used afterwards, even after an error.

        Raises:
            TargetError, ApplyError: the batch is not landed.
        """
        if end <= self.last:
            batch.discard()
            return None
        return self.add(batch.finish(f"{int(end):020d}"), begin, end, transactions)

    def add(self, files: Sequence[LandedFile], begin: Lsn, end: Lsn, transactions: BatchTransactions) -> Manifest:
        """Write the manifest for files in the directory."""
        manifest = Manifest(
            **asdict(transactions), previous=self.last, begin=max(begin, self.last), end=end, landed_time=clock(), files=tuple(files)
        )
        if files:
            self._storage.sync([self.directory])
        crash_points.reached("landing.files_written")
        write_document(self._storage, manifest_name(self.directory, end), manifest.to_json())
        crash_points.reached("landing.landed")
        self.last = end
        return manifest


def batch_of(name: str) -> tuple[int, int] | None:
    """The end of the batch that a file belongs to, and the number of its table. None: of no batch, or in a store of an unfinished one."""
    match = _LANDED.fullmatch(name)
    return (int(match[1]), int(match[2])) if match is not None else None
