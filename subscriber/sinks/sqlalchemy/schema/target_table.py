"""Matches a published table with a table of the target: the target's column for each value, and the value's conversion.

Columns are matched by name. :mod:`subscriber.sinks.sqlalchemy.schema.converters` converts each value for the driver, or rejects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import (
    Column,
    ColumnElement,
    LargeBinary,
    Table,
    and_,
    bindparam,
    cast,
    collate,
    func,
    literal_column,
    or_,
    true,
    type_coerce,
)
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.types import UserDefinedType

from subscriber.errors import RelationError
from subscriber.interfaces import PublishedTable, TableName
from subscriber.protocol.messages import Relation
from subscriber.sinks.sqlalchemy.schema.converters import Converter, Family, Unfit, converter, family_of
from subscriber.sinks.sqlalchemy.schema.names import folded_column
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable, reflect
from subscriber.types import PgType, TypeRegistry, codec

__all__ = ["ColumnPlan", "Comparison", "TargetTable", "in_range", "load_target_table", "plan_target_table", "source_types"]

_CREATE_HINT: Final = "create the table in the target, or run with --create-tables"
_STREAM_HINT: Final = (
    "if the table was renamed on the publisher, rename it in the target; if it is new, create it in the target, then start the run again"
    " (or `subscriber alter NAME --refresh`): that adds and copies it"
)
Bind = Callable[[bytes], object]


class AsIs(UserDefinedType[Any]):
    """The type of a parameter that goes to the driver unchanged. SQLAlchemy replaces NullType by the column's type, with its processors."""

    cache_ok = True


class Comparison(StrEnum):
    """How a column is compared with a value so that only the identical value matches."""

    PLAIN = "plain"
    COLLATED = "collated"
    """With the collation BINARY: SQLite, because the column may have another collation."""
    KEY_COLLATED = "key collated"
    """With the column's collation and with BINARY, so that SQLite can use an index of either collation."""
    BYTES = "bytes"
    """By the bytes of its text: MySQL, if different texts are equal under the column's collation."""
    KEY_BYTES = "key bytes"
    """With the column's collation and by the bytes, so that MySQL can use an index."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnPlan:
    """One published column.

    Attributes:
        name: on the publisher, and in the target.
        source: its type on the publisher.
        column: the target's column; None if the target has no such column.
        text, binary: convert the bytes of a value, in text or binary format, to a parameter for the driver, without SQLAlchemy's
            processors. They raise :data:`subscriber.types.codec.READ_ERRORS` (ValueRefused if the column cannot hold the value).
        comparison: how :meth:`matches` compares.
        exact: whether values that are equal under a unique key of the target always give parameters that are equal in Python.
    """

    name: str
    source: PgType
    column: Column[Any] | None
    text: Bind
    binary: Bind
    comparison: Comparison = Comparison.PLAIN
    exact: bool = False

    def parameter(self, name: str) -> ColumnElement[Any]:
        """Return the expression for a value of the column in a statement: a parameter of this name, with its cast."""
        return bindparam(name, type_=AsIs())

    def matches(self, name: str) -> ColumnElement[bool]:
        """Return the condition that the column has a value other than NULL: that of the parameter of this name."""
        column, parameter = self._present(), self.parameter(name)
        match self.comparison:
            case Comparison.COLLATED:
                return column == collate(parameter, "BINARY")
            case Comparison.KEY_COLLATED:
                return and_(column == parameter, column == collate(parameter, "BINARY"))
            case Comparison.BYTES:
                return _bytes(column) == cast(parameter, LargeBinary())
            case Comparison.KEY_BYTES:
                return and_(column == parameter, _bytes(column) == cast(parameter, LargeBinary()))
        return column == parameter

    def _present(self) -> Column[Any]:
        if self.column is None:
            raise RelationError(f'the target has no column "{self.name}"')
        return self.column


def _bytes(column: Column[Any]) -> ColumnElement[Any]:
    # converted to the connection's character set, which the parameter has
    return cast(func.convert(column.op("USING")(literal_column("utf8mb4"))), LargeBinary())


@dataclass(frozen=True, slots=True, eq=False)
class TargetTable:
    """A published table and its table in the target.

    Attributes:
        name: on the publisher.
        table: in the target.
        columns: in the order of the published columns.
        key: the columns (indexes) by which a row is found; None: a row is found by all columns (REPLICA IDENTITY FULL), and a change is
            for only one of the rows that match.
        missing: names of published columns that the target lacks.
        autoincrement: whether the table has a sequence or counter that RESTART IDENTITY restarts.
        taken: the missing columns whose names the target does not distinguish from another column, each with the other column's name.
    """

    name: TableName
    table: Table
    columns: tuple[ColumnPlan, ...]
    key: tuple[int, ...] | None
    missing: tuple[str, ...]
    autoincrement: bool
    taken: tuple[tuple[str, str], ...] = ()

    def require_complete(self) -> None:
        """Check that the target has every published column.

        Raises:
            RelationError: it lacks one, in PostgreSQL's words.
        """
        self.require_addable()
        if self.missing:
            raise _relation_error(
                self.name,
                "is missing replicated",
                self.missing,
                "add the column to the target's table, set schema_change = add, or leave it out of the publication",
            )

    def require_addable(self) -> None:
        """Check that the target distinguishes the missing columns from its other columns.

        Raises:
            RelationError
        """
        for name, other in self.taken:
            raise RelationError(
                f'columns "{name}" and "{other}" of table "{self.name}" have the same name in the target',
                sqlstate="42701",
                hint="rename it on the publisher, and set schema_change = ignore meanwhile (its values until then are not applied);"
                " if it was renamed, rename the target's column",
            )


def in_range(column: Column[Any], low: int | None, high: int | None) -> ColumnElement[bool]:
    """The condition that a column's value is from ``low`` to before ``high``. NULL lies above all values."""
    above = [column >= type_coerce(low, AsIs())] if low is not None else []
    if high is None:
        return or_(*above, column.is_(None)) if above else true()
    return and_(*above, column < type_coerce(high, AsIs()))


