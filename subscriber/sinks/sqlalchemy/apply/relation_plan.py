"""A relation of the publisher and its table in the target. Converts rows to vectors of parameters, and changes to statements.

Changes of one kind need different statements if their *patterns* differ. A pattern says which values were not sent, whether the key may
have changed, and, for a table without a key, which values are NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Dialect

from subscriber.abc import TableName
from subscriber.config import InsertConflict
from subscriber.errors import ApplyError, ProtocolError, RelationError
from subscriber.protocol.messages import BINARY, NULL, TEXT, UNCHANGED, Delete, Relation, TupleData, Update
from subscriber.sinks.sqlalchemy.apply.statements import Statement, delete_row, insert_row, update_row
from subscriber.sinks.sqlalchemy.schema.target_table import ColumnPlan, TargetTable
from subscriber.types import ValueRefused
from subscriber.types.codec import READ_ERRORS

__all__ = ["Operation", "RelationPlan", "RowBinder"]

_STATEMENTS: Final = 256
"""How many statements of one relation are cached."""
_APPLY_HINT: Final = "make the column text in the target, or compare its type with the publisher's"

# translations from the kinds of a row's values to parts of a pattern
_ONLY_UNCHANGED: Final = bytes(code if code == UNCHANGED else ord(".") for code in range(256))
_ONLY_NULL: Final = bytes(NULL if code in {NULL, UNCHANGED} else ord(".") for code in range(256))


Bind = Callable[[bytes], object]


def _nothing(_value: bytes) -> None:
    """The parameter for a column that the target lacks: None."""


class UnfitValue(ApplyError):
    """A value that the target's column cannot hold.

    Attributes:
        column: the name of the column.
    """

    def __init__(self, message: str, *, hint: str | None, column: str) -> None:
        super().__init__(message, sqlstate="22000", hint=hint)
        self.column = column


class RowBinder:
    """Converts the fields of a row to parameters for the driver."""

    __slots__ = ("_binary", "_columns", "_seen", "_text", "width")

    def __init__(self, columns: Sequence[ColumnPlan]) -> None:
        self._columns = columns
        self._text: list[Bind] = [_nothing if plan.column is None else plan.text for plan in columns]
        self._binary: list[Bind] = [_nothing if plan.column is None else plan.binary for plan in columns]
        self._seen = TEXT
        self.width = len(columns)

    @property
    def reading(self) -> tuple[int, list[Bind]]:
        """The format of the last row, TEXT or BINARY, and the function of each column that binds a value in that format."""
        return self._seen, self._binary if self._seen == BINARY else self._text

    def columns(self, rows: int, columns: Sequence[Sequence[bytes | None]], *, binary: bool) -> list[tuple[object, ...]]:
        """Bind the columns of rows whose values all have one format; return the rows.

        Raises:
            ApplyError: as in :meth:`fields`, for the first row that has such a value.
        """
        if not columns:
            return [()] * rows
        binds = self._binary if binary else self._text
        try:
            bound = list(map(_bound, binds, columns))
        except READ_ERRORS:
            return [self.fields(row, binary=binary) for row in zip(*columns, strict=True)]
        return list(zip(*bound, strict=True))

    def fields(self, values: Sequence[bytes | None], *, binary: bool) -> tuple[object, ...]:
        """Bind a row whose values all have one format.

        Raises:
            ApplyError: a value is not valid for its column's type, or does not fit into the target's column.
        """
        binds = self._binary if binary else self._text
        try:
            return tuple([None if value is None else bind(value) for bind, value in zip(binds, values, strict=True)])
        except READ_ERRORS:
            raise self._refused(binds, values) from None

    def row(self, data: TupleData) -> tuple[object, ...]:
        """Bind a row of the stream. A value that was not sent becomes None.

        Raises:
            ApplyError: as in :meth:`fields`.
        """
        kinds = data.kinds
        if BINARY not in kinds:
            self._seen = TEXT
            return self.fields(data.values, binary=False)
        if TEXT not in kinds:
            self._seen = BINARY
            return self.fields(data.values, binary=True)
        binds = [self._binary[number] if kind == BINARY else self._text[number] for number, kind in enumerate(kinds)]
        try:
            return tuple([None if value is None else bind(value) for bind, value in zip(binds, data.values, strict=True)])
        except READ_ERRORS:
            raise self._refused(binds, data.values) from None

    def some(self, data: TupleData, wanted: Sequence[int]) -> tuple[object, ...]:
        """Bind some columns. The others are None.

        Raises:
            ApplyError: as in :meth:`fields`.
        """
        found: list[object] = [None] * self.width
        for number in wanted:
            value = data.values[number]
            if value is not None:
                bind = self._binary[number] if data.kinds[number] == BINARY else self._text[number]
                try:
                    found[number] = bind(value)
                except READ_ERRORS as error:
                    raise _value_error(error, self._columns[number].name) from None
        return tuple(found)

    def _refused(self, binds: Sequence[Bind], values: Sequence[bytes | None]) -> ApplyError:
        for plan, bind, value in zip(self._columns, binds, values, strict=True):
            try:
                if value is not None:
                    bind(value)
            except READ_ERRORS as error:
                return _value_error(error, plan.name)
        return ApplyError("a value was rejected", sqlstate="22000", hint=_APPLY_HINT)


def _bound(bind: Bind, values: Sequence[bytes | None]) -> list[object]:
    if None in values:
        return [None if value is None else bind(value) for value in values]
    return list(map(bind, values))  # type: ignore[arg-type]


def _value_error(error: BaseException, column: str) -> ApplyError:
    if isinstance(error, ValueRefused):
        # its text never shows the value
        return UnfitValue(str(error), hint=error.hint or _APPLY_HINT, column=column)
    return UnfitValue("a value is not of its column's type", hint=_APPLY_HINT, column=column)


@dataclass(slots=True)
class Operation:
    """One change, with its bound values.

    Attributes:
        statement: the statement that makes it.
        vector: the values from which the statement's parameters are picked.
        keys: the keys of the rows that it touches; empty: they are not known.
    """

    statement: Statement
    vector: tuple[object, ...]
    keys: tuple[object, ...] = ()


class RelationPlan:
    """A relation and its table in the target, for the changes of one relation.

    Args:
        remote: the publisher's description.
        target: the table in the target.
        dialect: the target's.
        conflict: what an INSERT of an existing key does.
        keyed: only the key makes rows of the table unique: changes of different keys may be reordered.
        ordered: triggers of the target see every change: changes are made one by one, in order.
        problem: why UPDATE and DELETE are impossible, or None.

    Attributes:
        key: the columns (indexes) of the key, if changes of different keys may be reordered; None: they may not.
    """

    def __init__(
        self,
        remote: Relation,
        target: TargetTable,
        dialect: Dialect,
        conflict: InsertConflict,
        *,
        keyed: bool,
        ordered: bool,
        problem: RelationError | None,
    ) -> None:
        self.remote = remote
        self.target = target
        self.ordered = ordered
        self._problem = problem
        self._dialect = dialect
        self._conflict: InsertConflict = conflict
        self.key = target.key if keyed else None
        self._binder = RowBinder(target.columns)
        self._present = [number for number, plan in enumerate(target.columns) if plan.column is not None]
        self._insert: Statement | None = None
        self._statements: dict[object, Statement] = {}

    @property
    def name(self) -> TableName:
        """The name of the publisher's table."""
        return self.target.name

    @property
    def width(self) -> int:
        """How many columns are published."""
        return self._binder.width

    @property
    def reading(self) -> tuple[int, Sequence[Bind]]:
        """See :attr:`RowBinder.reading`."""
        return self._binder.reading

    @property
    def by_key(self) -> bool:
        """Whether UPDATE and DELETE are possible, and find rows by their key."""
        return self._problem is None and self.target.key is not None

    def insert_statement(self) -> Statement:
        """Return the statement for an INSERT.

        Raises:
            RelationError: ``insert_conflict`` is upsert, and that is not possible for this table.
        """
        statement = self._insert
        if statement is None:
            statement = self._insert = insert_row(self.target, self._dialect, self._conflict)
        return statement

    def update_statement(self, kinds: bytes | None = None, nulls: bytes = b"", *, key_kept: bool = True) -> Statement:
        """Return the statement for an UPDATE.

        Args:
            kinds: the kinds of the new row's values; None: all values are sent.
            nulls: the pattern of the old row's NULLs, for a table without a key.
            key_kept: the old row was not sent, so the key did not change.

        Raises:
            RelationError: there is no key, and the database cannot change only one of equal rows.
        """
        pattern = (kinds.translate(_ONLY_UNCHANGED) if kinds is not None else b"." * self.width, nulls, key_kept)
        statement = self._statements.get(pattern)
        if statement is None:
            sent = [number for number in self._present if pattern[0][number] != UNCHANGED]
            kept = self.target.key if key_kept else None
            changed = [number for number in sent if kept is None or number not in kept] or sent
            statement = self._kept(pattern, update_row(self.target, self._dialect, changed, _numbers(nulls)))
        return statement

    def delete_statement(self, nulls: bytes = b"") -> Statement:
        """Return the statement for a DELETE. ``nulls`` and errors as in :meth:`update_statement`."""
        statement = self._statements.get(nulls)
        if statement is None:
            statement = self._kept(nulls, delete_row(self.target, self._dialect, _numbers(nulls)))
        return statement

    def _require_width(self, data: TupleData) -> None:
        if len(data.kinds) != self._binder.width:
            raise ProtocolError(
                f"a row of {len(data.kinds)} columns for relation {self.name}, which was described with {self._binder.width}"
            )

    def require_updatable(self) -> None:
        """Check that UPDATE and DELETE can identify a row.

        Raises:
            RelationError: they cannot, in PostgreSQL's words.
        """
        if self._problem is not None:
            raise RelationError(str(self._problem), sqlstate=self._problem.sqlstate, hint=self._problem.hint)

    def insert(self, data: TupleData) -> Operation:
        """Bind an INSERT.

        Raises:
            ApplyError, RelationError, ProtocolError
        """
        self._require_width(data)
        statement = self.insert_statement()
        vector = self._binder.row(data)
        key = self.key
        return Operation(statement, vector, (self._of(key, vector),) if key is not None else ())

    def update(self, message: Update) -> Operation:
        """Bind an UPDATE.

        Raises:
            ApplyError, RelationError, ProtocolError
        """
        new, old = message.new, message.key or message.old
        self._require_width(new)
        search = new if old is None else old
        self._require_width(search)
        nulls = b"" if self.target.key is not None else search.kinds.translate(_ONLY_NULL)
        statement = self.update_statement(new.kinds, nulls, key_kept=old is None)
        vector = self._binder.row(new)
        found = vector if old is None else self._search(old)
        keys: tuple[object, ...] = ()
        if self.key is not None:
            before = self._of(self.key, found)
            after = before if old is None else self._of(self.key, vector)
            keys = (before,) if before == after else (before, after)
        return Operation(statement, vector + found, keys)

    def _kept(self, pattern: object, statement: Statement) -> Statement:
        # without a key there may be one statement for each set of NULL columns
        if len(self._statements) >= _STATEMENTS:
            self._statements.clear()
        self._statements[pattern] = statement
        return statement

    def _search(self, old: TupleData) -> tuple[object, ...]:
        """Bind the values that find the row: its old key, or all its columns."""
        return self._binder.row(old) if self.target.key is None else self._binder.some(old, self.target.key)

    def delete(self, message: Delete) -> Operation:
        """Bind a DELETE.

        Raises:
            ApplyError, RelationError, ProtocolError
        """
        old = message.key or message.old
        if old is None:
            raise ProtocolError("a Delete message without an old row")
        self._require_width(old)
        nulls = b"" if self.target.key is not None else old.kinds.translate(_ONLY_NULL)
        statement = self.delete_statement(nulls)
        found = self._search(old)
        return Operation(statement, (None,) * self._binder.width + found, (self._of(self.key, found),) if self.key is not None else ())

    @staticmethod
    def _of(key: Sequence[int], vector: Sequence[object]) -> object:
        return vector[key[0]] if len(key) == 1 else tuple(vector[number] for number in key)


def _numbers(nulls: bytes) -> frozenset[int]:
    return frozenset(number for number, code in enumerate(nulls) if code == NULL)
