"""Checks, after ALTER TABLE, that the rows of a table can be found by the replica identity of its changes.

* A key column that was added later is NULL in older rows, because the publisher does not send the values that ADD COLUMN or RENAME COLUMN
  gave them. (With REPLICA IDENTITY FULL, ``row_matching.py`` finds such a row by its other columns.)
* A column whose type changed may have other values on the publisher than in the lake (``type_changes.py``).

An UPDATE or DELETE that identifies a row by such a column would find no row, and be skipped. There is no problem with rows that were only
inserted, or that a TRUNCATE removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import read_base, read_changes
from subscriber.sinks.spark.merge.work_unit import UnitFile
from subscriber.sinks.spark.schema.table_schema import SPECIAL, LakeColumn, TableSchema
from subscriber.sinks.spark.schema.type_changes import keeps_values

__all__ = ["RowIdentityCheck", "RowIdentityResult", "TableBefore", "columns_before"]

_ANY_CHANGES = ("c", "i", "u", "d")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBefore:
    """A table before the changes are applied.

    Attributes:
        directory: of its files, relative to the lake.
        files: files that have rows.
        columns: its columns by their fields, as last described.
        late: fields that were added when the table had rows.
        doubtful: fields whose values may differ from the publisher's.
    """

    directory: str
    files: tuple[UnitFile, ...] = ()
    columns: Mapping[str, LakeColumn] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    doubtful: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RowIdentityResult:
    """The doubtful columns after the changes, and the reason if the row of a change cannot be found."""

    doubtful: frozenset[str]
    lost: str | None


@dataclass(slots=True)
class _Walk:
    """Goes through the changes in order."""

    types: pa.Schema
    rows: bool
    columns: Mapping[str, LakeColumn]
    lacking: set[str]
    doubtful: set[str]
    lost: str | None = None
    described: TableSchema | None = None

    def take(self, schema: TableSchema, operations: Sequence[str]) -> None:
        if schema is not self.described:
            self._describe(schema)
        lost = self._lost(schema)
        for operation in operations:
            if operation == "t":
                self.rows, self.lacking, self.doubtful, self.lost = False, set(), set(), None
                lost = None
            elif operation in {"u", "d"}:
                self.lost = self.lost or lost
            self.rows = self.rows or operation in {"c", "i", "u"}

    def _describe(self, schema: TableSchema) -> None:
        columns = {column.field: column for column in schema.columns}
        for name, column in columns.items() if self.rows else ():
            before = self.columns.get(name)
            if before is None:
                self.lacking.add(name)
            elif not keeps_values(before, column, self.types.field(name).type):
                self.doubtful.add(name)
        self.described, self.columns = schema, columns
        self.doubtful &= set(columns)  # a dropped column is NULL in all rows

    def _lost(self, schema: TableSchema) -> str | None:
        for key in schema.keys:
            column = f'column "{key}" of table "{schema.table}", which identifies the rows,'
            if key in self.doubtful:
                return f"{column} changed its type: old values cannot be converted"
            if key in self.lacking and not schema.full:
                return f"{column} was added later: earlier rows have no value in it"
        return None


@dataclass(slots=True)
class RowIdentityCheck:
    """The check, see the module.

    Attributes:
        storage: of the lake.
        complete: a cache: for each column, the files in which all rows have a value. A file never gets more rows.
    """

    storage: Storage
    complete: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def look(
        self, before: TableBefore, schema: TableSchema, files: Sequence[tuple[str, TableSchema]], after: int, *, truncated: bool
    ) -> RowIdentityResult:
        """Check whether the rows of all changes after an LSN can be found. ``truncated``: whether there is a TRUNCATE among them."""
        # first assume all kinds of changes: usually no row can be lost even then, and no file is read
        walk = _Walk(schema.current, bool(before.files), before.columns, set(before.late), set(before.doubtful))
        for _, described in files:
            walk.take(described, _ANY_CHANGES)
        if walk.lost is None and walk.doubtful == before.doubtful and not (truncated and before.doubtful):
            return RowIdentityResult(before.doubtful, None)
        keys = {key for _, described in files if not described.full for key in described.keys}
        lacking = {key for key in sorted(before.late & keys) if self._is_lacking(before, schema, key)}
        walk = _Walk(schema.current, bool(before.files), before.columns, lacking, set(before.doubtful))
        for file, described in files:
            operations = read_changes(self.storage, [file], described, after, ["_op", "_lsn"])["_op"]
            walk.take(described, operations.to_pylist())
        return RowIdentityResult(frozenset(walk.doubtful), walk.lost)

    def _is_lacking(self, before: TableBefore, schema: TableSchema, key: str) -> bool:
        known = self.complete.get((before.directory, key), set())
        found: set[str] = set()
        for file in before.files:
            if file.path not in known:
                rows = read_base(self.storage, before.directory, [file], schema, [key, SPECIAL])
                special = rows.filter(pc.is_null(rows[key]))[SPECIAL].to_pylist()
                if any(text is None or key not in json.loads(text) for text in special):
                    return True
            found.add(file.path)
        self.complete[before.directory, key] = found
        return False


def columns_before(described: TableSchema | None, present: pa.Schema) -> dict[str, LakeColumn]:
    """A table's columns by their fields, as they were described. If that is unknown, as the table has them."""
    if described is not None:
        return {column.field: column for column in described.columns}
    return {column.name: LakeColumn(column.name, column.name, column.type, key=False) for column in present if column.name != SPECIAL}
