"""The files of a Delta table, from its log: each with its ``add`` action, which includes its deletion vector. delta-rs does not tell these.

Neither delta-rs nor Spark fsyncs what it writes on a local file system. So this module makes commits durable, with what they depend on: the
files that a commit adds, the commit, its checksums, and each checkpoint in any of its forms: one file, parts, or a file with a UUID and its
sidecars. ``_last_checkpoint`` comes after the checkpoint that it names.

Source: Delta protocol, Delta Log Entries, Checkpoints, and Action Reconciliation.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector
from subscriber.sinks.spark.tables.table_errors import DamagedTable, TableStopped

__all__ = ["LOG", "TableFile", "TableLog", "changes_rows", "has"]

LOG: Final = "_delta_log"
_SIDECARS: Final = "_sidecars"
"""Its directory with parts of checkpoints."""
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\.(\d{10})\.(\d{10})|\.[0-9a-f-]{36})?\.(?:parquet|json)")
_CHECKSUM: Final = "crc"
_COLUMNS: Final = ("add", "remove", "sidecar")
_MAPS: Final = ("partitionValues", "tags")


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of a table. ``rows`` counts deleted ones too, and is None if the log does not say. ``add`` is the action that added it."""

    path: str
    size: int
    rows: int | None
    vector: DeletionVector | None
    add: Mapping[str, Any]

    def removal(self, now: int, *, changes_rows: bool) -> dict[str, Any]:
        """The ``remove`` action for it."""
        add = self.add
        found = {
            "path": add["path"],
            "deletionTimestamp": now,
            "dataChange": changes_rows,
            "extendedFileMetadata": True,
            "partitionValues": add.get("partitionValues") or {},
            "size": self.size,
        }
        return found if self.vector is None else {**found, "deletionVector": self.vector.to_json()}

    def with_vector(self, vector: DeletionVector, rows: int) -> dict[str, Any]:
        """The ``add`` action for it with another deletion vector."""
        stated = json.loads(self.add["stats"]) if self.add.get("stats") else {}
        stats = json.dumps({**stated, "numRecords": rows, "tightBounds": False})
        return {**self.add, "dataChange": True, "stats": stats, "deletionVector": vector.to_json()}


