"""The work for one table in a round, before it is divided into units."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.sinks.spark.merge.work_unit import UnitFile, Work
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import Bound
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector

__all__ = ["BaseFile", "TableWork", "plan_columns"]


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the table. ``rows`` counts deleted ones too; ``range`` is that of the first key column, None if it is unknown."""

    path: str
    rows: int
    range: tuple[Bound, Bound] | None
    size: int = 0
    vector: DeletionVector | None = None

    @property
    def deleted(self) -> int:
        """How many of its rows are deleted."""
        return self.vector.deleted if self.vector is not None else 0

    @property
    def live(self) -> int:
        """How many of its rows are not deleted."""
        return self.rows - self.deleted

    def read(self, *, kept: bool = False, shared: bool = False) -> UnitFile:
        """The file for a unit."""
        return UnitFile(self.path, self.vector, kept, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork(Work):
    """The work for one table.

    Attributes:
        base: its files.
        rewrite: whether all of them are rewritten.
        retyped: columns that have another type in them.
        vectors: whether deletion vectors may be written.
    """

    base: tuple[BaseFile, ...]
    rewrite: bool = False
    retyped: tuple[str, ...] = ()
    vectors: bool = False

    @property
    def marks(self) -> bool:
        """Whether units may keep files, and mark rows in them. Only the keys of these files are read."""
        plain = len(self.stretches) == 1 and not self.rewrite and not self.retyped
        return self.vectors and plain and bool(self.schema.keys) and not self.stretches[0].schema.full


def plan_columns(schema: TableSchema) -> list[str]:
    """The columns of changes that planning needs."""
    return ["_op", "_lsn", "_seq", "_moved", "_un", *schema.keys[:1]]
