"""The rows of a table: Python values by column name. Rows have a unique key, and every change can be undone."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ApplyError
from subscriber.interfaces import TableName
from subscriber.types import Value

__all__ = ["MemoryColumn", "MemoryTable", "Undo", "Values"]

Values = dict[str, Value | None]
"""The values of a row by column name; None is NULL."""

Undo = Callable[[], None]
"""Undoes one change. Changes must be undone in reverse order."""

_DUPLICATE: Final = "23505"
_NULL: Final = "23502"


@dataclass(frozen=True, slots=True)
class MemoryColumn:
    """A column.

    Attributes:
        name: name of the column.
        not_null: NULL is rejected.
        default: value of rows that were inserted without one.
    """

    name: str
    not_null: bool = False
    default: Value | None = None


class MemoryTable:
    """One table. Each row has a number, in the order of insertion. Numbers are never used again.

    Args:
        name: name of the table.
        columns: columns in their order.
        key: names of the primary key's columns; empty: rows may occur twice.
        oid: identifies the table permanently.
    """

    def __init__(self, name: TableName, columns: Iterable[MemoryColumn], key: Sequence[str], oid: int) -> None:
        self.name = name
        self.columns = {column.name: column for column in columns}
        self.key = tuple(key)
        self.oid = oid
        self._rows: dict[int, Values] = {}
        self._index: dict[Hashable, int] = {}
        self._next = 0

    def rows(self) -> list[Values]:
        """Copies of all rows, oldest first."""
        return [dict(row) for row in self._rows.values()]

    def numbers(self) -> list[int]:
        return list(self._rows)

    def row(self, number: int) -> Values:
        """The row with this number. The caller must not change it."""
        return self._rows[number]

    def add_column(self, column: MemoryColumn) -> None:
        """Add a column. Existing rows get its default."""
        self.columns[column.name] = column
        for row in self._rows.values():
            row[column.name] = column.default

    def find(self, values: Values) -> int | None:
        """The number of the oldest row that has all these values. NULL is equal to NULL."""
        if self.key and all(name in values for name in self.key):
            number = self._index.get(self._key_of(values))
            return number if number is not None and _has(self._rows[number], values) else None
        return next((number for number, row in self._rows.items() if _has(row, values)), None)

    def insert(self, values: Values) -> tuple[int, Undo]:
        """Add a row. Columns without a value get their defaults.

        Raises:
            ApplyError: a row with its key exists, or a column that must not be NULL has no value.
        """
        row = {column.name: values.get(column.name, column.default) for column in self.columns.values()}
        self._require(row)
        number = self._next
        self._next += 1
        self._enter(number, row)

        def undo() -> None:
            self._leave(number)

        return number, undo

    def update(self, number: int, values: Values) -> Undo:
        """Change some values of a row.

        Raises:
            ApplyError: as in :meth:`insert`.
        """
        before = self._rows[number]
        after = before | values
        self._require(after)
        self._unindex(before)
        try:
            self._enter(number, after)
        except ApplyError:
            self._enter(number, before)
            raise

        def undo() -> None:
            self._unindex(after)
            self._enter(number, before)

        return undo

    def delete(self, number: int) -> Undo:
        """Remove a row. After an undo, it is the last row: the order of rows is not guaranteed."""
        row = self._leave(number)
        return lambda: self._enter(number, row)

    def clear(self) -> Undo:
        """Remove all rows."""
        rows, index, self._rows, self._index = self._rows, self._index, {}, {}

        def undo() -> None:
            self._rows, self._index = rows, index

        return undo

    def _enter(self, number: int, row: Values) -> None:
        if self.key and self._index.setdefault(self._key_of(row), number) != number:
            raise ApplyError(f'duplicate key value violates the primary key of table "{self.name}"', sqlstate=_DUPLICATE)
        self._rows[number] = row

    def _leave(self, number: int) -> Values:
        row = self._rows.pop(number)
        self._unindex(row)
        return row

    def _unindex(self, row: Values) -> None:
        if self.key:
            del self._index[self._key_of(row)]

    def _key_of(self, values: Mapping[str, Value | None]) -> Hashable:
        return tuple(_hashable(values[name]) for name in self.key)

    def _require(self, row: Values) -> None:
        for name, column in self.columns.items():
            if row[name] is None and (column.not_null or name in self.key):
                message = f'null value in column "{name}" of relation "{self.name.name}" violates not-null constraint'
                raise ApplyError(message, sqlstate=_NULL)


def _hashable(value: object) -> Hashable:
    """A hashable form of a value, to find equal values. Arrays become tuples; NaN, which is not equal to itself, becomes a text."""
    if isinstance(value, list):
        return tuple(map(_hashable, value))
    if value != value:  # noqa: PLR0124 -- only NaN is not equal to itself
        return "NaN"
    assert isinstance(value, Hashable)
    return value


def _has(row: Values, values: Values) -> bool:
    return all(_hashable(row.get(name)) == _hashable(value) for name, value in values.items())
