"""The share of one table in a stream of all tables: what its changes count for ``max_apply_rate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from subscriber.apply.batch import collect
from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.interfaces import Batch, TableName
from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation, Tag
from subscriber.rate_limit import RateLimit
from subscriber.transaction.model import Transaction

__all__ = ["TableShare"]

_ROWS: Final = frozenset(b"IUD")


class TableShare:
    """Collects batches that are applied for one table only.

    Args:
        table: its name.
        rate: limits the changes.
    """

    def __init__(self, table: TableName, rate: RateLimit) -> None:
        self._table = table
        self._rate = rate
        self._ids = set[bytes]()

    def gate(self, relation: Relation, _: Lsn) -> bool:
        """Whether a relation is the table."""
        if (relation.namespace, relation.name) != self._table.pair:
            return False
        self._ids.add(relation.relation_id.to_bytes(4, "big"))
        return True

    async def collect(self, receiver: Receiver, settings: Settings) -> tuple[Batch, int]:
        """As :func:`subscriber.apply.batch.collect`. The batch ends where the table's changes have reached the rate, and counts for it."""
        if not self._rate.limit:
            return await collect(receiver, settings, self.gate)
        first, most = receiver.peek(), self._rate.at_once
        assert isinstance(first, Transaction)
        size = 0
        async for records in first.chunks():
            size += self._size(records, first)

        def begins_another(transaction: Transaction) -> bool:
            nonlocal size
            if size >= most or transaction.spilled:
                return True
            size += self._size(transaction.records, transaction)
            return False

        batch, held = await collect(receiver, settings, self.gate, lambda: begins_another)
        self._rate.owe(size)
        return batch, held

    def _size(self, records: Sequence[bytes], transaction: Transaction) -> int:
        """The bytes of the table's changes. What the gate has not seen yet is described among the records."""
        start, ids, size = 5 if transaction.prefixed else 1, self._ids, 0
        for record in records:
            tag = record[0]
            if tag in _ROWS:
                if record[start : start + 4] in ids:
                    size += len(record)
            elif tag == Tag.RELATION:
                relation = decode(record, in_stream=transaction.prefixed)
                assert isinstance(relation, Relation)
                self.gate(relation, transaction.final_lsn)
        return size
