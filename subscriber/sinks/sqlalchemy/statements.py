"""Statements for the changes of one table, compiled once by SQLAlchemy and executed past it, with tuples the driver takes.

The values that a statement gets are picked out of one vector: those of the new row, and behind them those that find the row (of the old
row, or again of the new one). So a change is bound the same way whatever statement it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, Final, Literal

from sqlalchemy import ColumnElement, Dialect, Executable, Select, Table, and_, delete, insert, literal_column, select, text, tuple_, update
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.sql.dml import UpdateBase

from subscriber.abc import TableName
from subscriber.config import InsertConflict
from subscriber.errors import RelationError
from subscriber.sinks.sqlalchemy.bulk import Bulk
from subscriber.sinks.sqlalchemy.bulk import bulk as bulk_of
from subscriber.sinks.sqlalchemy.columns import TargetTable
from subscriber.sinks.sqlalchemy.multi_row import MultiRow, multi_row

__all__ = ["Kind", "RowSearch", "Statement", "delete_all", "delete_row", "insert_row", "update_row"]

Kind = Literal["INSERT", "UPDATE", "DELETE", "TRUNCATE"]

_NEW: Final = "subscriber_n"
_OLD: Final = "subscriber_o"
_CHAIN: Final = 100
"""Terms of a condition: an expression of SQLite is at most 1000 deep (SQLITE_MAX_EXPR_DEPTH)."""
_ROWIDS: Final = ("rowid", "_rowid_", "oid")


_WITH_LIMIT: Final = frozenset({"sqlite", "postgresql", "mysql", "mariadb"})
"""Dialects of which the LIMIT clause is known. Without it a search by key still finds one row."""


class RowSearch:
    """Whether the row of an UPDATE or DELETE exists. Compiled when it is used first: only a change that found no row needs it.

    Args:
        target: the table and its columns.
        dialect: the target's.
        predicate: what the statement finds its row by.
    """

    def __init__(self, target: TargetTable, dialect: Dialect, predicate: ColumnElement[bool]) -> None:
        self._target = target
        self.table = target.table
        self._dialect = dialect
        self._predicate = predicate

    @cached_property
    def query(self) -> tuple[str, Callable[[Sequence[object]], Any]]:
        """A query that returns one row if it exists, and from a vector to its parameters."""
        found: Select[Any] = select(literal_column("1")).select_from(self._target.table).where(self._predicate)
        if self._dialect.name in _WITH_LIMIT:
            found = found.suffix_with(text("LIMIT 1"))
        sql, _, pick = _text(found, len(self._target.columns), self._dialect)
        return sql, pick


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """One statement, ready for the driver.

    Attributes:
        sql: its text.
        kind: of the changes it makes.
        table: whose, at the publisher.
        identity: the columns that find a row, for messages; empty: all of them.
        pick: from the vector to the parameters.
        bulk: how many UPDATEs or DELETEs are made at once, where that is another way than ``executemany``;
        many: how many INSERTs are.
        order: from the vector of an UPDATE or DELETE to its row's key, which has an order in Python; None: it has none.
        search: looks for the row of an UPDATE or DELETE.
    """

    sql: str
    kind: Kind
    table: TableName
    identity: tuple[str, ...]
    pick: Callable[[Sequence[object]], Any]
    bulk: Bulk | None = None
    many: MultiRow | None = None
    order: Callable[[Sequence[object]], Any] | None = None
    search: RowSearch | None = None


def _compiled(statement: UpdateBase, kind: Kind, target: TargetTable, dialect: Dialect, search: RowSearch | None = None) -> Statement:
    sql, parameters, pick = _text(statement, len(target.columns), dialect)
    if kind == "INSERT" and dialect.name == "postgresql":
        # native sets identity columns too
        sql = sql.replace(") VALUES (", ") OVERRIDING SYSTEM VALUE VALUES (", 1)
    many = multi_row(sql, parameters, dialect) if kind == "INSERT" else None
    return Statement(sql, kind, target.name, (), pick, many=many, search=search)


def _text(statement: Executable, width: int, dialect: Dialect) -> tuple[str, int, Callable[[Sequence[object]], Any]]:
    """A statement's text, the number of its parameters, and from a vector to these."""
    compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
    names = list(compiled.positiontup or ()) if compiled.positional else list(compiled.params)
    positions = [_position(name, width) for name in names]
    return str(compiled), len(positions), _tuple_of(positions) if compiled.positional else _dict_of(names, positions)


