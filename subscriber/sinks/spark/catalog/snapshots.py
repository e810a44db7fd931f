"""Published snapshots: one consistent state of all tables. The applier publishes them in the Delta table ``snapshots/`` of the lake.

A snapshot says up to which LSN the tables are complete, and which Delta version each of them has at that LSN. A reader that opens these
versions sees the tables as the publisher had them at one moment. A table that is still being synchronized, or is ahead of the snapshot, is
not in it. Neither is a stopped table, which the applier cannot continue, for example because another writer changed its rows.

Each publication is one commit (``pipeline/publisher.py``), which replaces all rows of the Delta table. ``docs/howto/lake-read.md``
describes its columns. Of a stopped table, ``stopped`` is what the applier needs to continue it, as JSON.

So Delta readers get the newest snapshot with a query, and earlier ones by time travel (``VERSION AS OF``, ``TIMESTAMP AS OF``). This
module reads without delta-rs: the commit of a publication names its only file, and has LSN and time in its ``userMetadata``. It finds the
newest commit from the last checkpoint, and others by binary search. Commits of other writers are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final
from urllib.parse import unquote

import pyarrow as pa

from subscriber.interfaces import TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.files.file_errors import DamagedFile, arrow_errors
from subscriber.sinks.spark.files.storage import Storage

__all__ = [
    "NOT_PUBLISHED",
    "SNAPSHOTS",
    "Publication",
    "Snapshot",
    "SnapshotTable",
    "Snapshots",
    "StoppedTable",
    "read_snapshot",
    "snapshot_rows",
]

SNAPSHOTS: Final = "snapshots"
"""Directory of the Delta table."""
_LOG: Final = f"{SNAPSHOTS}/_delta_log"
_SCHEMA: Final = pa.schema(
    [
        ("lsn", pa.string()),
        ("lsn_number", pa.int64()),
        ("published", pa.timestamp("us", "UTC")),
        ("schema_name", pa.string()),
        ("table_name", pa.string()),
        ("path", pa.string()),
        ("version", pa.int64()),
        ("table_lsn", pa.string()),
        ("error", pa.string()),
        ("stopped", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class SnapshotTable:
    """A table in a snapshot: its path relative to the lake, the Delta version of its current state, and the LSN of that version."""

    path: str
    version: int
    applied: Lsn


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedTable:
    """A table that the applier cannot continue. It may be a removed one that lacks landed changes.

    Attributes:
        last: the table in the last snapshot that had it. None: no snapshot had it.
        generation: of the copy that it began with. A new copy ends the stop.
        lsn: landed changes after this LSN are not in the table.
        kept: whether these changes are kept. Then the table continues once the reason is gone.
        since: when it stopped, in seconds since 1970.
        error: the reason, with a hint.
    """

    last: SnapshotTable | None
    generation: int
    lsn: Lsn
    kept: bool
    since: float
    error: str


@dataclass(frozen=True, slots=True)
class Publication:
    """What the commit of a publication says of it. ``applier`` identifies the process that published it."""

    lsn: Lsn
    landed: Lsn
    published: datetime
    applier: str

    def note(self) -> str:
        """The ``userMetadata`` of the commit."""
        note_values = {"lsn": str(self.lsn), "landed": str(self.landed), "published": self.published.isoformat(), "applier": self.applier}
        return json.dumps({"subscriber": "snapshot", **note_values})


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot, see the module. ``landed`` is the end of the last manifest in it; the next manifest follows that.

    ``publication`` is not set before it is published.
    """

    lsn: Lsn
    landed: Lsn
    tables: Mapping[TableName, SnapshotTable] = field(default_factory=dict)
    stopped: Mapping[TableName, StoppedTable] = field(default_factory=dict)
    publication: Publication | None = field(default=None, compare=False)

    def last(self, name: TableName) -> SnapshotTable | None:
        """A table in the last snapshot that had it, up to this one."""
        stop = self.stopped.get(name)
        return stop.last if stop is not None else self.tables.get(name)

    @property
    def needed(self) -> Lsn:
        """Landed changes up to this LSN are in all tables, or are no longer kept for stopped ones."""
        return min([self.landed, *(table.lsn for table in self.stopped.values() if table.kept)])

    @property
    def published(self) -> datetime | None:
        """When it was published."""
        return self.publication.published if self.publication is not None else None


NOT_PUBLISHED: Final = Snapshot(INVALID_LSN, INVALID_LSN)
"""Before the first."""


def read_snapshot(storage: Storage) -> Snapshot | None:
    """Read the newest published snapshot. None before the first."""
    return Snapshots(storage).newest()


