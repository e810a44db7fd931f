"""A statement as the pipeline sends it, and what it is about."""

from __future__ import annotations

from dataclasses import dataclass

from subscriber.abc import TableName

__all__ = ["Statement"]


@dataclass(frozen=True, slots=True, eq=False)
class Statement:
    """SQL with typed parameters. Identity is what makes two of them equal: they are the keys of the prepared ones.

    Attributes:
        parameter_types: type oid of each parameter.
        columns: the column each parameter carries, for messages of errors.
        message_type: the change it carries out (``INSERT`` …), or empty.
        table: what it changes, if one table.
        reused: worth preparing under a name.
        finds: its one value tells how many rows were found; else the command's count tells.
    """

    sql: bytes
    parameter_types: tuple[int, ...] = ()
    columns: tuple[str, ...] = ()
    message_type: str = ""
    table: TableName | None = None
    reused: bool = False
    finds: bool = False