def _keyed(statement: Any, kind: Kind, target: TargetTable, dialect: Dialect, changed: Sequence[int] | None) -> Statement:
    """Of one row, which is found by its key."""
    width, key = len(target.columns), target.key or ()
    # what is exact are integers or texts, and all values of a column the same of both; for PostgreSQL all are texts, in another order
    ordered = dialect.name != "postgresql" and all(target.columns[number].exact for number in key)
    predicate = _key(target)
    return replace(
        _compiled(statement.where(predicate), kind, target, dialect, RowSearch(target, dialect, predicate)),
        identity=tuple(target.columns[number].name for number in key),
        bulk=bulk_of(target, dialect, changed),
        order=itemgetter(*(width + number for number in key)) if ordered else None,
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


def insert_row(target: TargetTable, dialect: Dialect, conflict: InsertConflict = "error", into: Table | None = None) -> Statement:
    """INSERT of one row.

    Args:
        target: the table and its columns.
        dialect: the target's.
        conflict: what a row of the same key is: an error, or replaced.
        into: another table of the same columns.

    Raises:
        RelationError: an upsert is asked for, and the database has none, or the table has no key, or (MySQL) another one besides.
    """
    table = target.table if into is None else into
    values = {
        table.c[plan.name]: plan.parameter(f"{_NEW}{number}") for number, plan in enumerate(target.columns) if plan.column is not None
    }
    if conflict == "upsert":
        return _compiled(_upsert(target, dialect, values), "INSERT", target, dialect)
    return _compiled(insert(table).inline().values(values), "INSERT", target, dialect)


def _upsert(target: TargetTable, dialect: Dialect, values: dict[Any, Any]) -> UpdateBase:
    if target.unique is None:
        raise RelationError(
            f'table "{target.name}" of the target has no key for insert_conflict = upsert',
            hint="add a primary key, or leave the setting out",
        )
    keys = [target.columns[number].name for number in target.unique]
    rest = [column.name for column in values if column.name not in keys]
    match dialect.name:
        case "sqlite" | "postgresql":
            make = sqlite.insert if dialect.name == "sqlite" else postgresql.insert
            statement: Any = make(target.table).inline().values(values)
            if not rest:
                return statement.on_conflict_do_nothing(index_elements=keys)  # type: ignore[no-any-return]
            return statement.on_conflict_do_update(  # type: ignore[no-any-return]
                index_elements=keys, set_={name: statement.excluded[name] for name in rest}
            )
        case "mysql" | "mariadb":
            if target.otherwise_unique:
                # ON DUPLICATE KEY UPDATE would overwrite a row that is equal under any of them
                raise RelationError(
                    f'table "{target.name}" of the target has a unique key beside its primary key: insert_conflict = upsert would not tell '
                    "which row is meant",
                    sqlstate="55000",
                    hint="drop that key in the target, or leave the setting out",
                )
            replacing: Any = mysql.insert(target.table).inline().values(values)
            return replacing.on_duplicate_key_update(  # type: ignore[no-any-return]
                {name: replacing.inserted[name] for name in rest or keys}
            )
    raise RelationError(f"insert_conflict = upsert is not to be had on {dialect.name}", hint="leave the setting out")


def update_row(target: TargetTable, dialect: Dialect, changed: Sequence[int], nulls: frozenset[int]) -> Statement:
    """UPDATE of one row.

    Args:
        target: the table and its columns.
        dialect: the target's.
        changed: which columns are set.
        nulls: without a key, which columns of the row are NULL.

    Raises:
        RelationError: there is no key, and no way to say that one row only is meant.
    """
    values: dict[Any, Any] = {
        target.table.c[target.columns[number].name]: target.columns[number].parameter(f"{_NEW}{number}") for number in changed
    }
    if not values:
        # nothing of it was sent: whether the row is there is still told
        column = next(plan.column for plan in target.columns if plan.column is not None)
        values = {target.table.c[column.name]: target.table.c[column.name]}
    statement = update(target.table).values(values)
    if target.key is not None:
        return _keyed(statement, "UPDATE", target, dialect, changed)
    return _unkeyed(statement, "UPDATE", target, dialect, nulls)


def delete_row(target: TargetTable, dialect: Dialect, nulls: frozenset[int]) -> Statement:
    """DELETE of one row. The rest as :func:`update_row`."""
    statement = delete(target.table)
    if target.key is not None:
        return _keyed(statement, "DELETE", target, dialect, None)
    return _unkeyed(statement, "DELETE", target, dialect, nulls)


def _unkeyed(statement: Any, kind: Kind, target: TargetTable, dialect: Dialect, nulls: frozenset[int]) -> Statement:
    """Of one row, which is found by all its columns."""
    alike = _row(target, dialect, nulls)
    return _compiled(_one_row(statement, target, dialect, alike), kind, target, dialect, RowSearch(target, dialect, alike))


def _key(target: TargetTable) -> ColumnElement[bool]:
    return and_(*(target.columns[number].matches(f"{_OLD}{number}") for number in target.key or ()))


def _row(target: TargetTable, dialect: Dialect, nulls: frozenset[int]) -> ColumnElement[bool]:
    """All columns are as they were, NULL being NULL."""
    terms = [
        target.table.c[plan.name].is_(None) if number in nulls else plan.matches(f"{_OLD}{number}")
        for number, plan in enumerate(target.columns)
        if plan.column is not None
    ]
    if dialect.name != "sqlite" or len(terms) <= _CHAIN:
        return and_(*terms)
    # a chain of ANDs is an expression as deep as it is long; SQLAlchemy would join chains that are not compared with anything
    parts = (and_(*terms[place : place + _CHAIN]) for place in range(0, len(terms), _CHAIN))
    return and_(*(part == literal_column("1") for part in parts))


def _one_row(statement: Any, target: TargetTable, dialect: Dialect, alike: ColumnElement[bool]) -> UpdateBase:
    """Of rows that are alike, one is meant."""
    match dialect.name:
        case "sqlite":
            rowid = next((name for name in _ROWIDS if name not in {column.name.lower() for column in target.table.c}), None)
            if rowid is not None:
                return _where_first(statement, (rowid,), target, alike)
        case "postgresql":
            # each partition has rows of the same ctid
            return _where_first(statement, ("ctid", "tableoid"), target, alike)
        case "mysql" | "mariadb":
            return statement.where(alike).with_dialect_options(**{f"{dialect.name}_limit": 1})  # type: ignore[no-any-return]
    raise RelationError(
        f'rows of table "{target.name}" cannot be told apart in the target', sqlstate="55000", hint="add a primary key to the table"
    )


def _where_first(statement: Any, names: Sequence[str], target: TargetTable, alike: ColumnElement[bool]) -> UpdateBase:
    # inside, the names mean the row that is looked for; SQLAlchemy takes no notice of what is not a column
    which: list[ColumnElement[Any]] = [literal_column(name) for name in names]
    found = select(*which).select_from(target.table).where(alike).suffix_with(text("LIMIT 1")).correlate(None).scalar_subquery()
    return statement.where((tuple_(*which) if len(which) > 1 else which[0]) == found)  # type: ignore[no-any-return]


def delete_all(target: TargetTable, dialect: Dialect, *, restart_identity: bool) -> list[str]:
    """What empties a table within a transaction, as texts for the driver, without parameters.

    TRUNCATE commits implicitly on some databases; DELETE never does. A sequence is set back where the table has one that a transaction can
    set back: MariaDB and MySQL keep their counter.
    """
    quoted = dialect.identifier_preparer.format_table(target.table)
    texts = [f"DELETE FROM {quoted}"]  # noqa: S608 (quoted)
    if restart_identity and target.autoincrement:
        if dialect.name == "postgresql":
            texts.append(f"TRUNCATE {quoted} RESTART IDENTITY")
        elif dialect.name == "sqlite":
            name = target.table.name.replace("'", "''")
            texts.append(f"DELETE FROM sqlite_sequence WHERE name = '{name}'")  # noqa: S608 (quoted)
    return texts
