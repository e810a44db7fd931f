"""Apply row filters to the CopyData messages of a replication stream, before anything else reads them.

Each change becomes one change or none, so the stream stays valid for every reader. Changes of tables without a filter stay as they are:
only their tag and relation id are looked at. A filter is given the columns of its table at each Relation message. Inside a streamed
transaction that description applies to this transaction only; it applies to all later ones when the transaction commits or is prepared,
and is dropped when the transaction, or a subtransaction, is aborted (the publisher then sends it again). A row of a table that is not
described is an error, because it might not pass.

Source: PostgreSQL manual, Logical Replication Message Formats; ``cleanup_rel_sync_cache`` of pgoutput.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PAYLOAD
from subscriber.protocol.messages import Delete, Insert, Relation, StreamAbort, StreamCommit, StreamPrepare, StreamStart, Type, Update
from subscriber.rowfilter.filter_errors import RowFilterError
from subscriber.rowfilter.filters import FilterExpression, PublicationFilter, RelationFilters, combine
from subscriber.types import TypeRegistry

__all__ = ["FrameFilter"]

_W: Final = ord("w")
_ROWS: Final = frozenset(b"IUD")
_OTHERS: Final = frozenset(b"RYSEcpA")
_STREAM_STOP: Final = ord("E")

_Bound = tuple[Relation, RelationFilters] | RowFilterError
"""A filter that cannot be used is an error only if a row of its table arrives."""
_Filters = dict[int, _Bound | None]


class FrameFilter:
    """The filters of one connection.

    Args:
        expressions: by schema and name of the table that changes are published as.
    """

    def __init__(self, expressions: Mapping[tuple[str, str], FilterExpression]) -> None:
        self._expressions = expressions
        self._registry = TypeRegistry()
        self._known: _Filters = {}
        self._streamed: dict[int, _Filters] = {}
        self._chunk: _Filters | None = None

    def apply(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return the messages that pass, changed where a row filter changes them.

        Raises:
            RowFilterError: a filter does not fit its table, or it failed for a row.
            ProtocolError: a message is damaged, or a row's table was not described.
        """
        passed: list[bytes] = []
        for frame in frames:
            if len(frame) > PAYLOAD and frame[0] == _W:
                tag = frame[PAYLOAD]
                if tag in _ROWS:
                    kept = self._row(frame)
                    if kept is None:
                        continue
                    passed.append(kept)
                    continue
                if tag in _OTHERS:
                    self._control(frame[PAYLOAD:])
            passed.append(frame)
        return passed

    def _row(self, frame: bytes) -> bytes | None:
        start = PAYLOAD + (1 if self._chunk is None else 5)
        relation_id = int.from_bytes(frame[start : start + 4], "big")
        try:
            bound = self._chunk[relation_id] if self._chunk and relation_id in self._chunk else self._known[relation_id]
        except KeyError:
            # it may be of a table with a filter
            error = ProtocolError(f"no relation map entry for remote relation ID {relation_id}")
            error.hint = "restart the subscription: the publisher describes its tables again on a new connection"
            raise error from None
        if bound is None:
            return frame
        if isinstance(bound, RowFilterError):
            raise bound
        relation, filters = bound
        message = decode(frame[PAYLOAD:], in_stream=self._chunk is not None)
        assert isinstance(message, Insert | Update | Delete)  # by its tag
        if not isinstance(message, Insert):
            filters.check_identity(relation)
        changed = filters.transform(message)
        if changed is message:
            return frame
        return None if changed is None else frame[:PAYLOAD] + encode(changed)

    def _control(self, payload: bytes) -> None:
        if payload[0] == _STREAM_STOP:
            self._chunk = None
            return
        message = decode(payload, in_stream=self._chunk is not None)
        match message:
            case Relation():
                (self._known if self._chunk is None else self._chunk)[message.relation_id] = self._bind(message)
            case Type():
                self._registry.define(message.type_oid, message.namespace, message.name)
            case StreamStart():
                if message.first_segment:
                    self._streamed.pop(message.xid, None)
                self._chunk = self._streamed.setdefault(message.xid, {})
            case StreamCommit() | StreamPrepare():
                self._known.update(self._streamed.pop(message.xid, {}))
            case StreamAbort():
                if message.xid in self._streamed:
                    self._streamed[message.xid].clear()
                if message.xid == message.subxid:
                    self._streamed.pop(message.xid, None)

    def _bind(self, relation: Relation) -> _Bound | None:
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
