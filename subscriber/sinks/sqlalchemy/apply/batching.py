"""Groups changes so that one ``executemany`` executes each group: the fast path.

The resulting rows must be the same as if each change had been executed in order:

*Within a table, changes of the same row keep their order.* A change joins a group of the same statement only if no later group of the table
touches one of its keys (the row's key before and after the change). Otherwise it begins a new group after them. Changes of different keys
may be reordered, because in such tables only the key makes rows unique.
:class:`~subscriber.sinks.sqlalchemy.apply.relation_plan.RelationPlan` decides where this holds. If a change has no key, or the table has
other unique indexes, only adjacent changes are grouped.

*Between tables no order is kept.* Foreign keys are not checked. A table whose triggers could see the order is ``ordered``: all groups are
executed before each of its changes.

*After any error* the whole batch is rolled back and executed change by change (:mod:`subscriber.sinks.sqlalchemy.apply.applier`).

Two keys may differ in Python and be equal in the database (a collation, trailing blanks). They can only collide with an error, because
rows are found by comparisons that match only the identical value (:meth:`ColumnPlan.matches`). With ``insert_conflict = upsert`` they would
collide without an error: a table whose key has such a column then has changes without a key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.abc import TableName
from subscriber.sinks.sqlalchemy.apply.relation_plan import Operation
from subscriber.sinks.sqlalchemy.apply.runs import Run
from subscriber.sinks.sqlalchemy.apply.statements import Statement

__all__ = ["Batching", "Group"]

_LOOK_BACK: Final = 8
"""How many groups of its table a change may be moved past."""

Key = Callable[[Sequence[object]], object]


@dataclass(slots=True)
class Group:
    """Changes of one statement, in order.

    Attributes:
        statement: the statement.
        vectors: the values from which the statement's parameters are picked, for each change.
        movable: whether all changes have keys.
        bulky: whether all changes may be made by one bulk statement: each touches one row and does not change its key.
    """

    statement: Statement
    vectors: list[tuple[object, ...]] = field(default_factory=list)
    movable: bool = True
    bulky: bool = True
    _keys: set[object] = field(default_factory=set)
    # the keys of runs are computed only in touches(), which is not called while changes of one statement follow each other
    _key: Key | None = None
    _known: int = 0

    def add(self, operation: Operation) -> None:
        self.vectors.append(operation.vector)
        if operation.keys:
            self._keys.update(operation.keys)
        else:
            self.movable = False
        self.bulky = self.bulky and len(operation.keys) == 1

    def extend(self, run: Run) -> None:
        self.vectors += run.vectors
        if run.key is None:
            self.movable = self.bulky = False
        else:
            self._key = run.key

    def touches(self, keys: Collection[object]) -> bool:
        """Whether a change of the group touches a row with one of these keys."""
        if self._key is not None and self._known < len(self.vectors):
            self._keys.update(map(self._key, self.vectors[self._known :]))
            self._known = len(self.vectors)
        return not self._keys.isdisjoint(keys)


class Batching:
    """The groups that were not executed yet.

    Attributes:
        count: the number of changes in them.
    """

    __slots__ = ("_tables", "count")

    def __init__(self) -> None:
        self._tables: dict[TableName, list[Group]] = {}
        self.count = 0

    def add(self, operation: Operation) -> None:
        group = self._last(operation.statement) or self._joined(operation.statement, operation.keys)
        group.add(operation)
        self.count += 1

    def extend(self, run: Run) -> None:
        group = self._last(run.statement)
        if group is None:
            group = self._joined(run.statement, () if run.key is None else set(map(run.key, run.vectors)))
        group.extend(run)
        self.count += len(run.vectors)

    def _last(self, statement: Statement) -> Group | None:
        """The last group of a statement's table, if it has the same statement."""
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
        """Remove and return all groups, in an order in which they may be executed."""
        groups = [group for table in self._tables.values() for group in table]
        self._tables = {}
        self.count = 0
        return groups
