"""Engines do the work of a round. All engines produce the same rows, in Delta tables that any of them can continue.

``LocalEngine`` runs units of work in threads of this process. ``RewriteEngine`` runs the units of all tables as one Spark job: executors
rewrite the affected files with pyarrow, without a jar and without a shuffle. Engine ``merge`` is in ``merge_engine.py``.
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
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.merge_unit import merge_unit
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.pipeline.pending_changes import PendingChanges
from subscriber.sinks.spark.pipeline.plan import Plan, TableWork
from subscriber.sinks.spark.session.jobs import forget_jars, job_errors, job_failed
from subscriber.sinks.spark.tables.column_declarations import DeclaredColumns
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.delta import LakeDelta, commit_note

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


__all__ = ["Engine", "LocalEngine", "RewriteEngine", "TableResult", "TableRound", "UnitEngine"]


@dataclass(slots=True)
class TableRound:
    """One table in a round: the work to do, and the commit of its result.

    Attributes:
        name: name of the table.
        application: the Delta application that commits it.
        delta: the table. It exists, with its new columns unless ``overwrite`` replaces them.
        source: the waiting changes. The commit stores its ``reached``.
        task: the work.
        plan: the work, divided into units.
        overwrite: the new columns, if all files of the table are replaced.
        declared: how the publisher declares the columns, before and after the commit.
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
            TargetError: another writer changed the table in the meantime.
        """
        self.delta.commit(files, self.plan.removed, self.application, self.source.reached, note=self.note, overwrite=self.overwrite)

    @property
    def note(self) -> str:
        """What the commit does, for the table's history."""
        return commit_note("apply", self.source.reached, Lsn(self.task.after) if self.task.after else None)


@dataclass(slots=True)
class TableResult:
    """The result of one table: the files that the engine wrote, if it knows them, and the changes that found no row."""

    files: list[DataFile] = field(default_factory=list)
    missing: MissingRows = field(default_factory=MissingRows)


class Engine(Protocol):
    """Applies a round to its tables, each in one commit that contains the position."""

    @property
    def name(self) -> str:
        """The value of the option that selects it."""
        ...

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        """Do the work, and return the result of each table.

        Raises:
            TargetError: a table failed. Tables that were committed before remain committed, and their commits say so.
        """
        ...


class UnitEngine(ABC):
    """An engine whose units write files, which the engine then commits."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        """Run units concurrently, and return their results in order.

        Raises:
            TargetError: a unit failed. No commit names the files that other units wrote.
        """

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        """Run the units of all tables together, then commit table by table. See :meth:`Engine.apply`."""
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
    """Runs units in threads of this process, without Spark and Java. For small lakes, and where nothing else is installed.

    Args:
        storage: of the lake.
        threads: number of units that run at once.
    """

    name = "local"

    def __init__(self, storage: Storage, threads: int = 2) -> None:
        self._storage = storage
        self._threads = threads

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        if len(units) == 1:
            return [merge_unit(self._storage, units[0])]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(lambda unit: merge_unit(self._storage, unit), units))


class RewriteEngine(UnitEngine):
    """Runs the units of all tables as one Spark job.

    Args:
        spark: a session. Its executors can access the lake at ``location``, and have this package and pyarrow.
        location: of the lake.
    """

    name = "rewrite"

    def __init__(self, spark: SparkSession, location: Location) -> None:
        self._spark = spark
        self._location = location

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        if not units:
            return []
        location = self._location

        def work(unit: Unit) -> tuple[UnitResult | None, str | None]:
            return run_unit(location, unit)

        try:
            # no DataFrame: only Python does the work, and planning a query would double the time
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
    """Run a unit on an executor. Return its result, or the error."""
    try:
        return merge_unit(Storage.open(location), unit), None
    except SubscriberError as error:
        return None, error.one_line()
    finally:
        forget_jars()
