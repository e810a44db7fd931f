"""One writer per lake: an advisory lock on a file of the lake. A process holds it. It is released when the process ends.

An object store has no such lock. There the replication slot keeps two subscribers apart: only one walsender can serve it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Final

from subscriber.errors import SubscriptionInUse
from subscriber.sinks.flock import is_locked, lock_file
from subscriber.sinks.spark.files.file_errors import os_errors

__all__ = ["FileLock", "is_held"]

_POLL_SECONDS: Final = 0.05
_LOOKERS: Final = 5
_LOOKER_SECONDS: Final = 0.004
"""A process that checks whether a lock is held takes the lock for an instant."""


class FileLock:
    """A lock that this object may take several times. It is free after as many releases. Without a path, nothing is locked."""

    def __init__(self, path: Path | None, refusal: str, hint: str) -> None:
        self._path = path
        self._refusal = refusal
        self._hint = hint
        self._descriptor: int | None = None
        self._holders = 0

    @property
    def is_mine(self) -> bool:
        """Whether this object holds the lock."""
        return self._holders > 0

    def take(self) -> None:
        """Take the lock, possibly again. If another process holds it, raise SubscriptionInUse."""
        if self._holders == 0 and self._path is not None:
            with os_errors(str(self._path)):
                self._descriptor = _locked(self._path)
            if self._descriptor is None:
                raise SubscriptionInUse(self._refusal, hint=self._hint)
        self._holders += 1

    async def wait(self, seconds: float) -> None:
        """Take the lock. If another process still holds it after this time, raise SubscriptionInUse."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.take()
            except SubscriptionInUse:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    def give_back(self) -> None:
        """Release the lock once."""
        self._holders -= 1
        if self._holders == 0 and self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None


def _locked(path: Path) -> int | None:
    for _ in range(_LOOKERS - 1):
        if (descriptor := lock_file(path)) is not None:
            return descriptor
        time.sleep(_LOOKER_SECONDS)
    return lock_file(path)


def is_held(path: Path | None) -> bool:
    """Whether a process holds the lock of this file. Does not create the file."""
    return path is not None and is_locked(path)
