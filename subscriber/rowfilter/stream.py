"""Apply row filters to the CopyData messages of a replication stream, before anything else reads them.

A filter is given the columns of its table at each Relation message (:mod:`subscriber.transaction.relation_frames`). A row of a table that
is not described is an error, because it might not pass.
"""

from __future__ import annotations

from collections.abc import Mapping

from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PAYLOAD
from subscriber.protocol.messages import Delete, Insert, Relation, Type, Update
from subscriber.rowfilter.filter_errors import RowFilterError
from subscriber.rowfilter.filters import FilterExpression, PublicationFilter, RelationFilters, combine
from subscriber.transaction.relation_frames import RelationFrames
from subscriber.types import TypeRegistry

__all__ = ["FrameFilter"]

_Bound = tuple[Relation, RelationFilters] | RowFilterError
"""A filter that cannot be used is an error only if a row of its table arrives."""


class FrameFilter(RelationFrames[_Bound]):
    """The filters of one connection.

    Args:
        expressions: by schema and name of the table that changes are published as.
    """

    def __init__(self, expressions: Mapping[tuple[str, str], FilterExpression]) -> None:
        super().__init__()
        self._expressions = expressions
        self._registry = TypeRegistry()

    def row(self, frame: bytes, bound: _Bound) -> bytes | None:
        """Apply the filter of the row's table.

        Raises:
            RowFilterError: the filter does not fit its table, or it failed for the row.
        """
        if isinstance(bound, RowFilterError):
            raise bound
        relation, filters = bound
        message = decode(frame[PAYLOAD:], in_stream=self.in_stream)
        assert isinstance(message, Insert | Update | Delete)  # by its tag
        if not isinstance(message, Insert):
            filters.check_identity(relation)
        changed = filters.transform(message)
        if changed is message:
            return frame
        return None if changed is None else frame[:PAYLOAD] + encode(changed)

    def type(self, message: Type) -> None:
        """Note a type."""
        self._registry.define(message.type_oid, message.namespace, message.name)

    def bind(self, relation: Relation) -> _Bound | None:
        """Give the filter of a table the table's columns."""
        expression = self._expressions.get((relation.namespace, relation.name))
        if expression is None:
            return None
        try:
            filters = combine([PublicationFilter(expression.bind(relation, self._registry))])
        except RowFilterError as error:
            error.add_note(f'row filter of table "{relation.namespace}.{relation.name}"')
            return error
        assert filters is not None  # there is one
        return relation, filters
