"""Whether rows of a table can be found by the replica identity that its changes have, after ALTER TABLE.

A key column that came later is NULL in rows from before: the publisher does not say what ADD COLUMN, or RENAME COLUMN, gave them. An UPDATE
or DELETE that knows a row by it would find none, and pass it over. (Under REPLICA IDENTITY FULL ``adopted.py`` finds the row by its other
columns.) Rows that only came do no harm, and those that a TRUNCATE took away neither.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import pyarrow.compute as pc

from subscriber.sinks.spark.merge import read_base, read_changes
from subscriber.sinks.spark.schema import SPECIAL, TableSchema
from subscriber.sinks.spark.storage import Storage

__all__ = ["Before", "Findable"]

_ANY_CHANGES = ("c", "i", "u", "d")


@dataclass(frozen=True, slots=True)
class Before:
    """A table as it is before changes come.

    Attributes:
        directory: of its files, relative to the lake.
        files: those that have rows.
        fields: its columns.
        late: those of them that came when it had rows.
    """

    directory: str
    files: tuple[str, ...] = ()
    fields: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Walk:
    """Through changes in their order; ``lost`` is the column by which one that still counts does not find its row."""

    rows: bool
    fields: AbstractSet[str]
    lacking: set[str]
    lost: str | None = None

    def take(self, schema: TableSchema, operations: Sequence[str]) -> None:
        fields = {column.field for column in schema.columns}
        if self.rows:
            self.lacking |= fields - self.fields
        self.fields = fields
        for operation in operations:
            if operation == "t":
                self.rows, self.lacking, self.lost = False, set(), None
            elif operation in {"u", "d"} and self.lost is None and not schema.full:
                self.lost = next((key for key in schema.keys if key in self.lacking), None)
            self.rows = self.rows or operation in {"c", "i", "u"}


@dataclass(slots=True)
class Findable:
    """See the module.

    Attributes:
        storage: the lake's.
        complete: columns, and the files that have a value of each in all rows: files never change.
    """

    storage: Storage
    complete: dict[tuple[str, str], set[str]] = field(default_factory=dict)

    def lost(self, before: Before, schema: TableSchema, files: Sequence[tuple[str, TableSchema]], after: int) -> str | None:
        """The key column by which a change cannot find its row, as rows from before have no value there; None: there is none.

        Args:
            before: the table.
            schema: its columns from now on.
            files: landed ones, with what each was described with, in order.
            after: changes up to this LSN are in the table already.

        Raises:
            TargetError: a file cannot be read.
        """
        # whatever the changes are, mostly nothing of it can be: then nothing is read
        walk = _Walk(bool(before.files), before.fields, set(before.late))
        for _, described in files:
            walk.take(described, _ANY_CHANGES)
        if walk.lost is None:
            return None
        keys = {key for _, described in files if not described.full for key in described.keys}
        lacking = {key for key in sorted(before.late & keys) if self._is_lacking(before, schema, key)}
        walk = _Walk(bool(before.files), before.fields, lacking)
        for file, described in files:
            operations = read_changes(self.storage, [file], described, after, ["_op", "_lsn"])["_op"]
            walk.take(described, operations.to_pylist())
        return walk.lost

    def _is_lacking(self, before: Before, schema: TableSchema, key: str) -> bool:
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
