"""Table synchronization: copy one table under a snapshot, catch up from its own slot, hand over to the apply worker.

Steps of one table, with the state that is durable after each (``table_state.py`` explains the handover):

=====  ==========================================================================================================
 ``i``  not started, or an unfinished copy was undone
 ``d``  being copied: permanent slot ``pg_<oid>_sync_<relid>_<target>`` with an exported snapshot, parts read in parallel
 ``f``  all rows and the snapshot's LSN are stored in the target, atomically; the slot retains the WAL from there on
 ``s``  followed the slot up to an LSN at or past the apply worker's; the slot is dropped
 ``r``  (set by the apply worker once it has passed that LSN)
=====  ==========================================================================================================

A table that is to be *reconciled* (:class:`SyncMode`) has rows already. They are compared with the snapshot, and only what differs
is written (``subscription/run/reconciliation.py``). The rest is the same.

After a crash in ``i`` or ``d`` the copy starts again with a new slot. If the target has kept the rows of parts that were committed, they
are reconciled with the new snapshot. If that fails for a reason that may last, these rows are deleted, and the copy begins at its first
row. After a crash in ``f`` it resumes from the slot. A crash in
``s`` may leave the slot, which the next start drops.

Each table is retried separately after an error, on its own connections: it affects neither the apply worker nor other tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from subscriber import crash_points
from subscriber.apply.all_changes import require_all_changes
from subscriber.apply.progress import CopyProgress
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.retry import may_recur
from subscriber.apply.tables.table_share import TableShare
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.tasks import task_group
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable, RelationError, SubscriberError
from subscriber.interfaces import (
    ComparedTables,
    CopyFormat,
    Position,
    PublishedTable,
    ReconcilingTableSink,
    ReplicationStream,
    SyncMode,
    TableEntry,
    TableName,
    TableSink,
    TableState,
    TargetRows,
)
from subscriber.protocol.lsn import Lsn
from subscriber.rate_limit import RateLimit
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Transaction
from subscriber.waits import moved

__all__ = [
    "CopyPart",
    "CopySource",
    "ReconciledRows",
    "SnapshotSource",
    "SyncRun",
    "TableSynchronization",
    "sync_slot_prefix",
]

_log = logging.getLogger(__name__)

_TICK = 0.5
_NO_RANGES = "it has no ranges of a key"
_WORKER_ROWS = 200_000
"""So many rows are worth another worker."""


def sync_slot_prefix(oid: int) -> str:
    """The prefix of the names of a subscription's synchronization slots."""
    return f"pg_{oid}_sync_"


CopyPart = Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens one part of a table's rows under the snapshot, and returns it as COPY data."""


@dataclass(frozen=True, slots=True)
class ReconciledRows:
    """What was done to make a table equal to the publisher's.

    Attributes:
        kept: rows of the publisher that were equal in the target.
        compared: rows of the publisher that were compared.
        written: rows that were written.
        deleted: rows that only the target had. If a range of rows was replaced as a whole: all that the target had there.
    """

    kept: int
    compared: int
    written: int
    deleted: int


class SnapshotSource(Protocol):
    """A slot with its open exported snapshot."""

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot holds exactly what was committed before this LSN."""
        ...

    def parts(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> Awaitable[list[CopyPart]]:
        """The parts of the table's published rows. ``rows`` is called with the number of rows read."""
        ...

    def reconcile(
        self,
        table: PublishedTable,
        sink: ReconcilingTableSink,
        rows: TargetRows | ComparedTables,
        copy_format: CopyFormat,
        advanced: Callable[[int], None],
        *,
        workers: int,
        mode: SyncMode,
    ) -> Awaitable[ReconciledRows | None]:
        """Compare rows of the target with the snapshot, and replace those that differ.

        Args:
            table: as published.
            sink: the table's.
            rows: the target's rows, with as many sessions as workers.
            copy_format: of rows that are copied.
            advanced: called with the number of rows that are done.
            workers: how many ranges are worked on at once.
            mode: in mode COPY, ``rows`` are those that an interrupted copy has stored, else all rows of the target's table.

        Returns:
            None: nothing was done, because it is faster to copy the table again. Only in mode COPY.
        """
        ...

    async def verify(self, table: PublishedTable) -> None:
        """Check, after the last part, that all parts belong to one and the same table.

        Raises:
            PublisherUnavailable: it was renamed, or rewritten, so that rows may be missing or duplicate. Copy it again.
        """
        ...


