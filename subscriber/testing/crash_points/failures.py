"""How the program fails at a point: once in each phase of the scenario.

The test writes the phase into a file, and each process that fails adds a line to another one. So a process knows what has happened before.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any, Final

from subscriber import crash_points
from subscriber.errors import TargetUnavailable

__all__ = [
    "EXIT_STATUS",
    "PHASES",
    "SINK_LINE",
    "Failure",
    "FailureAt",
    "cut_connections",
    "failed_at",
    "fill_disk",
    "free_disk",
    "set_phase",
]

PHASES: Final = ("setup", "copy", "changes", "streams", "prepared", "stop")
"""Of the scenario, in their order. ``setup`` lasts until a large table is being copied; small tables are copied before."""
SINK_LINE: Final = "sink.line"
"""Stands for each line of the sink that runs while rows or changes are stored: the program fails at each of them, once after each point."""
_STORES: Final = frozenset({"copy.slot_created", "copy.stored", "apply.taken", "prepare.taken", "prepare.commit_taken"})
"""After these points the sink stores something."""

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


def set_phase(directory: Path, phase: str) -> None:
    """Begin a phase."""
    new = directory / "phase.new"
    new.write_text(phase)
    new.replace(directory / "phase")


def failed_at(directory: Path) -> list[str]:
    """The phases, or lines, in which the program has failed."""
    happened = directory / "happened"
    return happened.read_text().splitlines() if happened.exists() else []


@dataclass(slots=True)
class FailureAt:
    """The hook of a case.

    Attributes:
        point: where to fail.
        failure: how.
        phases: when.
        directory: for the files.
        cut: cuts the connections.
        fill_disk: from then on, writes fail.
        code: the directory, or the file, with the lines of the sink.
    """

    point: str
    failure: Failure
    phases: Sequence[str]
    directory: Path
    cut: Callable[[], None]
    fill_disk: Callable[[], None]
    code: str
    _after: str = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Fail while the block runs."""
        with crash_points.watched(self._reached):
            if self.point == SINK_LINE:
                threading.settrace(self._called)
                sys.settrace(self._called)
            try:
                yield
            finally:
                if self.point == SINK_LINE:
                    sys.settrace(None)
                    threading.settrace(None)

    def _reached(self, point: str) -> None:
        if point.startswith(("copy.", "apply.", "prepare.")):
            self._after = point
        if point == self.point and (phase := self._phase()) in self.phases:
            self._fail_once(phase)

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any] | None:
        return self._line if frame.f_code.co_filename.startswith(self.code) else None

    def _line(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        if event == "line" and self._after in _STORES and self._phase() in self.phases:
            self._fail_once(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} after {self._after}")
        return self._line

    def _phase(self) -> str:
        return (self.directory / "phase").read_text()

    def _fail_once(self, occurrence: str) -> None:
        if occurrence in failed_at(self.directory):
            return
        if self.failure is Failure.DISK_FULL:
            free_disk()  # it may still be full since an earlier phase
        with (self.directory / "happened").open("a") as file:
            file.write(f"{occurrence}\n")
        match self.failure:
            case Failure.EXIT:
                os._exit(EXIT_STATUS)
            case Failure.ERROR:
                raise TargetUnavailable(f"failed at crash point {self.point}", hint="a test wants this")
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
