"""A relation of the publisher and its table in the target. Makes the forms of its changes, with their statements.

Changes of a *plain* form are read as runs: INSERT, UPDATE that does not change the key, and DELETE, if the target's key finds the row. All
other changes are decoded one by one: an UPDATE of the key, and changes of a table without a key, because NULLs in the old row need another
statement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Dialect

from subscriber.config import TableRules
from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.protocol.messages import NULL, UNCHANGED, Delete, Insert, Relation, Tag, TupleData, Update
from subscriber.sinks import runs
from subscriber.sinks.runs import Part, Row, is_plain, old_and_new, parts_of
from subscriber.sinks.sqlalchemy.apply.binding import Bind, bind_columns, binds_of, picked
from subscriber.sinks.sqlalchemy.apply.statements import Statement, delete_row, insert_row, update_row
from subscriber.sinks.sqlalchemy.schema.target_table import ColumnPlan, TargetTable
from subscriber.types.codec import READ_ERRORS

__all__ = ["Form", "RelationPlan"]

_FORMS: Final = 256
"""How many forms of one relation are cached."""
_PIECE: Final = 1000
"""The number of rows that are bound at once."""

_ONLY_NULL: Final = bytes(NULL if code in {NULL, UNCHANGED} else ord(".") for code in range(256))

Vector = list[Sequence[Any]]


@dataclass(slots=True, eq=False, kw_only=True)
class Form(runs.Form):
    """What the changes of a run have in common, and the statement that makes them.

    Attributes:
        plan: the relation and its table.
        statement: makes one change.
        binds: bind the values of a row.
        columns: the columns of these values.
        unsent: names of columns of an UPDATE whose unchanged values were not sent.
    """

    plan: RelationPlan
    statement: Statement
    binds: Sequence[Bind]
    columns: Sequence[ColumnPlan]
    unsent: Sequence[str] = ()

    def bound(self, rows: Sequence[Row]) -> Vector:
        """Bind rows; return their columns in the order of a vector, see :mod:`subscriber.sinks.sqlalchemy.apply.statements`.

        Raises:
            ApplyError: a value is not valid for its column's type, or does not fit into the target's column.
        """
        found = bind_columns(self.binds, self.columns, list(zip(*rows, strict=True)))
        if self.tag == Tag.DELETE:
            return [[None] * len(rows)] * self.plan.width + found
        return found + found if self.tag == Tag.UPDATE and len(found) == self.plan.width else found

    def parameters(self, rows: list[Row], pick: Callable[[Vector], Any]) -> list[Any]:
        """Bind rows, and pick the parameters of a statement for each.

        Args:
            rows: the rows. The list is emptied, so that no large value is in memory twice.
            pick: picks the parameters from a vector.

        Raises:
            ApplyError: as in :meth:`bound`.
        """
        found: list[Any] = []
        while rows:
            vector = self.bound(rows[:_PIECE])
            count = min(len(rows), _PIECE)
            del rows[:_PIECE]
            found += picked(vector, pick, count)
        return found


class RelationPlan:
    """A relation and its table in the target, for the changes of one relation.

    Args:
        remote: the publisher's description.
        target: the table in the target.
        dialect: the target's.
        keyed: only the key makes rows of the table unique: changes of different keys may be reordered.
        ordered: triggers of the target see every change: changes are made one by one, in order.
        problem: why UPDATE and DELETE are impossible, or None.
        rules: what to do about conflicts.
    """

    def __init__(
        self,
        remote: Relation,
        target: TargetTable,
        dialect: Dialect,
        *,
        keyed: bool,
        ordered: bool,
        problem: RelationError | None,
        rules: TableRules,
    ) -> None:
        self.remote = remote
        self.rules = rules
        self.target = target
        self.ordered = ordered
        self.width = len(target.columns)
        self._problem = problem
        self._dialect = dialect
        self._keyed = keyed
        self._forms: dict[object, Form] = {}
        self._inserts: Statement | None = None
        self._overwrites: Statement | None = None

    @property
    def inserts(self) -> Statement:
        """The INSERT of a whole row."""
        if self._inserts is None:
            self._inserts = insert_row(self.target, self._dialect)
        return self._inserts

    @property
    def overwrites(self) -> Statement | None:
        """The UPDATE of all columns of the row that has the new row's key; None: the table has no key."""
        if self._overwrites is None and self.target.key is not None:
            rest = [n for n, plan in enumerate(self.target.columns) if plan.column is not None and n not in self.target.key]
            self._overwrites = update_row(self.target, self._dialect, rest, frozenset())
        return self._overwrites

    @property
    def name(self) -> TableName:
        """The name of the publisher's table."""
        return self.target.name

    def require_updatable(self) -> None:
        """Check that UPDATE and DELETE can identify a row.

        Raises:
            RelationError: they cannot, in PostgreSQL's words.
        """
        if self._problem is not None:
            raise RelationError(str(self._problem), sqlstate=self._problem.sqlstate, hint=self._problem.hint)

    def form(self, message: Insert | Update | Delete) -> tuple[Form, Row | None]:
        """The form of a change. If it is not plain, also the values of the change.

        Raises:
            ProtocolError: a row has another number of columns than the relation, or a DELETE has no old row.
            RelationError: the target has no statement for such a change.
        """
        old, new = old_and_new(message, self.width, self.name)
        plain = is_plain(message, self.target.key)
        parts = parts_of(message)
        # without a key, a NULL in the row that is searched needs another statement
        nulls = b"" if plain else _nulls(self.target, old or new)
        pattern = type(message), parts, nulls, plain
        form = self._forms.get(pattern)
        if form is None:
            if len(self._forms) >= _FORMS:
                # without a key there may be one for each set of NULL columns
                self._forms.clear()
            form = self._forms[pattern] = self._made(message, parts, nulls, plain=plain)
        if plain:
            return form, None
        return form, (*(new.values if new is not None else ()), *(old.values if old is not None else ()))

    def _made(self, message: Insert | Update | Delete, parts: tuple[Part, ...], nulls: bytes, *, plain: bool) -> Form:
        target, dialect = self.target, self._dialect
        kinds = parts[-1][1]
        searched = b"" if isinstance(message, Insert) else parts[0][1]
        if target.key is not None:
            # of an old row, only the key is needed
            searched = bytes(kind if number in target.key else NULL for number, kind in enumerate(searched))
        if isinstance(message, Insert):
            tag, statement = Tag.INSERT, self.inserts
        elif isinstance(message, Delete):
            tag, kinds, statement = Tag.DELETE, searched, delete_row(target, dialect, _numbers(nulls))
        else:
            tag = Tag.UPDATE
            sent = [number for number, plan in enumerate(target.columns) if plan.column is not None and kinds[number] != UNCHANGED]
            kept = target.key if plain and target.key is not None else ()
            changed = [number for number in sent if number not in kept] or sent
            statement = update_row(target, dialect, changed, _numbers(nulls))
            if not plain and len(parts) > 1:
                kinds += searched
        columns = [*target.columns, *target.columns][: len(kinds)]
        new = parts[-1][1]
        binds = binds_of(columns, kinds)
        movable = plain and self._keyed and target.key is not None and all(kinds[number] != UNCHANGED for number in target.key)
        return Form(
            tag=tag,
            parts=parts if plain else (),
            same=target.key or (),
            table=self.name,
            keys=partial(self._keys, binds) if movable else None,
            key_space=self,
            ordered=self.ordered,
            plan=self,
            statement=statement,
            binds=binds,
            columns=columns,
            unsent=[plan.name for plan, kind in zip(target.columns, new, strict=True) if kind == UNCHANGED] if tag == Tag.UPDATE else (),
        )

    def _keys(self, binds: Sequence[Bind], rows: Sequence[Row]) -> Sequence[object]:
        """The keys of rows: values that are equal in Python if they are equal in the database."""
        key, columns = self.target.key or (), self.target.columns
        if len(key) == 1:
            number, bind = key[0], binds[key[0]]
            with contextlib.suppress(*READ_ERRORS):
                return [None if row[number] is None else bind(row[number]) for row in rows]  # type: ignore[arg-type]
        found = bind_columns(
            [binds[number] for number in key], [columns[number] for number in key], [[row[number] for row in rows] for number in key]
        )
        return found[0] if len(found) == 1 else list(zip(*found, strict=True))


def _nulls(target: TargetTable, row: TupleData | None) -> bytes:
    return b"" if target.key is not None or row is None else row.kinds.translate(_ONLY_NULL)


def _numbers(nulls: bytes) -> frozenset[int]:
    return frozenset(number for number, code in enumerate(nulls) if code == NULL)
