"""Requests of other processes to the one that runs a subscription, in a directory: for targets whose catalog has no rows.

This is a :class:`subscriber.catalog.snapshot_requests.Requests`. ``snapshot_request.json`` is written by the verb, and
``snapshot_answer.json`` by the process. Each has one writer, so no lock is needed to change a state. Neither is durable: a request does not
outlive the verb. One that a crash of the machine has damaged is ignored. Locks of files show whether the two processes still run.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from subscriber.catalog.snapshot_requests import RequestState, SnapshotRequest
from subscriber.errors import SubscriptionInUse, TargetUnavailable
from subscriber.interfaces import TableEntry, TableName
from subscriber.sinks.flock import is_locked, lock_file
from subscriber.threads import run_in_thread

__all__ = ["RequestFiles"]

_REQUEST: Final = "snapshot_request.json"
_ANSWER: Final = "snapshot_answer.json"
_LOCK: Final = ".snapshot_request.lock"
_WRITER: Final = ".writer.lock"
_LOCK_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05


class RequestFiles:
    """See the module.

    Args:
        directory: of the files.
        writer: the file that the process locks. None: it calls :meth:`serve`.
        entries: reads the states of the subscription's tables.
        prefix: of the names of the files, if several subscriptions use the directory.
    """

    def __init__(
        self,
        directory: Path,
        *,
        entries: Callable[[], Awaitable[Mapping[TableName, TableEntry]]],
        writer: Path | None = None,
        prefix: str = "",
    ) -> None:
        self._request, self._answer, self._lock = (directory / f"{prefix}{name}" for name in (_REQUEST, _ANSWER, _LOCK))
        self._writer = writer or directory / f"{prefix}{_WRITER}"
        self._entries = entries
        self._descriptor: int | None = None
        self._serving: int | None = None

    def serve(self) -> None:
        """Show that this process runs the subscription. Another lock keeps others from running it.

        Raises:
            TargetUnavailable: another process still shows this.
        """
        with _errors(self._writer):
            self._serving = lock_file(self._writer)
        if self._serving is None:
            raise TargetUnavailable(f"{self._writer} is locked", hint="another process looks at it, or has not ended yet")

    def end(self) -> None:
        """End what :meth:`serve` has begun. Idempotent."""
        if self._serving is not None:
            os.close(self._serving)
            self._serving = None

    async def read(self) -> SnapshotRequest | None:
        return await run_in_thread(self._read)

    def _read(self) -> SnapshotRequest | None:
        request, answer = _document(self._request), _document(self._answer)
        if not request:
            return None
        number, state, said = request["request"], RequestState.REQUESTED, {}
        if answer and answer["request"] == number:
            state, said = RequestState(answer["state"]), answer["answer"]
        return SnapshotRequest(number, RequestState.DONE if request["done"] else state, request["payload"], said)

    async def put(self, number: str, payload: Mapping[str, Any]) -> None:
        """Write a request, in place of one that an earlier verb has left."""
        await _write(self._request, {"request": number, "payload": dict(payload), "done": False})

    async def change(self, number: str, *, only_from: RequestState, to: RequestState, answer: Mapping[str, Any] | None = None) -> bool:
        """Change the state of a request. False: it is not in the state ``only_from``."""
        found = await self.read()
        if found is None or found.number != number or found.state is not only_from:
            return False
        if to is RequestState.DONE and answer is None:
            # said by the verb
            await _write(self._request, {"request": number, "payload": dict(found.payload), "done": True})
        else:
            said = found.answer if answer is None else answer
            await _write(self._answer, {"request": number, "state": to.value, "answer": dict(said)})
        return True

    async def remove(self, number: str) -> None:
        found = await self.read()
        if found is not None and found.number == number:
            with _errors(self._request):
                self._request.unlink(missing_ok=True)

    async def take_lock(self) -> None:
        """Take the lock of the verb.

        Raises:
            SubscriptionInUse: another process still has it after ten seconds.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        while self._descriptor is None:
            with _errors(self._lock):
                self._descriptor = lock_file(self._lock)
            if self._descriptor is None and time.monotonic() >= deadline:
                raise SubscriptionInUse("the subscription is being verified by another process", hint="wait until it has ended")
            if self._descriptor is None:
                await asyncio.sleep(_POLL_SECONDS)

    async def release_lock(self) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None

    async def has_verb(self) -> bool:
        return is_locked(self._lock)

    async def has_worker(self) -> bool:
        return is_locked(self._writer)

    async def entries(self) -> Mapping[TableName, TableEntry]:
        return await self._entries()


def _document(path: Path) -> dict[str, Any]:
    """Read a document. The result is empty if it is missing or damaged."""
    with _errors(path):
        try:
            found = json.loads(path.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
    return found if isinstance(found, dict) else {}


async def _write(path: Path, document: Mapping[str, Any]) -> None:
    def write() -> None:
        new = path.with_name(f"{path.name}.new")
        with _errors(path):
            new.write_text(json.dumps(document))
            new.replace(path)

    await run_in_thread(write)


@contextlib.contextmanager
def _errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TargetUnavailable(f"cannot read or write {path}: {error.strerror}", hint="check the disk and the permissions") from error
