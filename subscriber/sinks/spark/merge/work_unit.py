"""A unit of work as plain data: some files of a table, and the changes of a range of its keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from subscriber.sinks.spark.merge.key_ranges import KeyRange
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.schema.evolution import Stretch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.sinks.spark.tables.data_file import DataFile
from subscriber.sinks.spark.tables.deletion_vectors import DeletionVector

__all__ = ["FoldedFile", "Unit", "UnitFile", "UnitResult", "Work"]


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A file of the table that a unit reads, and its deleted rows.

    Attributes:
        kept: whether the file remains, and its replaced and deleted rows are marked in its deletion vector. Otherwise it is rewritten.
        shared: whether other units read it too. If it is rewritten, each unit takes the rows in its ranges of keys.
    """

    path: str
    vector: DeletionVector | None = None
    kept: bool = False
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What the work for a table and its units have in common.

    Attributes:
        directory: of the table, relative to the lake.
        schema: the table's current schema.
        stretches: of its changes, in order. Each has changes that are not yet in the table.
        after: changes up to this LSN are already in the table.
        dropped: columns that the publisher no longer has. They become NULL in all rows.
        target_rows: rows that a file should have.
        feed: whether the rows of the table's Change Data Feed are written too.
    """

    directory: str
    schema: TableSchema
    stretches: tuple[Stretch, ...]
    after: int
    dropped: tuple[str, ...] = ()
    target_rows: int = 250_000
    feed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit(Work):
    """A unit of work, see the module.

    Attributes:
        base: files of the table.
        until: of a history: changes after this LSN are not part of the work.
        ranges: the unit's ranges of keys, disjoint. Empty: all keys.
        cleared: whether the table's previous rows are deleted, regardless of the changes.
        rows: number of rows that are rewritten and of changes, if the changes were counted.
        folded_into: a directory, relative to the lake, for the folded changes, which are written instead of files of the table. None: the
            unit writes files of the table.
    """

    base: tuple[UnitFile, ...]
    until: int = 0
    ranges: tuple[KeyRange, ...] = ()
    cleared: bool = False
    rows: int = 0
    folded_into: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedFile:
    """The folded changes of a unit, one row for each key. Without rows there is no file.

    Attributes:
        path, size: relative to the lake, in bytes. ``memory``: size of the rows in memory.
        keys: the minimum and maximum of the first key column. None if unknown.
        known: whether the table has a row for each key that is not deleted.
    """

    path: str = ""
    size: int = 0
    rows: int = 0
    memory: int = 0
    keys: tuple[Any, Any] | None = None
    known: bool = True


@dataclass(frozen=True, slots=True)
class UnitResult:
    """The result of a unit.

    Attributes:
        files, feed: new files of the table, and of its Change Data Feed.
        missing: counts of changes that found no row.
        deleted: Roaring bitmaps of deleted rows, by the paths of files that are kept.
    """

    files: list[DataFile]
    missing: MissingRows
    folded: FoldedFile | None = None
    seconds: float = 0.0
    deleted: Mapping[str, bytes] = field(default_factory=dict)
    feed: Sequence[DataFile] = ()
