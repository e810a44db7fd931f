"""The locks of an SQLite database: files beside it, with ``flock``."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from subscriber.errors import TargetError
from subscriber.sinks.flock import is_locked, lock_file

__all__ = ["FileLocks"]


class FileLocks:
    """The locks of one owner in one directory.

    Args:
        directory: created with the first lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine: dict[str, int] = {}

    async def try_take(self, key: str) -> bool:
        """Take a lock. Return whether this owner has it now, also from an earlier call.

        Raises:
            TargetError: its file cannot be created.
        """
        if key in self._mine:
            return True
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = lock_file(self._directory / key)
        except OSError as error:
            raise TargetError(
                f'the lock file "{self._directory / key}" cannot be created: {error.strerror}',
                hint="check the permissions of the directory",
            ) from error
        if descriptor is None:
            return False
        # the error message of another process shows this id
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        self._mine[key] = descriptor
        return True

    async def release(self, key: str) -> None:
        descriptor = self._mine.pop(key, None)
        if descriptor is not None:
            os.close(descriptor)

    async def held(self, key: str) -> bool:
        """Whether any process holds a lock. Creates no file."""
        return key in self._mine or is_locked(self._directory / key)

    async def holder(self, key: str) -> str | None:
        """Return the process id that the holder wrote to the file."""
        try:
            return (self._directory / key).read_text("ascii", "replace").strip() or None
        except OSError:
            return None

    async def end(self, number: int) -> None:
        """Do nothing: a file's lock ends with its process."""

    async def close(self) -> None:
        for key in tuple(self._mine):
            await self.release(key)
