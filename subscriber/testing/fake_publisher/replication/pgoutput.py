"""What pgoutput sends for decoded transactions: Relation and Type messages, row filters, column lists, and the order of messages.

Source: pgoutput.c, proto.c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import (
    BINARY,
    UNCHANGED,
    Begin,
    BeginPrepare,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Type,
    Update,
)
from subscriber.protocol.messages import Origin as OriginMessage
from subscriber.testing.fake_publisher.publications import Publication, Published, published
from subscriber.testing.fake_publisher.replication.decoding import DecodedTransaction
from subscriber.testing.fake_publisher.replication.filters import relation_filters, whole_tuple
from subscriber.testing.fake_publisher.replication.wal import (
    DeleteRow,
    EmittedMessage,
    InsertRow,
    Origin,
    Record,
    RowChange,
    TruncateTables,
    UpdateRow,
)
from subscriber.testing.fake_publisher.tables import TableShape, Types
from subscriber.testing.fake_publisher.values import binary_value

if TYPE_CHECKING:
    from subscriber.rowfilter import RelationFilters

__all__ = ["PgOutput", "PgOutputOptions", "Send"]

_FIRST_OID: Final = 16384

Send = Callable[[Lsn, Message], None]
"""Is given each message and its LSN, which is 0 if the message is not the last of its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PgOutputOptions:
    """The options of START_REPLICATION, checked."""

    protocol_version: int
    publications: tuple[str, ...]
    streaming: str = "off"
    two_phase: bool = False
    binary: bool = False
    messages: bool = False
    only_local: bool = False


