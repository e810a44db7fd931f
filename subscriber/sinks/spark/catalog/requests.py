"""Requests of other processes to the one that runs a lake's subscription, and the batch at which the applier ends a round for them.

``boundary.json`` has the end of a landed batch. A round of the applier that reaches it ends there, so that a snapshot with exactly these
batches is published. It is written while nothing is landed. So an applier that knows a later batch also finds the boundary, if it reads
that after the batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from subscriber.interfaces import TableEntry, TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.request_files import RequestFiles
from subscriber.sinks.spark.catalog.lake import WRITER_LOCK, Lake
from subscriber.sinks.spark.catalog.status_files import read_quietly
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.threads import run_in_thread

__all__ = ["lake_requests", "read_boundary", "write_boundary"]

_BOUNDARY: Final = "boundary.json"


def lake_requests(storage: Storage) -> RequestFiles:
    """The requests to a lake in a directory. Other storage has no locks, which show whether a process still runs."""
    root, writer = storage.root, storage.local(WRITER_LOCK)
    assert root is not None
    assert writer is not None

    async def entries() -> Mapping[TableName, TableEntry]:
        lake = await run_in_thread(lambda: Lake.find(storage))
        return {name: table.entry for name, table in lake.state.tables.items()} if lake is not None else {}

    return RequestFiles(root, writer=writer, entries=entries)


def write_boundary(storage: Storage, landed: Lsn) -> None:
    """Let a round of the applier end with the batch that ends at an LSN. Call it while nothing is landed."""
    write_document(storage, _BOUNDARY, {"landed": str(landed)}, durable=False)


def read_boundary(storage: Storage) -> Lsn:
    """The end of the batch that a round must end with. Read the batches before."""
    # an object store has no verbs
    found = read_quietly(storage, _BOUNDARY) if storage.root is not None else {}
    return Lsn.parse(found["landed"]) if found else INVALID_LSN
