"""The Delta tables of a lake that its applier has open."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.lake import Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import SnapshotTable
from subscriber.sinks.spark.copy.copied_rows import read_copy
from subscriber.sinks.spark.files.location import table_directory
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.file_check import checking_files
from subscriber.sinks.spark.tables.table_errors import DamagedTable, TableStopped

__all__ = ["OpenTables", "is_readable", "lacks_published"]


@dataclass(slots=True)
class OpenTables:
    """Opens each table of a lake once, and keeps them by directory."""

    storage: Storage
    retain_hours: int = 24
    opened: dict[str, LakeDelta] = field(default_factory=dict)

    def of(self, name: TableName, table: LakeTable) -> LakeDelta:
        """The Delta table of a table. It is not loaded here, and may not exist yet."""
        directory = table_directory("tables", name, table.id)
        return self.opened.setdefault(directory, LakeDelta(self.storage, directory, self.retain_hours))

    def load(self, name: TableName, table: LakeTable, published: SnapshotTable | None) -> None:
        """Load the newest version of a table, or raise TableStopped. A damaged table may begin again, see :meth:`begins_again`."""
        try:
            self._load(self.of(name, table))
        except DamagedTable:
            if not self.begins_again(name, table, published):
                raise

    def begins_again(self, name: TableName, table: LakeTable, published: SnapshotTable | None) -> bool:
        """Let a damaged table begin again, if its copy replaces all that was published. False if it does not.

        ``published``: the table in the last snapshot that had it.
        """
        copied = read_copy(self.storage, copy_directory(table)) if table.generation and table.until is None else None
        if copied is None or (published is not None and published.applied >= copied.lsn):
            return False
        self.of(name, table).begin_again()
        return True

    def is_applied(self, lake: Lake, name: TableName, table: LakeTable) -> bool | None:
        """Whether a table was committed since its last copy. None: there is no Delta table. If it cannot be read, raise TableStopped."""
        delta = self.of(name, table)
        return delta.applied(lake.application(table)) is not None if self._load(delta) else None

    def _load(self, delta: LakeDelta) -> bool:
        with checking_files(self.storage, delta):
            return delta.load()


def lacks_published(lake: Lake, table: LakeTable, delta: LakeDelta, published: SnapshotTable | None) -> bool:
    """Whether the log of a table has lost a published version, of the table before its last copy too."""
    if published is None or published.path != delta.directory:
        return False
    earlier = (replace(table, generation=number) for number in range(table.generation + 1))
    applied = (delta.applied(lake.application(one)) for one in earlier)
    return all(lsn is None or lsn < published.applied for lsn in applied)


def is_readable(delta: LakeDelta) -> bool:
    """Load a table. False if there is none, or if it cannot be read."""
    try:
        return delta.load()
    except TableStopped:
        return False
