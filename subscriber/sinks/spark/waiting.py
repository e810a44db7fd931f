"""What waits to be applied to one table: its files in order, and the schemas they were described with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import LakeTable
from subscriber.sinks.spark.files.documents import read_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile, check_files, check_paths, read_manifests
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.column_mapping import new_names, renamed_file, resolve_fields
from subscriber.sinks.spark.tables.data_file import DataFile, file_from_json
from subscriber.sinks.spark.tablesync import COPY_DOCUMENT

__all__ = ["Copied", "Source", "copied_source", "read_copy"]


@dataclass(slots=True)
class Source:
    """See the module.

    Attributes:
        reached: up to which LSN the table is with these files.
        files: relative to the lake, in order.
        size: of all files, bytes.
        schemas: in order, neighbours different; empty if nothing describes the table.
        described: of each file, what it was described with.
    """

    reached: Lsn
    files: list[str] = field(default_factory=list)
    size: int = 0
    schemas: list[TableSchema] = field(default_factory=list)
    described: list[TableSchema] = field(default_factory=list)

    def add(self, files: Sequence[LandedFile]) -> None:
        """These come next."""
        for file in files:
            self.files.append(file.path)
            self.size += file.size
            self.described.append(file.schema)
            self.describe(file.schema)

    def describe(self, schema: TableSchema) -> None:
        """The table is so from here on."""
        if not self.schemas or self.schemas[-1] != schema:
            self.schemas.append(schema)

    def rename(self, storage: Storage, present: Iterable[str]) -> None:
        """Let columns be the fields that they are in a table that has these; files with others are written again."""
        found = dict(zip(self.schemas, resolve_fields(present, self.schemas), strict=True))
        names = {landed: new_names(landed, table) for landed, table in found.items()}
        if any(names.values()):
            pairs = zip(self.files, self.described, strict=True)
            self.files = [renamed_file(storage, file, names[one]) if names[one] else file for file, one in pairs]
            self.described = [found[one] for one in self.described]
            self.schemas = [found[one] for one in self.schemas]


@dataclass(frozen=True, slots=True)
class Copied:
    """A table's copy: as of which LSN, its schema, and its files: landed ones, or those of the Delta table that executors wrote."""

    lsn: Lsn
    schema: TableSchema
    files: tuple[LandedFile, ...]
    base: tuple[DataFile, ...] | None = None


def read_copy(storage: Storage, directory: str) -> Copied | None:
    """What a table's copy says of itself; None: there was none.

    Raises:
        TargetError: it is damaged.
    """
    document = read_document(storage, f"{directory}/{COPY_DOCUMENT}")
    if document is None:
        return None
    try:
        files = tuple(LandedFile.from_json(data) for data in document["files"])
        base = None if document.get("base") is None else tuple(map(file_from_json, document["base"]))
        return Copied(Lsn.parse(document["lsn"]), TableSchema.from_json(document["schema"]), files, base)
    except (ValueError, KeyError, TypeError):
        raise TargetError(
            f"{storage.what(directory)}/{COPY_DOCUMENT} is damaged", hint="restore it from a backup, or start over in a new directory"
        ) from None


def copied_source(storage: Storage, directory: str, table: LakeTable) -> Source:
    """What a table begins with: its copy and its own batches, up to where it was handed over; nothing, if it was not copied.

    Raises:
        TargetError, DataLossError: something of it is missing or damaged.
    """
    copied = read_copy(storage, directory) if table.generation else None
    if copied is None:
        if table.generation:
            raise TargetError(
                f"the copy in {storage.what(directory)} is gone", hint="restore it from a backup, or start over in a new directory"
            )
        return Source(table.added)
    source = Source(copied.lsn)
    source.describe(copied.schema)
    check_paths(storage, directory, copied.files)
    source.add(copied.files)
    manifests = read_manifests(storage, directory)
    check_files(storage, directory, manifests)
    for manifest in manifests:
        source.add(manifest.files)
        source.reached = manifest.end
    if table.entry.lsn is not None:
        source.reached = max(source.reached, table.entry.lsn)
    return source
