"""A unit of work as plain data: some files of a table, and the changes of a range of its keys."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.sinks.spark.merge.key_ranges import KeyRange
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.schema.evolution import Stretch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile

__all__ = ["Unit", "UnitResult"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A unit of work, see the module.

    Attributes:
        directory: of the table, relative to the lake.
        schema: the table's current schema.
        base: files of the table, relative to its directory.
        stretches: of its changes, in order. Each has changes that are not yet in the table.
        after: changes up to this LSN are already in the table.
        ranges: the unit's ranges of keys, disjoint. Empty: all keys.
        cleared: whether the table's previous rows are deleted, regardless of the changes.
        dropped: columns that the publisher no longer has. They become NULL in all rows.
        added: columns added later: older rows have NULL there, even if the publisher has a value.
        target_rows: rows that a file should have.
    """

    directory: str
    schema: TableSchema
    base: tuple[str, ...]
    stretches: tuple[Stretch, ...]
    after: int
    ranges: tuple[KeyRange, ...] = ()
    cleared: bool = False
    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    target_rows: int = 250_000


@dataclass(frozen=True, slots=True)
class UnitResult:
    """The result of a unit: new files, and counts of changes that found no row."""

    files: list[DataFile]
    missing: MissingRows
