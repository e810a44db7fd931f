"""What to change in a table of the target, so that it has the columns of the publisher's table, and the abilities to do so."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from subscriber.interfaces.values import TableName

if TYPE_CHECKING:
    from subscriber.errors import RelationError
    from subscriber.protocol.lsn import Lsn
    from subscriber.protocol.messages import Relation
    from subscriber.transaction.column_history import KnownColumns

__all__ = ["AddColumn", "ChangeType", "ColumnPlan", "ColumnPlanner", "FillingSink", "FollowingSink", "NewColumnValues"]


@dataclass(frozen=True, slots=True)
class AddColumn:
    """A new column. Names and types are the publisher's.

    Attributes:
        name: its name.
        type: its type as PostgreSQL's ``format_type`` writes it.
        collation: if it is not the type's; else None.
        missing: what the rows have that exist, as text; None: NULL.
        default: the expression of its default now, or None.
        unknown: the error if the column must be added: it is not known what the rows have. None: it is known.
    """

    name: str
    type: str
    collation: str | None = None
    missing: str | None = None
    default: str | None = None
    unknown: RelationError | None = None


@dataclass(frozen=True, slots=True)
class ChangeType:
    """A column with another type.

    Attributes:
        name: its new name.
        old, new: its types.
    """

    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class ColumnPlan:
    """The changes of one table. Names are the publisher's.

    Attributes:
        known: what to store as the known columns; None: nothing.
        dropped: columns that the publisher dropped. They lose NOT NULL, so that rows without them can be stored.
        drop: these are dropped in the target as well, unless another subscription writes the table.
        renamed: the new name by the old one.
        retyped: columns with other types.
        added: new columns.
    """

    known: KnownColumns | None = None
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None
    retyped: tuple[ChangeType, ...] = ()
    added: tuple[AddColumn, ...] = ()
    drop: bool = False

    def __bool__(self) -> bool:
        return bool(self.dropped or self.renamed or self.retyped or self.added)


ColumnPlanner = Callable[["Relation", "Lsn", "KnownColumns | None"], Awaitable["ColumnPlan"]]
"""Compares the columns of a Relation message with the publisher's catalog. ``planner(relation, final_lsn, known)``.

Raises RelationError if it is not certain what changed, or what the rows have in a new column.
"""


NewColumnValues = Callable[["Relation", Sequence[str]], Awaitable[Mapping[str, str | None]]]
"""What the publisher's rows that are not sent again have in new columns: texts of PostgreSQL, or None for NULL.

``values(relation, names)`` raises RelationError if it is not known.
"""


@runtime_checkable
class FillingSink(Protocol):
    """An opened sink that adds new columns by itself (``schema_change = add``), and can fill them in the rows that it has."""

    def fill(self, values: NewColumnValues) -> None:
        """From now on, let existing rows have these values in a column that is added."""
        ...


@runtime_checkable
class FollowingSink(Protocol):
    """An opened sink that changes the columns of its tables as the publisher's were changed (``schema_change = follow``).

    It stores the known columns of each table in the target, in the same transaction as the changes.
    """

    def follow(self, planner: ColumnPlanner) -> None:
        """From now on, ask the planner about each Relation message of a table whose changes are applied, and make what it answers.

        The changes are a part of the transaction whose row needs them first.
        """
        ...

    async def unknown_columns(self) -> Sequence[TableName]:
        """The synchronized tables whose columns are not known."""
        ...

    async def store_columns(self, columns: Mapping[TableName, KnownColumns]) -> None:
        """Store the known columns of tables. Durable on return."""
        ...

    async def forget_columns(self) -> None:
        """Forget the known columns of all tables: they are not followed any more. Durable on return."""
        ...
