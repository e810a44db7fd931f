"""``test_decoding``: the output of PostgreSQL's contrib module, byte for byte.

Its options: ``include-xids`` (on), ``include-timestamp``, ``skip-empty-xacts``, ``only-local``, ``stream-changes``, ``force-binary``,
``include-rewrites``. What pgoutput does not tell is an error: empty transactions of version 15 and later (so ``skip-empty-xacts`` must be
on), and rewrites. The output is that of a session with ``search_path = ''``, ``timezone = UTC`` and the other settings of a walsender.

Source: contrib/test_decoding, output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from subscriber.errors import ConfigurationError
from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, OutputType, ReorderBufferTXN
from subscriber.plugins.names import format_type, quote_identifier, quote_qualified_identifier
from subscriber.plugins.option_values import boolean
from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.protocol.messages import Relation
from subscriber.protocol.quoting import quote_literal
from subscriber.transaction.changes import UNCHANGED, Change, DeleteChange, InsertChange, Row, TruncateChange, UpdateChange

__all__ = ["TestDecoding"]

_OPTIONS: Final = (
    "include-xids",
    "include-timestamp",
    "force-binary",
    "skip-empty-xacts",
    "only-local",
    "include-rewrites",
    "stream-changes",
)
_UNQUOTED: Final = frozenset({20, 21, 23, 26, 700, 701, 1700})
"""int8, int2, int4, oid, float4, float8, numeric"""
_BOOL: Final = 16
_BITS: Final = frozenset({1560, 1562})


@dataclass(slots=True)
class _Written:
    """What was written of a transaction: ``TestDecodingTxnData``."""

    transaction: bool = False
    stream: bool = False


class TestDecoding:
    """The plugin."""

    __test__ = False

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Read the options."""
        ctx.unknown_options(_OPTIONS)
        self._include_xids = boolean(ctx, "include-xids", default=True)
        self._include_timestamp = boolean(ctx, "include-timestamp", default=False)
        self._skip_empty = boolean(ctx, "skip-empty-xacts", default=False)
        self._only_local = options.only_local = boolean(ctx, "only-local", default=False)
        binary = boolean(ctx, "force-binary", default=False, bare=False)
        options.output_type = OutputType.BINARY if binary else OutputType.TEXTUAL
        options.receive_rewrites = boolean(ctx, "include-rewrites", default=False, bare=False)
        options.complete_relations = True
        stream = boolean(ctx, "stream-changes", default=False, bare=False)
        if stream and not ctx.streaming:
            raise ConfigurationError(
                "stream-changes needs transactions in progress, but here they come whole", hint="omit stream-changes, or streaming=off"
            )
        ctx.streaming &= stream
        if not self._skip_empty and not ctx.sends_empty_transactions:
            raise ConfigurationError(
                "pgoutput of PostgreSQL 15 and later does not send empty transactions, which test_decoding prints unless skip-empty-xacts"
                " is on",
                hint="set skip-empty-xacts=on",
            )

    def filter_by_origin(self, ctx: LogicalDecodingContext, origin: str | None) -> bool:
        """Drop transactions of others if ``only-local`` is on."""
        return self._only_local and origin is not None

    def filter_prepare(self, ctx: LogicalDecodingContext, xid: int, gid: str) -> bool:
        """Print a transaction at its COMMIT PREPARED if its identifier contains ``_nodecode``."""
        return "_nodecode" in gid

    # --- whole transactions

    def begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """BEGIN, unless it waits for the first change."""
        txn.output_plugin_private = _Written()
        if not self._skip_empty:
            self._begin(ctx, txn)

    begin_prepare = begin

    def _begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, *, last: bool = True) -> None:
        ctx.emit(self._with_xid("BEGIN", " {}", txn), last_write=last)

    def commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """COMMIT."""
        if self._wrote(txn):
            ctx.emit(self._with_xid("COMMIT", " {}", txn), self._at(txn))

    def prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_lsn: Lsn) -> None:
        """PREPARE TRANSACTION."""
        if self._wrote(txn):
            self._gid(ctx, txn, "PREPARE TRANSACTION")

    def commit_prepared(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """COMMIT PREPARED."""
        self._gid(ctx, txn, "COMMIT PREPARED")

    def rollback_prepared(
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN,
        prepare_end_lsn: Lsn,
        prepare_time: int,
    ) -> None:
        """ROLLBACK PREPARED."""
        self._gid(ctx, txn, "ROLLBACK PREPARED")

    def _gid(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, words: str) -> None:
        ctx.emit(self._with_xid(f"{words} {quote_literal(txn.gid or '')}", ", txid {}", txn), self._at(txn))

    def change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, change: Change) -> None:
        """One row."""
        self._first_change(ctx, txn)
        parts = ["table ", quote_qualified_identifier(relation.namespace, relation.name, ctx.capabilities), ":"]
        match change:
            case InsertChange():
                parts.append(" INSERT:")
                self._print(ctx, parts, relation, change.new, nulls=True)
            case UpdateChange():
                parts.append(" UPDATE:")
                old = change.old if change.key is None else change.key
                if old is not None:
                    parts.append(" old-key:")
                    self._print(ctx, parts, relation, old, nulls=False)
                    parts.append(" new-tuple:")
                self._print(ctx, parts, relation, change.new, nulls=True)
            case DeleteChange():
                parts.append(" DELETE:")
                self._print(ctx, parts, relation, (change.old if change.key is None else change.key) or {}, nulls=False)
        ctx.emit(*parts)

    def truncate(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relations: Sequence[Relation], change: TruncateChange) -> None:
        """TRUNCATE."""
        self._first_change(ctx, txn)
        names = ", ".join(quote_qualified_identifier(relation.namespace, relation.name, ctx.capabilities) for relation in relations)
        flags = (" restart_seqs" if change.restart_identity else "") + (" cascade" if change.cascade else "")
        ctx.emit("table ", names, ": TRUNCATE:", flags or " (no-flags)")

    def message(  # noqa: PLR0917 -- as PostgreSQL's callback
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN | None,
        message_lsn: Lsn,
        transactional: bool,
        prefix: str,
        message: bytes,
    ) -> None:
        """A logical message."""
        if txn is not None and transactional and ctx.capabilities.at_least(17):
            self._first_change(ctx, txn)
        ctx.emit(f"message: transactional: {transactional:d} prefix: {prefix}, sz: {len(message)} content:", message)

    # --- transactions in progress

    def stream_start(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """The opening of a block, unless it waits for the first change."""
        if txn.output_plugin_private is None:
            txn.output_plugin_private = _Written()
        txn.output_plugin_private.stream = False
        if not self._skip_empty:
            self._stream_start(ctx, txn)

    def _stream_start(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, *, last: bool = True) -> None:
        ctx.emit(self._with_xid("opening a streamed block for transaction", " TXN {}", txn), last_write=last)

    def stream_stop(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """The end of a block."""
        if not self._skip_empty or txn.output_plugin_private.stream:
            ctx.emit(self._with_xid("closing a streamed block for transaction", " TXN {}", txn))

    def stream_abort(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, abort_lsn: Lsn) -> None:
        """A (sub)transaction was rolled back."""
        if self._wrote(txn.toptxn or txn):
            ctx.emit(self._with_xid("aborting streamed (sub)transaction", " TXN {}", txn))

    def stream_prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_lsn: Lsn) -> None:
        """PREPARE TRANSACTION of a streamed transaction."""
        if self._wrote(txn):
            gid = quote_literal(txn.gid or "")
            text = f"TXN {gid}, txid {txn.xid}" if self._include_xids else gid
            ctx.emit(f"preparing streamed transaction {text}", self._at(txn))

    def stream_commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """COMMIT of a streamed transaction."""
        if self._wrote(txn):
            ctx.emit(self._with_xid("committing streamed transaction", " TXN {}", txn), self._at(txn))

    def stream_change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, change: Change) -> None:
        """A change, without its content."""
        self._first_stream_change(ctx, txn)
        ctx.emit(f"streaming change for TXN {txn.xid}" if self._include_xids else "streaming change for transaction")

    def stream_truncate(
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN,
        relations: Sequence[Relation],
        change: TruncateChange,
    ) -> None:
        """A TRUNCATE, without its content."""
        self._first_stream_change(ctx, txn)
        ctx.emit(f"streaming truncate for TXN {txn.xid}" if self._include_xids else "streaming truncate for transaction")

    def stream_message(  # noqa: PLR0917 -- as PostgreSQL's callback
        self,
        ctx: LogicalDecodingContext,
        txn: ReorderBufferTXN,
        message_lsn: Lsn,
        transactional: bool,
        prefix: str,
        message: bytes,
    ) -> None:
        """A logical message. The content of a transactional one is not shown."""
        if ctx.capabilities.at_least(17):
            self._first_stream_change(ctx, txn)
        ctx.emit(f"streaming message: transactional: {transactional:d} prefix: {prefix}, sz: {len(message)}")

    # --- parts

    def _first_change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        written = txn.output_plugin_private
        if self._skip_empty and not written.transaction:
            self._begin(ctx, txn, last=False)
        written.transaction = True

    def _first_stream_change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        written = txn.output_plugin_private
        if self._skip_empty and not written.stream:
            self._stream_start(ctx, txn, last=False)
        written.transaction = written.stream = True

    def _wrote(self, txn: ReorderBufferTXN) -> bool:
        return not self._skip_empty or txn.output_plugin_private.transaction

    def _with_xid(self, words: str, form: str, txn: ReorderBufferTXN) -> str:
        return words + form.format(txn.xid) if self._include_xids else words

    def _at(self, txn: ReorderBufferTXN) -> str:
        return f" (at {timestamp(txn.xact_time or 0)})" if self._include_timestamp else ""

    def _print(self, ctx: LogicalDecodingContext, parts: list[str], relation: Relation, found: Row, *, nulls: bool) -> None:
        for column in relation.columns:
            if column.name not in found:
                continue
            value = found[column.name]
            if value is None and not nulls:
                continue
            name = quote_identifier(column.name, ctx.capabilities)
            parts += (" ", name, "[", format_type(column.type_oid, ctx.types, ctx.capabilities), "]:")
            if value is None:
                parts.append("null")
            elif value is UNCHANGED:
                parts.append("unchanged-toast-datum")
            elif isinstance(value, bytes):
                raise ConfigurationError("test_decoding prints text, but the publisher sends binary values", hint="omit binary=true")
            else:
                parts.append(_literal(column.type_oid, value))


def _literal(type_oid: int, text: str) -> str:
    if type_oid in _UNQUOTED:
        return text
    if type_oid in _BITS:
        return f"B'{text}'"
    if type_oid == _BOOL:
        return "true" if text == "t" else "false"
    return "'" + text.replace("'", "''") + "'"


def timestamp(microseconds: int) -> str:
    """A time as ``timestamptz_to_str`` prints it, in UTC."""
    moment = POSTGRES_EPOCH + timedelta(microseconds=microseconds)
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return text + (f".{moment.microsecond:06}".rstrip("0") if moment.microsecond else "") + "+00"
