"""Processor time and memory of processes, from /proc."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from subscriber.testing.server import EmbeddedServer

__all__ = ["Cluster", "peak_memory", "tree", "tree_cpu"]

_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Process:
    """Seconds of the process itself, and of its children that have ended."""

    own: float
    ended: float


def _read(pid: int) -> _Process:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return _Process(0.0, 0.0)
    user, system, user_children, system_children = map(int, fields[11:15])
    return _Process((user + system) / _TICKS, (user_children + system_children) / _TICKS)


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [process for child in children.read_text().split() for process in tree(int(child))]
    return found


def tree_cpu(root: int) -> float:
    """Seconds of a process and its descendants, including those that have ended."""
    while True:
        ended = _read(root).ended
        processes = list(map(_read, tree(root)))
        # a child that ended meanwhile would count twice
        if processes[0].ended == ended:
            return sum(process.own + process.ended for process in processes)


def peak_memory(root: int) -> int:
    """Bytes of resident memory: the sum of the peaks of a process and its descendants that live."""
    return sum(map(_peak, tree(root)))


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


class Cluster:
    """The processes of a server, except the sessions of the benchmark itself."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._pid = server.pid

    def cpu(self, own_session: int) -> float:
        """Seconds of all its processes, without those of one session that lasts."""
        return tree_cpu(self._pid) - _read(own_session).own
