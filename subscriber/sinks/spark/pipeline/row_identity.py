"""Whether the rows of a table can be found by the replica identity that its changes have, after ALTER TABLE.

* A key column that was added later is NULL in rows from before: the publisher does not send the values that ADD COLUMN or RENAME COLUMN
  gave them. (With REPLICA IDENTITY FULL, ``row_matching.py`` finds such a row by its other columns.)
* A column whose type changed may have other values at the publisher than here (``type_changes.py``).

An UPDATE or DELETE that identifies a row by such a column would find none, and be skipped. Rows that were only inserted are safe, and so
are those that a TRUNCATE removed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.parquet import read_base, read_changes
from subscriber.sinks.spark.schema.table_schema import SPECIAL, LakeColumn, TableSchema
from subscriber.sinks.spark.schema.type_changes import keeps_values

__all__ = ["RowIdentityCheck", "RowIdentityResult", "TableBefore", "columns_before"]

_ANY_CHANGES = ("c", "i", "u", "d")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableBefore:
    """A table as it is before changes come.

    Attributes:
        directory: of its files, relative to the lake.
        files: those that have rows.
        columns: its columns by their fields, as they were described last.
        late: fields of it that came when it had rows.
        doubtful: fields whose values may be others than the publisher's.
    """

    directory: str
    files: tuple[str, ...] = ()
    columns: Mapping[str, LakeColumn] = field(default_factory=dict)
    late: frozenset[str] = frozenset()
    doubtful: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class RowIdentityResult:
    """The columns in doubt after the changes, and the reason if the row of a change cannot be found."""

    doubtful: frozenset[str]
    lost: str | None


@dataclass(slots=True)
class _Walk:
    """A walk through changes in their order."""

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
        self.doubtful &= set(columns)  # what went is NULL everywhere

    def _lost(self, schema: TableSchema) -> str | None:
        for key in schema.keys:
            told = f'column "{key}" of table "{schema.table}", by which its rows are known,'
            if key in self.doubtful:
                return f"{told} has another type: old values are not known in it"
            if key in self.lacking and not schema.full:
                return f"{told} came later: rows from before have no value in it"
        return None


@dataclass(slots=True)
class RowIdentityCheck:
    """See the module.

    Attributes:
        storage: the lake's.
        complete: columns, and the files that have a value of each in all rows: files never change.
    """

    storage: Storage
    complete: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def look(
        self, before: TableBefore, schema: TableSchema, files: Sequence[tuple[str, TableSchema]], after: int, *, truncated: bool
    ) -> RowIdentityResult:
        """Check whether the rows of all changes can be found.

        Args:
            before: the table.
            schema: its columns from now on.
            files: landed ones, with what each was described with, in order.
            after: changes up to this LSN are in the table already.
            truncated: whether there is a TRUNCATE among the changes.

        Raises:
            TargetError: a file cannot be read.
        """
        # whatever the changes are, mostly none of it can be: then nothing is read
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
        for path in before.files:
            if path not in known:
                rows = read_base(self.storage, before.directory, [path], schema, [key, SPECIAL])
                beside = rows.filter(pc.is_null(rows[key]))[SPECIAL].to_pylist()
                if any(text is None or key not in json.loads(text) for text in beside):
                    return True
            found.add(path)
        self.complete[before.directory, key] = found
        return False


def columns_before(described: TableSchema | None, present: pa.Schema) -> dict[str, LakeColumn]:
    """A table's columns by their fields: as they were described; where that is unknown, as the table itself has them."""
    if described is not None:
        return {column.field: column for column in described.columns}
    return {column.name: LakeColumn(column.name, column.name, column.type, key=False) for column in present if column.name != SPECIAL}
