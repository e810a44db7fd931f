"""Prepared transactions: their rows are durable in a separate directory until COMMIT PREPARED moves them into the landing zone.

Each has a directory ``prepared/<xid>-<digest of its gid>``. Its ``prepared.json`` is written last, and makes it valid. After a crash, when
the publisher sends a message again, this is known:

=======================  ==========================  ============================================
 the document             the commit's end LSN        meaning
=======================  ==========================  ============================================
 exists                   after the landing zone      COMMIT PREPARED is still to be done
 exists                   not after it                it is done; the directory is a leftover
 does not exist           not after it                it is done
 does not exist           after it                    PREPARE is to be done; or data was lost
=======================  ==========================  ============================================

``position.json`` has the names of these directories (``Lake.received``). A name is added when the position moves past PREPARE, and is
removed before the directory. At COMMIT PREPARED, it tells a transaction that was lost from one that was never received: before 18, a
publisher sends no PREPARE of a transaction without changes.

The LSN of a PREPARE decides nothing, because a PREPARE from before the slot's two-phase start is sent late. With ``confirm=applied``,
landed transactions are sent again. Then a finished transaction is kept, marked as finished, until the position is after its end. Otherwise
it would be prepared again, and stay prepared if its end is not sent again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Final

import pyarrow as pa

from subscriber import crash_points
from subscriber.protocol.lsn import Lsn, kept_in_years
from subscriber.protocol.messages import CommitPrepared
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.file_errors import arrow_errors
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import EPOCH_MICROSECONDS, LandedFile
from subscriber.sinks.spark.landing.zone import OpenBatch, write_file
from subscriber.sinks.spark.schema.table_schema import META
from subscriber.transaction.model import Transaction

__all__ = ["PreparedTransactions"]

_DIRECTORY: Final = "prepared"
_DOCUMENT: Final = "prepared.json"


class PreparedTransactions:
    """The prepared transactions of a lake. All methods block."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    def directory(self, xid: int, gid: str) -> str:
        return f"{_DIRECTORY}/{xid}-{hashlib.sha256(gid.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"

    def is_there(self, xid: int, gid: str) -> bool:
        """Whether the transaction is prepared. If so, make it durable, because it may have been renamed just before a crash."""
        directory = self.directory(xid, gid)
        if read_document(self._storage, f"{directory}/{_DOCUMENT}") is None:
            return False
        self._storage.sync([directory, _DIRECTORY, ""])
        return True

    def xids(self) -> frozenset[int]:
        """The publisher's transaction IDs of all prepared transactions."""
        return frozenset(int(document["xid"]) for document in self._documents() if not document.get("over"))

    def gids(self) -> list[str]:
        """The publisher's identifiers of all prepared transactions, in the order of their PREPARE."""
        waiting = [document for document in self._documents() if not document.get("over")]
        return [str(document["gid"]) for document in sorted(waiting, key=lambda document: Lsn.parse(document["end"]))]

    def _documents(self) -> list[dict[str, Any]]:
        directories = [f"{_DIRECTORY}/{name}" for name in self._storage.entries(_DIRECTORY)]
        found = [read_document(self._storage, f"{directory}/{_DOCUMENT}") for directory in directories]
        return [document for document in found if document is not None]

    def begin(self, xid: int, gid: str) -> OpenBatch:
        """Begin to prepare a transaction. The remains of an earlier attempt are removed."""
        directory = self.directory(xid, gid)
        self._storage.remove_directory(directory)
        self._storage.make_directory(directory)
        return OpenBatch(self._storage, directory)

    def prepare(self, batch: OpenBatch, transaction: Transaction, gid: str) -> None:
        """Make the prepared transaction durable."""
        directory = self.directory(transaction.xid, gid)
        files = batch.finish("prepared")
        self._storage.sync([directory])
        crash_points.reached("landing.prepared_files_written")
        document = {"xid": transaction.xid, "gid": gid, "end": str(transaction.end_lsn), "files": [file.to_json() for file in files]}
        write_document(self._storage, f"{directory}/{_DOCUMENT}", document)
        crash_points.reached("landing.prepared")

    def commit(self, message: CommitPrepared, directory: str) -> list[LandedFile] | None:
        """Write its rows into the landing zone's directory, as of the commit. They count with the manifest, which the caller writes.

        Returns:
            The files. None if the transaction is not prepared.
        """
        source = self.directory(message.xid, message.gid)
        document = read_document(self._storage, f"{source}/{_DOCUMENT}")
        if document is None:
            return None
        found: list[LandedFile] = []
        for number, data in enumerate(document["files"]):
            file = LandedFile.from_json(data)
            path = f"{directory}/{int(message.end_lsn):020d}-{file.table_id}-{number}.parquet"
            size = self._rewrite(file, path, message.end_lsn, kept_in_years(message.commit_time) + EPOCH_MICROSECONDS)
            found.append(LandedFile(table_id=file.table_id, path=path, rows=file.rows, size=size, schema=file.schema))
        write_document(self._storage, f"{source}/{_DOCUMENT}", {**document, "ended": str(message.end_lsn)})
        return found

    def recover(self, landed: Lsn, position: Lsn, forget_name: Callable[[str], None]) -> None:
        """After a crash: remove transactions that have ended and whose end is not sent again, because it is up to the position.

        Those that end up to ``landed`` are landed, but sent again.
        """
        for document in self._documents():
            xid, gid, ended = int(document["xid"]), str(document["gid"]), Lsn.parse(document.get("ended", "0/0"))
            if ended and ended <= position:
                self.forget(xid, gid, forget_name)
            elif ended and ended <= landed:
                self.end(xid, gid, ended)

    def end(self, xid: int, gid: str, lsn: Lsn) -> bool:
        """Mark it as ended: its end is landed, but will be sent again. Return whether it exists."""
        name = f"{self.directory(xid, gid)}/{_DOCUMENT}"
        document = read_document(self._storage, name)
        if document is None:
            return False
        if not document.get("over"):
            write_document(self._storage, name, {**document, "ended": str(lsn), "over": True})
        return True

    def _rewrite(self, file: LandedFile, path: str, end: Lsn, commit_time: int) -> int:
        stamps = {name: pa.scalar(value, META.field(name).type) for name, value in (("_lsn", int(end)), ("_ts", commit_time))}

        def stamped(batch: pa.RecordBatch) -> pa.RecordBatch:
            columns = zip(batch.schema.names, batch.columns, strict=True)
            arrays = [pa.repeat(stamps[name], batch.num_rows) if name in stamps else column for name, column in columns]
            return pa.RecordBatch.from_arrays(arrays, schema=file.schema.landing)

        with arrow_errors(self._storage.what(file.path)), self._storage.parquet(file.path) as source:
            return write_file(self._storage, path, file.schema.landing, map(stamped, source.iter_batches()))

    def forget(self, xid: int, gid: str, forget_name: Callable[[str], None]) -> None:
        """Remove it. No error if it does not exist. ``forget_name`` removes the name of its directory from the position first."""
        directory = self.directory(xid, gid)
        forget_name(directory)
        crash_points.reached("landing.prepare_forgotten")
        self._storage.remove_directory(directory)
