"""The landed changes that are waiting to be applied to one table: its files in order, with their schemas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import LakeTable
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.copy.copied_rows import read_copy
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile, check_files, read_manifests
from subscriber.sinks.spark.landing.zone import unique_path, write_file
from subscriber.sinks.spark.merge.parquet import read_changes
from subscriber.sinks.spark.pipeline.planning.table_work import TableWork, plan_columns
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY, new_names, renamed_file, resolve_fields
from subscriber.sinks.spark.tables.table_errors import COPY_AGAIN, TableStopped

__all__ = ["PendingChanges", "copied_changes", "read_work"]


@dataclass(slots=True)
class PendingChanges:
    """The waiting changes of a table, see the module.

    Attributes:
        begins, reached: the LSN of the table before these files are applied, and afterwards.
        schemas: in order; neighbours are different. Empty if there is no description of the table. ``described``: that of each file.
        copy: the directory of the copy that they begin with. None: they begin with no copy.
    """

    reached: Lsn
    files: list[str] = field(default_factory=list)
    size: int = 0
    schemas: list[TableSchema] = field(default_factory=list)
    described: list[TableSchema] = field(default_factory=list)
    copy: str | None = None
    begins: Lsn = field(init=False)

    def __post_init__(self) -> None:
        self.begins = self.reached

    def add(self, files: Sequence[LandedFile]) -> None:
        for file in files:
            self.files.append(file.path)
            self.size += file.size
            self.described.append(file.schema)
            self.describe(file.schema)

    def describe(self, schema: TableSchema) -> None:
        """Append a schema of the table, if it differs from the last one."""
        if not self.schemas or self.schemas[-1] != schema:
            self.schemas.append(schema)

    def rename(self, storage: Storage, present: Iterable[str]) -> None:
        """Map columns to the fields of a table, whose fields are ``present``. Files with other field names are rewritten."""
        found = dict(zip(self.schemas, resolve_fields(present, self.schemas), strict=True))
        names = {landed: new_names(landed, table) for landed, table in found.items()}
        if any(names.values()):
            pairs = zip(self.files, self.described, strict=True)
            self.files = [renamed_file(storage, file, names[one]) if names[one] else file for file, one in pairs]
            self.described = [found[one] for one in self.described]
            self.schemas = [found[one] for one in self.schemas]


def copied_changes(storage: Storage, directory: str, table: LakeTable, published: SnapshotTable | None) -> PendingChanges:
    """The changes that a table begins with: its copy and its own batches, up to the LSN of its handover. Empty without a copy.

    ``published`` is the table in the last snapshot that had it. Once it is published, its copy is removed.
    """
    copied = read_copy(storage, directory) if table.generation else None
    if copied is None:
        if table.generation:
            lost = f"the copy in {storage.what(directory)}" if published is None else f"the Delta table in {storage.what(published.path)}"
            raise TableStopped(f"{lost} is gone", hint=f"restore it from a backup, or {COPY_AGAIN}")
        return PendingChanges(table.added)
    source = PendingChanges(copied.lsn, copy=directory)
    source.describe(copied.schema)
    check_files(storage, directory, copied.files)
    source.add(copied.files)
    manifests = read_manifests(storage, directory)
    check_files(storage, directory, (file for manifest in manifests for file in manifest.files))
    for manifest in manifests:
        source.add(manifest.files)
        source.reached = manifest.end
    if table.entry.lsn is not None:
        source.reached = max(source.reached, table.entry.lsn)
    return source


_FEW_FILES: Final = 4
_GATHERED_BYTES: Final = 16 * 1024**2
"""This program gathers the rows, so on Spark they are in the memory of the driver."""


def read_work(storage: Storage, work: TableWork, source: PendingChanges) -> tuple[TableWork, pa.Table]:
    """Read the pending changes of a table for planning. Many small files are written as one, because each unit opens all of them.

    Returns:
        The remaining work, without stretches that are already in the table; and the columns of its changes that planning needs.
    """
    if len(work.stretches) == 1 and len(source.files) > _FEW_FILES and source.size <= _GATHERED_BYTES:
        changes = read_changes(storage, source.files, work.schema, work.after)
        storage.make_directory(ROUND_DIRECTORY)
        write_file(storage, path := unique_path(ROUND_DIRECTORY), changes.schema, changes.to_batches())
        stretch = replace(work.stretches[0], files=(path,))
        return replace(work, stretches=(stretch,) if changes.num_rows else ()), changes
    columns = plan_columns(work.schema)
    parts = [read_changes(storage, stretch.files, work.schema, work.after, columns) for stretch in work.stretches]
    left = tuple(stretch for stretch, part in zip(work.stretches, parts, strict=True) if part.num_rows)
    return replace(work, stretches=left), pa.concat_tables(parts or [read_changes(storage, (), work.schema, work.after, columns)])
