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

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.abc import TableName
from subscriber.sinks.sqlalchemy.relation_plan import Operation
from subscriber.sinks.sqlalchemy.runs import Run
from subscriber.sinks.sqlalchemy.statements import Statement

__all__ = ["Batching", "Group"]

_LOOK_BACK: Final = 8
"""How many groups of a table a change may be moved over."""

Key = Callable[[Sequence[object]], object]


@dataclass(slots=True)
class Group:
    """Changes of one statement, in order.

    Attributes:
        statement: it.
        vectors: what their parameters are picked from.
        movable: whether all of them have keys.
        bulky: whether all of them may be made at once: each touches one row, whose key stays as it is.
    """

    statement: Statement
    vectors: list[Sequence[object]] = field(default_factory=list)
    movable: bool = True
    bulky: bool = True
    _keys: set[object] = field(default_factory=set)
    # of runs the keys are looked at when somebody asks: where one kind of change follows another of its own nobody does
    _key: Key | None = None
    _known: int = 0

    def add(self, operation: Operation) -> None:
        """Add a change."""
        self.vectors.append(operation.vector)
        if operation.keys:
            self._keys.update(operation.keys)
        else:
            self.movable = False
        self.bulky = self.bulky and len(operation.keys) == 1

    def extend(self, run: Run) -> None:
        """Add a run."""
        self.vectors += run.vectors
        if run.key is None:
            self.movable = self.bulky = False
        else:
            self._key = run.key

    def touches(self, keys: Collection[object]) -> bool:
        """Whether one of the rows touched has one of these keys."""
        if self._key is not None and self._known < len(self.vectors):
            self._keys.update(map(self._key, self.vectors[self._known :]))
            self._known = len(self.vectors)
        return not self._keys.isdisjoint(keys)


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
        group = self._last(operation.statement) or self._joined(operation.statement, operation.keys)
        group.add(operation)
        self.count += 1

    def extend(self, run: Run) -> None:
        """Add a run, behind all changes that one of it must not overtake."""
        group = self._last(run.statement)
        if group is None:
            group = self._joined(run.statement, () if run.key is None else set(map(run.key, run.vectors)))
        group.extend(run)
        self.count += len(run.vectors)

    def _last(self, statement: Statement) -> Group | None:
        """The last group of a statement's table, if it is of that statement."""
        groups = self._tables.get(statement.table)
        return groups[-1] if groups and groups[-1].statement is statement else None

    def _joined(self, statement: Statement, keys: Collection[object]) -> Group:
        groups = self._tables.setdefault(statement.table, [])
        for place, group in enumerate(reversed(groups)):
            if group.statement is statement:
                return group
            if not keys or not group.movable or place == _LOOK_BACK or group.touches(keys):
                break
        groups.append(Group(statement))
        return groups[-1]

    def take(self) -> list[Group]:
        """All groups, in an order in which they may be executed; nothing is left."""
        groups = [group for table in self._tables.values() for group in table]
        self._tables = {}
        self.count = 0
        return groups
