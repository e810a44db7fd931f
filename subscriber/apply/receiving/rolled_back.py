"""Leave out the changes of a streamed transaction that the publisher rolled back without saying so.

PostgreSQL 14 to 18 can stream changes of a savepoint that is rolled back, and never send the STREAM ABORT of it. (A subtransaction counts
as streamed if it has changes in memory at the end of a block. One that was spilled to disk and read back may have none then.) Only the
publisher knows. So before a streamed transaction is given on, it is asked for the status of all its subtransactions that have changes and
were not aborted in the stream.

Only changes of subtransactions that *were* rolled back are left out. If the answer is not certain, the transaction is received again
without streaming, because then the publisher leaves them out itself. The same applies to what cannot be left out here: blocks that a reader
already has, and logical messages, which do not tell which subtransaction they belong to.

A subtransaction that is left out here was rolled back before other changes of the transaction. So only its own records are removed, not
everything after its first one as at a STREAM ABORT. What it described stays if a later change needs it, because without an abort the
publisher does not describe it again; unless the subtransaction altered the table, and then the later description counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from subscriber import crash_points
from subscriber.errors import UndecidedTransaction
from subscriber.interfaces import ReplicationStream, Spool
from subscriber.log_fields import extra_fields
from subscriber.protocol.messages import Tag
from subscriber.transaction.model import StreamedPart, Transaction

__all__ = ["leave_out_rolled_back", "remove_changes"]

_log = logging.getLogger(__name__)


async def leave_out_rolled_back(transaction: Transaction, stream: ReplicationStream, spool: Spool, turn: asyncio.Lock) -> None:
    """Remove the changes that the publisher rolled back, before the transaction's spool is opened for reading.

    Args:
        transaction: its end was received.
        stream: that sent it.
        spool: has its spilled records.
        turn: to use the spool.

    Raises:
        UndecidedTransaction: it must be received again.
        SpoolError: its changes cannot be read or written.
    """
    if not transaction.subxids:
        return
    aborted = await stream.rolled_back(transaction.xid, transaction.subxids)
    if not aborted:
        return
    if isinstance(transaction, StreamedPart):
        raise _undecided(transaction, "changes of a rolled back subtransaction were given on already")
    removal = _Removal(transaction, aborted)
    if transaction.spilled:
        async with turn:
            await removal.rewrite(spool)
    removal.finish()
    crash_points.reached("spool.rolled_back")
    _log.warning(
        "transaction %d: the publisher rolled back %d of its subtransactions without telling; their changes (%d) are left out",
        transaction.xid,
        len(aborted),
        transaction.left_out,
        extra=extra_fields(xid=transaction.xid),
    )


def remove_changes(transaction: Transaction, subxids: Collection[int]) -> None:
    """Remove the changes of subtransactions from a transaction that is in memory.

    Raises:
        UndecidedTransaction: they are not all known.
    """
    _Removal(transaction, subxids).finish()


class _Removal:
    """One transaction, record by record."""

    def __init__(self, transaction: Transaction, subxids: Collection[int]) -> None:
        self._transaction = transaction
        self._removed = frozenset(xid.to_bytes(4) for xid in subxids)
        # descriptions of relations that were removed, and that what follows may need
        self._described: dict[bytes, bytes] = {}

    async def rewrite(self, spool: Spool) -> None:
        """Write the remaining spilled records under the same number: the reader has its own file."""
        transaction = self._transaction
        spilled = spool.reader(transaction.spool_id)
        transaction.spilled = transaction.largest = 0
        async for records in spilled.chunks():
            if kept := self._kept(records):
                transaction.largest = max(transaction.largest, *map(len, kept))
                transaction.spilled += len(kept)
                await spool.append(transaction.spool_id, kept)
        await spilled.discard()

    def finish(self) -> None:
        """Remove what is in memory. Later transactions may need a description, so those that nothing replaced are kept."""
        kept = self._kept(self._transaction.records)
        self._transaction.records = [*kept, *self._restored(*self._described)]

    def _kept(self, records: Sequence[bytes]) -> list[bytes]:
        kept: list[bytes] = []
        for record in records:
            tag, relation = record[0], record[5:9]
            if tag == Tag.MESSAGE:
                raise _undecided(self._transaction, "a logical message may be of a subtransaction that was rolled back")
            if record[1:5] in self._removed and tag != Tag.TYPE:
                self._transaction.size -= len(record)
                self._transaction.rewritten = True
                if tag == Tag.RELATION:
                    self._described[relation] = record
                else:
                    self._transaction.left_out += 1
                continue
            if tag == Tag.RELATION:
                self._described.pop(relation, None)
            elif self._described:
                kept += self._restored(*(self._described if tag == Tag.TRUNCATE else (relation,)))
            kept.append(record)
        return kept

    def _restored(self, *relations: bytes) -> list[bytes]:
        found = [self._described.pop(each) for each in relations if each in self._described]
        self._transaction.size += sum(map(len, found))
        return found


def _undecided(transaction: Transaction, why: str) -> UndecidedTransaction:
    return UndecidedTransaction(f"transaction {transaction.xid}: {why}", hint="the transaction is received again, without streaming")
