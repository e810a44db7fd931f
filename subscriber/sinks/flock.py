"""Locks by ``flock`` on small files. The kernel releases them when their process ends, even if it is killed.

The files are never deleted. If one were deleted while another process opens it, two processes could hold the same lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

__all__ = ["is_locked", "lock_file"]


def lock_file(path: Path) -> int | None:
    """Lock a file, and create it if it does not exist.

    Returns:
        Its descriptor: closing it releases the lock. None: another process holds the lock.

    Raises:
        OSError: the file cannot be created or opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file. Does not create the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # shared, so that two processes that check at the same time do not take each other for the holder
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
