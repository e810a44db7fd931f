"""Changes gathered into groups that one ``executemany`` makes: the fast path.

What is kept, so that the rows at the end are those that change by change would have given:

*Per table, the order of changes that touch the same row.* A change joins a group of its own statement only if no later group of its table
touches one of its keys (its row's before and after); else it begins a new group behind them. Changes of different keys may change places:
nothing but the key makes rows unique there (:class:`~subscriber.sinks.sqlalchemy.relation_plan.RelationPlan` says where that is so, and
where a change has no key, or other unique indexes or triggers look on, only neighbours are grouped).

*Between tables there is no order to keep*: foreign keys are not checked, and triggers that would see the order make their table an
``ordered`` one, before whose changes everything is executed.

*An error anywhere* has the whole batch rolled back and made change by change (:mod:`subscriber.sinks.sqlalchemy.apply`).

Two keys that Python takes for different and the database for equal (a collation, trailing blanks) may only collide with an error: rows
are found by comparisons that take none but the very same value (:meth:`ColumnPlan.matches`). With ``insert_conflict = upsert`` they collide
without one: there, a table whose key has such a column has changes without a key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from subscriber.abc import TableName
from subscriber.sinks.sqlalchemy.relation_plan import Operation
from subscriber.sinks.sqlalchemy.statements import Statement

__all__ = ["Batching", "Group"]

_LOOK_BACK: Final = 8
"""How many groups of a table a change may be moved over."""


@dataclass(slots=True)
class Group:
    """Changes of one statement, in order.

    Attributes:
        statement: it.
        rows: its parameters;
        vectors: or, where it has a ``bulk``, what they will be picked from.
        keys: of the rows touched.
        movable: whether all of them have keys.
        bulky: whether all of them may be made at once: each touches one row, whose key stays as it is.
    """

    statement: Statement
    rows: list[Any] = field(default_factory=list)
    keys: set[object] = field(default_factory=set)
    movable: bool = True
    bulky: bool = False
    vectors: list[list[object]] = field(default_factory=list)


class Batching:
    """Groups that were not executed yet.

    Attributes:
        count: how many changes there are.
    """

    __slots__ = ("_tables", "count")

    def __init__(self) -> None:
        self._tables: dict[TableName, list[Group]] = {}
        self.count = 0

    def add(self, operation: Operation) -> None:
        """Add a change, behind all those that it must not overtake."""
        statement = operation.statement
        groups = self._tables.get(statement.table)
        if groups is None:
            groups = self._tables[statement.table] = []
        group = self._joined(groups, statement, operation.keys)
        if group is None:
            group = Group(statement, bulky=statement.bulk is not None)
            groups.append(group)
        if statement.bulk is None:
            group.rows.append(statement.pick(operation.vector))
        else:
            group.vectors.append(operation.vector)
            group.bulky = group.bulky and len(operation.keys) == 1
        if operation.keys:
            group.keys.update(operation.keys)
        else:
            group.movable = False
        self.count += 1

    def _joined(self, groups: list[Group], statement: Statement, keys: tuple[object, ...]) -> Group | None:
        for place, group in enumerate(reversed(groups)):
            if group.statement is statement:
                return group
            if not keys or not group.movable or place == _LOOK_BACK or not group.keys.isdisjoint(keys):
                return None
        return None

    def take(self) -> list[Group]:
        """All groups, in an order in which they may be executed; nothing is left."""
        groups = [group for table in self._tables.values() for group in table]
        self._tables = {}
        self.count = 0
        return groups
