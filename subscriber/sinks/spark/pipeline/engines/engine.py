"""Engines do the work of a round. Both engines leave the same rows in Delta tables, and may take turns on one lake.

A round's work is divided into units (``plan.py``): some files of a table, and the changes of their range of keys. An engine runs the units
of all tables together, then commits the tables in parallel. The driver plans and commits; only units touch rows.

* ``local`` runs units in threads of this process (``local_engine.py``).
* ``spark`` runs them on executors (``spark_engine.py``).
"""

from __future__ import annotations

import contextlib
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, TypeVar

import pyarrow as pa
from pyroaring import BitMap

from subscriber import crash_points
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.files.file_errors import MORE_MEMORY, NO_MEMORY, AccessDenied, DamagedFile, StorageFull
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.merge.units import merge_unit
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.pipeline.planning.pending_changes import PendingChanges
from subscriber.sinks.spark.pipeline.planning.plan import Plan
from subscriber.sinks.spark.pipeline.planning.table_work import TableWork
from subscriber.sinks.spark.session.jobs import job_name
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.delta import COMMITS_AT_ONCE, LakeDelta, commit_note
from subscriber.sinks.spark.tables.table_errors import CommitConflict, TableStopped

__all__ = ["Engine", "TableFailed", "TableResult", "TableRound", "attempt", "writing"]

_NOT_OF_A_TABLE: Final = (TargetUnavailable, AccessDenied, DamagedFile, StorageFull)
"""Errors of units that may be those of all tables. If they are about a file of one table, they name it."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class TableRound:
    """One table in a round: the work to do, and the commit of its result.

    Attributes:
        application: the Delta application that commits it.
        delta: the table. It exists, with its new columns unless ``overwrite``, the new columns of a table whose files are replaced, is set.
        source: the waiting changes. The commit stores its ``reached``.
        plan: the work, divided into units.
    """

    name: TableName
    application: str
    delta: LakeDelta
    source: PendingChanges
    task: TableWork
    plan: Plan
    overwrite: pa.Schema | None

    def commit(self, files: Sequence[DataFile], deleted: Mapping[str, BitMap], feed: Sequence[DataFile]) -> None:
        """Commit the files of the units to the table, and the rows that are deleted in files that are kept.

        If the table has a Change Data Feed, ``feed`` are the files with its rows.

        Raises:
            CommitConflict: another writer changed the table in the meantime.
            TableStopped: rows violate a constraint of the table.
        """
        if (reason := self.delta.violated(files)) is not None:
            raise self.refused(reason)
        self.delta.commit(
            files,
            self.plan.removed,
            self.application,
            self.source.reached,
            note=self.note,
            overwrite=self.overwrite,
            deleted=deleted,
            feed=feed,
        )

    def refused(self, reason: str) -> TableStopped:
        """The error for rows that violate a constraint of the table."""
        stop = TableStopped(f"Delta table {self.delta.uri}: {reason}", hint="drop the constraint")
        stop.refused = self.delta.directory, self.application, self.delta.version
        return stop

    @property
    def note(self) -> str:
        """What the commit does, for the table's history."""
        return commit_note("apply", self.source.reached, Lsn(self.task.after) if self.task.after else None)


class TableFailed(TargetError):
    """A unit, the commit of one table, or that of its new columns failed. The other tables can be committed.

    ``others`` are those of other tables, in the same attempt.
    """

    def __init__(self, work: TableRound, error: TargetError) -> None:
        super().__init__(f"Delta table {work.delta.uri} could not be written: {error}", hint=error.hint)
        self.work = work
        self.error = error
        self.others: Sequence[TableFailed] = ()


@contextlib.contextmanager
def writing(work: TableRound) -> Iterator[None]:
    """A block that writes one table.

    Raises:
        TableFailed: it raised an error.
        CommitConflict, TableStopped, StorageFull: as in the block.
    """
    try:
        yield
    except (CommitConflict, TableStopped, StorageFull):
        raise
    except TargetError as error:
        raise TableFailed(work, error) from error


@dataclass(slots=True)
class TableResult:
    """The result of one table: the files that its units wrote, the changes that found no row, and the seconds of units and commit."""

    files: list[DataFile] = field(default_factory=list)
    missing: MissingRows = field(default_factory=MissingRows)
    seconds: float = 0.0


