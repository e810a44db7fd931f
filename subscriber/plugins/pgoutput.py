"""``pgoutput``: the messages of the protocol, encoded again.

Its options: ``proto_version`` (4), ``streaming`` (``off``, ``on``, ``parallel``; off), ``two_phase`` (off), ``messages`` (off), ``origin``
(``any``, ``none``; any). There are no ``publication_names`` and no ``binary``: the stream that feeds the plugin has chosen the tables and
the format of the values.

Each relation is described before its first change, and again after the publisher described it again. A streamed transaction describes its
relations itself.

Source: pgoutput.c.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, ReorderBufferTXN
from subscriber.plugins.option_values import boolean
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import (
    BINARY,
    NULL,
    TEXT,
    UNCHANGED,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
    Type,
    Update,
)
from subscriber.transaction.changes import Change, DeleteChange, InsertChange, Row, TruncateChange, Unchanged, UpdateChange

__all__ = ["PgOutput"]

_OPTIONS: Final = ("proto_version", "streaming", "two_phase", "messages", "origin")
_VERSIONS: Final = ("1", "2", "3", "4")


class PgOutput:
    """The plugin."""

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        ctx.unknown_options(_OPTIONS)
        version = ctx.output_plugin_options.get("proto_version", "4")
        if version not in _VERSIONS:
            raise ConfigurationError(f'invalid proto_version "{version}"', hint="give 1, 2, 3 or 4")
        streaming = ctx.output_plugin_options.get("streaming", "off")
        if streaming not in {"off", "on", "parallel"}:
            raise ConfigurationError(f'invalid value "{streaming}" for streaming', hint="give off, on or parallel")
        origin = ctx.output_plugin_options.get("origin", "any")
        if origin not in {"any", "none"}:
            raise ConfigurationError(f'unrecognized origin value: "{origin}"', hint="give any or none")
        two_phase = boolean(ctx, "two_phase", default=False)
        needed = {"parallel": 4, "on": 2}.get(streaming, 1)
        for feature, least in (("streaming", needed), ("two-phase commit", 3 if two_phase else 1)):
            if int(version) < least:
                raise ConfigurationError(f"requested proto_version={version} does not support {feature}, need {least} or higher")
        if streaming != "off" and not ctx.streaming:
            raise ConfigurationError("streaming needs transactions in progress, but here they come whole", hint="omit streaming")
        if two_phase and not ctx.twophase:
            raise ConfigurationError(
                "two_phase needs prepared transactions, but they do not come", hint="request two_phase of the stream, too"
            )
        ctx.streaming &= streaming != "off"
        ctx.twophase &= two_phase
        self._parallel = streaming == "parallel"
        self._messages = boolean(ctx, "messages", default=False)
        self._only_local = options.only_local = origin == "none"
        self._described: dict[int, Relation] = {}
        self._streams: dict[int, dict[int, Relation]] = {}
        self._stream: int | None = None

    def filter_by_origin(self, ctx: LogicalDecodingContext, origin: str | None) -> bool:
        """Drop transactions of others if ``origin`` is none."""
        return self._only_local and origin is not None

    # --- transactions

    def begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """Begin, and Origin if there is one."""
        _send(ctx, Begin(txn.final_lsn, txn.xact_time or 0, txn.xid), last=txn.origin is None)
        self._origin(ctx, txn)

    def commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """Commit."""
        _send(ctx, Commit(0, commit_lsn, _end(txn), txn.xact_time or 0))

    def begin_prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """Begin Prepare."""
        message = BeginPrepare(txn.final_lsn, _end(txn), txn.xact_time or 0, txn.xid, txn.gid or "")
        _send(ctx, message, last=txn.origin is None)
        self._origin(ctx, txn)

    def prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_lsn: Lsn) -> None:
        """Prepare."""
        _send(ctx, Prepare(0, prepare_lsn, _end(txn), txn.xact_time or 0, txn.xid, txn.gid or ""))

    def commit_prepared(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """Commit Prepared."""
        _send(ctx, CommitPrepared(0, commit_lsn, _end(txn), txn.xact_time or 0, txn.xid, txn.gid or ""))

    def rollback_prepared(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_end_lsn: Lsn, prepare_time: int) -> None:
        """Rollback Prepared."""
        _send(ctx, RollbackPrepared(0, prepare_end_lsn, _end(txn), prepare_time, txn.xact_time or 0, txn.xid, txn.gid or ""))

    # --- changes

    def change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, change: Change) -> None:
        """Insert, Update or Delete."""
        self._describe(ctx, relation)
        oid, xid = relation.relation_id, ctx.change_xid if self._stream is not None else None
        match change:
            case InsertChange():
                _send(ctx, Insert(oid, _tuple(relation, change.new), xid))
            case UpdateChange():
                key, old = _optional(relation, change.key), _optional(relation, change.old)
                _send(ctx, Update(oid, key, old, _tuple(relation, change.new), xid))
            case DeleteChange():
                _send(ctx, Delete(oid, _optional(relation, change.key), _optional(relation, change.old), xid))

    stream_change = change

    def truncate(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relations: Sequence[Relation], change: TruncateChange) -> None:
        """Truncate."""
        for relation in relations:
            self._describe(ctx, relation)
        options = TruncateOption(0)
        if change.cascade:
            options |= TruncateOption.CASCADE
        if change.restart_identity:
            options |= TruncateOption.RESTART_IDENTITY
        xid = ctx.change_xid if self._stream is not None else None
        _send(ctx, Truncate(options, tuple(relation.relation_id for relation in relations), xid))

    stream_truncate = truncate

    def message(  # noqa: PLR0917 -- as PostgreSQL's callback
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN | None,
        message_lsn: Lsn,
        transactional: bool,
        prefix: str,
        message: bytes,
    ) -> None:
        """Message, if ``messages`` is on."""
        if self._messages:
            xid = ctx.change_xid if self._stream is not None else None
            _send(ctx, LogicalMessage(transactional, message_lsn, prefix, message, xid))

    stream_message = message

    # --- transactions in progress

    def stream_start(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """Stream Start, and Origin in the first block."""
        first = txn.xid not in self._streams
        self._streams.setdefault(txn.xid, {})
        self._stream = txn.xid
        with_origin = first and txn.origin is not None
        _send(ctx, StreamStart(txn.xid, first), last=not with_origin)
        if with_origin:
            self._origin(ctx, txn)

    def stream_stop(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """Stream Stop."""
        self._stream = None
        _send(ctx, StreamStop())

    def stream_abort(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, abort_lsn: Lsn) -> None:
        """Stream Abort. The transaction describes its relations again."""
        top = txn.toptxn or txn
        self._streams[top.xid].clear()
        if txn.toptxn is None:
            del self._streams[top.xid]
        more = (abort_lsn, txn.xact_time or 0) if self._parallel else (None, None)
        _send(ctx, StreamAbort(top.xid, txn.xid, *more))

    def stream_commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """Stream Commit."""
        self._described.update(self._streams.pop(txn.xid))
        _send(ctx, StreamCommit(txn.xid, 0, commit_lsn, _end(txn), txn.xact_time or 0))

    def stream_prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_lsn: Lsn) -> None:
        """Stream Prepare."""
        self._described.update(self._streams.pop(txn.xid))
        _send(ctx, StreamPrepare(0, prepare_lsn, _end(txn), txn.xact_time or 0, txn.xid, txn.gid or ""))

    # --- parts

    @staticmethod
    def _origin(ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        if txn.origin is not None:
            _send(ctx, Origin(txn.origin_lsn, txn.origin))

    def _describe(self, ctx: LogicalDecodingContext, relation: Relation) -> None:
        """Send Type and Relation, unless this description was sent."""
        described = self._described if self._stream is None else self._streams[self._stream]
        if described.get(relation.relation_id) is relation:
            return
        described[relation.relation_id] = relation
        xid = ctx.change_xid if self._stream is not None else None
        for column in relation.columns:
            if (named := ctx.type_messages.get(column.type_oid)) is not None:
                _send(ctx, Type(named.type_oid, named.namespace, named.name, xid), last=False)
        replica_identity, columns = relation.replica_identity, relation.columns
        _send(ctx, Relation(relation.relation_id, relation.namespace, relation.name, replica_identity, columns, xid), last=False)


def _send(ctx: LogicalDecodingContext, message: Message, *, last: bool = True) -> None:
    ctx.emit(encode(message), last_write=last)


def _end(txn: ReorderBufferTXN) -> Lsn:
    return INVALID_LSN if txn.end_lsn is None else txn.end_lsn


def _optional(relation: Relation, found: Row | None) -> TupleData | None:
    return None if found is None else _tuple(relation, found)


def _tuple(relation: Relation, found: Row) -> TupleData:
    kinds, values = bytearray(), list[bytes | None]()
    for column in relation.columns:
        value = found.get(column.name)
        match value:
            case None:
                kinds.append(NULL)
                values.append(None)
            case Unchanged():
                kinds.append(UNCHANGED)
                values.append(None)
            case str():
                kinds.append(TEXT)
                values.append(value.encode("utf-8", "surrogateescape"))
            case bytes():
                kinds.append(BINARY)
                values.append(value)
    return TupleData(bytes(kinds), values)
