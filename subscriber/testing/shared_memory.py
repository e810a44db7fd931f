"""Release the shared memory of a killed PostgreSQL server, which the system would keep for ever.

A postmaster holds a System V segment of a few bytes as a lock. A regular shutdown removes it. After a kill, the next postmaster of the
same data directory takes it over. If that directory is removed there is no next one, and a system has room for few segments: 4096 on
Linux, 32 on macOS.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Final

from subscriber.testing.binaries import ServerUser

__all__ = ["release", "segment"]

_LINE: Final = 6  # of postmaster.pid, counted from 0: LOCK_FILE_LINE_SHMEM_KEY of PostgreSQL's pidfile.h counts from 1
_IPC_RMID: Final = 0


def segment(pid_file: Path) -> tuple[int, int] | None:
    """Return key and identifier of a postmaster's segment from its ``postmaster.pid``; None without such a file."""
    try:
        line = pid_file.read_text().splitlines()[_LINE].split()
    except (FileNotFoundError, IndexError):
        return None
    # a negative key is written as a number of 64 bits
    return ctypes.c_int(int(line[0])).value, int(line[1])


def release(pid_file: Path, run_as: ServerUser) -> None:
    """Remove the segment of a postmaster that has ended without removing its ``postmaster.pid``. Does nothing without such a file.

    Processes that are still attached keep it until they end. ``run_as`` is the user that the server ran as.
    """
    named = segment(pid_file)
    if named is None:
        return
    key, identifier = named
    libc = ctypes.CDLL(None)
    # after a restart of the system the identifier may belong to another segment, which then has another key
    if libc.shmget(ctypes.c_int(key), ctypes.c_size_t(0), 0) != identifier:
        return
    if libc.shmctl(identifier, _IPC_RMID, None) != 0 and (ipcrm := shutil.which("ipcrm")):
        # root without CAP_SYS_ADMIN, as in a container, may not remove another user's segment
        run_as.run(ipcrm, "-m", str(identifier))
