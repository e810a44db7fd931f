"""Writes transactions into one landing zone. Collects them until there are enough, or until the oldest has waited long enough.

One call at a time. Disk I/O and casts of columns run in a thread, so that the event loop can answer the publisher in the meantime.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from subscriber.abc import ApplyStatistics, Batch, RelationGate
from subscriber.errors import SubscriberError
from subscriber.protocol.lsn import Lsn, kept_in_years
from subscriber.protocol.messages import Relation
from subscriber.sinks.spark.files.threads import run_in_thread
from subscriber.sinks.spark.landing.manifest import Manifest
from subscriber.sinks.spark.landing.row_buffer import RowBuffer
from subscriber.sinks.spark.landing.row_encoder import DescribedRelations, TransactionEncoder
from subscriber.sinks.spark.landing.zone import LandingZone, OpenBatch
from subscriber.sinks.spark.schema.table_schema import TableSchema
from subscriber.transaction.model import Transaction

__all__ = ["LandingWriter", "encode_transaction"]

TableIds = Callable[[Relation], int | None]
"""Gives the lake's number of a relation's table, or None."""


class LandingWriter:
    """Collects and lands transactions, see the module.

    Args:
        zone: the landing zone, recovered.
        table_ids: gives the lake's number of a table.
        statistics: updated with the counts.

    Attributes:
        described: the relations that the stream described. A new stream needs a new object.
        position: everything up to here was taken; it is in memory or landed.
        lost: whether something that was taken is lost.
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
        self._commit_time: int | None = None

    @property
    def size(self) -> int:
        """Approximate bytes that are collected in memory."""
        return self._batch.size if self._batch is not None else 0

    async def take(self, batch: Batch) -> None:
        """Take the transactions of a batch that are after the position.

        Raises:
            ProtocolError, TargetError, ConfigurationError: nothing of this transaction remains. If :attr:`lost` is set, everything that was
                collected is lost.
        """
        for transaction in batch.transactions:
            await self.take_transaction(transaction, batch.gate)

    async def take_transaction(self, transaction: Transaction, gate: RelationGate) -> None:
        """Take one transaction, like :meth:`take`."""
        if transaction.end_lsn <= self.position:
            await self.described.learn(transaction)
            await transaction.discard()
            return
        if self._batch is None:
            self._batch, self._begin = self.zone.begin(), self.position
            self.gathered = asyncio.get_running_loop().time()
        mark = self._batch.mark()
        try:
            await encode_transaction(
                transaction, gate, self._batch, described=self.described, table_ids=self._table_ids, statistics=self._statistics
            )
        except BaseException as error:
            if not isinstance(error, SubscriberError) or not self._batch.roll_back(mark):
                self.forget()
            raise
        self._transactions += 1
        self._commit_time = kept_in_years(transaction.commit_time)
        self.position = transaction.end_lsn
        self._statistics.transactions += 1
        await transaction.discard()

    async def land(self) -> Manifest | None:
        """Make everything that was collected durable. None if it has no rows.

        Raises:
            TargetError: it could not be written, and is discarded.
        """
        batch, self._batch, self.gathered = self._batch, None, None
        count, self._transactions = self._transactions, 0
        if batch is None or batch.is_empty:
            return None
        begin, end, commit_time = self._begin, self.position, self._commit_time
        self.lost = True  # until it is landed
        found = await run_in_thread(lambda: self.zone.land(batch, begin, end, transactions=count, commit_time=commit_time))
        self.lost = False
        return found

    def forget(self) -> None:
        """Discard everything that was collected. The position is then wrong until the lake is opened again."""
        self.lost = True
        if self._batch is not None:
            self._batch.discard()
        self._batch, self.gathered, self._transactions = None, None, 0


async def encode_transaction(
    transaction: Transaction,
    gate: RelationGate,
    batch: OpenBatch,
    *,
    described: DescribedRelations,
    table_ids: TableIds,
    statistics: ApplyStatistics,
) -> None:
    """Encode a transaction's rows into a batch.

    Raises:
        ProtocolError, ConfigurationError: the transaction cannot be encoded.
        TargetError: its rows cannot be written.
    """

    def buffer(relation: Relation, schema: TableSchema) -> RowBuffer | None:
        table_id = table_ids(relation)
        return None if table_id is None else batch.buffer(table_id, schema)

    encoder = TransactionEncoder(transaction, described, gate, buffer, statistics)

    def add(records: list[bytes]) -> None:
        encoder.add(records)
        batch.spill()

    async for chunk in transaction.chunks():
        if len(chunk) < _FEW and transaction.spool is None:
            encoder.add(chunk)
        else:
            await run_in_thread(lambda records=list(chunk): add(records))  # type: ignore[misc]
    if batch.size > _FEW_BYTES:
        await run_in_thread(batch.spill)


_FEW = 500
"""Number of records below which the event loop encodes them itself, because a thread would cost more."""
_FEW_BYTES = 32 * 1024**2
