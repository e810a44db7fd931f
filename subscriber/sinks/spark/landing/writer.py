"""Writes transactions into one landing zone. Collects them until there are enough, or until the oldest has waited long enough.

One call at a time. Disk I/O and casts of columns run in a thread, so that the event loop can answer the publisher in the meantime.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final

from subscriber.errors import SubscriberError
from subscriber.interfaces import ApplyStatistics, Batch, RelationGate
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.landing.manifest import BatchTransactions, Manifest, clock
from subscriber.sinks.spark.landing.row_encoder import DescribedRelations, TableIds, TransactionEncoder
from subscriber.sinks.spark.landing.zone import SPILL_BYTES, LandingZone, OpenBatch
from subscriber.threads import run_in_thread
from subscriber.transaction.model import Transaction

__all__ = ["LandingWriter", "count", "encode"]

_FEW: Final = 500
"""Number of records below which the event loop encodes them itself, because a thread would cost more."""


class LandingWriter:
    """Collects and lands transactions, see the module.

    Attributes:
        described: the relations that the stream described. A new stream needs a new object.
        position: everything up to here was taken; it is in memory or landed. ``lost``: whether some of it is lost.
        gathered: when the oldest transaction that is not landed was taken, by the event loop's clock. None if there is none.
    """

    def __init__(self, zone: LandingZone, table_ids: TableIds, statistics: ApplyStatistics, position: Lsn) -> None:
        self.zone = zone
        self.described = DescribedRelations()
        self.position = position
        self.lost = False
        self.gathered: float | None = None
        self._table_ids = table_ids
        self._statistics = statistics
        self._batch: OpenBatch | None = None
        self._begin = position
        self._transactions = 0
        self._counts = Counter[str]()
        self._commit_time = self._first_commit_time = self._received_time = 0

    @property
    def size(self) -> int:
        """Approximate bytes that are collected in memory."""
        return self._batch.size if self._batch is not None else 0

    def encoder(self, batch: OpenBatch, gate: RelationGate) -> TransactionEncoder:
        """An encoder of transactions of the stream into a batch. ``gate``: whether a relation's changes are for it."""
        return TransactionEncoder(
            batch, described=self.described, gate=gate, table_ids=self._table_ids, skipped_tables=self._statistics.skipped_tables
        )

    async def take(self, batch: Batch) -> None:
        """Take the transactions of a batch that are after the position.

        Raises:
            ProtocolError, TargetError, ConfigurationError: nothing of this transaction remains. If :attr:`lost` is set, everything that was
                collected is lost.
        """
        # in the order of their ends: those before the position are the first ones
        new = [transaction for transaction in batch.transactions if transaction.end_lsn > self.position]
        for transaction in batch.transactions[: len(batch.transactions) - len(new)]:
            await self.described.learn(transaction)
            await transaction.discard()
        if not new:
            return
        if self._batch is None:
            self._batch, self._begin = self.zone.begin(), self.position
            self.gathered = asyncio.get_running_loop().time()
            self._received_time = clock()
        encoder = self.encoder(self._batch, batch.gate)
        for held, group in groupby(new, lambda transaction: transaction.spool is None):
            transactions = list(group)
            if not held:
                for transaction in transactions:
                    await self._take_spooled(transaction, encoder)
            elif self.size <= SPILL_BYTES and sum([len(transaction.records) for transaction in transactions]) < _FEW:
                self._take_held(transactions, encoder)
            else:
                await run_in_thread(lambda some=transactions: self._take_held(some, encoder))  # type: ignore[misc]

    def _take_held(self, transactions: Sequence[Transaction], encoder: TransactionEncoder) -> None:
        """Take transactions whose records are in memory."""
        batch = encoder.batch
        # rows of earlier calls with few records are not checked yet
        unchecked = _FEW if batch.size > SPILL_BYTES else 0
        for transaction in transactions:
            records, spilled = transaction.records, batch.spilled
            encoder.begin(transaction)
            try:
                encoder.add(records)
                unchecked += len(records)
                if unchecked >= _FEW:
                    batch.spill()
                    unchecked = 0
            except BaseException as error:
                self._undo(error, encoder, spilled)
                raise
            self._taken(encoder)

    async def _take_spooled(self, transaction: Transaction, encoder: TransactionEncoder) -> None:
        spilled = encoder.batch.spilled
        try:
            await encode(encoder, transaction)
        except BaseException as error:
            self._undo(error, encoder, spilled)
            raise
        self._taken(encoder)
        await transaction.discard()

    def _undo(self, error: BaseException, encoder: TransactionEncoder, spilled: int) -> None:
        """Remove the rows of the transaction that failed; all rows, if some of it were written or the error may be of all."""
        if not isinstance(error, SubscriberError) or not encoder.batch.roll_back(encoder.stamp, spilled):
            self.forget()

    def _taken(self, encoder: TransactionEncoder) -> None:
        stamp = encoder.stamp
        self._transactions += 1
        if self._transactions == 1:
            self._first_commit_time = stamp.time
        self._commit_time = stamp.time
        self.position = stamp.end_lsn
        self._counts.update(encoder.counts, transactions=1)

    async def land(self) -> Manifest | None:
        """Make everything that was collected durable. None if it has no rows."""
        batch, self._batch, self.gathered = self._batch, None, None
        count, self._transactions = self._transactions, 0
        if batch is None or batch.is_empty:
            return None
        begin, end = self._begin, self.position
        counted = BatchTransactions(
            transactions=count,
            commit_time=self._commit_time,
            first_commit_time=self._first_commit_time,
            received_time=self._received_time,
        )
        self.lost = True  # until it is landed
        found = await run_in_thread(lambda: self.zone.land(batch, begin, end, counted))
        self.lost = False
        return found

    def count(self) -> None:
        """Add the numbers of what was taken to the statistics. Call it after :meth:`land`, when the position is durable too."""
        count(self._statistics, self._counts)
        self._counts.clear()

    def forget(self) -> None:
        """Discard everything that was collected. The position is then wrong until the lake is opened again."""
        self.lost = True
        if self._batch is not None:
            self._batch.discard()
        self._batch, self.gathered, self._transactions = None, None, 0
        self._counts.clear()


def count(statistics: ApplyStatistics, counts: Mapping[str, int]) -> None:
    """Add numbers to the statistics that have their names."""
    for name, number in counts.items():
        setattr(statistics, name, getattr(statistics, name) + number)


async def encode(encoder: TransactionEncoder, transaction: Transaction) -> None:
    """Encode the rows of a transaction whose records may be in a spool.

    Raises:
        ProtocolError, ConfigurationError: the transaction cannot be encoded.
    """
    encoder.begin(transaction)

    def add(records: Sequence[bytes]) -> None:
        encoder.add(records)
        encoder.batch.spill()

    async for chunk in transaction.chunks():
        await run_in_thread(lambda records=list(chunk): add(records))  # type: ignore[misc]
