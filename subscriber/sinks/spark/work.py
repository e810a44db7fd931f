"""One table in a round: what is to be done to it, and how that is committed where new files come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from subscriber.abc import TableName
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.plan import Plan, TableWork
from subscriber.sinks.spark.tables.column_declarations import DeclaredColumns
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.waiting import Source

__all__ = ["Done", "Work"]


@dataclass(slots=True)
class Work:
    """See the module.

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
    source: Source
    task: TableWork
    plan: Plan
    overwrite: pa.Schema | None
    declared: tuple[DeclaredColumns | None, DeclaredColumns]

    def commit(self, files: Sequence[DataFile]) -> None:
        """Let the units' files be the table's.

        Raises:
            TargetError: somebody else changed it meanwhile.
        """
        self.delta.commit(files, self.plan.removed, self.application, self.source.reached, overwrite=self.overwrite)


@dataclass(slots=True)
class Done:
    """What an engine did to one table: the files it wrote, if it knows them, and the changes that found no row."""

    files: list[DataFile] = field(default_factory=list)
    missing: MissingRows = field(default_factory=MissingRows)
