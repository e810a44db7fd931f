"""``applied.json``: one consistent cut of all tables, published by the applier in one rename.

It says up to which LSN the tables hold everything, and which Delta version each has there: a reader that opens these versions sees the
tables as the publisher had them at one moment. A table that is still being synchronized, or is ahead of the cut, is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from subscriber.abc import TableName
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.manifest import read_document, write_document
from subscriber.sinks.spark.storage import Storage

__all__ = ["Cut", "CutTable", "read_cut", "write_cut"]

_NAME: Final = "applied.json"


@dataclass(frozen=True, slots=True)
class CutTable:
    """One table in a cut: where it is, relative to the lake, and the version of its current state."""

    path: str
    version: int


@dataclass(frozen=True, slots=True)
class Cut:
    """See the module. ``landed`` is the end of the last manifest that is in it: the next one follows that."""

    lsn: Lsn
    landed: Lsn
    tables: Mapping[TableName, CutTable] = field(default_factory=dict)


def read_cut(storage: Storage) -> Cut | None:
    """The published cut; None before the first.

    Raises:
        TargetError: it is damaged, or cannot be read.
    """
    document = read_document(storage, _NAME)
    if document is None:
        return None
    try:
        tables = {TableName(*item["name"]): CutTable(item["path"], item["version"]) for item in document["tables"]}
        return Cut(Lsn.parse(document["lsn"]), Lsn.parse(document["landed"]), tables)
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"{storage.what(_NAME)} is damaged", hint="remove it: the applier publishes it again") from None


def write_cut(storage: Storage, cut: Cut) -> None:
    """Publish a cut.

    Raises:
        TargetError: it cannot be written; the one before it stays published.
    """
    tables = [{"name": [name.namespace, name.name], "path": table.path, "version": table.version} for name, table in cut.tables.items()]
    write_document(storage, _NAME, {"lsn": str(cut.lsn), "landed": str(cut.landed), "tables": tables})
