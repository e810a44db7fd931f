"""The results of reassembly: whole transactions, in the order in which the publisher committed or prepared them.

A transaction keeps its changes as the raw pgoutput payloads; no object is built per row. Most payloads are in
:attr:`Transaction.records`. Those of a large transaction are in a spool, which :meth:`Transaction.chunks` reads first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import (
    CommitPrepared,
    LogicalMessage,
    Origin,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
)

__all__ = ["Event", "PreparedTransaction", "SpooledRecords", "StreamedPart", "Transaction", "end_of"]


class SpooledRecords(Protocol):
    """The spilled records of one transaction, in the order received."""

    def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """Read from record number ``start``, some hundred kilobytes at a time. May be called more than once."""
        ...

    async def discard(self) -> None:
        """Delete them. Idempotent. Call it when the transaction is durable or abandoned."""
        ...


@dataclass(slots=True, eq=False, repr=False)
class Transaction:
    """One transaction as committed (or prepared) on the publisher, without aborted subtransactions.

    Attributes:
        xid: its (top) transaction id on the publisher.
        final_lsn: LSN of its commit (or prepare) record. PostgreSQL calls it remote_final_lsn.
        end_lsn: end of that record: the position after it is applied, and the position to acknowledge.
        commit_time: time of the commit (or prepare), microseconds since the PostgreSQL epoch.
        origin: where the publisher replicated it from, or None.
        prefixed: whether every record has a (sub)xid after its tag, that is, the transaction was streamed.
        records: raw payloads of Relation, Type, Insert, Update, Delete, Truncate and transactional LogicalMessage.
        spilled: how many records are in the spool. All of them precede those in ``records``.
        size: bytes of all records together.
        largest: bytes of the largest spilled record.
        subxids: the subtransactions of a streamed transaction that have changes and whose abort was not received.
        left_out: how many changes were left out, because the publisher rolled them back without sending the abort.
        rewritten: whether records were removed or moved for that.
        spool: the spilled records, set by the code that spilled them; None if ``spilled`` is 0.
        discarded: whether its spilled records are deleted, because it was applied or abandoned.
    """

    xid: int
    final_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    prefixed: bool
    records: list[bytes]
    origin: Origin | None = None
    spilled: int = 0
    size: int = 0
    largest: int = 0
    spool_id: int = 0
    subxids: Collection[int] = ()
    left_out: int = 0
    rewritten: bool = False
    spool: SpooledRecords | None = field(default=None, init=False)
    discarded: bool = field(default=False, init=False)

    @property
    def count(self) -> int:
        """Number of records, including spilled ones."""
        return self.spilled + len(self.records)

    def without_records(self) -> Transaction:
        """Return the same transaction without changes."""
        return Transaction(
            xid=self.xid,
            final_lsn=self.final_lsn,
            end_lsn=self.end_lsn,
            commit_time=self.commit_time,
            origin=self.origin,
            prefixed=self.prefixed,
            records=[],
        )

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """All records in order, or those from number ``start``, in pieces of bounded size. May be called more than once."""
        if self.spool is not None and start < self.spilled:
            async for chunk in self.spool.chunks(start):
                yield chunk
                del chunk
        rest = self.records[start - self.spilled :] if start > self.spilled else self.records
        if rest:
            yield rest

    async def discard(self) -> None:
        """Delete the spilled records."""
        if self.spool is not None:
            self.discarded = True
            await self.spool.discard()

    def __repr__(self) -> str:
        return f"Transaction(xid={self.xid}, final_lsn='{self.final_lsn}', end_lsn='{self.end_lsn}', count={self.count})"


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class StreamedPart(Transaction):
    """A part of a transaction in progress, for a reader that does not wait for its end: a block with its records, an abort, or its end.

    Attributes:
        message: StreamStart of a block, which ends with StreamStop; StreamAbort; StreamCommit or StreamPrepare. ``end_lsn`` and
            ``final_lsn`` are 0 unless the transaction ends.
    """

    message: StreamStart | StreamAbort | StreamCommit | StreamPrepare


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """A transaction that PREPARE TRANSACTION ended.

    Attributes:
        transaction: its changes.
        gid: its identifier on the publisher.
    """

    transaction: Transaction
    gid: str


Event = Transaction | PreparedTransaction | CommitPrepared | RollbackPrepared | LogicalMessage
"""The results of reassembly, in order. A LogicalMessage here is a non-transactional one."""


def end_of(event: Event) -> Lsn:
    """The LSN at which an event ends; 0: it has none."""
    match event:
        case PreparedTransaction(transaction):
            return transaction.end_lsn
        case RollbackPrepared(rollback_end_lsn=end) | Transaction(end_lsn=end) | CommitPrepared(end_lsn=end):
            return end
        case LogicalMessage():
            return INVALID_LSN
