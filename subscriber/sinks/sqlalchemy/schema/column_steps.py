"""``schema_change = follow``: which steps give a table of the target the columns that a Relation message describes. Reads nothing.

The target has no numbers of columns. So the known columns store the name that each of the publisher's numbers has in the target
(``KnownColumns.target``; 0: another column). A step gives a column a name that no other one has, and then the names are stored. If the
database commits ALTER TABLE at once, a crash can leave one step done and not stored: then the stored name of one column is missing in the
table, and its new name is there (:func:`places`). So every step can be the last one before a crash. Names that are swapped need a third
name meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import types as sql
from sqlalchemy.dialects import mysql, sqlite
from sqlalchemy.types import TypeEngine

from subscriber.errors import RelationError
from subscriber.interfaces import ChangeType, ColumnPlan, TableName
from subscriber.sinks.sqlalchemy.schema.converters import Family, family_of
from subscriber.sinks.sqlalchemy.schema.names import folded_column
from subscriber.sinks.sqlalchemy.schema.reflection import ReflectedTable
from subscriber.transaction.column_history import KnownColumns
from subscriber.transaction.type_changes import keeps_values

__all__ = ["AddColumns", "Drop", "Found", "Redefine", "Rename", "Step", "places", "steps", "with_target"]

_OTHER: Final = 0
"""The number of a column of the target that is none of the publisher's."""
_INTEGERS: Final = ("TINYINT", "SMALLINT", "MEDIUMINT", "INTEGER", "BIGINT")
"""By size."""


@dataclass(frozen=True, slots=True)
class Rename:
    """Give a column another name. ``known``: what to store when it is done."""

    old: str
    new: str
    known: KnownColumns

    fits_earlier = False
    """Whether rows of the table can still be stored that were described before."""

    def __str__(self) -> str:
        return f'column "{self.old}" is to be "{self.new}"'


@dataclass(frozen=True, slots=True)
class Drop:
    """Drop a column. ``known``: what to store when it is done."""

    name: str
    known: KnownColumns

    fits_earlier = False

    def __str__(self) -> str:
        return f'column "{self.name}" is to be dropped'


@dataclass(frozen=True, slots=True)
class Found:
    """Only store names: columns were renamed by an earlier attempt, or renamed or dropped by hand. Another one could get the old name."""

    known: KnownColumns

    fits_earlier = True

    def __str__(self) -> str:
        return "columns were renamed or dropped there"


@dataclass(frozen=True, slots=True)
class Redefine:
    """Give a column another type; None: let it be NULL."""

    name: str
    type: TypeEngine[Any] | None

    fits_earlier = True

    def __str__(self) -> str:
        return f'column "{self.name}" is to have another type' if self.type is not None else f'column "{self.name}" is NOT NULL'


@dataclass(frozen=True, slots=True)
class AddColumns:
    """Add the columns that are missing. ``values``: what existing rows have in them, as texts of PostgreSQL."""

    values: Mapping[str, str | None]

    @property
    def fits_earlier(self) -> bool:
        """See :attr:`Rename.fits_earlier`: they would get NULL."""
        return all(value is None for value in self.values.values())

    def __str__(self) -> str:
        return "it lacks " + ", ".join(f'column "{name}"' for name in self.values)


Step = Rename | Drop | Found | Redefine | AddColumns


def with_target(known: KnownColumns, table: ReflectedTable, *, learned: bool = False) -> KnownColumns:
    """The known columns with those of the target. ``learned``: for the first time."""
    there = [str(column.name) for column in table.table.c]
    named = {each.number: each.name for each in known.columns if each.name in there}
    taken = set(named.values())
    if learned:
        others = [(_OTHER, name) for name in there if name not in taken]
    else:
        others = [(number, name) for number, name in known.target if number not in named and name in there and name not in taken]
    return replace(known, target=(*named.items(), *others))


def places(known: KnownColumns, new: Mapping[int, str], table: ReflectedTable) -> dict[int, str]:
    """The name that each column of the publisher has in the target now. ``new``: the names that they are to get."""
    there = {str(column.name) for column in table.table.c}
    stored = {name for _, name in known.target}
    found = {}
    for number, name in known.target:
        for candidate in (name, _aside(number), None if new.get(number) in stored else new.get(number)):
            if number != _OTHER and candidate in there:
                found[number] = str(candidate)
                break
    return found


def _aside(number: int) -> str:
    """The name of a column while another one still has its new name."""
    return f"subscriber_renamed_{number}"


