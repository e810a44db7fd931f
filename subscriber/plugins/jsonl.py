"""``jsonl``: JSON lines, those of ``subscriber tail --format json``. It has no options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subscriber.plugins.context import LogicalDecodingContext, OutputPluginOptions, OutputType, ReorderBufferTXN
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.json_lines import json_line
from subscriber.sinks.output_lines import change_line, message_line, moment, without_none
from subscriber.transaction.changes import Change, MessageChange, TruncateChange

__all__ = ["JsonLinesPlugin"]


class JsonLinesPlugin:
    """The plugin."""

    def startup(self, ctx: LogicalDecodingContext, options: OutputPluginOptions, is_init: bool) -> None:
        """Choose text."""
        ctx.unknown_options(())
        options.output_type = OutputType.TEXTUAL

    def begin(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """The line ``begin``."""
        self._transaction(ctx, txn, "begin")

    def commit(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """The line ``commit``."""
        self._transaction(ctx, txn, "commit")

    def begin_prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN) -> None:
        """The line ``begin prepare``."""
        self._transaction(ctx, txn, "begin prepare")

    def prepare(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_lsn: Lsn) -> None:
        """The line ``prepare``."""
        self._transaction(ctx, txn, "prepare")

    def commit_prepared(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, commit_lsn: Lsn) -> None:
        """The line ``commit prepared``."""
        self._transaction(ctx, txn, "commit prepared")

    def rollback_prepared(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, prepare_end_lsn: Lsn, prepare_time: int) -> None:
        """The line ``rollback prepared``."""
        self._transaction(ctx, txn, "rollback prepared")

    def change(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relation: Relation, change: Change) -> None:
        """One row."""
        ctx.emit(json_line(change_line(change, txn.xid)))

    def truncate(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, relations: Sequence[Relation], change: TruncateChange) -> None:
        """TRUNCATE."""
        ctx.emit(json_line(change_line(change, txn.xid)))

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
        if txn is None:
            line = message_line(message_lsn, prefix, message, transactional=transactional)
        else:
            line = change_line(MessageChange(message_lsn, prefix, message), txn.xid)
        ctx.emit(json_line(line))

    def _transaction(self, ctx: LogicalDecodingContext, txn: ReorderBufferTXN, kind: str) -> None:
        line: dict[str, Any] = {"kind": kind, "xid": txn.xid, "gid": txn.gid, "lsn": txn.final_lsn, "end_lsn": txn.end_lsn}
        time = None if txn.xact_time is None else moment(txn.xact_time)
        ctx.emit(json_line(without_none({**line, "time": time, "origin": txn.origin})))
