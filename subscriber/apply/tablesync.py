"""Table synchronization: copy one table under a snapshot, catch up from a slot of its own, hand over to the apply worker.

Steps of one table, with the state that is durable after each (``table_state.py`` tells how the handover works):

=====  ==========================================================================================================
 ``i``  nothing yet, or a crash undid an unfinished copy
 ``d``  a copy is under way: permanent slot ``pg_<oid>_sync_<relid>_<target>`` with an exported snapshot, parts read in parallel
 ``f``  all rows and the snapshot's LSN are in the target, together; the slot holds the WAL from there on
 ``s``  the slot was followed up to an LSN at or past the apply worker's; the slot is dropped
 ``r``  (set by the apply worker once it passed that LSN)
=====  ==========================================================================================================

A crash in ``i`` or ``d`` starts from zero with a new slot; a crash in ``f`` goes on with the slot; a crash in ``s`` may leave the slot
behind, which the next start drops.

Each table is tried again by itself after an error, on connections of its own: neither the apply worker nor other tables notice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from subscriber.abc import (
    CopyFormat,
    Position,
    PublishedTable,
    ReplicationStream,
    SnapshotOrder,
    SnapshotTableSink,
    TableEntry,
    TableName,
    TableSink,
    TableState,
)
from subscriber.apply.batch import collect
from subscriber.apply.progress import CopyProgress
from subscriber.apply.receiver import Receiver
from subscriber.apply.spool import SpoolDirectory
from subscriber.apply.table_state import TableStates
from subscriber.apply.tasks import task_group
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable, RelationError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Transaction
from subscriber.waits import moved

__all__ = ["CopySource", "SnapshotSource", "TableSynchronization", "sync_slot_name", "sync_slot_prefix"]

_log = logging.getLogger(__name__)

_TICK = 0.5


def sync_slot_prefix(oid: int) -> str:
    """How the names of a subscription's synchronization slots start."""
    return f"pg_{oid}_sync_"


def sync_slot_name(oid: int, relation_id: int, target_identifier: str) -> str:
    """Native's name of a table's own slot: pg_%u_sync_%u_%llu."""
    return f"{sync_slot_prefix(oid)}{relation_id}_{target_identifier}"


CopyPart = Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens one part of a table's rows under the snapshot, and reads it as COPY data."""


class SnapshotSource(Protocol):
    """A slot with its exported snapshot, open."""

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot holds exactly what was committed before this LSN."""
        ...

    def parts(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> Awaitable[list[CopyPart]]:
        """The parts that together are the table's published rows. ``rows`` is told how many were read."""
        ...

    async def order(self, table: PublishedTable) -> SnapshotOrder:
        """The same, for somebody else to read."""
        ...

    async def verify(self, table: PublishedTable) -> None:
        """See, after the last part, that all parts were of one and the same table.

        Raises:
            PublisherUnavailable: it was rewritten meanwhile, so that rows may be missing or double, or renamed: copy it anew.
        """
        ...


class CopySource(Protocol):
    """The publisher, as table synchronization sees it. The wiring gives it; each call uses connections of its own."""

    async def describe(self, table: TableName) -> PublishedTable | None:
        """The table as published now; None if it no longer is."""
        ...

    def snapshot(self, slot_name: str) -> AbstractAsyncContextManager[SnapshotSource]:
        """Create the slot, after dropping one of that name, and keep its snapshot open."""
        ...

    def stream(self, position: Position) -> AbstractAsyncContextManager[ReplicationStream]:
        """Follow the position's slot from there, without two-phase."""
        ...

    async def drop_slot(self, slot_name: str) -> None:
        """Drop it; fine if it is gone."""
        ...


