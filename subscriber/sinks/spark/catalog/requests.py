"""Requests of other processes to the one that runs a lake's subscription: :class:`subscriber.catalog.snapshot_requests.Requests`.

``snapshot_request.json`` is written by the verb, and ``snapshot_answer.json`` by the process. Each has one writer, so no lock is needed to
change a state. Neither is durable: a request does not outlive the verb. One that a crash of the machine has damaged is ignored.

``boundary.json`` has the end of a landed batch. A round of the applier that reaches it ends there, so that a snapshot with exactly these
batches is published. It is written while nothing is landed. So an applier that knows a later batch also finds the boundary, if it reads
that after the batches.

Only a lake in a directory has the locks that show whether the verb still runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from subscriber.abc import TableEntry, TableName
from subscriber.catalog.snapshot_requests import RequestState, SnapshotRequest
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.status_files import read_quietly
from subscriber.sinks.spark.catalog.subscriptions import locks
from subscriber.sinks.spark.files.documents import write_document
from subscriber.sinks.spark.files.file_lock import FileLock, is_held
from subscriber.sinks.spark.files.storage import Storage
from subscriber.threads import run_in_thread

__all__ = ["LakeRequests", "read_boundary", "write_boundary"]

_REQUEST: Final = "snapshot_request.json"
_ANSWER: Final = "snapshot_answer.json"
_BOUNDARY: Final = "boundary.json"
_LOCK: Final = ".snapshot_request.lock"
_LOCK_SECONDS: Final = 10.0


class LakeRequests:
    """See the module. Only for a lake in a directory."""

    def __init__(self, storage: Storage) -> None:
        assert storage.root is not None
        self._storage = storage
        self._path = storage.root / _LOCK
        self._lock = FileLock(self._path, "the subscription of the lake is being verified by another process", "wait until it has ended")

    async def read(self) -> SnapshotRequest | None:
        return await run_in_thread(self._read)

    def _read(self) -> SnapshotRequest | None:
        request, answer = read_quietly(self._storage, _REQUEST), read_quietly(self._storage, _ANSWER)
        if not request:
            return None
        number, state, said = request["request"], RequestState.REQUESTED, {}
        if answer and answer["request"] == number:
            state, said = RequestState(answer["state"]), answer["answer"]
        return SnapshotRequest(number, RequestState.DONE if request["done"] else state, request["payload"], said)

    async def put(self, number: str, payload: Mapping[str, Any]) -> None:
        """Write a request, in place of one that an earlier verb has left."""
        await self._write(_REQUEST, {"request": number, "payload": dict(payload), "done": False})

    async def change(self, number: str, *, only_from: RequestState, to: RequestState, answer: Mapping[str, Any] | None = None) -> bool:
        """Change the state of a request. False: it is not in the state ``only_from``."""
        found = await self.read()
        if found is None or found.number != number or found.state is not only_from:
            return False
        if to is RequestState.DONE:
            await self._write(_REQUEST, {"request": number, "payload": dict(found.payload), "done": True})
        else:
            said = found.answer if answer is None else answer
            await self._write(_ANSWER, {"request": number, "state": to.value, "answer": dict(said)})
        return True

    async def remove(self, number: str) -> None:
        found = await self.read()
        if found is not None and found.number == number:
            await run_in_thread(lambda: self._storage.delete([_REQUEST]))

    async def take_lock(self) -> None:
        """Take the lock of the verb.

        Raises:
            SubscriptionInUse: another process still has it after ten seconds.
        """
        await self._lock.wait(_LOCK_SECONDS)

    async def release_lock(self) -> None:
        self._lock.give_back()

    async def has_verb(self) -> bool:
        return is_held(self._path)

    async def has_worker(self) -> bool:
        return is_held(locks(self._storage)[0])

    async def entries(self) -> Mapping[TableName, TableEntry]:
        lake = await run_in_thread(lambda: Lake.find(self._storage))
        return {name: table.entry for name, table in lake.state.tables.items()} if lake is not None else {}

    async def _write(self, name: str, document: Mapping[str, Any]) -> None:
        await run_in_thread(lambda: write_document(self._storage, name, document, durable=False))


def write_boundary(storage: Storage, landed: Lsn) -> None:
    """Let a round of the applier end with the batch that ends at an LSN. Call it while nothing is landed."""
    write_document(storage, _BOUNDARY, {"landed": str(landed)}, durable=False)


def read_boundary(storage: Storage) -> Lsn:
    """The end of the batch that a round must end with. Read the batches before."""
    # an object store has no verbs
    found = read_quietly(storage, _BOUNDARY) if storage.root is not None else {}
    return Lsn.parse(found["landed"]) if found else INVALID_LSN
