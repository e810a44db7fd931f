"""An initial copy by executors: what the subscriber orders, and what the applier's tasks leave. The two programs meet in the lake only.

In the directory of a table's copy:

====================  ===================================================================================================
``order.json``        the subscriber's: snapshot, address of the publisher, and the parts of the table as queries. Written
                      once, while the snapshot is open; of no use any more when it is gone
``done-<n>.json``     a task's: part ``n`` is stored, in these base files of the Delta table. Whatever is killed, a part
                      that is done stays done as long as the snapshot lives
``failure.json``      the applier's: why parts could not be read, last; removed once they could
``copy.json``         the subscriber's: all parts are done. From here on the copy counts (``table_sync.py``)
====================  ===================================================================================================

Base files lie in the Delta table's own directory, where no commit names them until the applier registers them all in one. Their names have
the table's number and the copy's generation, and are never the same twice: a task that comes again, or too late, spoils nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile, file_from_json, file_to_json

__all__ = ["CopyFailure", "CopyOrder", "DonePart", "base_file_name", "remove_base_files"]

_ORDER: Final = "order.json"
_FAILURE: Final = "failure.json"
_DONE: Final = re.compile(r"done-(\d{6})\.json")
_BASE: Final = re.compile(r"(?:\.tmp-[0-9a-f]{32}-)?copy-(\d+)-(\d+)-[0-9a-f]{32}\.parquet")


@dataclass(frozen=True, slots=True)
class DonePart:
    """A part of a table that is stored.

    Attributes:
        number: of the part.
        files: of the Delta table; their ranges of keys are told by themselves.
    """

    number: int
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        """The count of its rows."""
        return sum(file.rows for file in self.files)


@dataclass(frozen=True, slots=True)
class CopyFailure:
    """Why a copy failed. ``gone``: the snapshot is lost or of no use, and a retry is of no use."""

    text: str
    gone: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOrder:
    """See the module.

    Attributes:
        directory: of the copy, relative to the lake.
        base: of the Delta table, likewise.
        table_id, generation: of the table, and of its copy.
        snapshot_name, connection, setup: see :class:`subscriber.abc.SnapshotOrder`.
        queries: a part's rows each; the columns are those of ``schema``.
        checks: of each query; see :class:`subscriber.abc.SnapshotOrder`.
        schema: the table's.
        lsn: the snapshot's consistent point.
        workers: how many parts are read at once at most.
    """

    directory: str
    base: str
    table_id: int
    generation: int
    snapshot_name: str
    connection: str
    setup: tuple[str, ...]
    queries: tuple[str, ...]
    checks: tuple[str, ...]
    schema: TableSchema
    lsn: Lsn
    workers: int

    def place(self, storage: Storage) -> None:
        """Write the order.

        Raises:
            TargetError: it cannot be written.
        """
        document = {
            "base": self.base,
            "id": self.table_id,
            "generation": self.generation,
            "snapshot": self.snapshot_name,
            "connection": self.connection,
            "setup": list(self.setup),
            "queries": list(self.queries),
            "checks": list(self.checks),
            "schema": self.schema.to_json(),
            "lsn": str(self.lsn),
            "workers": self.workers,
        }
        write_document(storage, f"{self.directory}/{_ORDER}", document)

    @classmethod
    def find(cls, storage: Storage, directory: str) -> CopyOrder | None:
        """The order in a copy's directory; None if there is none.

        Raises:
            TargetError: it is damaged.
        """
        document = read_document(storage, f"{directory}/{_ORDER}")
        if document is None:
            return None
        try:
            return cls(
                directory=directory,
                base=document["base"],
                table_id=document["id"],
                generation=document["generation"],
                snapshot_name=document["snapshot"],
                connection=document["connection"],
                setup=tuple(document["setup"]),
                queries=tuple(document["queries"]),
                checks=tuple(document["checks"]),
                schema=TableSchema.from_json(document["schema"]),
                lsn=Lsn.parse(document["lsn"]),
                workers=document["workers"],
            )
        except (ValueError, KeyError, TypeError):
            raise _damaged(storage, f"{directory}/{_ORDER}") from None

    # --- what is done

    def mark(self, storage: Storage, number: int, files: Iterable[DataFile]) -> None:
        """Mark a part as stored; durable on return, including its files.

        Raises:
            TargetError: it cannot be written, or the copy was given up.
        """
        storage.sync([self.base])
        write_document(storage, f"{self.directory}/done-{number:06d}.json", {"files": [file_to_json(file) for file in files]})

    def numbers_done(self, storage: Storage) -> set[int]:
        """The numbers of the parts that are stored."""
        return {int(match[1]) for file in storage.files(self.directory) if (match := _DONE.fullmatch(file.name))}

    def done(self, storage: Storage, number: int) -> DonePart:
        """A part that is stored.

        Raises:
            TargetError: what it left behind is damaged, or gone.
        """
        name = f"{self.directory}/done-{number:06d}.json"
        document = read_document(storage, name)
        try:
            assert document is not None
            return DonePart(number, tuple(file_from_json(data) for data in document["files"]))
        except (AssertionError, ValueError, KeyError, TypeError):
            raise _damaged(storage, name) from None

    # --- what is not

    def report(self, storage: Storage, failure: CopyFailure | None) -> None:
        """Tell the subscriber why the copy failed; None: it continues.

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


def base_file_name(table_id: int, generation: int) -> str:
    """A new name for a base file of a copy."""
    return f"copy-{table_id}-{generation}-{uuid4().hex}.parquet"


def remove_base_files(storage: Storage, base: str, table_id: int, generations: range) -> None:
    """Remove base files of copies of a table that were never finished.

    Args:
        storage: the lake's.
        base: the table's directory.
        table_id: the lake's number of the table.
        generations: of these copies.

    Raises:
        TargetError: they cannot be removed.
    """
    found = [(file.name, _BASE.fullmatch(file.name)) for file in storage.files(base)]
    storage.delete(f"{base}/{name}" for name, match in found if match and int(match[1]) == table_id and int(match[2]) in generations)


def _damaged(storage: Storage, name: str) -> TargetError:
    return TargetError(f"{storage.what(name)} is damaged", hint="stop the subscriber and start it again: the table is copied again")
