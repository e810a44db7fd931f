"""How the program fails at a point. A failure happens once."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from subscriber.errors import TargetUnavailable

__all__ = ["EXIT_STATUS", "Failure", "FailureAt", "cut_connections", "fill_disk", "free_disk"]

EXIT_STATUS: Final = 86
"""Of a process that ended at its point."""


class Failure(Enum):
    """The kinds."""

    EXIT = "exit"
    """The process ends at once (``os._exit``), as by SIGKILL."""
    ERROR = "error"
    """The step raises TargetUnavailable."""
    CUT = "cut"
    """All connections of the process are cut."""
    DISK_FULL = "disk_full"
    """No write succeeds any more, until the program has reported that."""


@dataclass(slots=True)
class FailureAt:
    """The hook of a case.

    Attributes:
        point: where to fail.
        failure: how.
        occurrence: at which time that the point is reached, from 1.
        happened: a file that is created when it fails.
        counts: a file that gets a line for each point that is reached. None: no file.
        cut: cuts the connections.
        fill_disk: from then on, writes fail.
    """

    point: str
    failure: Failure
    occurrence: int
    happened: Path
    cut: Callable[[], None]
    fill_disk: Callable[[], None]
    counts: Path | None = None

    def __call__(self, point: str) -> None:
        if self.counts is not None:
            with self.counts.open("a") as file:
                file.write(f"{point}\n")
        if point != self.point or self.occurrence == 0:
            return
        self.occurrence -= 1
        if self.occurrence:
            return
        self.happened.touch()
        match self.failure:
            case Failure.EXIT:
                os._exit(EXIT_STATUS)
            case Failure.ERROR:
                raise TargetUnavailable(f"failed at crash point {point}", hint="a test wants this")
            case Failure.CUT:
                self.cut()
            case Failure.DISK_FULL:
                self.fill_disk()


def fill_disk() -> None:
    """Let this process write no more to any file: the system rejects it as for a file that is too large."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def free_disk() -> None:
    """End what :func:`fill_disk` has begun."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def cut_connections() -> None:
    """Shut down all connections of this process. Pairs of sockets, such as the event loop's, have no address and stay."""
    for name in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # no socket, or closed meanwhile
        with connection:
            try:
                if connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # it listens, or is not connected any more
