"""A statement for the pipeline, with the change that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from subscriber.interfaces import TableName

__all__ = ["Resolution", "Statement", "Truncated", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """The row that an INSERT or UPDATE writes, as SQL with the statement's own parameters. It is used to find the conflicting rows.

    Attributes:
        scanned: the table, for FROM.
        row: a query for the row, with all columns of the target's table.
        own: the predicate (over alias x) that finds the row to update; empty for an INSERT.
        role: the role that runs the query; None: the session's own role.
    """

    scanned: str
    row: str
    own: str
    role: str | None


@dataclass(frozen=True, slots=True)
class Truncated:
    """A table that is truncated, perhaps with others.

    Attributes:
        name: its name.
        scanned: the table, for TRUNCATE.
        role: the role that changes it; None: the session's own role.
        referenced_by: tables with a foreign key to it.
    """

    name: TableName
    scanned: str
    role: str | None
    referenced_by: frozenset[TableName]


@dataclass(frozen=True, slots=True)
class Resolution:
    """How a statement resolves conflicts.

    Attributes:
        rules: the rules of the table, by kind of conflict.
        indexes: name and key of each unique index that is searched.
        timed: the last parameter is the commit time on the publisher, in microseconds since 2000; NULL: it is not known yet.
        unsent: columns of the new row that the publisher did not send.
        logged: its conflicts are written into a table.
    """

    rules: Mapping[str, str]
    indexes: tuple[tuple[str, tuple[str, ...]], ...]
    timed: bool
    unsent: tuple[str, ...]
    logged: bool


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """SQL with typed parameters. Statements are compared by identity, because they are the keys of the prepared statements.

    Attributes:
        parameter_types: type oid of each parameter.
        columns: the column of each parameter, for error messages.
        message_type: the change that it makes (``INSERT`` …), or empty.
        table: the table that it changes, if it is one table.
        reused: prepare it under a name.
        finds: its first result column is the number of rows found; else the command's row count is.
        identity: columns that find its row, for messages about conflicts; empty: all columns.
        written: the row that an INSERT or UPDATE writes.
        together: it makes the changes of a set of rows. Its parameters are arrays. It fails if a row is not found.
        ends: it ends the transaction: constraints that were deferred are checked then.
        truncated: the tables that it truncates.
        hint: what to do if it is rejected.
        resolves: it resolves conflicts by rules; None: by those of a native subscription.
    """

    sql: bytes
    parameter_types: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    message_type: str = ""
    table: TableName | None = None
    reused: bool = False
    finds: bool = False
    identity: tuple[str, ...] = ()
    written: Written | None = None
    together: bool = False
    ends: bool = False
    truncated: tuple[Truncated, ...] = ()
    hint: str = ""
    resolves: Resolution | None = None