class CopySource(Protocol):
    """The publisher, for table synchronization. Each call uses its own connections."""

    async def describe(self, table: TableName) -> PublishedTable | None:
        """Describe the table as published now; None if it is not published any more."""
        ...

    def snapshot(self, slot_name: str) -> AbstractAsyncContextManager[SnapshotSource]:
        """Create the slot, after dropping one of the same name, and keep its snapshot open."""
        ...

    def stream(self, position: Position) -> AbstractAsyncContextManager[ReplicationStream]:
        """Stream from the position's slot, without two-phase."""
        ...

    async def drop_slot(self, slot_name: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncRun:
    """What the table synchronizations of one run share.

    Attributes:
        oid, target_identifier: of the subscription, for the names of slots.
        position: of the subscription, for its system identifier and timeline.
        source: the publisher.
        states: shared with the apply worker.
        settings: of the process.
        copy_format: the format of initial copies.
        progress: is told about copies.
        reconciled: what was done to tables that were not copied.
        apply_rate: limits the changes that are applied to catch up.
    """

    oid: int
    target_identifier: str
    position: Position
    source: CopySource
    states: TableStates
    settings: Settings
    copy_format: CopyFormat
    progress: CopyProgress
    reconciled: dict[TableName, ReconciledRows]
    apply_rate: RateLimit

    def note_reconciled(self, table: TableName, found: ReconciledRows) -> None:
        """Log and keep what was done."""
        self.reconciled[table] = found
        counts = found.compared, found.written, found.deleted
        _log.info('table "%s" was reconciled: %d rows were compared, %d written, %d deleted', table, *counts)

    def slot_name(self, relation_id: int) -> str:
        """PostgreSQL's name for a table's own slot: pg_%u_sync_%u_%llu."""
        return f"{sync_slot_prefix(self.oid)}{relation_id}_{self.target_identifier}"


class TableSynchronization:
    """Takes one table to SYNCDONE.

    Args:
        run: what all synchronizations share.
        table: its name.
        sink: the table's sink, not begun.
        spool: of this table's stream; opened when it is needed.
    """

    def __init__(self, run: SyncRun, table: TableName, sink: TableSink, spool: SpoolDirectory) -> None:
        self._run = run
        self._table = table
        self._sink = sink
        self._spool = spool
        self._source = run.source
        self._states = run.states
        self._share = TableShare(table, run.apply_rate)
        self._slot: str | None = None

    async def run(self) -> None:
        """Do the remaining steps of the table. Raises on the first error; call it again then.

        Raises:
            SubscriberError: of the publisher, the target or the spool.
        """
        if self._states.state(self._table) is TableState.PARKED:
            # its slot would retain WAL
            if self._slot is not None:
                await self._source.drop_slot(self._slot)
            return
        try:
            entry = await self._begin()
            crash_points.reached("copy.begun")
            slot = self._slot = self._run.slot_name(self._sink.relation_id)
            # if an earlier attempt could not find out whether SYNCDONE was stored, this is known now
            self._states.known(self._table)
            if entry.state is TableState.SYNCDONE:
                self._settle(entry)
            elif entry.state is not TableState.READY:
                self._states.set(self._table, entry)
                self._states.abandon_handover(self._table)
                done = False
                if entry.state is not TableState.FINISHEDCOPY:
                    complete_to = await self._copy(slot, entry)
                    if complete_to is None:
                        return
                    # if the apply worker has skipped no change of the table since the snapshot, there is nothing to catch up with
                    done = await self._hand_over(complete_to)
                if not done:
                    await self._catch_up()
            crash_points.reached("copy.synchronized")
            await self._source.drop_slot(slot)
            crash_points.reached("copy.slot_dropped")
        finally:
            self._states.abandon_handover(self._table)
            await self._sink.close()

    async def _begin(self) -> TableEntry:
        try:
            sink = self._sink
            return await (sink.begin_again() if isinstance(sink, ReconcilingTableSink) else sink.begin())
        except RelationError:
            # the table was dropped, or is not part of the subscription any more: no handover can be in progress
            self._states.known(self._table)
            # if the table is parked now, its slot is dropped
            with contextlib.suppress(SubscriberError):
                self._slot = self._run.slot_name(self._sink.relation_id)
            raise

    def _settle(self, entry: TableEntry) -> None:
        self._states.set(self._table, entry)
        self._states.abandon_handover(self._table)

    async def _copy(self, slot: str, entry: TableEntry) -> Lsn | None:
        """Copy or reconcile the table. Return the LSN up to which its rows are complete; None: it is not published any more."""
        described = await self._source.describe(self._table)
        if described is None:
            if entry.state is TableState.DATASYNC and entry.mode is SyncMode.COPY and isinstance(self._sink, ReconcilingTableSink):
                await self._sink.undo_copy()
            _log.warning('table "%s" is no longer published; it is not copied', self._table)
            self._states.remove(self._table)
            await self._source.drop_slot(slot)
            return None
        try:
            await self._sink.describe(described)
        except RelationError:
            # of an attempt before the table was altered: it would retain WAL until the table matches again
            await self._source.drop_slot(slot)
            raise
        await self._sink.start_copy()
        crash_points.reached("copy.started")
        self._states.set(self._table, TableEntry(TableState.DATASYNC, mode=entry.mode))
        async with self._source.snapshot(slot) as snapshot:
            crash_points.reached("copy.slot_created")
            # after the slot was created, because that waited for transactions that may have altered the table
            table = await self._source.describe(self._table)
            if table is None:
                raise PublisherUnavailable(
                    f'table "{self._table}" was just removed from the publications', hint="the publications are checked again"
                )
            await self._sink.describe(table)
            self._run.progress.started(self._table, table.estimated_rows)
            if not await self._reconcile(snapshot, table, entry):
                await self._copy_rows(snapshot, table)
            crash_points.reached("copy.stored")
            await snapshot.verify(table)
            position = Position(
                slot_name=slot,
                system_identifier=self._run.position.system_identifier,
                timeline=self._run.position.timeline,
                lsn=snapshot.consistent_point,
            )
            await self._sink.finish_copy(position)
            crash_points.reached("copy.finished")
        self._states.set(self._table, TableEntry(TableState.FINISHEDCOPY))
        self._run.progress.finished(self._table)
        _log.info('table "%s" is complete as of %s', self._table, position.lsn)
        return self._states.covered(table.relation_id, position.lsn)

    async def _reconcile(self, snapshot: SnapshotSource, table: PublishedTable, entry: TableEntry) -> bool:
        """Compare the rows that the target has, and write only what differs. False: the table must be copied.

        In mode COPY they are those of a copy that was interrupted, else all rows.
        """
        sink, copies = self._sink, entry.mode is SyncMode.COPY
        if not isinstance(sink, ReconcilingTableSink) or (copies and entry.state is not TableState.DATASYNC):
            return False
        if entry.mode is SyncMode.RECONCILE:
            require_all_changes([table])
        advanced = partial(self._run.progress.advanced, self._table)
        reason = _NO_RANGES
        try:
            workers = min(self._run.settings.max_copy_workers_per_table, 1 + (table.estimated_rows or 0) // _WORKER_ROWS)
            rows = await sink.compared(workers)
            if rows is None:
                return False
            found = await snapshot.reconcile(table, sink, rows, self._run.copy_format, advanced, workers=workers, mode=entry.mode)
        except SubscriberError as error:
            if not (copies and may_recur(error)):
                raise
            found, reason = None, f"what it has left cannot be compared or replaced: {error.one_line()}"
        if found is None:
            await sink.undo_copy()
            # a small table is copied at once
            level = logging.INFO if reason is _NO_RANGES and (table.estimated_rows or 0) < _WORKER_ROWS else logging.WARNING
            _log.log(level, 'the copy of table "%s" was interrupted, and begins again at its first row: %s', self._table, reason)
            # rows that were compared are counted again
            self._run.progress.started(self._table, table.estimated_rows)
            return False
        if copies:
            _log.info('the copy of table "%s" was resumed: %d rows were kept, %d copied', self._table, found.kept, found.written)
        else:
            self._run.note_reconciled(self._table, found)
        return True

    async def _copy_rows(self, snapshot: SnapshotSource, table: PublishedTable) -> None:
        def advanced(rows: int) -> None:
            self._run.progress.advanced(self._table, rows)

        parts = await snapshot.parts(table, self._run.copy_format, advanced)
        limit = asyncio.Semaphore(self._run.settings.max_copy_workers_per_table)
        async with task_group() as group:
            for part in parts:
                group.create_task(self._copy_part(part, table, limit))

    async def _copy_part(self, part: CopyPart, table: PublishedTable, limit: asyncio.Semaphore) -> None:
        async with limit, part() as rows:
            await self._sink.copy(table.columns, self._run.copy_format, rows)

    async def _catch_up(self) -> None:
        position = await self._sink.position()
        tracker = FlushTracker(position.lsn)
        async with self._source.stream(position) as stream, self._spool:
            receiver = Receiver(stream, tracker, self._spool, self._run.settings)
            await receiver.start()
            try:
                await self._follow(receiver, tracker)
            finally:
                await receiver.close()

    async def _follow(self, receiver: Receiver, tracker: FlushTracker) -> None:
        first_goal, rate = self._states.handed, self._run.apply_rate
        while True:
            moved()
            event = receiver.peek()
            if isinstance(event, Transaction) and (pause := rate.pause):
                rate.hold(pause)
                await receiver.rest(min(pause, _TICK))
            elif isinstance(event, Transaction):
                await self._apply_batch(receiver, tracker)
            elif event is not None:
                receiver.release(receiver.pop()[1])  # a logical message, which changes no rows
            else:
                await receiver.wait(_TICK)
            # if nothing is pending, everything received is applied
            lsn = tracker.received if tracker.idle else tracker.applied
            if lsn >= first_goal:
                self._states.request_handover(self._table)
            if await self._hand_over(lsn):
                return

    async def _hand_over(self, lsn: Lsn) -> bool:
        """Store SYNCDONE, unless the apply worker is ahead."""
        if not self._states.try_handover(self._table, lsn):
            return False
        self._states.storing(self._table)
        crash_points.reached("copy.caught_up")
        await self._sink.finish_sync(lsn)
        self._states.complete_handover(self._table)
        _log.info('table "%s" is synchronized up to %s', self._table, lsn)
        return True

    async def _apply_batch(self, receiver: Receiver, tracker: FlushTracker) -> None:
        batch, held = await self._share.collect(receiver, self._run.settings)
        try:
            await self._sink.apply(batch)
            crash_points.reached("copy.batch_applied")
        finally:
            receiver.release(held)
        tracker.applied_to(batch.end_lsn)
        tracker.flush(batch.end_lsn)
        receiver.report()
