"""The synchronization of one table. A copy empties the table first, and again if it was not finished."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from subscriber.errors import TargetError
from subscriber.interfaces import ApplyStatistics, Batch, CopyFormat, Position, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.sinks.atomic.row_changes import ClearTable, InsertRow, read_batch, text_only
from subscriber.sinks.atomic.stored import Stored, SubscriptionRecord, TableRecord
from subscriber.types import copy_decoder

__all__ = ["AtomicTableSink"]

_ROWS = 5000
"""Rows of a copy that are stored at once."""


class AtomicTableSink:
    """A :class:`subscriber.interfaces.TableSink`."""

    def __init__(self, stored: Stored, name: TableName) -> None:
        self._stored = stored
        self._name = name
        self._relations: dict[int, Relation] = {}
        self.relation_id = 0

    async def begin(self) -> TableEntry:
        await self._stored.acquire(self)
        table = (await self._stored.record(self)).table(self._name)
        self.relation_id = table.number
        self._relations.clear()
        if table.entry.state is TableState.DATASYNC:
            await self._clear(TableState.INIT)
            return TableEntry(TableState.INIT)
        return table.entry

    async def start_copy(self) -> None:
        await self._clear(TableState.DATASYNC)

    async def _clear(self, state: TableState) -> None:
        async with self._stored.changing(self) as (record, changes):
            self._table(record, TableState.INIT, TableState.DATASYNC).entry = TableEntry(state)
            changes.append(ClearTable(self._name))

    async def describe(self, table: PublishedTable) -> None:
        """Nothing to do: the target stores any columns."""

    async def copy(self, columns: Sequence[str], copy_format: CopyFormat, data: AsyncIterator[bytes]) -> None:
        if copy_format is not CopyFormat.TEXT:
            raise text_only()
        decoder = copy_decoder(len(columns), binary=False)
        rows: list[InsertRow] = []
        async for chunk in data:
            for fields in decoder.feed(chunk):
                values = [None if value is None else value.decode("utf-8", "surrogateescape") for value in fields]
                rows.append(InsertRow(self._name, dict(zip(columns, values, strict=True))))
            if len(rows) >= _ROWS:
                await self._insert(rows)
                rows = []
        decoder.finish()
        await self._insert(rows)

    async def _insert(self, rows: Sequence[InsertRow]) -> None:
        async with self._stored.changing(self) as (record, changes):
            self._table(record, TableState.DATASYNC)
            changes.extend(rows)

    async def finish_copy(self, position: Position) -> None:
        async with self._stored.changing(self) as (record, _):
            table = self._table(record, TableState.DATASYNC)
            table.entry, table.position = TableEntry(TableState.FINISHEDCOPY), position

    async def position(self) -> Position:
        return _position(self._table(await self._stored.record(self), TableState.FINISHEDCOPY))

    async def apply(self, batch: Batch) -> None:
        async with self._stored.changing(self) as (record, changes):
            table = self._table(record, TableState.FINISHEDCOPY)
            position = _position(table)
            changes.extend(await read_batch(batch, self._relations, position.lsn, ApplyStatistics()))
            table.position = replace(position, lsn=max(position.lsn, batch.end_lsn))
        for transaction in batch.transactions:
            await transaction.discard()

    async def finish_sync(self, lsn: Lsn) -> None:
        async with self._stored.changing(self) as (record, _):
            table = self._table(record, TableState.FINISHEDCOPY)
            table.entry, table.position = TableEntry(TableState.SYNCDONE, lsn), None

    def _table(self, record: SubscriptionRecord, *states: TableState) -> TableRecord:
        table = record.table(self._name)
        if table.entry.state not in states:
            raise TargetError(f'table "{self._name}" is in state {table.entry.state.name}', hint="start the run again")
        return table

    async def close(self) -> None:
        await self._stored.release(self)


def _position(table: TableRecord) -> Position:
    assert table.position is not None, "a copied table has a position"
    return table.position
