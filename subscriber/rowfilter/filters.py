"""Row filters of a table: evaluate them for changes, and turn an UPDATE into an INSERT or a DELETE.

::

    expression = parse_filter("a > 5 AND c = 'NSW'")            # syntax
    filter_ = expression.bind(relation, registry)                # columns and types
    filter_.check_identity(relation, "update")                   # replica identity
    filters = combine([PublicationFilter(filter_), …])           # OR of the publications, for each operation
    change = filters.transform(change)                           # an Insert, Update, Delete or None

A row passes if the filter is true, not if it is false or NULL. An UPDATE is judged by its old and its new row:

===========  ===========  ==============
old row      new row      becomes
===========  ===========  ==============
no match     no match     not replicated
no match     match        INSERT
match        no match     DELETE
match        match        UPDATE
===========  ===========  ==============

If no column of the replica identity changed, no old row is sent. Then the new row alone decides, because the filter of an UPDATE uses
columns of the replica identity only. A value of the new row that was not sent because it did not change (TOAST) is taken from the old row.

Source: PostgreSQL manual, Row Filters; ``pgoutput_row_filter``, ``CheckCmdReplicaIdentity``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from subscriber.errors import ProtocolError
from subscriber.protocol.messages import BINARY, NULL, UNCHANGED, Delete, Insert, Relation, TupleData, Update
from subscriber.rowfilter.binding import bind
from subscriber.rowfilter.filter_errors import RowFilterError
from subscriber.rowfilter.sql_types import value_reader
from subscriber.rowfilter.syntax import Node, parse_expression
from subscriber.types import PgType, TypeRegistry, ValueRefused

__all__ = ["FilterExpression", "PublicationFilter", "RelationFilters", "RowFilter", "combine", "parse_filter"]

Operation = Literal["insert", "update", "delete"]

_OPERATIONS: Final[tuple[Operation, ...]] = ("insert", "update", "delete")


@dataclass(frozen=True, slots=True)
class FilterExpression:
    """A filter whose syntax is allowed. :func:`parse_filter` creates it.

    Attributes:
        text: as given, without the parentheses of the WHERE clause.
    """

    text: str
    _node: Node

    def bind(self, relation: Relation, registry: TypeRegistry) -> RowFilter:
        """Give it the columns of a table.

        Args:
            relation: the table, with all columns that the filter may use.
            registry: resolves the types.

        Raises:
            RowFilterError: a column does not exist, types do not fit, or the filter cannot be evaluated exactly.
        """
        types = {column.name: registry.resolve(column.type_oid, column.type_modifier) for column in relation.columns}
        evaluation = bind(self._node, types)
        return RowFilter(self.text, relation, evaluation.columns, evaluation.evaluate, types)


def parse_filter(text: str) -> FilterExpression:
    """Parse a row filter.

    Raises:
        RowFilterError: it is not an expression, or uses what row filters may not use.
    """
    return FilterExpression(text, parse_expression(text))


class RowFilter:
    """A filter for the rows of one relation, as its latest Relation message describes them.

    Attributes:
        text: the expression.
        columns: names of the columns that it uses.
    """

    __slots__ = ("_evaluate", "_readers", "_relation", "_width", "columns", "text")

    def __init__(
        self, text: str, relation: Relation, used: Mapping[str, str], evaluate: Callable[[Sequence[Any]], Any], types: Mapping[str, PgType]
    ) -> None:
        self.text = text
        self.columns = tuple(used)
        self._relation = relation
        self._evaluate = evaluate
        self._width = len(relation.columns)
        names = [column.name for column in relation.columns]
        self._readers = [(names.index(name), *value_reader(types[name], type_)) for name, type_ in used.items()]

    def check_identity(self, relation: Relation, operation: Literal["update", "delete"]) -> None:
        """Check that the filter uses only columns of the replica identity.

        Raises:
            RowFilterError: with PostgreSQL's error for the command.
        """
        if relation.replica_identity == "f":
            return
        keys = {column.name for column in relation.columns if column.key}
        if not keys.issuperset(self.columns):
            raise RowFilterError(
                f'cannot {"update" if operation == "update" else "delete from"} table "{relation.name}"',
                detail="Column used in the publication WHERE expression is not part of the replica identity.",
                sqlstate="42P10",
            )

    def matches(self, data: TupleData) -> bool:
        """Whether a row passes.

        Raises:
            RowFilterError: the expression failed, or a value that it needs was not sent.
            ProtocolError: the row does not fit the relation.
        """
        if len(data.kinds) != self._width:
            name = f"{self._relation.namespace}.{self._relation.name}"
            raise ProtocolError(f"a row of relation {name} has {len(data.kinds)} columns, its description has {self._width}")
        row: list[Any] = []
        for place, read_text, read_binary in self._readers:
            value = data.values[place]
            if value is None:
                if data.kinds[place] == UNCHANGED:
                    raise self._failed(place, "a large value that did not change was not sent")
                row.append(None)
                continue
            try:
                row.append(read_binary(value) if data.kinds[place] == BINARY else read_text(value))
            except ValueRefused as error:
                raise self._failed(place, str(error)) from error
        try:
            return self._evaluate(row) is True
        except RowFilterError as error:
            error.add_note(f'evaluating the row filter of table "{self._relation.namespace}.{self._relation.name}"')
            raise

    def _failed(self, place: int, reason: str) -> RowFilterError:
        relation = self._relation
        name, column = f"{relation.namespace}.{relation.name}", relation.columns[place].name
        return RowFilterError(
            f'row filter of table "{name}" cannot be evaluated: column "{column}": {reason}',
            hint="set REPLICA IDENTITY FULL on the publisher's table, or leave the column out of the filter",
        )


@dataclass(frozen=True, slots=True)
class PublicationFilter:
    """One publication of a table.

    Attributes:
        filter: of the table that changes are published as: the root if ``publish_via_partition_root`` is true, else the partition itself.
            None if it has none, and for FOR ALL TABLES and TABLES IN SCHEMA.
        operations: what the publication publishes.
    """

    filter: RowFilter | None
    operations: frozenset[Operation] = frozenset(_OPERATIONS)


class RelationFilters:
    """The filters of one relation: for each operation, a row passes if one of them is true. :func:`combine` creates it."""

    __slots__ = ("_filters",)

    def __init__(self, filters: Mapping[Operation, Sequence[RowFilter]]) -> None:
        self._filters = filters

    def check_identity(self, relation: Relation) -> None:
        """Check the filters of UPDATE and DELETE; see :meth:`RowFilter.check_identity`."""
        for operation in ("update", "delete"):
            for each in self._filters.get(operation, ()):
                each.check_identity(relation, operation)

    def transform(self, change: Insert | Update | Delete) -> Insert | Update | Delete | None:
        """Return the change that is replicated instead: the same one, another one, or None.

        Raises:
            RowFilterError, ProtocolError: as :meth:`RowFilter.matches`.
        """
        match change:
            case Insert():
                return change if self._pass("insert", change.new) else None
            case Delete():
                old = change.key or change.old
                return change if old is None or self._pass("delete", old) else None
        return self._update(change)

    def _pass(self, operation: Operation, data: TupleData) -> bool:
        filters = self._filters.get(operation, ())
        return not filters or any(each.matches(data) for each in filters)

    def _update(self, change: Update) -> Insert | Update | Delete | None:
        if not self._filters.get("update"):
            return change
        old = change.key or change.old
        if old is None:
            return change if self._pass("update", change.new) else None
        new = _completed(change.new, old)
        before, after = self._pass("update", old), self._pass("update", new)
        if before and after:
            return change
        if after:
            return Insert(change.relation_id, new, change.xid)
        return Delete(change.relation_id, change.key, change.old, change.xid) if before else None


def combine(publications: Iterable[PublicationFilter]) -> RelationFilters | None:
    """Combine the filters of all publications that a table is in. Return None if no operation is filtered.

    For each operation only the publications that publish it count. One of them without a filter makes the others redundant.
    """
    given = list(publications)
    filters: dict[Operation, Sequence[RowFilter]] = {}
    for operation in _OPERATIONS:
        found = [each.filter for each in given if operation in each.operations]
        if found and None not in found:
            filters[operation] = [each for each in found if each is not None]
    return RelationFilters(filters) if filters else None


def _completed(new: TupleData, old: TupleData) -> TupleData:
    """The new row, with the values that were not sent because they did not change taken from the old row."""
    if UNCHANGED not in new.kinds:
        return new
    kinds, values = bytearray(new.kinds), list(new.values)
    for place, kind in enumerate(new.kinds):
        if kind == UNCHANGED and place < len(old.kinds) and old.kinds[place] not in {NULL, UNCHANGED}:
            kinds[place], values[place] = old.kinds[place], old.values[place]
    return TupleData(bytes(kinds), values)
