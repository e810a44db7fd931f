"""Published snapshots ("cuts"): one consistent state of all tables. The applier publishes it as ``applied.json``, with one rename.

A cut says up to which LSN the tables are complete, and which Delta version each of them has at that LSN. A reader that opens these versions
sees the tables as the publisher had them at one moment. A table that is still being synchronized, or is ahead of the cut, is not in it.
Neither is a stopped table, which the applier cannot continue, for example because another writer changed its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.abc import TableName
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.storage import Storage

__all__ = ["CUTS", "Cut", "CutTable", "StoppedTable", "cut_as_of", "forget_cuts", "read_cut", "restore_cut", "write_cut"]

_NAME: Final = "applied.json"
CUTS: Final = "cuts"


@dataclass(frozen=True, slots=True)
class CutTable:
    """A table in a cut: its path relative to the lake, the Delta version of its current state, and the LSN of that version."""

    path: str
    version: int
    applied: Lsn | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedTable:
    """A table that the applier cannot continue. It may be a removed one that lacks landed changes.

    Attributes:
        last: the table in the last cut that had it. None: no cut had it.
        generation: of the copy that it began with. A new copy ends the stop.
        lsn: landed changes after this LSN are not in the table.
        kept: whether these changes are kept. Then the table continues once the reason is gone.
        since: when it stopped, in seconds since 1970.
        error: the reason, with a hint.
    """

    last: CutTable | None
    generation: int
    lsn: Lsn
    kept: bool
    since: float
    error: str


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut, see the module. ``landed`` is the end of the last manifest in it; the next manifest follows that."""

    lsn: Lsn
    landed: Lsn
    tables: Mapping[TableName, CutTable] = field(default_factory=dict)
    stopped: Mapping[TableName, StoppedTable] = field(default_factory=dict)

    @property
    def needed(self) -> Lsn:
        """Landed changes up to this LSN are in all tables, or are no longer kept for stopped ones."""
        return min([self.landed, *(table.lsn for table in self.stopped.values() if table.kept)])


def read_cut(storage: Storage) -> Cut | None:
    """Read the published cut. None before the first.

    Raises:
        TargetError: it is damaged, or cannot be read.
    """
    return _read(storage, _NAME)


def _read(storage: Storage, name: str) -> Cut | None:
    document = read_document(storage, name)
    if document is None:
        return None
    try:
        tables = {TableName(*item["name"]): _table(item) for item in document["tables"]}
        stopped = {TableName(*item["name"]): _stopped(item) for item in document.get("stopped", ())}
        return Cut(Lsn.parse(document["lsn"]), Lsn.parse(document["landed"]), tables, stopped)
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"{storage.what(name)} is damaged", hint="remove it: the applier publishes it again") from None


def _table(item: Mapping[str, Any]) -> CutTable:
    applied = item.get("applied")
    return CutTable(item["path"], item["version"], None if applied is None else Lsn.parse(applied))


def _stopped(item: Mapping[str, Any]) -> StoppedTable:
    return StoppedTable(
        last=None if item["last"] is None else _table(item["last"]),
        generation=item["generation"],
        lsn=Lsn.parse(item["lsn"]),
        kept=item["kept"],
        since=item["since"],
        error=item["error"],
    )


def _table_json(table: CutTable) -> dict[str, Any]:
    return {"path": table.path, "version": table.version, "applied": None if table.applied is None else str(table.applied)}


def write_cut(storage: Storage, cut: Cut) -> None:
    """Publish a cut.

    Raises:
        TargetError: it cannot be written. The previous cut stays published.
    """
    stopped = [
        {
            "name": [name.namespace, name.name],
            "last": None if table.last is None else _table_json(table.last),
            "generation": table.generation,
            "lsn": str(table.lsn),
            "kept": table.kept,
            "since": table.since,
            "error": table.error,
        }
        for name, table in cut.stopped.items()
    ]
    tables = [{"name": [name.namespace, name.name], **_table_json(table)} for name, table in cut.tables.items()]
    document = {"lsn": str(cut.lsn), "landed": str(cut.landed), "tables": tables, "stopped": stopped}
    storage.make_directory(CUTS)
    # for readers of earlier cuts; correctness does not depend on it
    write_document(storage, f"{CUTS}/{int(cut.lsn):020d}.json", document, durable=False)
    write_document(storage, _NAME, document)


def restore_cut(storage: Storage) -> None:
    """Publish the newest stored cut again, if an applier that was believed dead has published an older one after it.

    The landed files after the older cut may be removed already. Only for storage in which files are durable when written, in any order.

    Raises:
        TargetError: it is damaged, or cannot be read or written.
    """
    cut, names = read_cut(storage), _remembered(storage)
    newest = _read(storage, f"{CUTS}/{names[-1]}") if names else None
    if newest is not None and cut is not None and newest.lsn > cut.lsn:
        write_cut(storage, newest)


def cut_as_of(storage: Storage, lsn: Lsn) -> Cut | None:
    """Return the last stored cut at or before an LSN. None if there is none.

    Raises:
        TargetError: it is damaged, or cannot be read.
    """
    newest = read_cut(storage)
    if newest is not None and newest.lsn <= lsn:
        return newest
    limit = f"{int(lsn):020d}.json"
    names = [name for name in _remembered(storage) if name <= limit]
    return _read(storage, f"{CUTS}/{names[-1]}") if names else None


def forget_cuts(storage: Storage, keep: int) -> None:
    """Keep only the newest ``keep`` cuts."""
    storage.delete(f"{CUTS}/{name}" for name in _remembered(storage)[:-keep])


def _remembered(storage: Storage) -> list[str]:
    return [file.name for file in storage.files(CUTS) if file.name[0].isdigit()]