def steps(
    known: KnownColumns,
    plan: ColumnPlan,
    name: TableName,
    table: ReflectedTable,
    *,
    dialect: str,
    created: Callable[[str], TypeEngine[Any]],
) -> Iterator[Step]:
    """The steps that are left, in their order. Some may have been made already: before a crash, or by hand.

    Args:
        known: what is stored.
        plan: what changed on the publisher.
        name: of the table.
        table: of the target.
        dialect: the target's.
        created: the type that a column of the publisher, by its new name, gets in a table that is created.

    Raises:
        RelationError: another column has the name that one is to get, or a type cannot be changed without loss of exactness.
    """
    assert plan.known is not None
    numbers = {each.name: each.number for each in known.columns}
    new = {each.number: each.name for each in plan.known.columns}
    place = places(known, new, table)
    there = {str(column.name) for column in table.table.c}
    if lost := [new[number] for number, _ in known.target if number in new and number not in place]:
        raise RelationError(
            f'column "{lost[0]}" of table "{name}" has been renamed or dropped in the target',
            hint=f"rename it back; or `subscriber alter NAME --resync {name}` adds the column and compares all rows",
            sqlstate="55000",
        )
    known, stored = _with_places(known, place, there), known
    if set(known.target) != set(stored.target):
        yield Found(known)
    # the columns that the table has, by their names now
    columns = {str(column.name): column for column in table.table.c}
    for number in [numbers[name] for name in plan.dropped if numbers[name] in place]:
        if plan.drop:
            column = place.pop(number)
            del columns[column]
            known = _with_places(known, place, columns)
            yield Drop(column, known)
        elif place[number] in table.required:
            yield Redefine(place[number], None)
    renamed = {numbers[old]: now for old, now in (plan.renamed or {}).items() if numbers[old] in place}
    for step in _renames(known, place, renamed, name, tuple(columns), dialect=dialect):
        columns[step.new] = columns.pop(step.old)
        yield step
    for change in plan.retyped:
        if change.name in columns:
            wanted = _wanted(name, change, columns[change.name].type, created(change.name), dialect)
            if wanted is not None:
                yield Redefine(change.name, wanted)
    folded = {folded_column(column, dialect): column for column in columns}
    older = {*place.values(), *renamed.values(), *(other for number, other in known.target if number == _OTHER)}
    missing = []
    for added in plan.added:
        present = folded.get(folded_column(added.name, dialect))
        if present is None:
            if added.unknown is not None:
                raise added.unknown
            missing.append(added)
        elif present in older or present != added.name:
            raise _blocked(name, present, added.name, dialect)
    if missing:
        yield AddColumns({added.name: added.missing for added in missing})


def _renames(
    known: KnownColumns, place: dict[int, str], renamed: Mapping[int, str], name: TableName, there: Collection[str], *, dialect: str
) -> Iterator[Rename]:
    """Rename columns one by one. ``place`` follows."""

    def fold(column: str) -> str:
        return folded_column(column, dialect)

    left = {number: new for number, new in renamed.items() if place[number] != new}
    now = {fold(column): column for column in there}
    for new in left.values():
        if (other := now.get(fold(new), new)) in there and other not in [place[number] for number in left]:
            raise _blocked(name, other, new, dialect)
    while left:
        free = [number for number, new in left.items() if now.get(fold(new), place[number]) == place[number]]
        number = (free or list(left))[0]
        old, new = place[number], left.pop(number) if free else _aside(number)
        del now[fold(old)]
        now[fold(new)] = place[number] = new
        yield Rename(old, new, _with_places(known, place, there))


def _with_places(known: KnownColumns, place: Mapping[int, str], there: Collection[str]) -> KnownColumns:
    return replace(known, target=(*place.items(), *(each for each in known.target if each[0] == _OTHER and each[1] in there)))


def _wanted(
    table: TableName, change: ChangeType, present: TypeEngine[Any], created: TypeEngine[Any], dialect: str
) -> TypeEngine[Any] | None:
    """The type that a column needs for the publisher's new one; None: its own is enough.

    Raises:
        RelationError: the publisher's values may have changed.
    """
    family = family_of(present, dialect)
    if not keeps_values(change.old, change.new) or family is Family.ANY:
        wanted = created.compile(dialect=(sqlite if dialect == "sqlite" else mysql).dialect())
        raise RelationError(
            f'column "{change.name}" of table "{table}" has type {change.new} on the publisher now, {change.old} before, and its rows in'
            " the target may need other values",
            hint=f"let it be {wanted or 'a column without a type'} there, unless its type can hold them; then compare all rows with"
            f" `subscriber alter NAME --resync {table}`",
            sqlstate="55000",
        )
    if family is Family.TEXT:
        if dialect == "sqlite":
            return None
        lengths = getattr(present, "length", None), getattr(created, "length", None)
        return None if lengths[0] is None or (lengths[1] is not None and lengths[1] <= lengths[0]) else created
    if isinstance(present, sql.Numeric) and f"numeric({present.precision},{present.scale})" != change.old:
        # chosen by the user
        return None
    if family is not family_of(created, dialect):
        return created if family_of(created, dialect) is Family.TEXT else None
    if family is Family.INTEGER and dialect != "sqlite":
        return created if _size(present) < _size(created) else None
    return created if isinstance(created, sql.Numeric) and family is Family.NUMERIC else None


def _size(kind: TypeEngine[Any]) -> int:
    name = str(kind.__visit_name__).upper()
    return _INTEGERS.index(name) if name in _INTEGERS else len(_INTEGERS)


def _blocked(table: TableName, present: str, name: str, dialect: str) -> RelationError:
    quoted = f'"{present}"' if dialect == "sqlite" else f"`{present}`"
    return RelationError(
        f'table "{table}" of the target has another column "{present}", and a column of the publisher has the name "{name}" now',
        hint=f"rename it there, or drop it (ALTER TABLE … DROP COLUMN {quoted});"
        f" or take it for the publisher's with `subscriber alter NAME --resync {table}`",
        sqlstate="42701",
    )
