"""Where the files of tests are: in memory, where there is enough of it. A pytest plugin.

A run makes and drops some two thousand databases of three hundred files each. ext4 checks every inode that was deleted in the last
minute before it creates a file: CREATE DATABASE takes five times as long there as on tmpfs, nearly all of it the kernel's.

``SUBSCRIBER_TEST_DIRECTORY`` names another place, whose files stay as pytest leaves them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import pytest

VARIABLE: Final = "SUBSCRIBER_TEST_DIRECTORY"
_MEMORY: Final = Path("/dev/shm")
_PREFIX: Final = "subscriber-tests-"
_ENOUGH: Final = 12 * 1024**3
"""Bytes. A whole run needs a third of it at most, and its processes as much again."""
_made = pytest.StashKey[tuple[Path, int]]()


def _has_room() -> bool:
    """Whether files may be there, and programs (some are copied)."""
    try:
        found = os.statvfs(_MEMORY)
        available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return False
    room = min(found.f_bavail * found.f_frsize, int(available.split()[1]) * 1024, *_left_in_control_groups())
    return os.access(_MEMORY, os.W_OK) and not found.f_flag & os.ST_NOEXEC and room >= _ENOUGH


def _left_in_control_groups() -> list[int]:
    """Bytes that this process' control group may still take, and those above it, where they have a limit."""
    found = []
    with contextlib.suppress(OSError):
        own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
        path = Path("/sys/fs/cgroup", own.strip("/"))
        for group in (path, *path.parents):
            with contextlib.suppress(OSError, ValueError):
                limit = int((group / "memory.max").read_text())  # "max" is no limit
                found.append(limit - int((group / "memory.current").read_text()))
    return found


def _locked(directory: Path) -> int | None:
    """A descriptor that keeps it for this process; None if another one has it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_those_of_the_dead() -> None:
    for path in _MEMORY.glob(f"{_PREFIX}*"):
        if path.stat().st_uid == os.getuid() and (descriptor := _locked(path)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(descriptor)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        return  # has it from who started it
    given = os.environ.get(VARIABLE)
    if given is not None:
        directory = Path(given).absolute()
        directory.mkdir(parents=True, exist_ok=True)
    elif _has_room():
        with contextlib.suppress(OSError):  # of another run that does the same
            _remove_those_of_the_dead()
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_MEMORY))
        descriptor = _locked(directory)
        assert descriptor is not None
        config.stash[_made] = directory, descriptor
        directory.chmod(0o711)  # servers run as another user
    else:
        return
    os.environ["TMPDIR"] = str(directory)
    tempfile.tempdir = None


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(_made, None)
    if made is not None:
        shutil.rmtree(made[0], ignore_errors=True)
        os.close(made[1])
