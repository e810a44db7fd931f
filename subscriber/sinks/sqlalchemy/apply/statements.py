"""Statements for the changes of one table. SQLAlchemy compiles each once; they are executed directly, with parameters for the driver.

The parameters of a statement are picked from one vector: the values of the new row, followed by the values that find the row (those of the
old row, or again those of the new row). So the values of a change are bound in the same way for every statement. The same functions pick
columns from a vector of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Dialect, Executable, Select, Table, and_, delete, insert, literal_column, select, text, update
from sqlalchemy.sql.dml import UpdateBase

from subscriber.errors import RelationError
from subscriber.interfaces import TableName
from subscriber.sinks.sqlalchemy.apply.bulk import Bulk
from subscriber.sinks.sqlalchemy.apply.bulk import bulk as bulk_of
from subscriber.sinks.sqlalchemy.apply.multi_row import MultiRow, multi_row
from subscriber.sinks.sqlalchemy.schema.target_table import TargetTable

__all__ = ["Kind", "RowSearch", "Statement", "delete_all", "delete_row", "insert_row", "update_row"]

Kind = Literal["INSERT", "UPDATE", "DELETE", "TRUNCATE"]

_NEW: Final = "subscriber_n"
_OLD: Final = "subscriber_o"
_CHAIN: Final = 100
"""Terms in one chain of a condition. The depth of an expression in SQLite is limited to 1000 (SQLITE_MAX_EXPR_DEPTH)."""
_ROWIDS: Final = ("rowid", "_rowid_", "oid")


_WITH_LIMIT: Final = frozenset({"sqlite", "mysql", "mariadb"})
"""Dialects that have a LIMIT clause. Without it, a search by key still finds only one row."""


class RowSearch:
    """Finds out whether the row of an UPDATE or DELETE exists. It is compiled at first use: only a change that found no row needs it.

    Args:
        target: the table and its columns.
        dialect: the target's.
        predicate: the condition by which the statement finds its row.
    """

    def __init__(self, target: TargetTable, dialect: Dialect, predicate: ColumnElement[bool]) -> None:
        self._target = target
        self.table = target.table
        self._dialect = dialect
        self._predicate = predicate

    @cached_property
    def query(self) -> tuple[str, Callable[[Sequence[object]], Any]]:
        """A query that returns a row if the row exists, and the function that picks its parameters from a vector."""
        return self._query(literal_column("1"))

    @cached_property
    def whole(self) -> tuple[str, Callable[[Sequence[object]], Any]]:
        """The same, for all columns of the row."""
        return self._query(*self._target.table.c)

    def _query(self, *columns: ColumnElement[Any]) -> tuple[str, Callable[[Sequence[object]], Any]]:
        found: Select[Any] = select(*columns).select_from(self._target.table).where(self._predicate)
        if self._dialect.name in _WITH_LIMIT:
            found = found.suffix_with(text("LIMIT 1"))
        sql, _, pick = _text(found, len(self._target.columns), self._dialect)
        return sql, pick


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """One statement, ready for the driver.

    Attributes:
        sql: its text.
        kind: the kind of the changes that it makes.
        table: the publisher's table.
        identity: the columns that find a row, for messages; empty: all columns.
        pick: picks the parameters from a vector.
        bulk: the statements for many UPDATEs or DELETEs, if they are used instead of ``executemany``.
        many: the statement for many INSERTs, if it is used instead of ``executemany``.
        sortable: it is an UPDATE or DELETE of a row that is found by a key, and Python can sort such keys.
        search: finds out whether the row of an UPDATE or DELETE exists.
    """

    sql: str
    kind: Kind
    table: TableName
    identity: tuple[str, ...]
    pick: Callable[[Sequence[object]], Any]
    bulk: Bulk | None = None
    many: MultiRow | None = None
    sortable: bool = False
    search: RowSearch | None = None


def _compiled(statement: UpdateBase, kind: Kind, target: TargetTable, dialect: Dialect, search: RowSearch | None = None) -> Statement:
    width = len(target.columns)
    sql, positions, pick = _text(statement, width, dialect)
    if kind != "INSERT":
        return Statement(sql, kind, target.name, (), pick, search=search)
    return Statement(sql, kind, target.name, (), pick, many=multi_row(sql, len(positions), dialect))


def _text(statement: Executable, width: int, dialect: Dialect) -> tuple[str, list[int], Callable[[Sequence[object]], Any]]:
    """Return a statement's text, the positions of its parameters in a vector, and the function that picks them."""
    compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    names = list(compiled.positiontup or ()) if compiled.positional else list(compiled.params)
    positions = [_position(name, width) for name in names]
    return str(compiled), positions, _tuple_of(positions) if compiled.positional else _dict_of(names, positions)


def _keyed(statement: Any, kind: Kind, target: TargetTable, dialect: Dialect, changed: Sequence[int] | None) -> Statement:
    """Complete a statement whose row is found by its key."""
    key = target.key or ()
    predicate = _key(target)
    return replace(
        _compiled(statement.where(predicate), kind, target, dialect, RowSearch(target, dialect, predicate)),
        identity=tuple(target.columns[number].name for number in key),
        bulk=bulk_of(target, dialect, changed),
        # exact columns hold only integers, or only texts
        sortable=all(target.columns[number].exact for number in key),
    )


def _position(name: str, width: int) -> int:
    if name.startswith(_NEW):
        return int(name[len(_NEW) :])
    return width + int(name[len(_OLD) :])


