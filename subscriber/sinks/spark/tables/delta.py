"""Delta tables of the lake, with delta-rs: their current files, and commits.

A commit contains the table's new position in Delta's ``txn`` action: an application ID and an LSN. So data and position are atomic, and
after a crash a commit that was already made is recognised. Other programs may maintain the tables (OPTIMIZE, VACUUM, properties). A commit
follows theirs if they left the files that it changes; otherwise it fails with :class:`CommitConflict`, and the work is planned again.

delta-rs and Spark do not fsync commits. A published snapshot and the removal of landed files depend on commits, and must not survive a
crash that the commits do not survive. So call :meth:`LakeDelta.make_durable` first.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Schema, TableFeatures
from deltalake.exceptions import CommitFailedError, DeltaError
from pyroaring import BitMap

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.commit_actions import TableChange, actions_of, commit_by_library, row_count, stored_vectors
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.deletion_vectors import VECTORS, DeletionVector
from subscriber.sinks.spark.tables.lake_columns import ADDED, ADDED_KEY, is_without_zone, lake_schema, with_added, with_comments
from subscriber.sinks.spark.tables.log_durability import sync_added, sync_log
from subscriber.sinks.spark.tables.table_errors import CommitConflict, read_error, write_error
from subscriber.sinks.spark.tables.table_features import ENABLE_FEED, ENABLE_VECTORS, unwritable, violated
from subscriber.sinks.spark.tables.table_log import LOG, TableFile, TableLog

__all__ = ["COMMITS_AT_ONCE", "LakeDelta", "changes_rows", "commit_note", "has", "lake_schema", "with_added"]

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
_NEW_COLUMNS: Final = CommitProperties({"userMetadata": json.dumps({"subscriber": "new columns"})})
_NEW_RETENTION: Final = CommitProperties({"userMetadata": json.dumps({"subscriber": "retention"})})
_WITHOUT_ZONE: Final = "timestampNtz"
_BEGUN: Final = "_begun.json"
"""Delta ignores names that begin with an underscore."""
_LAST_COMMITS: Final = 10
"""How many of the last commits of a newly opened table may not be durable yet."""


class LakeDelta:
    """A Delta table, open at its newest version.

    Attributes:
        directory: relative to the lake.

    Args:
        storage: of the lake.
        directory: relative to the lake.
        retain_hours: how long a version that was replaced can be read.
    """

    def __init__(self, storage: Storage, directory: str, retain_hours: int = 24) -> None:
        self._storage = storage
        self._retain_hours = retain_hours
        self.directory = directory
        self._table: DeltaTable | None = None
        self._durable = -1
        self._log = TableLog(storage, directory)
        self._asked: tuple[DeltaTable, int] | None = None
        self._applied: dict[str, Lsn | None] = {}

    @property
    def uri(self) -> str:
        if self._storage.root is not None:
            return str(self._storage.root / self.directory)
        return f"{self._storage.place.rstrip('/')}/{self.directory}"

    def load(self) -> bool:
        """Read the newest version. False if there is no table yet.

        Raises:
            TableStopped: the table is damaged, or delta-rs cannot read this kind of table.
            TargetError: its file system cannot be read.
        """
        with self._reading():
            if not DeltaTable.is_deltatable(self.uri):
                self._table = None
            elif self._table is not None:
                self._table.update_incremental()
            else:
                self._table, self._durable, self._log = DeltaTable(self.uri), -1, TableLog(self._storage, self.directory)
        return self._table is not None

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
            TargetError: it cannot be created.
        """
        self._storage.make_directory(self.directory)
        if begins is not None:
            write_document(self._storage, f"{self.directory}/{_BEGUN}", {"lsn": str(begins)})
        with self._translated():
            self._durable, self._log = -1, TableLog(self._storage, self.directory)
            self._table = DeltaTable.create(self.uri, Schema.from_arrow(schema), configuration={**_PROPERTIES, **self._retention()})
        if self.version:
            raise CommitConflict(self.uri)
        self._storage.sync([self.directory])
        self._sync_log()

    def begins(self) -> Lsn | None:
        """What :meth:`create` was told. None: nothing.

        Raises:
            TargetError: it cannot be read.
        """
        found = read_document(self._storage, f"{self.directory}/{_BEGUN}")
        return None if found is None else Lsn.parse(found["lsn"])

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

    @property
    def is_there(self) -> bool:
        """Whether the table existed when it was loaded."""
        return self._table is not None

    @property
    def _there(self) -> DeltaTable:
        assert self._table is not None
        return self._table

    @property
    def version(self) -> int:
        """Delta's version number."""
        return int(self._there.version())

    @property
    def schema(self) -> pa.Schema:
        """The columns, in the lake's Arrow types."""
        return lake_schema(self._there)

    @property
    def added(self) -> frozenset[str]:
        """Columns that were added when the table already had rows."""
        return frozenset(field.name for field in self._there.schema().fields if ADDED_KEY in field.metadata)

    def table_files(self) -> dict[str, TableFile]:
        """The files of the loaded version by their paths, which are relative to the table.

        Raises:
            TargetError: the log cannot be read.
        """
        self._log.read(self.version)
        return self._log.files

    def files(self) -> dict[str, int]:
        """The number of rows in each file, even deleted ones. Paths are relative to the table."""
        return {path: self.row_count(file) for path, file in self.table_files().items()}

    def add_actions(self) -> pa.Table:
        """The files of the loaded version with Delta's statistics, see ``column_statistics.py``."""
        with self._reading():
            return pa.table(self._there.get_add_actions(flatten=True))

    def at(self, version: int) -> DeltaTable:
        """The table as of a version.

        Raises:
            TargetError: the log does not reach back that far.
        """
        with self._reading():
            return DeltaTable(self.uri, version=version)

    def files_at(self, version: int) -> dict[str, TableFile]:
        """The files that belonged to a version.

        Raises:
            TargetError: the log does not reach back that far.
        """
        log = TableLog(self._storage, self.directory)
        log.read(version)
        return log.files

    def rows_at(self, version: int) -> frozenset[tuple[str, DeletionVector | None]]:
        """Identifies the rows of a version: its files, and their deletion vectors. Raises as :meth:`files_at`."""
        return frozenset((path, file.vector) for path, file in self.files_at(version).items())

    def applied(self, application: str) -> Lsn | None:
        """The LSN of an application's last commit. None if it never committed."""
        if self._table is None:
            return None
        if self._asked != (self._table, self.version):
            self._asked, self._applied = (self._table, self.version), {}
        if application not in self._applied:
            with self._reading():
                found = self._table.transaction_version(application)
            self._applied[application] = None if found is None else Lsn(found)
        return self._applied[application]

    def applied_at(self, version: int, application: str) -> Lsn | None:
        """The LSN of an application's last commit, as of a version.

        Raises:
            TargetError: the log does not reach back that far.
        """
        with self._reading():
            found = self.at(version).transaction_version(application)
        return None if found is None else Lsn(found)

    def unwritable(self, *, columns: bool) -> str | None:
        """What prevents commits by delta-rs, see :func:`subscriber.sinks.spark.tables.table_features.unwritable`."""
        if self._storage.root is None and any(file.vector is not None for file in self.table_files().values()):
            return "files with deletion vectors, in an object store"
        if self._storage.root is None and self.has_feed:
            return "a Change Data Feed, in an object store"
        with self._translated():
            return unwritable(self._there, columns=columns)

    def violated(self, added: Sequence[DataFile]) -> str | None:
        """The constraint that rows of new files violate. See :func:`subscriber.sinks.spark.tables.table_features.violated`."""
        with self._translated():
            return violated(self._there, [(f"{self.uri}/{quote(file.path)}", file.size, file.stats) for file in added])

    def add_columns(self, schema: pa.Schema) -> None:
        """Add the missing columns of ``schema`` in a separate commit. They are in :attr:`added` from then on."""
        there = set(self.schema.names)
        new = [field.with_metadata(ADDED) for field in schema if field.name not in there]
        if new:
            with self._next_version():
                self._there.alter.add_columns(Schema.from_arrow(pa.schema(new)).fields, commit_properties=_NEW_COLUMNS)
            self.make_durable()

    def mark_added(self, fields: Iterable[str]) -> None:
        """Mark these columns as :attr:`added`. Makes one commit for each that is not marked yet."""
        for field in sorted({*fields} - self.added):
            with self._next_version():
                self._there.alter.set_column_metadata(field, dict(ADDED), commit_properties=_NEW_COLUMNS)
            self.make_durable()

    @property
    def takes_vectors(self) -> bool:
        """Whether deletion vectors may be written. A table's property may forbid it, and delta-rs commits in object stores."""
        return self._storage.root is not None and self._there.metadata().configuration.get(ENABLE_VECTORS, "").lower() != "false"

    @property
    def has_feed(self) -> bool:
        """Whether the table has a Change Data Feed."""
        return self._there.metadata().configuration.get(ENABLE_FEED, "").lower() == "true"

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
        """Commit files, and ``lsn`` as the table's position.

        Args:
            added: new files in the table's directory.
            removed: paths of files that no longer belong to the table.
            application: the application of the LSN.
            lsn: the application's changes up to here are in the table.
            note: for the table's history, by :func:`commit_note`.
            overwrite: the new columns of the table; then all previous files are removed.
            same_rows: whether the added files have the rows of the removed ones. Then readers that follow the table ignore them.
            deleted: positions of deleted rows, by the paths of their files, for :attr:`takes_vectors`.
            feed: files of the Change Data Feed. If there are any, its readers take no rows from the other files.

        Raises:
            CommitConflict: another writer changed the table in the meantime.
            TargetError: the commit is refused.
        """
        if overwrite is not None:
            self._take_types(overwrite := with_comments(overwrite, self._there))
        self._storage.sync([self.directory])
        taken = {path: self.table_files().get(path) for path in (*removed, *(deleted or ()))}
        if None in taken.values():
            raise CommitConflict(self.uri)
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
            raise CommitConflict(self.uri)
        if version % _CHECKPOINT_VERSIONS == 0:
            self._there.create_checkpoint()

    def row_count(self, file: TableFile) -> int:
        """How many rows are in a file, even deleted ones.

        Raises:
            TargetError: it cannot be read.
        """
        return row_count(self._storage, self.directory, file)

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
            with self._translated():
                yield
        except TargetError as error:
            if isinstance(error.__cause__, CommitFailedError) and self.load() and self.version > before:
                raise CommitConflict(self.uri) from error
            raise
        self.load()
        if self.version != before + 1:
            raise CommitConflict(self.uri)

    def actions(self, version: int) -> list[dict[str, Any]] | None:
        """The actions of a commit. None: the log no longer has it."""
        return self._log.actions(version)

    def written(self, since: int, application: str) -> tuple[int, int]:
        """The number of files that an application's commits after a version wrote, and the bytes of these files and commits."""
        files, size = 0, 0
        for version in range(since + 1, self.version + 1):
            actions = self.actions(version) or []
            if not any(action["txn"]["appId"] == application for action in actions if "txn" in action):
                continue
            removed = {action["remove"]["path"] for action in actions if "remove" in action}
            for action in actions:
                size += len(json.dumps(action))
                added = action.get("add") or action.get("cdc")
                if added is not None and added["path"] not in removed:
                    files, size = files + 1, size + added["size"]
                elif added is not None and added.get("deletionVector"):
                    size += added["deletionVector"]["sizeInBytes"]
        return files, size

    def _take_types(self, schema: pa.Schema) -> None:
        """Enable the table features that these columns need, in a separate commit."""
        needed = any(is_without_zone(field.type) for field in schema)
        if needed and _WITHOUT_ZONE not in (self._there.protocol().writer_features or ()):
            with self._next_version():
                self._there.alter.add_feature(TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True)

    def make_durable(self) -> None:
        """Make the loaded commits and their files durable, even if another process made them.

        Raises:
            TargetError: the file system refuses.
        """
        if self._table is None or self._durable >= self.version or self._storage.root is None:
            return
        # a killed process of ours leaves at most its last commit; other writers make a few at once
        since = self._durable if self._durable >= 0 else max(self.version - _LAST_COMMITS, -1)
        sync_added(self._storage, self.directory, self._log, since, self.version)
        self._sync_log(since)

    def _sync_log(self, since: int | None = None) -> None:
        since, version = self._durable if since is None else since, self.version
        sync_log(self._storage, self.directory, since, version)
        self._durable = version
        if version // _CHECKPOINT_VERSIONS > max(since, 0) // _CHECKPOINT_VERSIONS:
            with self._translated():
                self._there.cleanup_metadata()

    def unneeded(self, retain_hours: int) -> list[str]:
        """Files in the table's directory that no version within the retention time has, and that are older than that time themselves."""
        with self._translated():
            found = self._there.vacuum(retention_hours=retain_hours, dry_run=True, enforce_retention_duration=False, full=True)
        # delta-rs does not know which files have vectors
        before = time.time() - retain_hours * 3600
        files = self._storage.files(f"{self.directory}/{VECTORS}")
        vectors = [f"{VECTORS}/{file.name}" for file in files if file.changed < before]
        needed = {file.vector.file for file in self.table_files().values() if file.vector is not None}
        self._log.forget_removed(int(before * 1000))
        return [path for path in {*found, *vectors} - needed if path not in self._log.removed]

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DeltaError, OSError) as error:
            self._table = None
            raise write_error(self.uri, error) from error

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (DeltaError, OSError) as error:
            self._table = None
            raise read_error(self.uri, self.directory, error) from error


def commit_note(operation: str, lsn: Lsn, after: Lsn | None = None) -> str:
    """What a commit did, as ``userMetadata`` in the table's history: changes after an LSN, up to another."""
    note = {"subscriber": operation, "lsn": str(lsn), "after": None if after is None else str(after)}
    return json.dumps({name: value for name, value in note.items() if value is not None})


def has(commit: Iterable[Mapping[str, Any]], *kinds: str) -> bool:
    """Whether a commit has an action of one of these kinds."""
    return any(kind in action for action in commit for kind in kinds)


def changes_rows(commit: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a commit adds or removes rows, and does not only move them between files."""
    return any(action[kind].get("dataChange", True) for action in commit for kind in ("add", "remove") if kind in action)
