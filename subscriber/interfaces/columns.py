"""What to change in a table of the target, so that it has the columns of the publisher's table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from subscriber.errors import RelationError
    from subscriber.transaction.column_history import KnownColumns

__all__ = ["AddColumn", "ChangeType", "ColumnPlan"]


@dataclass(frozen=True, slots=True)
class AddColumn:
    """A new column. Names and types are the publisher's.

    Attributes:
        name: its name.
        type: its type as PostgreSQL's ``format_type`` writes it.
        collation: if it is not the type's; else None.
        missing: what the rows have that exist, as an array of one text; None: NULL.
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
        renamed: the new name by the old one.
        retyped: columns with other types.
        added: new columns.
    """

    known: KnownColumns | None = None
    dropped: tuple[str, ...] = ()
    renamed: Mapping[str, str] | None = None
    retyped: tuple[ChangeType, ...] = ()
    added: tuple[AddColumn, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped or self.renamed or self.retyped or self.added)
