"""Engines: they do the work of a round. All of them leave the same rows, in Delta tables that any of them can continue.

``LocalEngine`` runs units of work in threads of this process. ``RewriteEngine`` runs the units of all tables as one Spark job: executors
rewrite the touched files by pyarrow, without a jar and without a shuffle. Engine ``merge`` is in ``merge_engine.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import pyarrow as pa

from subscriber.abc import TableName
from subscriber.errors import SubscriberError, TargetError
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.merge_unit import merge_unit
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.unit import Unit, UnitResult
from subscriber.sinks.spark.pipeline.pending_changes import PendingChanges
from subscriber.sinks.spark.pipeline.plan import Plan, TableWork
from subscriber.sinks.spark.session.jobs import forget_jars, job_errors, job_failed
from subscriber.sinks.spark.tables.column_declarations import DeclaredColumns
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.delta import LakeDelta

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["Engine", "LocalEngine", "RewriteEngine", "TableResult", "TableRound", "UnitEngine"]


@dataclass(slots=True)
class TableRound:
    """One table in a round: the work to do, and the commit of its result.

    Attributes:
        name: the table's.
        application: in whose name it is committed.
        delta: the table; it exists, with the columns it shall have unless ``overwrite`` gives it others.
        source: what waits; its ``reached`` is what the commit says.
        task: what is to be done.
        plan: the same, in units.
        overwrite: its columns from now on, if all its files are replaced.
        declared: how the publisher has declared them, before the commit and after it.
    """

    name: TableName
    application: str
    delta: LakeDelta
    source: PendingChanges
    task: TableWork
    plan: Plan
    overwrite: pa.Schema | None
    declared: tuple[DeclaredColumns | None, DeclaredColumns]

    def commit(self, files: Sequence[DataFile]) -> None:
        """Commit the files of the units to the table.

        Raises:
            TargetError: another writer changed it meanwhile.
        """
        self.delta.commit(files, self.plan.removed, self.application, self.source.reached, overwrite=self.overwrite)


@dataclass(slots=True)
class TableResult:
    """What an engine did to one table: the files it wrote, if it knows them, and the changes that found no row."""

    files: list[DataFile] = field(default_factory=list)
    missing: MissingRows = field(default_factory=MissingRows)


class Engine(Protocol):
    """Applies a round to its tables, each in one commit that states the position."""

    @property
    def name(self) -> str:
        """The value of the option that selects it."""
        ...

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        """Do the work, and return the result of each table.

        Raises:
            TargetError: one of them failed; tables that were committed before it stay so, and are known by what their commits say.
        """
        ...


class UnitEngine(ABC):
    """An engine whose units write files, which it then commits."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """Run units concurrently, and return their results in order.

        Raises:
            TargetError: one of them failed; what others wrote is not named by anything.
        """

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        """See :meth:`Engine.apply`: the units of all tables together, then table after table."""
        results = iter(self.run([unit for work in works for unit in work.plan.units]))
        found: list[TableResult] = []
        for work in works:
            done = TableResult()
            for _ in work.plan.units:
                result = next(results)
                done.files += result.files
                done.missing.add(result.missing)
            work.commit(done.files)
            found.append(done)
        return found


class LocalEngine(UnitEngine):
    """Runs units in threads of this process: no Spark, no Java. For small lakes, and where nothing else is installed.

    Args:
        storage: the lake's.
        threads: how many units at once.
    """

    name = "local"

    def __init__(self, storage: Storage, threads: int = 2) -> None:
        self._storage = storage
        self._threads = threads

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """See :meth:`UnitEngine.run`."""
        if len(units) == 1:
            return [merge_unit(self._storage, units[0])]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda unit: merge_unit(self._storage, unit), units))


class RewriteEngine(UnitEngine):
    """Runs the units of all tables as one Spark job.

    Args:
        spark: a session; its executors reach the lake at ``location``, and have this package and pyarrow.
        location: of the lake.
    """

    name = "rewrite"

    def __init__(self, spark: SparkSession, location: Location) -> None:
        self._spark = spark
        self._location = location

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """See :meth:`UnitEngine.run`."""
        if not units:
            return []
        location = self._location

        def work(unit: Unit) -> tuple[UnitResult | None, str | None]:
            return run_unit(location, unit)

        try:
            # no DataFrame: the work is Python's alone, and planning a query for it takes as long again
            found = self._spark.sparkContext.parallelize(units, len(units)).map(work).collect()
        except job_errors() as error:
            raise job_failed(self._spark, error) from error
        written: list[UnitResult] = []
        for result, failure in found:
            if result is None:
                raise TargetError(failure or "a unit of work failed", hint="nothing of this round was published")
            written.append(result)
        return written


def run_unit(location: Location, unit: Unit) -> tuple[UnitResult | None, str | None]:
    """Run a unit on an executor: its result, or the error."""
    try:
        return merge_unit(Storage.open(location), unit), None
    except SubscriberError as error:
        return None, error.one_line()
    finally:
        forget_jars()
