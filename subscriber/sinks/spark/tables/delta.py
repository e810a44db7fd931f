"""Writes Delta tables of the lake, with delta-rs: creates them, and commits.

A commit contains the table's new position in Delta's ``txn`` action: an application ID and an LSN. So data and position are atomic, and
after a crash a commit that was already made is recognised. Other programs may maintain the tables (OPTIMIZE, VACUUM, properties). A commit
follows theirs if they left the files that it changes; otherwise it fails with :class:`CommitConflict`, and the work is planned again.

delta-rs and Spark do not fsync commits. A published snapshot and the removal of landed files depend on commits, and must not survive a
crash that the commits do not survive. So call :meth:`LakeDelta.make_durable` first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final
from urllib.parse import quote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures
from deltalake.exceptions import CommitFailedError
from pyroaring import BitMap

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.commit_actions import TableChange, actions_of, commit_by_library, stored_vectors
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.deletion_vectors import VECTORS
from subscriber.sinks.spark.tables.delta_reader import BEGUN, DeltaReader
from subscriber.sinks.spark.tables.lake_columns import is_without_zone, with_comments
from subscriber.sinks.spark.tables.table_errors import CommitConflict
from subscriber.sinks.spark.tables.table_features import ENABLE_VECTORS, is_append_only, unwritable, violated, with_deletion_vectors
from subscriber.sinks.spark.tables.table_log import LOG, TableFile, TableLog, changes_rows, has

__all__ = ["COMMITS_AT_ONCE", "LakeDelta", "commit_note"]

_log = logging.getLogger(__name__)

COMMITS_AT_ONCE: Final = 8
"""Number of tables to commit in parallel. A commit mostly waits for the disk or the object store."""
_CHECKPOINT_VERSIONS: Final = 100
_PROPERTIES: Final[Mapping[str, str]] = {
    "delta.checkpointInterval": str(_CHECKPOINT_VERSIONS),
    # cleanup when a checkpoint is written would remove the commits that it replaces before the checkpoint is on disk
    "delta.enableExpiredLogCleanup": "false",
}
_RETENTION: Final = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
"""How long the log has a version, and how long it names removed files."""
_HOURS: Final = re.compile(r"interval (\d+) hours")
_NEW_COLUMNS_NOTE: Final = json.dumps({"subscriber": "new columns"})
_NEW_COLUMNS: Final = CommitProperties({"userMetadata": _NEW_COLUMNS_NOTE})
_NEW_RETENTION: Final = CommitProperties({"userMetadata": json.dumps({"subscriber": "retention"})})
_VECTORS_NOTE: Final = (
    "to_pandas and to_pyarrow_table of delta-rs cannot read it from now on; deletion_vectors.SCHEMA.TABLE=off in the URL prevents this"
    " (docs/howto/lake.md names other readers)"
)
_WITHOUT_ZONE: Final = "timestampNtz"
_LAST_COMMITS: Final = 10
"""How many of the last commits of a newly opened table may not be durable yet."""


class LakeDelta(DeltaReader):
    """A Delta table that the lake writes. Versions that were replaced can be read for ``retain_hours``."""

    def __init__(self, storage: Storage, directory: str, retain_hours: int = 24) -> None:
        super().__init__(storage, directory)
        self._retain_hours = retain_hours
        self._durable = -1

    def load(self) -> bool:
        """Read the newest version, see :meth:`DeltaReader.load`."""
        opened = self._table
        found = super().load()
        if self._table is not opened:
            self._durable = -1
        return found

    def begin_again(self) -> None:
        """Forget all versions of a damaged table. Its files are removed once they are old enough."""
        self._storage.remove_directory(f"{self.directory}/{LOG}")
        self._table = None

    def create(self, schema: pa.Schema, begins: Lsn | None = None) -> None:
        """Create the table, empty.

        Args:
            schema: its columns.
            begins: every snapshot that has the table has it at this LSN or later. An earlier one had another table in this directory,
                with versions of the same numbers.

        Raises:
            CommitConflict: another writer created it at the same time. It may have rows already.
        """
        self._storage.make_directory(self.directory)
        if begins is not None:
            write_document(self._storage, f"{self.directory}/{BEGUN}", {"lsn": str(begins)})
        with self._translated(writes=True):
            self._durable, self._log = -1, TableLog(self._storage, self.directory)
            self._table = DeltaTable.create(self.uri, Schema.from_arrow(schema), configuration={**_PROPERTIES, **self._retention()})
        if self.version:
            raise CommitConflict(self.uri, self.directory)
        self._storage.sync([self.directory])
        self._sync_log()

    def _retention(self) -> dict[str, str]:
        return dict.fromkeys(_RETENTION, f"interval {self._retain_hours} hours")

    def set_retention(self) -> None:
        """Store the retention time in the table's properties. A value that was not written by an applier is left as it is.

        Raises:
            CommitConflict: another writer changed the table in the meantime.
        """
        known = self._there.metadata().configuration
        ours = {name: value for name, value in self._retention().items() if _HOURS.fullmatch(known.get(name, value))}
        if any(known.get(name) != value for name, value in ours.items()):
            with self._next_version():
                self._there.alter.set_table_properties(ours, commit_properties=_NEW_RETENTION)
            self.make_durable()

    def unwritable(self, *, columns: bool) -> str | None:
        """What prevents commits by delta-rs, see :func:`subscriber.sinks.spark.tables.table_features.unwritable`."""
        if self._storage.root is None and any(file.vector is not None for file in self.table_files().values()):
            return "files with deletion vectors, in an object store"
        if self._storage.root is None and self.has_feed:
            return "a Change Data Feed, in an object store"
        with self._translated(writes=True):
            return unwritable(self._there, columns=columns)

    @property
    def is_append_only(self) -> bool:
        """Whether a property of the table forbids to change rows."""
        return is_append_only(self._there)

    def violated(self, added: Sequence[DataFile]) -> str | None:
        """The constraint that rows of new files violate. See :func:`subscriber.sinks.spark.tables.table_features.violated`."""
        with self._translated(writes=True):
            return violated(self._there, [(f"{self.uri}/{quote(file.path)}", file.size, file.stats) for file in added])

    def add_columns(self, schema: pa.Schema, by: Callable[[pa.Schema, str], None] | None = None) -> None:
        """Add the missing columns of ``schema`` in a separate commit.

        ``by`` makes the commit, of these columns and with this ``userMetadata``. None: delta-rs.
        """
        there = set(self.schema.names)
        new = pa.schema([field for field in schema if field.name not in there])
        if new:
            with self._next_version():
                if by is None:
                    self._there.alter.add_columns(Schema.from_arrow(new).fields, commit_properties=_NEW_COLUMNS)
                else:
                    by(new, _NEW_COLUMNS_NOTE)
            self.make_durable()

    def takes_columns_of_delta(self, schema: pa.Schema) -> bool:
        """Whether Delta itself may add the missing columns: their names in files are theirs, and they need no new table feature."""
        there = set(self.schema.names)
        is_mapped = self._there.metadata().configuration.get("delta.columnMapping.mode", "none") != "none"
        without_zone = any(is_without_zone(field.type) for field in schema if field.name not in there)
        return not is_mapped and (not without_zone or _WITHOUT_ZONE in (self._there.protocol().writer_features or ()))

    @property
    def takes_vectors(self) -> bool:
        """Whether deletion vectors may be written. A table's property may forbid it, and delta-rs commits in object stores."""
        return self._storage.root is not None and self._there.metadata().configuration.get(ENABLE_VECTORS, "").lower() != "false"

    def commit(
        self,
        added: Sequence[DataFile],
        removed: Sequence[str],
        application: str,
        lsn: Lsn,
        *,
        note: str,
        overwrite: pa.Schema | None = None,
        same_rows: bool = False,
        deleted: Mapping[str, BitMap] | None = None,
        feed: Sequence[DataFile] = (),
    ) -> None:
        """Commit files, and ``lsn`` as the table's position: the application's changes up to here are in the table.

        ``added`` are new files in the table's directory, ``removed`` paths of files that no longer belong to the table, ``deleted``
        positions of deleted rows by the paths of their files, for :attr:`takes_vectors`. ``overwrite`` are new columns; then all previous
        files are removed. With ``same_rows``, readers that follow the table ignore the commit. ``feed`` are files of the Change Data Feed;
        with any, its readers take no rows from the other files. ``note`` is by :func:`commit_note`.

        Raises:
            CommitConflict: another writer changed the table in the meantime.
        """
        if overwrite is not None:
            self._take_types(overwrite := with_comments(overwrite, self._there))
        self._storage.sync([self.directory])
        taken = {path: self.table_files().get(path) for path in (*removed, *(deleted or ()))}
        if None in taken.values():
            raise CommitConflict(self.uri, self.directory)
        change = TableChange(
            added=added,
            removed=removed,
            application=application,
            lsn=lsn,
            note=note,
            overwrite=overwrite,
            same_rows=same_rows,
            vectors=stored_vectors(self._storage, self.directory, self.table_files(), deleted or {}),
            feed=feed,
        )
        if deleted and with_deletion_vectors(self._there.protocol()) is not None:
            _log.info("Delta table %s gets its first deletion vector: %s", self.uri, _VECTORS_NOTE)
        while True:
            self.make_durable()
            before = self.version
            try:
                with self._next_version():
                    if self._storage.root is None:
                        commit_by_library(self._there, self.table_files(), change)
                    else:
                        self._write_next(change)
                break
            except CommitConflict:
                if overwrite is not None or not self._is_maintained(before, taken):
                    raise
        self._sync_log()

    def _write_next(self, change: TableChange) -> None:
        version = self.version + 1
        actions = actions_of(self._storage, self.directory, self._there, self.table_files(), change)
        content = "".join(f"{json.dumps(action)}\n" for action in actions)
        written = self._storage.write_new(f"{self.directory}/{LOG}/{version:020d}.json", content.encode())
        self.load()
        if not written:
            raise CommitConflict(self.uri, self.directory)
        if version % _CHECKPOINT_VERSIONS == 0:
            self._there.create_checkpoint()

    def _is_maintained(self, since: int, taken: Mapping[str, TableFile | None]) -> bool:
        """Whether all commits after a version only moved rows between files, and left these files as they are."""
        commits = [self.actions(version) for version in range(since + 1, self.version + 1)]
        moved = all(commit is not None and not changes_rows(commit) and not has(commit, "metaData", "protocol") for commit in commits)
        files = self.table_files()
        return moved and all(file is not None and path in files and files[path].vector == file.vector for path, file in taken.items())

    @contextlib.contextmanager
    def _next_version(self) -> Iterator[None]:
        """Commit the next version in the block, and load it.

        Raises:
            CommitConflict: another writer committed since the table was loaded. The newest version is loaded.
        """
        before = self.version
        try:
            with self._translated(writes=True):
                yield
        except TargetError as error:
            if isinstance(error.__cause__, CommitFailedError) and self.load() and self.version > before:
                raise CommitConflict(self.uri, self.directory) from error
            raise
        self.load()
        if self.version != before + 1:
            raise CommitConflict(self.uri, self.directory)

    def _take_types(self, schema: pa.Schema) -> None:
        """Enable the table features that these columns need, in a separate commit."""
        needed = any(is_without_zone(field.type) for field in schema)
        if needed and _WITHOUT_ZONE not in (self._there.protocol().writer_features or ()):
            with self._next_version():
                self._there.alter.add_feature(TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True)

    def make_durable(self) -> None:
        """Make the loaded commits and their files durable, even if another process made them."""
        if self._table is None or self._durable >= self.version or self._storage.root is None:
            return
        # a killed process of ours leaves at most its last commit; other writers make a few at once
        since = self._durable if self._durable >= 0 else max(self.version - _LAST_COMMITS, -1)
        self._log.sync_added(since, self.version)
        self._sync_log(since)

    def _sync_log(self, since: int | None = None) -> None:
        since, version = self._durable if since is None else since, self.version
        self._log.sync(since, version)
        self._durable = version
        if version // _CHECKPOINT_VERSIONS > max(since, 0) // _CHECKPOINT_VERSIONS:
            with self._translated(writes=True):
                self._there.cleanup_metadata()

    def unneeded(self, retain_hours: int) -> list[str]:
        """Files in the table's directory that no version within the retention time has, and that are older than that time themselves."""
        with self._translated(writes=True):
            found = self._there.vacuum(retention_hours=retain_hours, dry_run=True, enforce_retention_duration=False, full=True)
        # delta-rs does not know which files have vectors
        before = time.time() - retain_hours * 3600
        files = self._storage.files(f"{self.directory}/{VECTORS}")
        vectors = [f"{VECTORS}/{file.name}" for file in files if file.changed < before]
        needed = {file.vector.file for file in self.table_files().values() if file.vector is not None}
        self._log.forget_removed(int(before * 1000))
        return [path for path in {*found, *vectors} - needed if path not in self._log.removed]


def commit_note(operation: str, lsn: Lsn, after: Lsn | None = None) -> str:
    """What a commit did, as ``userMetadata`` in the table's history: changes after an LSN, up to another."""
    note = {"subscriber": operation, "lsn": str(lsn), "after": None if after is None else str(after)}
    return json.dumps({name: value for name, value in note.items() if value is not None})
