"""Leave out the changes of a streamed transaction that the publisher rolled back without saying so.

PostgreSQL 14 to 18 can stream changes of a savepoint that is rolled back, and never send the STREAM ABORT of it. (A subtransaction counts
as streamed if it has changes in memory at the end of a block. One that was spilled to disk and read back may have none then.) Only the
publisher knows. So before a streamed transaction is given on, it is asked for the status of all its subtransactions that have changes and
were not aborted in the stream.

Only changes of subtransactions that *were* rolled back are left out. If the answer is not certain, the transaction is received again
without streaming, because then the publisher leaves them out itself. The same applies to what cannot be left out here: blocks that a reader
already has, and logical messages, which do not tell which subtransaction they belong to.

A subtransaction that is left out here was rolled back before other changes of the transaction. So only its own records are removed, not
everything after its first one as at a STREAM ABORT. Its Relation and Type records stay, because the publisher does not send them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Final

from subscriber import crash_points
from subscriber.abc import ReplicationStream, Spool
from subscriber.errors import UndecidedTransaction
from subscriber.protocol.messages import Tag
from subscriber.transaction.model import StreamedPart, Transaction

__all__ = ["leave_out_rolled_back", "remove_changes"]

_log = logging.getLogger(__name__)

_DESCRIPTIONS: Final = frozenset((int(Tag.RELATION), int(Tag.TYPE)))


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
    if transaction.spilled:
        async with turn:
            await _rewrite(transaction, aborted, spool)
    remove_changes(transaction, aborted)
    crash_points.reached("spool.rolled_back")
    _log.warning(
        "transaction %d: the publisher rolled back %d of its subtransactions without telling; their changes (%d) are left out",
        transaction.xid,
        len(aborted),
        transaction.left_out,
    )


def remove_changes(transaction: Transaction, subxids: Collection[int]) -> None:
    """Remove the changes of subtransactions that are in memory.

    Raises:
        UndecidedTransaction: they are not all known.
    """
    transaction.records = _kept(transaction, subxids, transaction.records)


async def _rewrite(transaction: Transaction, subxids: Collection[int], spool: Spool) -> None:
    """Write the remaining records under the same number: the reader has its own file."""
    spilled = spool.reader(transaction.spool_id)
    transaction.spilled = transaction.largest = 0
    async for records in spilled.chunks():
        if kept := _kept(transaction, subxids, records):
            transaction.largest = max(transaction.largest, *map(len, kept))
            transaction.spilled += len(kept)
            await spool.append(transaction.spool_id, kept)
    await spilled.discard()


def _kept(transaction: Transaction, subxids: Collection[int], records: Sequence[bytes]) -> list[bytes]:
    removed = {xid.to_bytes(4) for xid in subxids}
    kept = []
    for record in records:
        if record[0] == Tag.MESSAGE:
            raise _undecided(transaction, "a logical message may be of a subtransaction that was rolled back")
        if record[1:5] in removed and record[0] not in _DESCRIPTIONS:
            transaction.left_out += 1
            transaction.size -= len(record)
        else:
            kept.append(record)
    return kept


def _undecided(transaction: Transaction, why: str) -> UndecidedTransaction:
    return UndecidedTransaction(f"transaction {transaction.xid}: {why}", hint="the transaction is received again, without streaming")
