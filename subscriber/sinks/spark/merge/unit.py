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
    """See the module.

    Attributes:
        directory: of the table, relative to the lake.
        schema: the table's now.
        base: files of the table, relative to its directory.
        stretches: of its changes, one after the other; each has some that are not in the table already.
        after: changes up to this LSN are in the table already.
        ranges: of the keys it is about, disjoint; empty: all.
        cleared: the table's former rows are gone, whatever the changes say.
        dropped: columns that the publisher has no more: NULL in all rows.
        added: columns that came later: rows from before have NULL there, whatever the publisher has.
        target_rows: how many rows a file should have.
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
    """The result of a unit: new files, and how many changes found no row."""

    files: list[DataFile]
    missing: MissingRows
