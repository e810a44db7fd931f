"""The SQL that makes the changes of a whole set of rows. Its parameters are arrays, one for each column.

An array has the column's type as its element type. So each element is read by the type's own input or receive function, as the parameter of
a statement for one row is. A column whose type is itself an array is an exception: there are no arrays of arrays. Its values are passed as
texts and cast. Without a row in pg_cast, this cast calls the input function.

``unnest`` in the SELECT list gives the rows in their order, without storing them first.

UPDATE and DELETE find their rows by the target's key, as they do for one row. Their last parameter is the number of rows. If another number
is found, the statement fails (division by zero), because COMMIT is already sent. No two rows of a set may have the same key. These
statements are planned each time: a cached plan would join in a way that suits the table's size at that time.
"""

# names are quoted, values are parameters
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.protocol.messages import BINARY
from subscriber.protocol.quoting import quote_identifier
from subscriber.sinks.postgres.session.statement import Statement
from subscriber.sinks.postgres.tables.relation_mapping import RelationMapping, TargetColumn, qualified_name

__all__ = ["can_be_element", "delete_set", "elements", "insert_set", "update_set"]

_INT8: Final = 20


def can_be_element(column: TargetColumn, kind: int) -> bool:
    """Whether an array can hold values of the column that come in this format."""
    return column.array != 0 and (kind != BINARY or column.cast is None)


def _element(column: TargetColumn, number: int) -> str:
    return f"pg_catalog.unnest(${number})" + (f"::{column.cast}" if column.cast else "")


def _statement(mapping: RelationMapping, message_type: str, sql: str, indexes: Sequence[int], *, finds: bool = False) -> Statement:
    arrays = tuple(mapping.columns[index].array for index in indexes)
    return Statement(
        sql.encode("utf-8", "surrogateescape"),
        (*arrays, _INT8) if finds else arrays,
        (),
        message_type,
        mapping.table.name,
        reused=not finds,
        finds=finds,
        identity=tuple(mapping.columns[index].name for index, _ in mapping.key or ()),
        together=True,
    )


def elements(mapping: RelationMapping, indexes: Sequence[int]) -> str:
    """The rows, as a SELECT list. The column of index i is named c<i>."""
    return ", ".join(f"{_element(mapping.columns[index], number)} AS c{index}" for number, index in enumerate(indexes, 1))


def insert_set(mapping: RelationMapping, indexes: Sequence[int]) -> Statement:
    """Insert rows. ``indexes``: the columns, one for each array."""
    names = ", ".join(quote_identifier(mapping.columns[index].name) for index in indexes)
    sql = f"INSERT INTO {qualified_name(mapping.table.name)} ({names}) OVERRIDING SYSTEM VALUE SELECT {elements(mapping, indexes)}"
    return _statement(mapping, "INSERT", sql, indexes)


def update_set(mapping: RelationMapping, indexes: Sequence[int]) -> Statement:
    """Update rows, without a change of the key. ``indexes``: as in :func:`insert_set`, with all columns of the key."""
    assignments = ", ".join(f"{quote_identifier(mapping.columns[index].name)} = u.c{index}" for index in indexes)
    changed = f"UPDATE {mapping.table.scanned} AS x SET {assignments} FROM"
    return _statement(mapping, "UPDATE", _counted(mapping, changed, indexes), indexes, finds=True)


def delete_set(mapping: RelationMapping, indexes: Sequence[int]) -> Statement:
    """Delete rows. ``indexes``: as in :func:`insert_set`: the columns of the key."""
    changed = f"DELETE FROM {mapping.table.scanned} AS x USING"
    return _statement(mapping, "DELETE", _counted(mapping, changed, indexes), indexes, finds=True)


def _counted(mapping: RelationMapping, changed: str, indexes: Sequence[int]) -> str:
    found = " AND ".join(f"x.{quote_identifier(mapping.columns[index].name)} {equals} u.c{index}" for index, equals in mapping.key or ())
    return (
        f"WITH changed AS ({changed} (SELECT {elements(mapping, indexes)}) AS u WHERE {found} RETURNING 1)"
        f" SELECT pg_catalog.count(*) / (pg_catalog.count(*) = ${len(indexes) + 1})::int4 FROM changed"
    )
