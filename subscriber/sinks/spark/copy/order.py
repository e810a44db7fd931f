"""An initial copy by executors: the subscriber's order, and the results of the applier's tasks. The programs communicate only by the lake.

Files in the directory of a table's copy:

====================  ===================================================================================================
``order.json``        by the subscriber: snapshot, address of the publisher, and the parts of the table: names, numbers and
                      ranges. A task makes the SQL. Written once, while the snapshot is open
``done-<n>.json``     by a task: part ``n`` is stored, in these base files of the Delta table. A finished part stays
                      finished while the snapshot exists, even if processes are killed
``failure.json``      by the applier: the last reason why parts could not be read; removed once they could
``copy.json``         by the subscriber: all parts are done. This makes the copy valid (``spark_table_sink.py``)
====================  ===================================================================================================

Base files are in the Delta table's directory. No commit names them until the applier adds all of them in one commit. Their names have
the table's number and the copy's generation, and are unique: a task that is repeated, or too late, does no harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from subscriber.errors import TargetError
from subscriber.interfaces.copy_parts import CopyPart
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.copy.select_list import select_list
from subscriber.sinks.spark.files.documents import parse_document, read_document, write_document
from subscriber.sinks.spark.files.location import inside
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile, file_from_json, file_to_json

__all__ = ["CopyFailure", "CopyOrder", "base_file_name", "remove_base_files"]

_ORDER: Final = "order.json"
_FAILURE: Final = "failure.json"
_COPIED_AGAIN: Final = "stop the subscriber and start it again: the table is copied again"
_DONE: Final = re.compile(r"done-(\d{6})\.json")
_BASE: Final = re.compile(r"(?:\.tmp-[0-9a-f]{32}-)?copy-(\d+)-(\d+)-[0-9a-f]{32}\.parquet")


@dataclass(frozen=True, slots=True)
class CopyFailure:
    """Why a copy failed. ``gone``: the snapshot is lost or no longer valid, so a retry cannot succeed."""

    text: str
    gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """The order of a copy, see the module.

    Attributes:
        directory: of the copy, relative to the lake.
        base: directory of the Delta table, relative to the lake.
        table_id, generation: of the table, and of its copy.
        snapshot_name, connection: see :class:`subscriber.interfaces.SnapshotOrder`.
        parts: see :class:`subscriber.interfaces.SnapshotOrder`.
        columns, column_types: of the published table, in the order of ``schema``.
        schema: of the table.
        lsn: the snapshot's consistent point.
        workers: how many parts are read at once, at most.
    """

    directory: str
    base: str
    table_id: int
    generation: int
    snapshot_name: str
    connection: str
    parts: tuple[CopyPart, ...]
    columns: tuple[str, ...]
    column_types: tuple[int, ...]
    schema: TableSchema
    lsn: Lsn
    workers: int

    def place(self, storage: Storage) -> None:
        """Write the order."""
        document = {
            "base": self.base,
            "id": self.table_id,
            "generation": self.generation,
            "snapshot": self.snapshot_name,
            "connection": self.connection,
            "parts": [part.to_json() for part in self.parts],
            "columns": list(self.columns),
            "types": list(self.column_types),
            "schema": self.schema.to_json(),
            "lsn": str(self.lsn),
            "workers": self.workers,
        }
        write_document(storage, f"{self.directory}/{_ORDER}", document)

    @classmethod
    def find(cls, storage: Storage, directory: str) -> CopyOrder | None:
        """Find the order in a copy's directory. None if there is none.

        Raises:
            TargetError: it is damaged.
        """
        return parse_document(storage, f"{directory}/{_ORDER}", lambda document: cls._parsed(directory, document), _COPIED_AGAIN)

    @classmethod
    def _parsed(cls, directory: str, document: dict[str, Any]) -> CopyOrder:
        return cls(
            directory=directory,
            base=inside(document["base"]),
            table_id=_whole(document["id"]),
            generation=_whole(document["generation"]),
            snapshot_name=_text(document["snapshot"]),
            connection=_text(document["connection"]),
            parts=tuple(map(CopyPart.from_json, document["parts"])),
            columns=tuple(map(_text, document["columns"])),
            column_types=tuple(map(_whole, document["types"])),
            schema=TableSchema.from_json(document["schema"]),
            lsn=Lsn.parse(document["lsn"]),
            workers=_whole(document["workers"]),
        )

    def query(self, number: int) -> str:
        """The SELECT of a part. The columns are those of ``schema``."""
        return f"SELECT {select_list(self.columns, self.column_types, self.schema)} {self.parts[number].source()}"

    # --- finished parts

    def mark(self, storage: Storage, number: int, files: Iterable[DataFile]) -> None:
        """Mark a part as stored. On return the mark and its files are durable.

        Raises:
            TargetError: it cannot be written, or the copy was given up.
        """
        storage.sync([self.base])
        write_document(storage, f"{self.directory}/done-{number:06d}.json", {"files": [file_to_json(file) for file in files]})

    def numbers_done(self, storage: Storage) -> set[int]:
        """The numbers of the stored parts."""
        return {int(match[1]) for file in storage.files(self.directory) if (match := _DONE.fullmatch(file.name))}

    def done(self, storage: Storage, number: int) -> tuple[DataFile, ...]:
        """The files of a stored part. Their ranges of keys are in the files.

        Raises:
            TargetError: its document is damaged or missing.
        """
        name = f"{self.directory}/done-{number:06d}.json"
        found = parse_document(storage, name, lambda document: tuple(map(file_from_json, document["files"])), _COPIED_AGAIN)
        if found is None:
            raise TargetError(f"{storage.what(name)} is missing", hint=_COPIED_AGAIN)
        return found

    # --- failures

    def report(self, storage: Storage, failure: CopyFailure | None) -> None:
        """Tell the subscriber why the copy failed. None: it continues.

        Raises:
            TargetError: it cannot be written, or the copy was given up.
        """
        if failure is None:
            storage.delete([f"{self.directory}/{_FAILURE}"])
            return
        write_document(storage, f"{self.directory}/{_FAILURE}", {"text": failure.text, "gone": failure.gone}, durable=False)

    def failure(self, storage: Storage) -> CopyFailure | None:
        """The last failure that :meth:`report` stored."""
        document = read_document(storage, f"{self.directory}/{_FAILURE}")
        return None if document is None else CopyFailure(str(document.get("text")), bool(document.get("gone")))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value


def base_file_name(table_id: int, generation: int) -> str:
    """A new name for a base file of a copy."""
    return f"copy-{table_id}-{generation}-{uuid4().hex}.parquet"


def remove_base_files(storage: Storage, base: str, table_id: int, generations: range) -> None:
    """Remove base files of copies of a table that were never finished: of these generations."""
    found = [(file.name, _BASE.fullmatch(file.name)) for file in storage.files(base)]
    storage.delete(f"{base}/{name}" for name, match in found if match and int(match[1]) == table_id and int(match[2]) in generations)
