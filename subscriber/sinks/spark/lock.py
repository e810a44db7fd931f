"""One writer a lake: an advisory lock on a file in it, held by the process and gone with it.

An object store has no such lock. There the replication slot is what keeps two subscribers apart: only one walsender can serve it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from subscriber.errors import SubscriptionInUse
from subscriber.sinks.spark.failures import translated

__all__ = ["FileLock"]


class FileLock:
    """A lock that may be taken several times by this object, and is free when it was given back as often.

    Args:
        path: of the file; None: nothing is locked.
        refusal: what to say if somebody else has it.
        hint: the remedy.
    """

    def __init__(self, path: Path | None, refusal: str, hint: str) -> None:
        self._path = path
        self._refusal = refusal
        self._hint = hint
        self._descriptor: int | None = None
        self._holders = 0

    def take(self) -> None:
        """Take it, or once more.

        Raises:
            SubscriptionInUse: another process has it.
            TargetError: the file cannot be made.
        """
        if self._holders == 0 and self._path is not None:
            with translated(str(self._path)):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(descriptor)
                raise SubscriptionInUse(self._refusal, hint=self._hint) from None
            self._descriptor = descriptor
        self._holders += 1

    def give_back(self) -> None:
        """Give it back once."""
        self._holders -= 1
        if self._holders == 0 and self._descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = None