def _tuple_of(positions: Sequence[int]) -> Callable[[Sequence[object]], Any]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda vector: tuple(vector[position] for position in positions)


def _dict_of(names: Sequence[str], positions: Sequence[int]) -> Callable[[Sequence[object]], Any]:
    return lambda vector: {name: vector[position] for name, position in zip(names, positions, strict=True)}


def insert_row(target: TargetTable, dialect: Dialect, into: Table | None = None) -> Statement:
    """Build an INSERT of one row.

    Args:
        target: the table and its columns.
        dialect: the target's.
        into: another table of the same columns, to insert there.
    """
    table = target.table if into is None else into
    values = {
        table.c[plan.name]: plan.parameter(f"{_NEW}{number}") for number, plan in enumerate(target.columns) if plan.column is not None
    }
    return _compiled(insert(table).inline().values(values), "INSERT", target, dialect)


def update_row(target: TargetTable, dialect: Dialect, changed: Sequence[int], nulls: frozenset[int]) -> Statement:
    """Build an UPDATE of one row.

    Args:
        target: the table and its columns.
        dialect: the target's.
        changed: the columns to set.
        nulls: for a table without a key, the columns of the row that are NULL.

    Raises:
        RelationError: there is no key, and the database cannot change only one of equal rows.
    """
    values: dict[Any, Any] = {
        target.table.c[target.columns[number].name]: target.columns[number].parameter(f"{_NEW}{number}") for number in changed
    }
    if not values:
        # no value was sent: the statement changes nothing, but its row count still tells whether the row exists
        column = next(plan.column for plan in target.columns if plan.column is not None)
        values = {target.table.c[column.name]: target.table.c[column.name]}
    statement = update(target.table).values(values)
    if target.key is not None:
        return _keyed(statement, "UPDATE", target, dialect, changed)
    return _unkeyed(statement, "UPDATE", target, dialect, nulls)


def delete_row(target: TargetTable, dialect: Dialect, nulls: frozenset[int]) -> Statement:
    """Build a DELETE of one row. Arguments and errors as in :func:`update_row`."""
    statement = delete(target.table)
    if target.key is not None:
        return _keyed(statement, "DELETE", target, dialect, None)
    return _unkeyed(statement, "DELETE", target, dialect, nulls)


def _unkeyed(statement: Any, kind: Kind, target: TargetTable, dialect: Dialect, nulls: frozenset[int]) -> Statement:
    """Complete a statement whose row is found by all its columns."""
    alike = _row(target, dialect, nulls)
    return _compiled(_one_row(statement, target, dialect, alike), kind, target, dialect, RowSearch(target, dialect, alike))


def _key(target: TargetTable) -> ColumnElement[bool]:
    return and_(*(target.columns[number].matches(f"{_OLD}{number}") for number in target.key or ()))


def _row(target: TargetTable, dialect: Dialect, nulls: frozenset[int]) -> ColumnElement[bool]:
    """Return the condition that all columns have the values of the old row, with NULL equal to NULL."""
    terms = [
        target.table.c[plan.name].is_(None) if number in nulls else plan.matches(f"{_OLD}{number}")
        for number, plan in enumerate(target.columns)
        if plan.column is not None
    ]
    if dialect.name != "sqlite" or len(terms) <= _CHAIN:
        return and_(*terms)
    # an AND of n terms is an expression of depth n; the comparison with 1 keeps SQLAlchemy from joining the parts
    parts = (and_(*terms[place : place + _CHAIN]) for place in range(0, len(terms), _CHAIN))
    return and_(*(part == literal_column("1") for part in parts))


def _one_row(statement: Any, target: TargetTable, dialect: Dialect, alike: ColumnElement[bool]) -> UpdateBase:
    """Restrict a statement to one of several equal rows."""
    match dialect.name:
        case "sqlite":
            rowid = next((name for name in _ROWIDS if name not in {column.name.lower() for column in target.table.c}), None)
            if rowid is not None:
                return _where_first(statement, rowid, target, alike)
        case "mysql" | "mariadb":
            return statement.where(alike).with_dialect_options(**{f"{dialect.name}_limit": 1})  # type: ignore[no-any-return]
    raise RelationError(
        f'rows of table "{target.name}" cannot be told apart in the target', sqlstate="55000", hint="add a primary key to the table"
    )


def _where_first(statement: Any, rowid: str, target: TargetTable, alike: ColumnElement[bool]) -> UpdateBase:
    # in the subquery, the name belongs to its own table; SQLAlchemy does not resolve it, because it is a literal column
    which: ColumnElement[Any] = literal_column(rowid)
    found = select(which).select_from(target.table).where(alike).suffix_with(text("LIMIT 1")).correlate(None).scalar_subquery()
    return statement.where(which == found)  # type: ignore[no-any-return]


def delete_all(target: TargetTable, dialect: Dialect, *, restart_identity: bool) -> list[str]:
    """Return the statements that empty a table within a transaction, without parameters.

    DELETE is used because TRUNCATE commits implicitly on some databases. ``restart_identity`` restarts the table's counter on SQLite.
    MariaDB and MySQL cannot restart their counter within a transaction: it stays.
    """
    quoted = dialect.identifier_preparer.format_table(target.table)
    texts = [f"DELETE FROM {quoted}"]  # noqa: S608 (quoted)
    if restart_identity and target.autoincrement and dialect.name == "sqlite":
        name = target.table.name.replace("'", "''")
        texts.append(f"DELETE FROM sqlite_sequence WHERE name = '{name}'")  # noqa: S608 (quoted)
    return texts