def source_types(table: Relation | PublishedTable, published: PublishedTable | None = None) -> list[tuple[str, PgType]]:
    """Return name and type of each column.

    Args:
        table: as the stream or the publisher's catalog describes it.
        published: the latest description from the publisher's catalog, for types that are not built in.
    """
    registry = TypeRegistry()
    if published is not None:
        registry.add(published.types)
    if isinstance(table, PublishedTable):
        registry.add(table.types)
        modifiers = table.column_modifiers or (-1,) * len(table.columns)
        return [
            (name, registry.resolve(oid, modifier))
            for name, oid, modifier in zip(table.columns, table.column_types, modifiers, strict=True)
        ]
    return [(column.name, registry.resolve(column.type_oid, column.type_modifier)) for column in table.columns]


async def load_target_table(
    connection: AsyncConnection, relation: Relation | PublishedTable, published: PublishedTable | None = None
) -> TargetTable:
    """Find a published table in the target and plan the conversion of its values. Only reads.

    Args:
        connection: to the target.
        relation: the current description of the table; the plan's columns have its order.
        published: the latest description from the publisher's catalog, for types that are not built in.

    Raises:
        RelationError: the table does not exist, a column is generated there, or cannot store the published column's type without loss.
    """
    name = relation.name if isinstance(relation, PublishedTable) else TableName(relation.namespace, relation.name)
    return plan_target_table(await reflect(connection, name), relation, published, connection.dialect.name)


def plan_target_table(
    found: ReflectedTable | None, relation: Relation | PublishedTable, published: PublishedTable | None, dialect: str
) -> TargetTable:
    """The same, of a table of the target that was read already; None: it is not there.

    Raises:
        RelationError: as :func:`load_target_table`.
    """
    name = relation.name if isinstance(relation, PublishedTable) else TableName(relation.namespace, relation.name)
    if found is None:
        error = RelationError(
            f'logical replication target relation "{name}" does not exist',
            sqlstate="55000",
            hint=_CREATE_HINT if isinstance(relation, PublishedTable) else _STREAM_HINT,
        )
        error.missing = relation.relation_id, str(name)
        raise error
    sources = source_types(relation, published)
    names = [column for column, _ in sources]
    generated = [column for column in names if column in found.generated]
    if generated:
        hint = "make it an ordinary column of the target's table, or leave it out of the publication"
        raise _relation_error(name, "has incompatible generated", generated, hint)
    key = _key(relation, names, found)
    plans = tuple(
        _plan(name, found, column, source, dialect, indexed=key is not None and index in key)
        for index, (column, source) in enumerate(sources)
    )
    return TargetTable(
        name,
        found.table,
        plans,
        key,
        tuple(column for column in names if column not in found.table.c),
        found.autoincrement,
        _taken(names, found, dialect),
    )


def _taken(names: Sequence[str], found: ReflectedTable, dialect: str) -> tuple[tuple[str, str], ...]:
    present = {folded_column(column.name, dialect): str(column.name) for column in found.table.c}
    pairs = ((name, present.setdefault(folded_column(name, dialect), name)) for name in names if name not in found.table.c)
    return tuple((name, other) for name, other in pairs if other != name)


def _relation_error(table: TableName, what: str, columns: Sequence[str], hint: str) -> RelationError:
    quoted = ", ".join(f'"{column}"' for column in columns)
    message = f'logical replication target relation "{table}" {what} column{"s" if len(columns) > 1 else ""}: {quoted}'
    return RelationError(message, sqlstate="55000", hint=hint)


def _positions(columns: Sequence[str], names: Sequence[str]) -> tuple[int, ...] | None:
    return tuple(names.index(column) for column in columns) if set(columns) <= set(names) else None


def _key(relation: Relation | PublishedTable, names: Sequence[str], found: ReflectedTable) -> tuple[int, ...] | None:
    """Return the columns of the publisher's replica identity; with FULL, those of a NOT NULL key of the target that is published whole."""
    if relation.replica_identity == "f":
        for columns in found.keys:
            positions = _positions(columns, names)
            if positions is not None and found.not_null.issuperset(columns):
                return positions
        return None
    if isinstance(relation, PublishedTable):
        flagged = set(relation.key_columns)
    else:
        flagged = {column.name for column in relation.columns if column.key}
    return tuple(index for index, column in enumerate(names) if column in flagged and column in found.table.c) or None


def _plan(table: TableName, found: ReflectedTable, name: str, source: PgType, dialect: str, *, indexed: bool) -> ColumnPlan:
    reading = codec(source)
    column = found.table.c.get(name)
    if column is None:
        return ColumnPlan(name, source, None, reading.text_from_text, reading.text_from_binary)
    try:
        binds: Converter = converter(reading, column.type, dialect)
    except Unfit as reason:
        raise RelationError(
            f'column "{name}" of table "{table}": {reason}', sqlstate="42804", hint="make it a text column in the target"
        ) from None
    comparison = Comparison.PLAIN
    family = family_of(column.type, dialect)
    exact = family is Family.INTEGER or (family is Family.TEXT and name not in found.inexact)
    if dialect == "sqlite":
        if family in {Family.TEXT, Family.ANY}:
            comparison = Comparison.KEY_COLLATED if indexed else Comparison.COLLATED
    elif name in found.inexact:
        comparison = Comparison.KEY_BYTES if indexed else Comparison.BYTES
    return ColumnPlan(name, source, column, binds.text, binds.binary, comparison, exact)
