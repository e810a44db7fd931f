"""A Delta table as readers see it: its versions with their files, columns, and the LSNs that are in its log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.documents import read_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.commit_actions import row_count
from subscriber.sinks.spark.tables.lake_columns import lake_schema
from subscriber.sinks.spark.tables.table_errors import read_error, write_error
from subscriber.sinks.spark.tables.table_features import ENABLE_FEED
from subscriber.sinks.spark.tables.table_log import LOG, TableFile, TableLog

__all__ = ["BEGUN", "DeltaReader"]

BEGUN: Final = "_begun.json"
"""Delta ignores names that begin with an underscore."""


class DeltaReader:
    """A Delta table in a directory of the lake, open at its newest version."""

    def __init__(self, storage: Storage, directory: str) -> None:
        # it may be from a snapshot's file
        storage.require_inside(directory)
        self._storage = storage
        self.directory = directory
        self._table: DeltaTable | None = None
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
        """
        with self._translated():
            if not DeltaTable.is_deltatable(self.uri):
                self._table = None
                return False
            if self._table is not None:
                self._table.update_incremental()
                # delta-rs may not notice that the newest version was removed
                if self._storage.root is not None and not self._storage.exists(f"{self.directory}/{LOG}/{self.version:020d}.json"):
                    self._table = None
            if self._table is None:
                self._table, self._log = DeltaTable(self.uri), TableLog(self._storage, self.directory)
        return True

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
        """Delta's version number. -1: there is no table."""
        return int(self._table.version()) if self._table is not None else -1

    @property
    def schema(self) -> pa.Schema:
        """The columns, in the lake's Arrow types."""
        return lake_schema(self._there)

    @property
    def has_feed(self) -> bool:
        """Whether the table has a Change Data Feed."""
        return self._there.metadata().configuration.get(ENABLE_FEED, "").lower() == "true"

    def table_files(self) -> dict[str, TableFile]:
        """The files of the loaded version by their paths, which are relative to the table."""
        self._log.read(self.version)
        return self._log.files

    def files(self) -> dict[str, int]:
        """The number of rows in each file, even deleted ones. Paths are relative to the table."""
        return {path: self.row_count(file) for path, file in self.table_files().items()}

    def row_count(self, file: TableFile) -> int:
        """How many rows are in a file, even deleted ones."""
        return row_count(self._storage, self.directory, file)

    def add_actions(self) -> pa.Table:
        """The files of the loaded version with Delta's statistics, see ``column_statistics.py``."""
        with self._translated():
            return pa.table(self._there.get_add_actions(flatten=True))

    def begins(self) -> Lsn | None:
        """The LSN of the first snapshot that has the table, see :meth:`LakeDelta.create`. None: unknown."""
        found = read_document(self._storage, f"{self.directory}/{BEGUN}")
        return None if found is None else Lsn.parse(found["lsn"])

    def at(self, version: int) -> DeltaTable:
        """The table as of a version."""
        with self._translated():
            return DeltaTable(self.uri, version=version)

    def files_at(self, version: int) -> dict[str, TableFile]:
        """The files that belonged to a version."""
        log = TableLog(self._storage, self.directory)
        log.read(version)
        return log.files

    def applied(self, application: str) -> Lsn | None:
        """The LSN of an application's last commit. None if it never committed."""
        if self._table is None:
            return None
        # delta-rs calls any two tables equal
        if self._asked is None or self._asked[0] is not self._table or self._asked[1] != self.version:
            self._asked, self._applied = (self._table, self.version), {}
        if application not in self._applied:
            with self._translated():
                found = self._table.transaction_version(application)
            self._applied[application] = None if found is None else Lsn(found)
        return self._applied[application]

    def applied_at(self, version: int, application: str) -> Lsn | None:
        """The LSN of an application's last commit, as of a version."""
        with self._translated():
            found = self.at(version).transaction_version(application)
        return None if found is None else Lsn(found)

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

    @contextlib.contextmanager
    def _translated(self, *, writes: bool = False) -> Iterator[None]:
        try:
            yield
        except (DeltaError, OSError) as error:
            self._table = None
            raise (write_error(self.uri, error) if writes else read_error(self.uri, self.directory, error)) from error
