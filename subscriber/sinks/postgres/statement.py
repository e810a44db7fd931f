"""A statement as the pipeline sends it, and what it is about."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.abc import TableName

__all__ = ["Statement", "Written"]


@dataclass(frozen=True, slots=True)
class Written:
    """The row that an INSERT or UPDATE writes, as SQL over the statement's own parameters: to find out what it collided with.

    Attributes:
        scanned: the table, for FROM.
        row: a query for the row, all columns of the target's table under their names.
        own: the predicate (over alias x) that finds the row that is updated; empty for an INSERT.
        role: to look as.
    """

    scanned: str
    row: str
    own: str
    role: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """SQL with typed parameters. Identity is what makes two of them equal: they are the keys of the prepared ones.

    Attributes:
        parameter_types: type oid of each parameter.
        columns: the column each parameter carries, for messages of errors.
        message_type: the change it carries out (``INSERT`` …), or empty.
        table: what it changes, if one table.
        reused: worth preparing under a name.
        finds: its first value tells how many rows were found; else the command's count tells.
        identity: columns that its row is looked up by, for messages of conflicts; empty: all of them.
        written: what it writes; of an INSERT or UPDATE.
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
