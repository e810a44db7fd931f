"""Locks as ``flock`` on small files beside a database file. The kernel gives them back when their process ends, however it ends.

The files stay: to remove one while another process opens it would leave two locks of one name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from subscriber.errors import TargetError

__all__ = ["FileLocks"]


class FileLocks:
    """Locks of one owner in one directory.

    Args:
        directory: made with the first lock.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mine: dict[str, int] = {}

    async def try_take(self, key: str) -> bool:
        """Take one if it is free or ours already.

        Raises:
            TargetError: its file cannot be made.
        """
        if key in self._mine:
            return True
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(self._directory / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TargetError(
                f'the lock file "{self._directory / key}" cannot be made: {error.strerror}', hint="look at the directory's rights"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        # for whoever is told that it is held
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        self._mine[key] = descriptor
        return True

    async def release(self, key: str) -> None:
        """Give one back if it is ours."""
        descriptor = self._mine.pop(key, None)
        if descriptor is not None:
            os.close(descriptor)

    async def held(self, key: str) -> bool:
        """Whether anybody holds it. Makes no file."""
        if key in self._mine:
            return True
        try:
            descriptor = os.open(self._directory / key, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            # shared: two that look do not see one another
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    async def holder(self, key: str) -> str | None:
        """What the holder wrote of itself: its process id."""
        try:
            return (self._directory / key).read_text("ascii", "replace").strip() or None
        except OSError:
            return None

    async def end(self, number: int) -> None:
        """Nothing: a file's lock goes with its process."""

    async def close(self) -> None:
        """Give all back."""
        for key in tuple(self._mine):
            await self.release(key)
