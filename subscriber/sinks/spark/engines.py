"""Who does the units of a round. All write the same files; only where the work runs is different."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from subscriber.sinks.spark.merge import NewFile, Unit, merge_unit
from subscriber.sinks.spark.storage import Storage

__all__ = ["Engine", "LocalEngine"]


class Engine(Protocol):
    """Runs units beside each other."""

    def run(self, units: Sequence[Unit]) -> list[list[NewFile]]:
        """The files that each unit wrote, in the order of the units.

        Raises:
            TargetError: one of them failed; what others wrote is not named by anything.
        """
        ...


class LocalEngine:
    """Threads of this process: no Spark, no Java. For small lakes, and where nothing else is installed.

    Args:
        storage: the lake's.
        threads: how many units at once.
    """

    def __init__(self, storage: Storage, threads: int = 2) -> None:
        self._storage = storage
        self._threads = threads

    def run(self, units: Sequence[Unit]) -> list[list[NewFile]]:
        """See :meth:`Engine.run`."""
        if len(units) == 1:
            return [merge_unit(self._storage, units[0])]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda unit: merge_unit(self._storage, unit), units))
