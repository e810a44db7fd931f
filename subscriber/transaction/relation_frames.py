"""Change the CopyData messages of a replication stream by the table that they belong to, before anything else reads them.

Each change becomes one change or none, so the stream stays valid for every reader. What is done with a table is decided at each Relation
message. Inside a streamed transaction that description applies to this transaction only; it applies to all later ones when the transaction
commits or is prepared, and is dropped when the transaction, or a subtransaction, is aborted (the publisher then sends it again). Of other
changes, only tag and relation id are looked at.

Source: PostgreSQL manual, Logical Replication Message Formats; ``cleanup_rel_sync_cache`` of pgoutput.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.frames import PAYLOAD
from subscriber.protocol.messages import Relation, StreamAbort, StreamCommit, StreamPrepare, StreamStart, Type

__all__ = ["RelationFrames"]

_W: Final = ord("w")
_ROWS: Final = frozenset(b"IUD")
_OTHERS: Final = frozenset(b"RYSEcpA")
_TRUNCATE: Final = ord("T")
_STREAM_STOP: Final = ord("E")

_Bound = TypeVar("_Bound")


class RelationFrames(ABC, Generic[_Bound]):
    """The changes of one connection. A subclass says what is done with each table.

    Args:
        rows: whether rows may change. If not, they are not looked at.
    """

    def __init__(self, *, rows: bool = True) -> None:
        self._rows = rows
        self._known: dict[int, _Bound | None] = {}
        self._streamed: dict[int, dict[int, _Bound | None]] = {}
        self._chunk: dict[int, _Bound | None] | None = None

    @abstractmethod
    def bind(self, relation: Relation) -> _Bound | None:
        """Decide what is done with the changes of a table. None: nothing."""

    @abstractmethod
    def row(self, frame: bytes, bound: _Bound) -> bytes | None:
        """Change an Insert, Update or Delete. None: leave it out."""

    def described(self, frame: bytes, relation: Relation, bound: _Bound | None) -> bytes | None:
        """Change a Relation message. None: leave it out."""
        return frame

    def truncate(self, frame: bytes, start: int) -> bytes | None:
        """Change a Truncate, whose fields begin at ``start``. None: leave it out."""
        return frame

    def type(self, message: Type) -> None:
        """Note a type."""

    def apply(self, frames: Sequence[bytes]) -> list[bytes]:
        """Return the messages that remain, changed.

        Raises:
            SubscriberError: of the subclass.
            ProtocolError: a message is damaged, or a row's table was not described.
        """
        passed: list[bytes] = []
        for frame in frames:
            kept: bytes | None = frame
            if len(frame) > PAYLOAD and frame[0] == _W:
                tag = frame[PAYLOAD]
                if tag in _ROWS:
                    if self._rows and (bound := self.bound(frame, PAYLOAD + self.head)) is not None:
                        kept = self.row(frame, bound)
                elif tag in _OTHERS:
                    kept = self._control(frame)
                elif tag == _TRUNCATE:
                    kept = self.truncate(frame, PAYLOAD + self.head)
            if kept is not None:
                passed.append(kept)
        return passed

    @property
    def head(self) -> int:
        """The bytes of a payload before its fields: the tag, and inside a streamed transaction the xid."""
        return 1 if self._chunk is None else 5

    @property
    def in_stream(self) -> bool:
        """Whether the current message is inside a streamed transaction."""
        return self._chunk is not None

    def bound(self, frame: bytes, place: int) -> _Bound | None:
        """What is done with the table whose id is at a place.

        Raises:
            ProtocolError: it was not described.
        """
        relation_id = int.from_bytes(frame[place : place + 4], "big")
        try:
            return self._chunk[relation_id] if self._chunk and relation_id in self._chunk else self._known[relation_id]
        except KeyError:
            # it may be one whose changes are not to pass
            error = ProtocolError(f"no relation map entry for remote relation ID {relation_id}")
            error.hint = "restart the subscription: the publisher describes its tables again on a new connection"
            raise error from None

    def _control(self, frame: bytes) -> bytes | None:
        if frame[PAYLOAD] == _STREAM_STOP:
            self._chunk = None
            return frame
        message = decode(frame[PAYLOAD:], in_stream=self._chunk is not None)
        match message:
            case Relation():
                bound = self.bind(message)
                (self._known if self._chunk is None else self._chunk)[message.relation_id] = bound
                return self.described(frame, message, bound)
            case Type():
                self.type(message)
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
        return frame