class Engine(ABC):
    """Applies a round to its tables, each in one commit that contains the position. See the module."""

    name: ClassVar[str]
    """The value of the option that selects it."""
    round_rows: ClassVar[int] = 500_000
    """Number of landed changes after which a round takes no more. It bounds the memory that this process needs for a backlog."""
    _round = "apply"
    """What the units of a round are called."""

    def apply(self, works: Sequence[TableRound]) -> list[TableResult]:
        """Run the units of all tables, then commit those whose units succeeded. Return the result of each table.

        Raises:
            TableFailed: a table could not be written. Tables that were committed remain committed, and their commits say so.
            CommitConflict, TableStopped: the same, see :meth:`TableRound.commit`.
            TargetError: units failed, and not because of one table only.
        """
        self._round = job_name(
            "apply",
            [work.name for work in works],
            Lsn(min((work.task.after for work in works), default=0)),
            max((work.source.reached for work in works), default=None),
        )
        units = [self.divide(work) for work in works]
        outcomes = iter(self.run([unit for of_table in units for unit in of_table]))
        done = [[next(outcomes) for _ in of_table] for of_table in units]
        crash_points.reached("publishing.files_written")
        with ThreadPoolExecutor(COMMITS_AT_ONCE) as pool:
            committed = list(pool.map(self._committed, works, done))
        failed = [outcome for outcome in committed if isinstance(outcome, TableFailed)]
        for number, error in enumerate(failed):
            error.others = (*failed[:number], *failed[number + 1 :])
        return _successes(committed)

    def _committed(self, work: TableRound, outcomes: Sequence[UnitResult | SubscriberError]) -> TableResult | SubscriberError:
        began = time.monotonic()
        try:
            results = _successes(outcomes)
            with writing(work):
                found = self.commit(work, results)
        except (CommitConflict, TableStopped, TableFailed, *_NOT_OF_A_TABLE) as error:
            return error
        except SubscriberError as error:
            return TableFailed(work, error) if isinstance(error, TargetError) else error
        crash_points.reached("publishing.table_committed")
        found.seconds = sum(result.seconds for result in results) + time.monotonic() - began
        return found

    def divide(self, work: TableRound) -> Sequence[Unit]:
        """The units of a table."""
        return work.plan.units

    def merges(self, work: TableRound) -> bool:
        """Whether Delta's MERGE INTO applies the changes, which gives the files of the table names of its own."""
        return False

    def refuses(self, work: TableRound) -> str | None:
        """What prevents this engine from writing the table. None: nothing."""
        return work.delta.unwritable(columns=False) if work.delta.is_there else None

    def refuses_columns(self, work: TableRound) -> str | None:
        """What prevents this engine from changing the columns of the table. None: nothing."""
        return work.delta.unwritable(columns=True)

    def add_columns(self, work: TableRound) -> None:
        """Add the new columns of a table that is there."""
        work.delta.add_columns(work.task.schema.current)

    def run(self, units: Sequence[Unit]) -> list[UnitResult | SubscriberError]:
        """Run units concurrently, and return their results or errors in order. No commit names the files that failed units wrote."""
        return self.outcomes(merge_unit, units, [unit.rows for unit in units], self._round)

    def each(
        self, function: Callable[[Storage, _Item], _Result], items: Sequence[_Item], weights: Sequence[int], what: str
    ) -> list[_Result]:
        """Call a function for each item concurrently, see :class:`subscriber.sinks.spark.maintenance.log_files.Workers`."""
        return _successes(self.outcomes(function, items, weights, what))

    @abstractmethod
    def outcomes(
        self, function: Callable[[Storage, _Item], _Result], items: Sequence[_Item], weights: Sequence[int], what: str
    ) -> list[_Result | SubscriberError]:
        """The same, but return an error in place of the result of its item."""

    def commit(self, work: TableRound, results: Sequence[UnitResult]) -> TableResult:
        """Commit a table. ``results`` are those of its units."""
        found = TableResult([file for result in results for file in result.files])
        deleted: dict[str, BitMap] = {}
        for result in results:
            found.missing.add(result.missing)
            for path, rows in result.deleted.items():
                deleted[path] = deleted.get(path, BitMap()) | BitMap.deserialize(rows)
        work.commit(found.files, deleted, [file for result in results for file in result.feed])
        return found


def attempt(function: Callable[[Storage, _Item], _Result], storage: Storage, item: _Item) -> _Result | SubscriberError:
    """Call a function for an item. Return its result or its error.

    The text of an unexpected error is left out, because it may contain values.
    """
    try:
        return function(storage, item)
    except SubscriberError as error:
        return error
    except MemoryError:
        return TargetError(NO_MEMORY, hint=MORE_MEMORY)
    except Exception as error:  # noqa: BLE001 -- it must not stop other tables
        frames = traceback.extract_tb(error.__traceback__)
        place = next(frame for frame in reversed(frames) if "subscriber" in Path(frame.filename).parts)
        return TargetError(f"unexpected {type(error).__name__} in {Path(place.filename).name}, line {place.lineno}", hint="report this")


def _successes(outcomes: Sequence[_Result | SubscriberError]) -> list[_Result]:
    found: list[_Result] = []
    for outcome in outcomes:
        if isinstance(outcome, SubscriberError):
            raise outcome
        found.append(outcome)
    return found
