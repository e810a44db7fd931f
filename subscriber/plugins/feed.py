"""Feed an output plugin from pgoutput: messages become callbacks.

The messages come one by one, as a walsender sends them (:meth:`PluginFeed.message`), or as whole transactions, after reassembly
(:meth:`PluginFeed.begin`, :meth:`PluginFeed.change`, :meth:`PluginFeed.end`). Transactions in progress come in the first way.

The order of the callbacks is that of the server (reorderbuffer.c, logical.c), with what pgoutput does not tell left out:

* ``begin`` is called when the message after Begin is known, because that may tell the origin of the transaction.
* ``filter_by_origin`` is asked once for each transaction that is not streamed. The server asks for each change.
* A transaction that ``filter_prepare`` filters is kept in memory until its end. A streamed one is passed on, without ``stream_prepare``,
  and ends with ``stream_commit`` or ``stream_abort``. The server passes on its last block only then. Until the end
  :attr:`PluginFeed.holding` is true, and nothing may be acknowledged: the publisher sends a prepared transaction only once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from subscriber.errors import ConfigurationError, ProtocolError
from subscriber.plugins.calls import PluginCalls
from subscriber.plugins.context import LogicalDecodingContext, ReorderBufferTXN
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import (
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
    Type,
    Update,
)
from subscriber.transaction.changes import Change, DeleteChange, InsertChange, MessageChange, TruncateChange, UpdateChange, row
from subscriber.transaction.header import TransactionHeader

__all__ = ["PluginFeed"]


@dataclass(slots=True)
class _Open:
    """A transaction that was begun.

    Attributes:
        txn: as the plugin knows it.
        prepared: whether it ends with PREPARE TRANSACTION.
        begun: whether the plugin was told.
        dropped: whether ``filter_by_origin`` dropped it.
        held: its changes, if it is kept until its COMMIT PREPARED.
        relations: described in this transaction, if it is streamed.
    """

    txn: ReorderBufferTXN
    prepared: bool = False
    begun: bool = False
    dropped: bool = False
    held: list[Change] | None = None
    relations: dict[int, Relation] = field(default_factory=dict)


class PluginFeed(PluginCalls):
    """One plugin that is fed from one stream. It is made as :class:`PluginCalls`."""

    def __init__(self, plugin: object, context: LogicalDecodingContext) -> None:
        super().__init__(plugin, context)
        self._relations: dict[int, Relation] = {}
        self._open: _Open | None = None
        self._streams: dict[int, _Open] = {}
        self._block: _Open | None = None
        self._held: dict[tuple[int, str], _Open] = {}

    @property
    def holding(self) -> bool:
        """Whether a prepared transaction is kept until its end. Nothing may be acknowledged meanwhile."""
        return bool(self._held)

    # --- messages one by one

    def message(self, message: Message) -> None:
        """Feed the next message of the stream.

        Raises:
            ProtocolError: the message does not fit here.
            SubscriberError: the plugin failed.
        """
        match message:
            case Insert() | Update() | Delete() | Truncate():
                self._row(message)
            case LogicalMessage():
                self._logical_message(message)
            case Relation():
                target = self._relations if self._block is None else self._block.relations
                target[message.relation_id] = message
            case Type():
                self.context.types.define(message.type_oid, message.namespace, message.name)
                self.context.type_messages[message.type_oid] = message
            case Begin():
                txn = ReorderBufferTXN(message.xid, final_lsn=message.final_lsn, xact_time=message.commit_time)
                self._open = _Open(txn)
            case BeginPrepare():
                txn = ReorderBufferTXN(message.xid, gid=message.gid, final_lsn=message.prepare_lsn, end_lsn=message.end_lsn)
                txn.xact_time = message.prepare_time
                self._open = self._prepared(txn)
            case Origin():
                txn = self._current().txn
                txn.origin, txn.origin_lsn = message.name, message.commit_lsn
            case Commit():
                current = self._current()
                current.txn.end_lsn = message.end_lsn
                self._commit(current)
            case Prepare():
                self._prepare(self._current())
            case CommitPrepared() | RollbackPrepared():
                self._end_prepared(message)
            case _:
                self._stream(message)

    def _stream(self, message: StreamStart | StreamStop | StreamAbort | StreamCommit | StreamPrepare) -> None:
        if not self.context.streaming and not isinstance(message, StreamAbort):
            raise ProtocolError(f"a {type(message).__name__} message although streaming was not requested")
        match message:
            case StreamStart():
                stream = self._streams.get(message.xid)
                if stream is None or message.first_segment:
                    stream = self._streams[message.xid] = _Open(ReorderBufferTXN(message.xid))
                stream.begun = False
                self._block = stream
            case StreamStop():
                block = self._in_block()
                self._block = None
                self._call_stream(block, "stream_stop")
            case StreamAbort():
                self._stream_abort(message)
            case StreamCommit():
                stream = self._ended(message.xid)
                txn = stream.txn
                txn.final_lsn, txn.end_lsn, txn.xact_time = message.commit_lsn, message.end_lsn, message.commit_time
                self._call_stream(stream, "stream_commit", message.commit_lsn)
            case StreamPrepare():
                stream = self._ended(message.xid)
                txn = stream.txn
                txn.final_lsn, txn.end_lsn, txn.xact_time = message.prepare_lsn, message.end_lsn, message.prepare_time
                txn.gid = message.gid
                if self.call("filter_prepare", self.context, txn.xid, txn.gid):
                    self._held[txn.xid, message.gid] = stream
                else:
                    self._call_stream(stream, "stream_prepare", message.prepare_lsn)

    def _in_block(self) -> _Open:
        """The open block of a stream, after the plugin was told that it began."""
        block = self._block
        if block is None:
            raise ProtocolError("STREAM STOP without STREAM START")
        if not block.begun:
            block.begun = True
            block.dropped = bool(self.call("filter_by_origin", self.context, block.txn.origin))
            self._call_stream(block, "stream_start")
        return block

    def _call_stream(self, stream: _Open, callback: str, *arguments: Lsn) -> None:
        if not stream.dropped:
            self.call(callback, self.context, stream.txn, *arguments, txn=stream.txn)

    def _stream_abort(self, message: StreamAbort) -> None:
        stream = self._streams.get(message.xid)
        if stream is None:
            # PostgreSQL 18.4 sends such a message even without streaming
            return
        txn = stream.txn
        stream.relations.clear()
        if message.subxid == message.xid:
            del self._streams[message.xid]
        else:
            txn = ReorderBufferTXN(message.subxid, toptxn=txn)
        txn.xact_time = message.abort_time
        if not stream.dropped:
            self.call("stream_abort", self.context, txn, message.abort_lsn or INVALID_LSN, txn=txn)

    def _ended(self, xid: int) -> _Open:
        stream = self._streams.pop(xid, None)
        if stream is None:
            raise ProtocolError(f"transaction {xid} ends, but no block of it was received")
        self._relations.update(stream.relations)
        return stream

    def _current(self) -> _Open:
        current = self._block or self._open
        if current is None:
            raise ProtocolError("a change or the end of a transaction outside a transaction")
        return current

    def _relation(self, relation_id: int) -> Relation:
        found = self._block.relations.get(relation_id) if self._block is not None else None
        found = found or self._relations.get(relation_id)
        if found is None:
            raise ProtocolError(f"no relation map entry for remote relation ID {relation_id}")
        return found

    def _row(self, message: Insert | Update | Delete | Truncate) -> None:
        self.context.change_xid = message.xid
        if isinstance(message, Truncate):
            relations = tuple(map(self._relation, message.relation_ids))
            cascade, restart = TruncateOption.CASCADE in message.options, TruncateOption.RESTART_IDENTITY in message.options
            self.change(TruncateChange(relations, cascade=cascade, restart_identity=restart))
            return
        relation = self._relation(message.relation_id)
        if isinstance(message, Insert):
            self.change(InsertChange(relation, row(relation, message.new)))
            return
        key = None if message.key is None else row(relation, message.key, key_only=True)
        old = None if message.old is None else row(relation, message.old)
        if isinstance(message, Update):
            self.change(UpdateChange(relation, key, old, row(relation, message.new)))
        else:
            self.change(DeleteChange(relation, key, old))

    def _logical_message(self, message: LogicalMessage) -> None:
        if message.transactional:
            self.context.change_xid = message.xid
            self.change(MessageChange(message.lsn, message.prefix, message.content))
        else:
            self.loose_message(message.lsn, message.prefix, message.content)

    # --- whole transactions

    def begin(self, header: TransactionHeader) -> None:
        """Begin a transaction, unless the event is the end of a prepared one."""
        if header.kind not in {"commit", "prepare"}:
            return
        txn = ReorderBufferTXN(
            header.xid,
            gid=header.gid,
            final_lsn=header.commit_lsn,
            end_lsn=header.end_lsn,
            xact_time=header.commit_time,
            origin=header.origin,
        )
        self._open = self._prepared(txn) if header.kind == "prepare" else _Open(txn)

    def change(self, change: Change) -> None:
        """Give the next change of the transaction."""
        if self._block is not None:
            block = self._in_block()
            if not block.dropped:
                self._give(block.txn, change, "stream_")
            return
        current = self._begun()
        if current.held is not None:
            current.held.append(change)
        elif not current.dropped:
            self._give(current.txn, change, "")

    def end(self, header: TransactionHeader, rollback: RollbackPrepared | None = None) -> None:
        """End the transaction.

        Args:
            header: that was given to :meth:`begin`.
            rollback: the message, if the event is ROLLBACK PREPARED.
        """
        if header.kind == "commit":
            self._commit(self._begun())
        elif header.kind == "prepare":
            self._prepare(self._begun())
        elif rollback is not None:
            self._end_prepared(rollback)
        else:
            gid = header.gid or ""
            self._end_prepared(CommitPrepared(0, header.commit_lsn, header.end_lsn, header.commit_time, header.xid, gid))

    def loose_message(self, lsn: Lsn, prefix: str, content: bytes) -> None:
        """Give a logical message that was written outside any transaction."""
        if self.options.only_local and not self.context.capabilities.origin:
            raise ConfigurationError(
                f'output plugin "{self.context.name}" wants only changes without an origin, but before 16 a publisher does not tell the'
                " origin of a logical message outside transactions",
                hint="omit the option (test_decoding: only-local)",
            )
        self.call("message", self.context, None, lsn, False, prefix, content, lsn=lsn)

    # --- both

    def _prepared(self, txn: ReorderBufferTXN) -> _Open:
        if not self.context.twophase:
            raise ProtocolError("a prepared transaction although two-phase commit was not requested")
        current = _Open(txn, prepared=True)
        if self.call("filter_prepare", self.context, txn.xid, txn.gid):
            current.held = []
        return current

    def _begun(self) -> _Open:
        """The open transaction, after the plugin was told of it."""
        current = self._open
        if current is None:
            raise ProtocolError("a change or the end of a transaction outside a transaction")
        if not current.begun:
            current.begun = True
            txn = current.txn
            current.dropped = bool(self.call("filter_by_origin", self.context, txn.origin))
            if not current.dropped and current.held is None:
                self.call("begin_prepare" if current.prepared else "begin", self.context, txn, txn=txn)
        return current

    def _give(self, txn: ReorderBufferTXN, change: Change, prefix: str) -> None:
        match change:
            case TruncateChange():
                self.call(f"{prefix}truncate", self.context, txn, change.relations, change, txn=txn)
            case MessageChange():
                # the fourth argument: transactional
                self.call(f"{prefix}message", self.context, txn, change.lsn, True, change.prefix, change.content, txn=txn)
            case _:
                self.call(f"{prefix}change", self.context, txn, change.relation, change, txn=txn)

    def _commit(self, current: _Open) -> None:
        self._begun()
        self._open = None
        if not current.dropped:
            self.call("commit", self.context, current.txn, current.txn.final_lsn, txn=current.txn)

    def _prepare(self, current: _Open) -> None:
        self._begun()
        self._open = None
        txn = current.txn
        if current.held is not None:
            self._held[txn.xid, txn.gid or ""] = current
        elif not current.dropped:
            self.call("prepare", self.context, txn, txn.final_lsn, txn=txn)

    def _end_prepared(self, message: CommitPrepared | RollbackPrepared) -> None:
        if not self.context.twophase:
            raise ProtocolError("the end of a prepared transaction although two-phase commit was not requested")
        held = self._held.pop((message.xid, message.gid), None)
        if held is not None and held.held is None:
            self._end_stream(held, message)
            return
        txn = ReorderBufferTXN(message.xid, gid=message.gid)
        if isinstance(message, RollbackPrepared):
            txn.end_lsn, txn.xact_time = message.rollback_end_lsn, message.rollback_time
            txn.final_lsn = message.rollback_end_lsn
            if held is None:
                prepared = message.prepare_end_lsn, message.prepare_time
                self.call("rollback_prepared", self.context, txn, *prepared, txn=txn)
            return
        txn.final_lsn, txn.end_lsn, txn.xact_time = message.commit_lsn, message.end_lsn, message.commit_time
        if held is None:
            self.call("commit_prepared", self.context, txn, message.commit_lsn, txn=txn)
            return
        txn.origin = held.txn.origin
        current = self._open = _Open(txn)
        for change in held.held or ():
            self.change(change)
        self._commit(current)

    def _end_stream(self, stream: _Open, message: CommitPrepared | RollbackPrepared) -> None:
        """End a streamed transaction whose PREPARE was filtered."""
        txn = stream.txn
        if isinstance(message, RollbackPrepared):
            txn.final_lsn = txn.end_lsn = message.rollback_end_lsn
            txn.xact_time = message.rollback_time
            self._call_stream(stream, "stream_abort", message.rollback_end_lsn)
        else:
            txn.final_lsn, txn.end_lsn, txn.xact_time = message.commit_lsn, message.end_lsn, message.commit_time
            self._call_stream(stream, "stream_commit", message.commit_lsn)
