"""Who does the work of a round, and where it runs. All engines leave the same rows, in Delta tables that any of them goes on with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.merge_unit import merge_unit
from subscriber.sinks.spark.merge.unit import Unit, UnitResult
from subscriber.sinks.spark.work import Done, Work

__all__ = ["Engine", "LocalEngine", "UnitEngine"]


class Engine(Protocol):
    """Brings the tables of a round to where they shall be, each in one commit that says so."""

    @property
    def name(self) -> str:
        """As it is asked for."""
        ...

    def apply(self, works: Sequence[Work]) -> list[Done]:
        """Do it, and say what was done to each.

        Raises:
            TargetError: one of them failed; tables that were committed before it stay so, and are known by what their commits say.
        """
        ...


class UnitEngine(ABC):
    """An engine whose units write files, which it then commits."""

    @property
    @abstractmethod
    def name(self) -> str:
        """See :attr:`Engine.name`."""

    @abstractmethod
    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """What came of each unit, in their order; they run beside each other.

        Raises:
            TargetError: one of them failed; what others wrote is not named by anything.
        """

    def apply(self, works: Sequence[Work]) -> list[Done]:
        """See :meth:`Engine.apply`: the units of all tables together, then table after table."""
        results = iter(self.run([unit for work in works for unit in work.plan.units]))
        found: list[Done] = []
        for work in works:
            done = Done()
            for _ in work.plan.units:
                result = next(results)
                done.files += result.files
                done.missing.add(result.missing)
            work.commit(done.files)
            found.append(done)
        return found


class LocalEngine(UnitEngine):
    """Threads of this process: no Spark, no Java. For small lakes, and where nothing else is installed.

    Args:
        storage: the lake's.
        threads: how many units at once.
    """

    def __init__(self, storage: Storage, threads: int = 2) -> None:
        self._storage = storage
        self._threads = threads

    @property
    def name(self) -> str:
        """See :attr:`Engine.name`."""
        return "local"

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """See :meth:`UnitEngine.run`."""
        if len(units) == 1:
            return [merge_unit(self._storage, units[0])]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda unit: merge_unit(self._storage, unit), units))