class TableSynchronization:
    """Takes one table to SYNCDONE.

    Args:
        oid, target_identifier: of the subscription (they make the slot's name).
        table: which.
        sink: the table's sink, not begun.
        source: the publisher.
        states: shared with the apply worker.
        spool: of this table's stream; opened when it is needed.
    """

    def __init__(
        self,
        *,
        oid: int,
        target_identifier: str,
        position: Position,
        table: TableName,
        sink: TableSink,
        source: CopySource,
        states: TableStates,
        spool: SpoolDirectory,
        settings: Settings,
        copy_format: CopyFormat,
        progress: CopyProgress,
    ) -> None:
        self._oid = oid
        self._target_identifier = target_identifier
        self._main_position = position
        self._table = table
        self._sink = sink
        self._source = source
        self._states = states
        self._spool = spool
        self._settings = settings
        self._copy_format = copy_format
        self._progress = progress

    async def run(self) -> None:
        """Do whatever is left to do for the table. Raises on the first error; to be called again then.

        Raises:
            SubscriberError: of the publisher, the target or the spool.
        """
        try:
            entry = await self._begin()
            slot = sync_slot_name(self._oid, self._sink.relation_id, self._target_identifier)
            # what an earlier attempt could not tell (whether SYNCDONE was stored) is known now
            self._states.known(self._table)
            if entry.state is TableState.SYNCDONE:
                self._settle(entry)
            elif entry.state is not TableState.READY:
                self._states.set(self._table, entry)
                self._states.abandon_handover(self._table)
                if entry.state is not TableState.FINISHEDCOPY and not await self._copy(slot):
                    return
                await self._catch_up()
            await self._source.drop_slot(slot)
        finally:
            self._states.abandon_handover(self._table)
            await self._sink.close()

    async def _begin(self) -> TableEntry:
        try:
            return await self._sink.begin()
        except RelationError:
            # the table is gone, or not of the subscription any more: no handover of it can be half done
            self._states.known(self._table)
            raise

    def _settle(self, entry: TableEntry) -> None:
        self._states.set(self._table, entry)
        self._states.abandon_handover(self._table)

    async def _copy(self, slot: str) -> bool:
        described = await self._source.describe(self._table)
        if described is None:
            _log.warning('table "%s" is no longer published; it is not copied', self._table)
            self._states.remove(self._table)
            await self._source.drop_slot(slot)
            return False
        try:
            await self._sink.describe(described)
        except RelationError:
            # of an attempt before the table was altered: it would retain WAL until the table fits
            await self._source.drop_slot(slot)
            raise
        await self._sink.start_copy()
        self._states.set(self._table, TableEntry(TableState.DATASYNC))
        async with self._source.snapshot(slot) as snapshot:
            # not before: the slot waited for the transactions that were writing, and they may have altered the table
            table = await self._source.describe(self._table)
            if table is None:
                raise PublisherUnavailable(
                    f'table "{self._table}" was taken out of the publications just now', hint="it is looked at again"
                )
            await self._sink.describe(table)
            self._progress.started(self._table, table.estimated_rows)
            await self._copy_rows(snapshot, table)
            await snapshot.verify(table)
            position = Position(
                slot_name=slot,
                system_identifier=self._main_position.system_identifier,
                timeline=self._main_position.timeline,
                lsn=snapshot.consistent_point,
            )
            await self._sink.finish_copy(position)
        self._states.set(self._table, TableEntry(TableState.FINISHEDCOPY))
        self._progress.finished(self._table)
        _log.info('table "%s" is copied as of %s', self._table, position.lsn)
        return True

    async def _copy_rows(self, snapshot: SnapshotSource, table: PublishedTable) -> None:
        def advanced(rows: int) -> None:
            self._progress.advanced(self._table, rows)

        if table.columns and isinstance(self._sink, SnapshotTableSink):
            await self._sink.copy_snapshot(await snapshot.order(table), advanced)
            return
        parts = await snapshot.parts(table, self._copy_format, advanced)
        limit = asyncio.Semaphore(self._settings.max_copy_workers_per_table)
        async with task_group() as group:
            for part in parts:
                group.create_task(self._copy_part(part, table, limit))

    async def _copy_part(self, part: CopyPart, table: PublishedTable, limit: asyncio.Semaphore) -> None:
        async with limit, part() as rows:
            await self._sink.copy(table.columns, self._copy_format, rows)

    async def _catch_up(self) -> None:
        position = await self._sink.position()
        tracker = FlushTracker(position.lsn)
        async with self._source.stream(position) as stream, self._spool:
            receiver = Receiver(stream, tracker, self._spool, self._settings)
            await receiver.start()
            try:
                await self._follow(receiver, tracker)
            finally:
                await receiver.close()

    async def _follow(self, receiver: Receiver, tracker: FlushTracker) -> None:
        first_goal = self._states.handed
        while True:
            moved()
            if isinstance(receiver.peek(), Transaction):
                await self._apply_batch(receiver, tracker)
            elif receiver.peek() is not None:
                receiver.release(receiver.pop()[1])  # a logical message: nothing to apply
            else:
                await receiver.wait(_TICK)
            # with nothing pending, all that was received is applied
            lsn = tracker.received if tracker.idle else tracker.applied
            if lsn >= first_goal:
                self._states.request_handover(self._table)
            if self._states.try_handover(self._table, lsn):
                self._states.storing(self._table)
                await self._sink.finish_sync(lsn)
                self._states.complete_handover(self._table)
                _log.info('table "%s" is synchronized up to %s', self._table, lsn)
                return

    async def _apply_batch(self, receiver: Receiver, tracker: FlushTracker) -> None:
        batch, held = await collect(receiver, self._settings, self._gate)
        try:
            await self._sink.apply(batch)
        finally:
            receiver.release(held)
        tracker.applied_to(batch.end_lsn)
        tracker.flush(batch.end_lsn)
        receiver.report()

    def _gate(self, relation: Relation, final_lsn: Lsn) -> bool:
        return relation.namespace == self._table.namespace and relation.name == self._table.name
