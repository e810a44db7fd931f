"""The reorder buffer: WAL records become transactions, in the order of their ends, or streamed in parts.

As in reorderbuffer.c:

* Changes are collected by transaction. When all of them together exceed ``logical_decoding_work_mem``, the largest top transaction is
  streamed if the client wants streaming, else the largest (sub)transaction is serialized: here it only leaves the accounted memory and is
  counted, because a test has no need of files.
* A transaction whose commit record starts before the position from which the client wants changes was sent before, and is skipped. Until
  the decoder is past that position nothing is streamed.
* An abort of a streamed (sub)transaction is sent when its record is decoded, the children first. A fault leaves out that of a savepoint.
* A transaction that was prepared before two-phase was enabled for the slot is sent whole at its COMMIT PREPARED.

Pure: no IO, and no knowledge of pgoutput. An :class:`Output` gets the callbacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.testing.fake_publisher.replication.wal import (
    Abort,
    Commit,
    CommitPrepared,
    EmittedMessage,
    Origin,
    Prepare,
    Record,
    RollbackPrepared,
)

__all__ = ["DecodedTransaction", "Decoder", "DecodingStatistics", "Output"]


@dataclass(slots=True, eq=False)
class DecodedTransaction:
    """A top transaction.

    Attributes:
        xid: its id.
        changes: those that were not sent yet.
        sizes: of the accounted changes, by (sub)xid.
        streamed: whether a part of it was streamed.
        streamed_xids: the (sub)transactions that the client knows of.
        subxids: its subtransactions.
        origin: or None.
        gid: of a prepared transaction.
        start, end, time: of the record that ended it: COMMIT or PREPARE.
        aborted: whether it was found to be rolled back, before its abort record was decoded.
        prepared: whether PREPARE was decoded; ``sent``: and the client got it.
    """

    xid: int
    changes: list[Record] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    streamed: bool = False
    streamed_xids: set[int] = field(default_factory=set)
    subxids: set[int] = field(default_factory=set)
    origin: Origin | None = None
    gid: str = ""
    start: Lsn = INVALID_LSN
    end: Lsn = INVALID_LSN
    time: int = 0
    aborted: bool = False
    prepared: bool = False
    sent: bool = False

    @property
    def size(self) -> int:
        """Accounted bytes."""
        return sum(self.sizes.values())


class Output(Protocol):
    """The callbacks of an output plugin, as far as the fake publisher needs them."""

    def transaction(self, txn: DecodedTransaction, changes: Sequence[Record]) -> None:
        """A whole committed transaction."""

    def prepared(self, txn: DecodedTransaction, changes: Sequence[Record]) -> None:
        """A whole prepared transaction."""

    def commit_prepared(self, txn: DecodedTransaction, record: Record, time: int) -> None:
        """COMMIT PREPARED."""

    def rollback_prepared(self, txn: DecodedTransaction, record: Record, time: int) -> None:
        """ROLLBACK PREPARED."""

    def stream(self, txn: DecodedTransaction, changes: Sequence[Record]) -> None:
        """A part of a transaction in progress."""

    def stream_abort(self, txn: DecodedTransaction, subxid: int, record: Record, time: int) -> None:
        """A streamed (sub)transaction was rolled back."""

    def stream_commit(self, txn: DecodedTransaction) -> None:
        """A streamed transaction committed."""

    def stream_prepare(self, txn: DecodedTransaction) -> None:
        """A streamed transaction was prepared."""

    def message(self, record: Record, content: EmittedMessage) -> None:
        """A message outside transactions."""

    def skips_origin(self, origin: Origin | None) -> bool:
        """``filter_by_origin``."""


@dataclass(slots=True)
class DecodingStatistics:
    """The columns of ``pg_stat_replication_slots`` (14)."""

    spill_txns: int = 0
    spill_count: int = 0
    spill_bytes: int = 0
    stream_txns: int = 0
    stream_count: int = 0
    stream_bytes: int = 0
    total_txns: int = 0


class Decoder:
    """One decoding session.

    Args:
        output: gets the callbacks.
        caps: of the emulated version.
        start: transactions that ended before it are skipped.
        work_mem: ``logical_decoding_work_mem`` in bytes.
        streaming: whether transactions in progress are sent.
        two_phase_at: from where prepared transactions are sent at PREPARE, or None: never.
        statistics: of the slot.
        is_aborted: whether a transaction has been rolled back by now. 18 discards the changes of such a transaction when memory is short.
        loses_abort: asked at the rollback of a streamed savepoint: whether its abort is not sent, a fault of 14 to 18.
    """

    def __init__(
        self,
        output: Output,
        caps: Capabilities,
        *,
        start: Lsn,
        work_mem: int,
        streaming: bool,
        two_phase_at: Lsn | None,
        statistics: DecodingStatistics,
        is_aborted: Callable[[int], bool],
        loses_abort: Callable[[], bool] = lambda: False,
    ) -> None:
        self._output = output
        self._caps = caps
        self._start = start
        self._work_mem = work_mem
        self._streaming = streaming
        self._two_phase_at = two_phase_at
        self._statistics = statistics
        self._is_aborted = is_aborted
        self._loses_abort = loses_abort
        self._open: dict[int, DecodedTransaction] = {}
        self._memory = 0

    def feed(self, record: Record) -> None:
        """Decode the next record."""
        content = record.content
        match content:
            case Commit():
                self._commit(record, content.time)
            case Abort():
                self._abort(record, content)
            case Prepare():
                self._prepare(record, content)
            case CommitPrepared():
                self._commit_prepared(record, content)
            case RollbackPrepared():
                self._rollback_prepared(record, content)
            case EmittedMessage(transactional=False):
                if record.start >= self._start:
                    self._output.message(record, content)
            case _:
                self._change(record)

    def _change(self, record: Record) -> None:
        if self._output.skips_origin(record.origin):
            return
        txn = self._open.setdefault(record.top_xid, DecodedTransaction(record.top_xid))
        if txn.aborted:
            return
        txn.origin = record.origin
        txn.changes.append(record)
        txn.sizes[record.xid] = txn.sizes.get(record.xid, 0) + record.size
        self._memory += record.size
        if record.xid != record.top_xid:
            txn.subxids.add(record.xid)
        while self._memory > self._work_mem:
            self._make_room(record)

    def _make_room(self, record: Record) -> None:
        statistics = self._statistics
        if self._streaming and record.start >= self._start:
            largest = max((txn for txn in self._open.values()), key=lambda txn: txn.size)
            if not self._discards(largest):
                self._stream(largest)
            return
        # the largest transaction or subtransaction
        size, xid, txn = max(
            ((size, xid, txn) for txn in self._open.values() for xid, size in txn.sizes.items()), key=lambda found: found[:2]
        )
        if self._discards(txn):
            return
        self._memory -= size
        txn.sizes[xid] = 0
        statistics.spill_txns += 1
        statistics.spill_count += 1
        statistics.spill_bytes += size

    def _discards(self, txn: DecodedTransaction) -> bool:
        """Whether the transaction is known to be rolled back; then its changes are discarded (ReorderBufferCheckAndTruncateAbortedTXN)."""
        if not self._caps.at_least(18) or not self._is_aborted(txn.xid):
            return False
        self._release(txn)
        txn.aborted = True
        return True

    def _stream(self, txn: DecodedTransaction) -> None:
        statistics = self._statistics
        statistics.stream_txns += not txn.streamed
        statistics.stream_count += 1
        statistics.stream_bytes += txn.size
        changes = txn.changes
        self._output.stream(txn, changes)
        txn.streamed = True
        txn.streamed_xids |= {txn.xid} | {change.xid for change in changes}
        self._release(txn)

    def _release(self, txn: DecodedTransaction) -> None:
        """Discard the changes."""
        self._memory -= txn.size
        txn.changes = []
        txn.sizes.clear()

    def _close(self, xid: int) -> DecodedTransaction | None:
        """Take a transaction out of the buffer, with its changes."""
        txn = self._open.pop(xid, None)
        if txn is not None:
            self._memory -= txn.size
            txn.sizes.clear()
        return txn

    def _needs_skip(self, record: Record) -> bool:
        return record.start < self._start or self._output.skips_origin(record.origin)

    def _end(self, txn: DecodedTransaction, record: Record, time: int) -> None:
        txn.start, txn.end, txn.time = record.start, record.end, time
        txn.origin = record.origin
        self._statistics.total_txns += 1

    def _commit(self, record: Record, time: int) -> None:
        txn = self._close(record.top_xid)
        if txn is None or self._needs_skip(record):
            return
        self._end(txn, record, time)
        if txn.streamed:
            self._stream(txn)
            self._output.stream_commit(txn)
        else:
            self._output.transaction(txn, txn.changes)

    def _abort(self, record: Record, content: Abort) -> None:
        txn = self._open.get(record.top_xid)
        if txn is None:
            return
        gone = (*content.subxids, record.xid)
        sent = txn.streamed_xids.intersection(gone)
        if sent and not (record.xid != record.top_xid and self._loses_abort()):
            for xid in gone:
                if xid in sent:
                    self._output.stream_abort(txn, xid, record, content.time)
        if record.xid == record.top_xid:
            self._close(record.top_xid)
            return
        txn.changes = [change for change in txn.changes if change.xid not in gone]
        for xid in gone:
            self._memory -= txn.sizes.pop(xid, 0)

    def _prepare(self, record: Record, content: Prepare) -> None:
        txn = self._open.get(record.top_xid)
        if self._two_phase_at is None or self._output.skips_origin(record.origin):
            return
        if txn is None:
            # nothing of it is decoded: 18 sends its PREPARE, earlier versions only the end
            txn = self._open[record.top_xid] = DecodedTransaction(record.top_xid)
        txn.gid, txn.prepared = content.gid, True
        self._end(txn, record, content.time)
        if record.start < self._two_phase_at:
            # to be sent whole at its end
            return
        if record.start < self._start:
            self._release(txn)
            return
        txn.sent = True
        if txn.streamed:
            self._stream(txn)
            self._output.stream_prepare(txn)
        elif txn.changes or txn.aborted or self._caps.empty_prepares:
            self._output.prepared(txn, txn.changes)
        self._release(txn)

    def _commit_prepared(self, record: Record, content: CommitPrepared) -> None:
        if self._two_phase_at is None:
            self._commit(record, content.time)
            return
        txn = self._close(record.top_xid)
        if self._needs_skip(record):
            return
        if txn is None:
            txn = DecodedTransaction(record.top_xid, gid=content.gid)
        if txn.prepared and not txn.sent and txn.start < self._two_phase_at and txn.changes:
            self._output.prepared(txn, txn.changes)
        txn.gid = content.gid
        self._output.commit_prepared(txn, record, content.time)

    def _rollback_prepared(self, record: Record, content: RollbackPrepared) -> None:
        txn = self._close(record.top_xid)
        if self._two_phase_at is None or self._needs_skip(record):
            if txn is not None and txn.streamed and not self._needs_skip(record):
                for xid in (*content.subxids, record.xid):
                    if xid in txn.streamed_xids:
                        self._output.stream_abort(txn, xid, record, content.time)
            return
        if txn is None:
            txn = DecodedTransaction(record.top_xid, gid=content.gid)
        txn.gid = content.gid
        self._output.rollback_prepared(txn, record, content.time)