@dataclass(slots=True)
class _Stream:
    """What was described in a stream that has not ended."""

    shapes: dict[int, TableShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Sent:
    """How a table is sent."""

    how: Published
    filters: RelationFilters | None


class PgOutput:
    """One session of pgoutput.

    Args:
        options: of the session.
        caps: of the emulated version.
        types: of the publisher.
        publications: returns the subscribed publications, as they are now.
        send: gets the messages.
    """

    def __init__(
        self,
        options: PgOutputOptions,
        *,
        caps: Capabilities,
        types: Types,
        publications: Callable[[], Iterable[Publication]],
        send: Send,
    ) -> None:
        self._options = options
        self._caps = caps
        self._types = types
        self._publications = publications
        self._send = send
        self._described: dict[int, TableShape] = {}
        self._streams: dict[int, _Stream] = {}
        self._block: DecodedTransaction | None = None

    def skips_origin(self, origin: Origin | None) -> bool:
        return self._options.only_local and origin is not None

    # --- whole transactions

    def transaction(self, txn: DecodedTransaction, changes: Sequence[Record]) -> None:
        begun = False

        def begin() -> None:
            nonlocal begun
            if not begun:
                begun = True
                self._begin(changes[0].start if changes else txn.start, Begin(txn.start, txn.time, txn.xid), txn)

        if not self._caps.at_least(15):
            # since 15, a transaction without published changes is not sent
            begin()
        self._changes(changes, begin)
        if begun:
            self._send(txn.end, Commit(0, txn.start, txn.end, txn.time))

    def prepared(self, txn: DecodedTransaction, changes: Sequence[Record]) -> None:
        if changes or txn.aborted:
            self._begin(changes[0].start if changes else txn.start, BeginPrepare(txn.start, txn.end, txn.time, txn.xid, txn.gid), txn)
            self._changes(changes, lambda: None)
        self._send(txn.end, Prepare(0, txn.start, txn.end, txn.time, txn.xid, txn.gid))

    def commit_prepared(self, txn: DecodedTransaction, record: Record, time: int) -> None:
        self._streams.pop(txn.xid, None)
        self._send(record.end, CommitPrepared(0, record.start, record.end, time, record.top_xid, txn.gid))

    def rollback_prepared(self, txn: DecodedTransaction, record: Record, time: int) -> None:
        self._streams.pop(txn.xid, None)
        self._send(record.end, RollbackPrepared(0, txn.end, record.end, txn.time, time, record.top_xid, txn.gid))

    def _begin(self, lsn: Lsn, message: Begin | BeginPrepare, txn: DecodedTransaction) -> None:
        self._send(INVALID_LSN if txn.origin else lsn, message)
        if txn.origin is not None:
            self._send(lsn, OriginMessage(txn.origin.lsn, txn.origin.name))

    # --- transactions in progress

    def stream(self, txn: DecodedTransaction, changes: Sequence[Record]) -> None:
        lsn = changes[0].start if changes else txn.end
        origin = None if txn.streamed else txn.origin
        self._send(INVALID_LSN if origin else lsn, StreamStart(txn.xid, not txn.streamed))
        if origin is not None:
            self._send(lsn, OriginMessage(origin.lsn, origin.name))
        self._streams.setdefault(txn.xid, _Stream())
        self._block = txn
        self._changes(changes, lambda: None)
        self._block = None
        self._send(changes[-1].start if changes else txn.end, StreamStop())

    def stream_abort(self, txn: DecodedTransaction, subxid: int, record: Record, time: int) -> None:
        # the client forgets what was described in the stream
        self._streams[txn.xid] = _Stream()
        if subxid == txn.xid:
            del self._streams[txn.xid]
        parallel = self._options.streaming == "parallel"
        self._send(record.end, StreamAbort(txn.xid, subxid, record.end if parallel else None, time if parallel else None))

    def stream_commit(self, txn: DecodedTransaction) -> None:
        self._end_stream(txn)
        self._send(txn.end, StreamCommit(txn.xid, 0, txn.start, txn.end, txn.time))

    def stream_prepare(self, txn: DecodedTransaction) -> None:
        self._end_stream(txn)
        self._send(txn.end, StreamPrepare(0, txn.start, txn.end, txn.time, txn.xid, txn.gid))

    def _end_stream(self, txn: DecodedTransaction) -> None:
        self._described.update(self._streams.pop(txn.xid, _Stream()).shapes)

    # --- changes

    def message(self, record: Record, content: EmittedMessage) -> None:
        if self._options.messages:
            self._send(record.end, LogicalMessage(content.transactional, record.end, content.prefix, content.content))

    def _changes(self, changes: Sequence[Record], begin: Callable[[], None]) -> None:
        publications = list(self._publications())
        known: dict[int, tuple[TableShape, _Sent | None]] = {}
        for record in changes:
            match record.content:
                case EmittedMessage() as content if self._options.messages:
                    begin()
                    xid = None if self._block is None else self._block.xid
                    self._send(record.start, LogicalMessage(True, record.end, content.prefix, content.content, xid))
                case TruncateTables():
                    self._truncate(record, record.content, publications, begin)
                case InsertRow() | UpdateRow() | DeleteRow() as content:
                    shape = content.shape
                    found = known.get(shape.oid)
                    if found is None or found[0] is not shape:
                        how = published(shape, publications)
                        sent = None if how is None else _Sent(how, relation_filters(shape, publications, self._types))
                        found = known[shape.oid] = shape, sent
                    if found[1] is not None:
                        self._row(record, content, found[1], begin)

    def _xid(self, record: Record) -> int | None:
        return None if self._block is None else record.xid

    def _truncate(self, record: Record, content: TruncateTables, publications: Sequence[Publication], begin: Callable[[], None]) -> None:
        found = [(shape, published(shape, publications)) for shape in content.shapes]
        sent = [(shape, how) for shape, how in found if how is not None and "truncate" in how.operations]
        if not sent:
            return
        begin()
        for shape, how in sent:
            self._describe(record, shape, how)
        self._send(record.start, Truncate(content.options, tuple(shape.oid for shape, _ in sent), self._xid(record)))

    def _row(self, record: Record, content: RowChange, sent: _Sent, begin: Callable[[], None]) -> None:
        operation = {InsertRow: "insert", UpdateRow: "update", DeleteRow: "delete"}[type(content)]
        message = _whole_change(content, self._xid(record)) if operation in sent.how.operations else None
        if message is not None and sent.filters is not None:
            message = sent.filters.transform(message)
        if message is None:
            return
        begin()
        shape, how = content.shape, sent.how
        self._describe(record, shape, how)
        match message:
            case Insert(new=new):
                message = Insert(shape.oid, self._tuple(shape, how, new), message.xid)
            case Update(key=key, old=old, new=new):
                message = Update(shape.oid, *self._old(shape, how, key, old), self._tuple(shape, how, new), message.xid)
            case Delete(key=key, old=old):
                message = Delete(shape.oid, *self._old(shape, how, key, old), message.xid)
        self._send(record.start, message)

    def _old(
        self, shape: TableShape, how: Published, key: TupleData | None, old: TupleData | None
    ) -> tuple[TupleData | None, TupleData | None]:
        return (None if key is None else self._tuple(shape, how, key), None if old is None else self._tuple(shape, how, old))

    def _tuple(self, shape: TableShape, how: Published, data: TupleData) -> TupleData:
        """The published columns of a row, in the format that the client wants."""
        kinds = bytearray()
        values: list[bytes | None] = []
        for place in how.columns:
            column, kind, value = shape.columns[place], data.kinds[place], data.values[place]
            if value is not None and self._options.binary:
                binary = binary_value(self._types, column.type_oid, column.modifier, value)
                if binary is not None:
                    kind, value = BINARY, binary
            kinds.append(kind)
            values.append(value)
        return TupleData(bytes(kinds), values)

    def _describe(self, record: Record, shape: TableShape, how: Published) -> None:
        """Send Type and Relation messages, unless the client knows them (maybe_send_schema)."""
        block = self._block
        known = self._described if block is None else self._streams[block.xid].shapes
        # a stream has descriptions of its own: it may end in a rollback
        if known.get(shape.oid) is shape:
            return
        known[shape.oid] = shape
        xid = self._xid(record)
        columns = [shape.columns[place] for place in how.columns]
        for column in columns:
            if column.type_oid >= _FIRST_OID:
                # of a domain, the base type is named
                fact = self._types.fact(column.type_oid)
                base = fact
                while base.kind == "d":
                    base = self._types.fact(base.element)
                self._send(INVALID_LSN, Type(column.type_oid, base.namespace, base.name, xid))
        flags = shape.key_flags
        described = tuple(Column(column.name, column.type_oid, column.modifier, column.name in flags) for column in columns)
        self._send(INVALID_LSN, Relation(shape.oid, shape.name.namespace, shape.name.name, shape.replica_identity, described, xid))


def _whole_change(content: RowChange, xid: int | None) -> Insert | Update | Delete | None:
    """The message of a change with all columns as text. None: a table without replica identity has no old row to send."""
    oid = content.shape.oid
    match content:
        case InsertRow():
            return Insert(oid, whole_tuple(content.new), xid)
        case UpdateRow():
            new = whole_tuple(content.new)
            for name in content.unchanged:
                place = content.shape.places[name]
                new.values[place] = None
                new.kinds = new.kinds[:place] + bytes([UNCHANGED]) + new.kinds[place + 1 :]
            return Update(oid, *_key_or_old(content), new, xid)
        case DeleteRow():
            return None if content.old is None else Delete(oid, *_key_or_old(content), xid)


def _key_or_old(content: UpdateRow | DeleteRow) -> tuple[TupleData | None, TupleData | None]:
    data = None if content.old is None else whole_tuple(content.old)
    return (data, None) if content.old_is_key else (None, data)
