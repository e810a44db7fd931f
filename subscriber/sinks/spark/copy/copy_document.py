"""The document ``copy.json`` of a table's copy. It lists the copied files and makes them valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import COPY_DOCUMENT
from subscriber.sinks.spark.files.documents import parse_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import LandedFile
from subscriber.sinks.spark.schema.table_schema import TableSchema

__all__ = ["TableCopy", "read_copy", "write_copy"]


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A table's copy: its LSN, its schema, and its files.

    Attributes:
        started: when it was begun, in seconds since 1970. None: it was made by an earlier version.
    """

    lsn: Lsn
    schema: TableSchema
    files: tuple[LandedFile, ...]
    started: float | None = None


def write_copy(storage: Storage, directory: str, copy: TableCopy) -> None:
    """Store the document of a table's copy. Durable on return, with the files in its directory."""
    document = {
        "lsn": str(copy.lsn),
        "schema": copy.schema.to_json(),
        "files": [file.to_json() for file in copy.files],
        "started": copy.started,
    }
    storage.sync([directory])
    write_document(storage, f"{directory}/{COPY_DOCUMENT}", document)


def read_copy(storage: Storage, directory: str) -> TableCopy | None:
    """Read the document of a table's copy. None if there is none.

    Raises:
        TargetError: it is damaged.
    """
    return parse_document(storage, f"{directory}/{COPY_DOCUMENT}", _parsed)


def _parsed(document: dict[str, Any]) -> TableCopy:
    files = tuple(LandedFile.from_json(data) for data in document["files"])
    return TableCopy(Lsn.parse(document["lsn"]), TableSchema.from_json(document["schema"]), files, document.get("started"))