class TableLog:
    """The files of one table by path, at a version (-1: none).

    ``removed`` has files of deletion vectors that no longer belong to the table, and since when, in milliseconds.
    """

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self.version = -1
        self.files: dict[str, TableFile] = {}
        self.removed: dict[str, int] = {}

    def actions(self, version: int) -> list[dict[str, Any]] | None:
        """The actions of a commit. None: the log no longer has it."""
        content = self._storage.read(f"{self._directory}/{LOG}/{version:020d}.json")
        if content is None:
            return None
        with self._intact(f"version {version}"):
            if not content.strip():
                raise ValueError
            return [json.loads(line) for line in content.splitlines() if line.strip()]

    @contextlib.contextmanager
    def _intact(self, what: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, KeyError, TypeError, pa.ArrowException):
            raise DamagedTable(self._storage.what(self._directory), self._directory, f"{what} of its log is damaged") from None

    def read(self, version: int) -> None:
        """Move to a version. If the log does not have it, or is damaged, raise TableStopped."""
        if version < self.version or self.version < 0 or not self._follow(version):
            self._begin(version)
            if not self._follow(version):
                raise TableStopped(
                    f"the log of Delta table {self._storage.what(self._directory)} does not reach back to version {version}",
                    hint="its commits were removed; use a newer version",
                )

    def _follow(self, version: int) -> bool:
        for number in range(self.version + 1, version + 1):
            actions = self.actions(number)
            if actions is None:
                return False
            with self._intact(f"version {number}"):
                self._take(actions)
            self.version = number
        return True

    def _begin(self, version: int) -> None:
        """Read the last checkpoint up to a version."""
        self.version, self.files, self.removed = -1, {}, {}
        found: dict[int, list[str]] = {}
        for file in self._storage.files(f"{self._directory}/{LOG}"):
            match = _CHECKPOINT.fullmatch(file.name)
            if match is not None and int(match[1]) <= version and file.size:
                names = found.setdefault(int(match[1]), [])
                names.append(file.name)
        for number in sorted(found, reverse=True):
            names = _complete(found[number])
            if names:
                for name in names:
                    # it may have the removal of a file with its earlier vector beside the file
                    with self._intact(f"checkpoint {name}"):
                        self._take(self._checkpoint(f"{self._directory}/{LOG}/{name}"), removals=False)
                self.version = number
                return

    def _checkpoint(self, path: str) -> Iterator[dict[str, Any]]:
        if path.endswith(".json"):
            rows = [json.loads(line) for line in (self._storage.read(path) or b"").splitlines() if line.strip()]
        else:
            with self._storage.reading(path), pq.ParquetFile(path, filesystem=self._storage.filesystem) as file:
                there = [name for name in _COLUMNS if name in file.schema_arrow.names]
                rows = file.read(columns=there).to_pylist() if there else []
        for row in rows:
            if row.get("sidecar") is not None:
                yield from self._checkpoint(f"{self._directory}/{LOG}/{_SIDECARS}/{row['sidecar']['path']}")
            elif row.get("add") is not None:
                yield {"add": _action(row["add"])}
            elif row.get("remove") is not None:
                yield {"remove": _action(row["remove"])}

    def _take(self, actions: Iterable[Mapping[str, Any]], *, removals: bool = True) -> None:
        added: dict[str, TableFile] = {}
        for action in actions:
            if "add" in action:
                file = _table_file(action["add"])
                added[file.path] = file
            elif "remove" in action:
                data = action["remove"]
                if removals:
                    self.files.pop(unquote(data["path"]), None)
                vector = DeletionVector.from_json(data["deletionVector"]) if data.get("deletionVector") else None
                if vector is not None and vector.file is not None:
                    self.removed[vector.file] = data.get("deletionTimestamp") or 0
        # a commit that changes a vector both removes and adds its file
        self.files |= added

    def forget_removed(self, before: int) -> None:
        """Forget files of deletion vectors that were removed before a time, in milliseconds."""
        self.removed = {name: since for name, since in self.removed.items() if since >= before}

    def sync_added(self, since: int, version: int) -> None:
        """Fsync the files that the commits after a version add to the table, and its directory."""
        for number in range(since + 1, version + 1):
            added = [action[kind] for action in self.actions(number) or () for kind in ("add", "cdc") if kind in action]
            files = {unquote(action["path"]) for action in added}
            files.update(DeletionVector.from_json(action["deletionVector"]).file or "" for action in added if action.get("deletionVector"))
            self._storage.sync((f"{self._directory}/{path}" for path in files - {""}), missing_ok=True)
        self._storage.sync([self._directory])

    def sync(self, since: int, version: int) -> None:
        """Fsync the commits after a version, and the checkpoints. Does nothing in an object store."""
        storage, log = self._storage, f"{self._directory}/{LOG}"
        if storage.root is None:
            return
        names = [f"{number:020d}.{ending}" for number in range(since + 1, version + 1) for ending in ("json", _CHECKSUM)]
        known = [(file.name, match) for file in storage.files(log) if (match := _CHECKPOINT.fullmatch(file.name)) is not None]
        checkpoints = [name for name, match in known if int(match[1]) > since]
        sidecars = storage.files(f"{log}/{_SIDECARS}") if checkpoints else []
        storage.sync((f"{log}/{_SIDECARS}/{file.name}" for file in sidecars), missing_ok=True)
        if sidecars:
            storage.sync([f"{log}/{_SIDECARS}"])
        for name in (*names, *checkpoints, "_last_checkpoint"):
            # Spark writes a checksum file for each file, and relies on it
            storage.sync([f"{log}/{name}", f"{log}/.{name}.{_CHECKSUM}"], missing_ok=True)
        storage.sync([log])


def _complete(names: list[str]) -> list[str]:
    """The files of one checkpoint. Empty if parts of it are missing."""
    for name in names:
        match = _CHECKPOINT.fullmatch(name)
        assert match is not None
        if match[3] is None:
            return [name]
        parts = [other for other in names if other.split(".")[3:4] == [match[3]]]
        if len(parts) == int(match[3]):
            return parts
    return []


def _action(data: Mapping[str, Any]) -> dict[str, Any]:
    """An action of a checkpoint, as it is in a commit."""
    found = {name: value for name, value in data.items() if value is not None and not name.endswith("_parsed")}
    for name in _MAPS:
        if isinstance(found.get(name), list):
            found[name] = dict(found[name])
    if isinstance(found.get("deletionVector"), Mapping):
        found["deletionVector"] = {name: value for name, value in found["deletionVector"].items() if value is not None}
    return found


def _table_file(add: Mapping[str, Any]) -> TableFile:
    stated = json.loads(add["stats"]) if add.get("stats") else {}
    vector = DeletionVector.from_json(add["deletionVector"]) if add.get("deletionVector") else None
    return TableFile(unquote(add["path"]), add["size"], stated.get("numRecords"), vector, add)


def has(commit: Iterable[Mapping[str, Any]], *kinds: str) -> bool:
    """Whether a commit has an action of one of these kinds."""
    return any(kind in action for action in commit for kind in kinds)


def changes_rows(commit: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a commit adds or removes rows, and does not only move them between files."""
    return any(action[kind].get("dataChange", True) for action in commit for kind in ("add", "remove") if kind in action)