class Snapshots:
    """Reads the snapshots of a lake. An object that is kept finds the next snapshot faster."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._version = -1
        self._found: tuple[int, Snapshot] | None = None

    def newest(self) -> Snapshot | None:
        """The newest published snapshot. None before the first."""
        self._version = self._newest_version()
        return self.at(self._version)

    def last(self, is_before: Callable[[Publication], bool]) -> Snapshot | None:
        """The last snapshot of which this is true. It must be true of all before it. None if there is none, or it is no longer stored."""
        self._version = self._newest_version()
        # what is no longer stored is before everything else
        low, high = -1, self._version + 1
        while high - low > 1:
            middle = (low + high) // 2
            found = self._publication(middle)
            if found is None or is_before(found[1]):
                low = middle
            else:
                high = middle
        return self.at(low)

    def at(self, version: int) -> Snapshot | None:
        """The snapshot as of a version of the Delta table. None if there is none."""
        found = self._publication(version)
        if found is None:
            return None
        number, publication, files = found
        if self._found is None or self._found[0] != number:
            rows = [row for file in files for row in self._rows(f"{SNAPSHOTS}/{file}")]
            try:
                self._found = number, _snapshot(publication, rows)
            except (ValueError, KeyError, TypeError):
                raise DamagedFile(self._storage.what(f"{SNAPSHOTS}/{files[0]}"), f"{SNAPSHOTS}/{files[0]}") from None
        return self._found[1]

    def _publication(self, version: int) -> tuple[int, Publication, list[str]] | None:
        """The last publication at or before a version: its own version, what it says, and its files."""
        for number in range(version, -1, -1):
            actions = self._actions(number)
            if actions is None:
                return None
            note = next((action["commitInfo"].get("userMetadata") for action in actions if "commitInfo" in action), None)
            if note is not None and (publication := _publication(note)) is not None:
                return number, publication, [unquote(action["add"]["path"]) for action in actions if "add" in action]
        return None

    def _actions(self, version: int) -> list[dict[str, Any]] | None:
        name = f"{_LOG}/{version:020d}.json"
        content = self._storage.read(name)
        try:
            return None if content is None else [json.loads(line) for line in content.splitlines() if line.strip()]
        except ValueError:
            raise DamagedFile(self._storage.what(name), name) from None

    def _rows(self, name: str) -> list[dict[str, Any]]:
        with arrow_errors(self._storage.what(name)), self._storage.parquet(name) as file:
            return list(file.read().to_pylist())

    def _newest_version(self) -> int:
        """The number of the last commit; -1 if there is none. Numbers have no gaps after the last checkpoint."""
        last = max(self._version, self._checkpoint())
        if not self._is_there(last + 1):
            if last >= 0 or not (names := [file.name for file in self._storage.files(_LOG)]):
                return last
            return max((int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal()), default=-1)
        last, step = last + 1, 1
        while self._is_there(last + step):
            last, step = last + step, step * 2
        while step > 1:
            step //= 2
            if self._is_there(last + step):
                last += step
        return last

    def _checkpoint(self) -> int:
        content = self._storage.read(f"{_LOG}/_last_checkpoint") if self._version < 0 else None
        try:
            return -1 if content is None else int(json.loads(content)["version"])
        except (ValueError, KeyError, TypeError):
            return -1

    def _is_there(self, version: int) -> bool:
        return self._storage.exists(f"{_LOG}/{version:020d}.json")


def snapshot_rows(snapshot: Snapshot, publication: Publication) -> pa.Table:
    """The rows of a snapshot, see the module."""
    common = {"lsn": str(publication.lsn), "lsn_number": int(publication.lsn), "published": publication.published}
    rows: list[dict[str, Any]] = [
        {"schema_name": name.namespace, "table_name": name.name, **_table_json(table)} for name, table in snapshot.tables.items()
    ]
    for name, table in snapshot.stopped.items():
        stop = {
            "last": None if table.last is None else _table_json(table.last),
            "generation": table.generation,
            "lsn": str(table.lsn),
            "kept": table.kept,
            "since": table.since,
        }
        rows.append({"schema_name": name.namespace, "table_name": name.name, "error": table.error, "stopped": json.dumps(stop)})
    return pa.Table.from_pylist([{**common, **row} for row in rows], _SCHEMA)


def _publication(note: str) -> Publication | None:
    try:
        note_values = json.loads(note)
        if note_values["subscriber"] != "snapshot":
            return None
        published = datetime.fromisoformat(note_values["published"])
        return Publication(Lsn.parse(note_values["lsn"]), Lsn.parse(note_values["landed"]), published, note_values["applier"])
    except (ValueError, KeyError, TypeError):
        return None  # of another writer


def _snapshot(publication: Publication, rows: list[dict[str, Any]]) -> Snapshot:
    tables: dict[TableName, SnapshotTable] = {}
    stopped: dict[TableName, StoppedTable] = {}
    for row in rows:
        name = TableName(row["schema_name"], row["table_name"])
        if row["stopped"] is None:
            tables[name] = _table(row)
        else:
            stopped[name] = _stopped(row["error"], json.loads(row["stopped"]))
    return Snapshot(publication.lsn, publication.landed, tables, stopped, publication)


def _table_json(table: SnapshotTable) -> dict[str, Any]:
    return {"path": table.path, "version": table.version, "table_lsn": str(table.applied)}


def _table(row: Mapping[str, Any]) -> SnapshotTable:
    return SnapshotTable(row["path"], int(row["version"]), Lsn.parse(row["table_lsn"]))


def _stopped(error: str, stop: Mapping[str, Any]) -> StoppedTable:
    return StoppedTable(
        last=None if stop["last"] is None else _table(stop["last"]),
        generation=stop["generation"],
        lsn=Lsn.parse(stop["lsn"]),
        kept=stop["kept"],
        since=stop["since"],
        error=error,
    )
