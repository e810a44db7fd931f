"""What reassembly gives: whole transactions, in the order in which the publisher committed or prepared them.

A transaction keeps its changes as the raw pgoutput payloads that carried them; no object is made a row. Most are held in
:attr:`Transaction.records`; those of a large one lie in a spool, which :meth:`Transaction.chunks` reads first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, Origin, RollbackPrepared

__all__ = ["Event", "PreparedTransaction", "SpooledRecords", "Transaction"]


class SpooledRecords(Protocol):
    """The spilled part of one transaction, in the order in which it was received."""

    def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """Read it from record number ``start`` on, some hundred kilobytes at a time. May be called more than once."""
        ...

    async def discard(self) -> None:
        """Free it. Idempotent; to be called when the transaction is durable or given up."""
        ...


class Transaction:
    """One transaction as committed (or prepared) on the publisher, aborted subtransactions left out.

    Attributes:
        xid: its (top) transaction id on the publisher.
        final_lsn: LSN of its commit record (of its prepare record, when prepared): what native calls remote_final_lsn.
        end_lsn: end of that record: the position once it is applied, and what is acknowledged.
        commit_time: microseconds since the PostgreSQL epoch (time of the prepare, when prepared).
        origin: where the publisher itself got it from, or None.
        prefixed: True if every record carries a (sub)xid after its tag, that is, if the transaction was streamed.
        records: raw payloads of Relation, Type, Insert, Update, Delete, Truncate and transactional LogicalMessage.
        spilled: how many records, all before those in ``records``, are in the spool.
        size: bytes of all records together.
        largest: bytes of the largest spilled record.
        spool: the spilled part; set by whoever did the spilling, None if ``spilled`` is 0.
    """

    __slots__ = (
        "commit_time",
        "end_lsn",
        "final_lsn",
        "largest",
        "origin",
        "prefixed",
        "records",
        "size",
        "spilled",
        "spool",
        "spool_id",
        "xid",
    )

    def __init__(
        self,
        *,
        xid: int,
        final_lsn: Lsn,
        end_lsn: Lsn,
        commit_time: int,
        prefixed: bool,
        records: list[bytes],
        origin: Origin | None = None,
        spilled: int = 0,
        size: int = 0,
        largest: int = 0,
        spool_id: int = 0,
    ) -> None:
        self.xid = xid
        self.final_lsn = final_lsn
        self.end_lsn = end_lsn
        self.commit_time = commit_time
        self.origin = origin
        self.prefixed = prefixed
        self.records = records
        self.spilled = spilled
        self.size = size
        self.largest = largest
        self.spool_id = spool_id
        self.spool: SpooledRecords | None = None

    @property
    def count(self) -> int:
        """How many records there are, spilled ones included."""
        return self.spilled + len(self.records)

    def without_records(self) -> Transaction:
        """The same transaction, had it changed nothing."""
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
        """All records in order, or those from number ``start`` on, in pieces of bounded size. May be called again."""
        if self.spool is not None and start < self.spilled:
            async for chunk in self.spool.chunks(start):
                yield chunk
                del chunk
        rest = self.records[start - self.spilled :] if start > self.spilled else self.records
        if rest:
            yield rest

    async def discard(self) -> None:
        """Free what was spilled."""
        if self.spool is not None:
            await self.spool.discard()

    def __repr__(self) -> str:
        return f"Transaction(xid={self.xid}, final_lsn='{self.final_lsn}', end_lsn='{self.end_lsn}', count={self.count})"


@dataclass(frozen=True, slots=True)
class PreparedTransaction:
    """A transaction that PREPARE TRANSACTION ended, and the publisher's gid of it."""

    transaction: Transaction
    gid: str


Event = Transaction | PreparedTransaction | CommitPrepared | RollbackPrepared | LogicalMessage
"""What reassembly hands on, in order. A LogicalMessage here is a non-transactional one."""
