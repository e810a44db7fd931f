"""What pgoutput sends for decoded transactions: Relation and Type messages, row filters, column lists, and the order of messages.

Source: pgoutput.c, proto.c.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import (
    BINARY,
    NULL,
    TEXT,
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
from subscriber.testing.fake_publisher.decoding import DecodedTransaction
from subscriber.testing.fake_publisher.publications import Publication, Published, published
from subscriber.testing.fake_publisher.tables import RowValues, TableShape, Types
from subscriber.testing.fake_publisher.values import binary_value
from subscriber.testing.fake_publisher.wal import (
    DeleteRow,
    EmittedMessage,
    InsertRow,
    Origin,
    Record,
    RowChange,
    TruncateTables,
    UpdateRow,
)

__all__ = ["PgOutput", "PgOutputOptions", "Send"]

_FIRST_OID: Final = 16384

Send = Callable[[Lsn, Message], None]
"""Is given each message and its LSN, which is 0 if the message is not the last of its record."""
RowTest = Callable[[TableShape, tuple[str, ...], RowValues], bool]


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


class PgOutput:
    """One session of pgoutput.

    Args:
        options: of the session.
        caps: of the emulated version.
        types: of the publisher.
        publications: returns the subscribed publications, as they are now.
        passes: whether a row passes one of some filters.
        send: gets the messages.
    """

    def __init__(
        self,
        options: PgOutputOptions,
        *,
        caps: Capabilities,
        types: Types,
        publications: Callable[[], Iterable[Publication]],
        passes: RowTest,
        send: Send,
    ) -> None:
        self._options = options
        self._caps = caps
        self._types = types
        self._publications = publications
        self._passes = passes
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
        if changes:
            self._begin(changes[0].start, BeginPrepare(txn.start, txn.end, txn.time, txn.xid, txn.gid), txn)
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
        known: dict[int, tuple[TableShape, Published | None]] = {}
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
                        found = known[shape.oid] = shape, published(shape, publications)
                    if found[1] is not None:
                        self._row(record, content, found[1], begin)

    def _xid(self, record: Record) -> int | None:
        return None if self._block is None else record.xid

    def _truncate(self, record: Record, content: TruncateTables, publications: Sequence[Publication], begin: Callable[[], None]) -> None:
        found = [(shape, published(shape, publications)) for shape in content.shapes]
        sent = [(shape, how) for shape, how in found if how is not None and "truncate" in how.filters]
        if not sent:
            return
        begin()
        for shape, how in sent:
            self._describe(record, shape, how)
        self._send(record.start, Truncate(content.options, tuple(shape.oid for shape, _ in sent), self._xid(record)))

    def _row(self, record: Record, content: RowChange, how: Published, begin: Callable[[], None]) -> None:
        operation = {InsertRow: "insert", UpdateRow: "update", DeleteRow: "delete"}[type(content)]
        if operation not in how.filters:
            return
        if isinstance(content, DeleteRow) and content.old is None:
            # without a replica identity there is nothing to send
            return
        message = self._filtered(record, content, how, how.filters[operation])
        if message is None:
            return
        begin()
        self._describe(record, content.shape, how)
        self._send(record.start, message)

    def _filtered(self, record: Record, content: RowChange, how: Published, filters: tuple[str, ...] | None) -> Message | None:
        """The message of a change, after the row filter (pgoutput_row_filter)."""
        shape, xid = content.shape, self._xid(record)

        def passes(row: RowValues) -> bool:
            return filters is None or self._passes(shape, filters, row)

        def whole(row: RowValues, unchanged: frozenset[str] = frozenset()) -> TupleData:
            return self._tuple(shape, how, row, unchanged)

        match content:
            case InsertRow():
                return Insert(shape.oid, whole(content.new), xid) if passes(content.new) else None
            case DeleteRow(old=old) if old is not None:
                return Delete(shape.oid, *self._old(shape, how, old, key=content.old_is_key), xid) if passes(old) else None
            case UpdateRow(old=None):
                return Update(shape.oid, None, None, whole(content.new, content.unchanged), xid) if passes(content.new) else None
            case UpdateRow(old=old) if old is not None:
                before, after = passes(old), passes(content.new)
                if not after:
                    return Delete(shape.oid, *self._old(shape, how, old, key=content.old_is_key), xid) if before else None
                if not before:
                    # unchanged TOASTed values are taken from the old row where it has them
                    return Insert(shape.oid, whole(content.new, content.unchanged if content.old_is_key else frozenset()), xid)
                old_tuples = self._old(shape, how, old, key=content.old_is_key)
                return Update(shape.oid, *old_tuples, whole(content.new, content.unchanged), xid)
        return None

    def _old(self, shape: TableShape, how: Published, row: RowValues, *, key: bool) -> tuple[TupleData | None, TupleData | None]:
        data = self._tuple(shape, how, row, frozenset())
        return (data, None) if key else (None, data)

    def _tuple(self, shape: TableShape, how: Published, row: RowValues, unchanged: frozenset[str]) -> TupleData:
        kinds = bytearray()
        values: list[bytes | None] = []
        for place in how.columns:
            column, value = shape.columns[place], row[place]
            if value is None:
                kind = NULL
            elif column.name in unchanged:
                kind, value = UNCHANGED, None
            else:
                kind = TEXT
                if self._options.binary:
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
        if known.get(shape.oid) is shape:
            return
        if block is not None and self._described.get(shape.oid) is shape:
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
