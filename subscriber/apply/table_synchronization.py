"""Table synchronization: copy one table under a snapshot, catch up from its own slot, hand over to the apply worker.

Steps of one table, with the state that is durable after each (``table_state.py`` explains the handover):

=====  ==========================================================================================================
 ``i``  not started, or an unfinished copy was undone
 ``d``  being copied: permanent slot ``pg_<oid>_sync_<relid>_<target>`` with an exported snapshot, parts read in parallel
 ``f``  all rows and the snapshot's LSN are stored in the target, atomically; the slot retains the WAL from there on
 ``s``  followed the slot up to an LSN at or past the apply worker's; the slot is dropped
 ``r``  (set by the apply worker once it has passed that LSN)
=====  ==========================================================================================================

After a crash in ``i`` or ``d`` the copy starts again with a new slot. If the target has kept the rows of parts that were committed, they
are compared with the new snapshot, and only what differs is copied (``subscription/run/resumed_copy.py``). If that fails for a reason
that may last, these rows are deleted, and the copy begins at its first row. After a crash in ``f`` it resumes from the slot. A crash in
``s`` may leave the slot, which the next start drops.

Each table is retried separately after an error, on its own connections: it affects neither the apply worker nor other tables.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from subscriber import crash_points
from subscriber.apply.batch import collect
from subscriber.apply.progress import CopyProgress
from subscriber.apply.receiver import Receiver
from subscriber.apply.retry import may_recur
from subscriber.apply.spool import SpoolDirectory
from subscriber.apply.table_state import TableStates
from subscriber.apply.tasks import task_group
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable, RelationError, SubscriberError
from subscriber.interfaces import (
    Condition,
    CopyFormat,
    KeptRows,
    Position,
    PublishedTable,
    ReplicationStream,
    ResumableTableSink,
    SnapshotOrder,
    SnapshotTableSink,
    TableEntry,
    TableName,
    TableSink,
    TableState,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Transaction
from subscriber.waits import moved

__all__ = ["CopyPart", "CopySource", "Replacement", "ResumedRange", "SnapshotSource", "SyncRun", "TableSynchronization", "sync_slot_prefix"]

_log = logging.getLogger(__name__)

_TICK = 0.5


def sync_slot_prefix(oid: int) -> str:
    """The prefix of the names of a subscription's synchronization slots."""
    return f"pg_{oid}_sync_"


CopyPart = Callable[[], AbstractAsyncContextManager[AsyncIterator[bytes]]]
"""Opens one part of a table's rows under the snapshot, and returns it as COPY data."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """Rows that are copied in place of rows that an interrupted copy has left.

    Attributes:
        condition: which rows of the target; None: there are none.
        rows: the publisher's rows.
    """

    condition: Condition | None
    rows: CopyPart


ResumedRange = Callable[[], Awaitable[Replacement | None]]
"""Compares a range of an interrupted copy with the snapshot. None: nothing must be copied."""


class SnapshotSource(Protocol):
    """A slot with its open exported snapshot."""

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot holds exactly what was committed before this LSN."""
        ...

    def parts(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> Awaitable[list[CopyPart]]:
        """The parts of the table's published rows. ``rows`` is called with the number of rows read."""
        ...

    def resumed(
        self, table: PublishedTable, kept: KeptRows, copy_format: CopyFormat, rows: Callable[[int], None], kept_rows: Callable[[int], None]
    ) -> Awaitable[Sequence[ResumedRange] | None]:
        """The ranges of a table whose copy was interrupted; None: it must be copied from the start.

        ``rows`` is called with the number of rows read, ``kept_rows`` with the number of those that are not read again.
        """
        ...

    async def order(self, table: PublishedTable) -> SnapshotOrder:
        """The same, for a target that reads the rows in its own sessions."""
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
    """

    oid: int
    target_identifier: str
    position: Position
    source: CopySource
    states: TableStates
    settings: Settings
    copy_format: CopyFormat
    progress: CopyProgress

    def slot_name(self, relation_id: int) -> str:
        """PostgreSQL's name for a table's own slot: pg_%u_sync_%u_%llu."""
        return f"{sync_slot_prefix(self.oid)}{relation_id}_{self.target_identifier}"


class _Count:
    """Counts rows of a table's copy, and tells the progress."""

    def __init__(self, progress: CopyProgress, table: TableName) -> None:
        self._progress = progress
        self._table = table
        self.rows = 0

    def add(self, rows: int) -> None:
        self.rows += rows
        self._progress.advanced(self._table, rows)


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

    async def run(self) -> None:
        """Do the remaining steps of the table. Raises on the first error; call it again then.

        Raises:
            SubscriberError: of the publisher, the target or the spool.
        """
        try:
            entry = await self._begin()
            crash_points.reached("copy.begun")
            slot = self._run.slot_name(self._sink.relation_id)
            # if an earlier attempt could not find out whether SYNCDONE was stored, this is known now
            self._states.known(self._table)
            if entry.state is TableState.SYNCDONE:
                self._settle(entry)
            elif entry.state is not TableState.READY:
                self._states.set(self._table, entry)
                self._states.abandon_handover(self._table)
                if entry.state is not TableState.FINISHEDCOPY and not await self._copy(slot, entry):
                    return
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
            return await (sink.begin_again() if isinstance(sink, ResumableTableSink) else sink.begin())
        except RelationError:
            # the table was dropped, or is not part of the subscription any more: no handover can be in progress
            self._states.known(self._table)
            raise

    def _settle(self, entry: TableEntry) -> None:
        self._states.set(self._table, entry)
        self._states.abandon_handover(self._table)

    async def _copy(self, slot: str, entry: TableEntry) -> bool:
        described = await self._source.describe(self._table)
        if described is None:
            if entry.state is TableState.DATASYNC and isinstance(self._sink, ResumableTableSink):
                await self._sink.undo_copy()
            _log.warning('table "%s" is no longer published; it is not copied', self._table)
            self._states.remove(self._table)
            await self._source.drop_slot(slot)
            return False
        try:
            await self._sink.describe(described)
        except RelationError:
            # of an attempt before the table was altered: it would retain WAL until the table matches again
            await self._source.drop_slot(slot)
            raise
        await self._sink.start_copy()
        crash_points.reached("copy.started")
        self._states.set(self._table, TableEntry(TableState.DATASYNC))
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
            if not (entry.state is TableState.DATASYNC and await self._resume_copy(snapshot, table)):
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
        _log.info('table "%s" is copied as of %s', self._table, position.lsn)
        return True

    async def _resume_copy(self, snapshot: SnapshotSource, table: PublishedTable) -> bool:
        """Copy what an interrupted copy has not left. False: nothing of it is left."""
        sink = self._sink
        if not isinstance(sink, ResumableTableSink):
            return False
        copied, left = _Count(self._run.progress, self._table), _Count(self._run.progress, self._table)
        limit = asyncio.Semaphore(self._run.settings.max_copy_workers_per_table)
        reason = "it has no ranges of a key"
        try:
            kept = await sink.kept()
            if kept is None:
                return False
            ranges = await snapshot.resumed(table, kept, self._run.copy_format, copied.add, left.add)
            found = None if ranges is None else await self._delete_differing(sink, ranges, limit)
        except SubscriberError as error:
            if not may_recur(error):
                raise
            found, reason = None, f"what it has left cannot be compared or replaced: {error.one_line()}"
        if found is None:
            await self._begin_again(sink, reason)
            # rows that are kept were counted
            self._run.progress.started(self._table, table.estimated_rows)
            return False
        try:
            async with task_group() as group:
                for each in found:
                    group.create_task(self._copy_part(each.rows, table, limit))
        except SubscriberError as error:
            if may_recur(error):
                try:
                    await self._begin_again(sink, "its rest could not be copied")
                except SubscriberError as another:
                    error.also.append(another)
            raise
        _log.info('the copy of table "%s" was resumed: %d rows were kept, %d copied', self._table, left.rows, copied.rows)
        return True

    async def _begin_again(self, sink: ResumableTableSink, reason: str) -> None:
        await sink.undo_copy()
        _log.warning('the copy of table "%s" was interrupted, and begins again at its first row: %s', self._table, reason)

    async def _delete_differing(
        self, sink: ResumableTableSink, ranges: Sequence[ResumedRange], limit: asyncio.Semaphore
    ) -> Sequence[Replacement]:
        async with task_group() as group:
            tasks = [group.create_task(self._compare(each, limit)) for each in ranges]
        found = [each for task in tasks if (each := task.result()) is not None]
        crash_points.reached("resume.planned")
        # before anything is copied: a new row may have a unique value that one of these had
        for each in found:
            if each.condition is not None:
                await sink.delete_kept(each.condition)
                crash_points.reached("resume.deleted")
                moved()
        return found

    async def _compare(self, each: ResumedRange, limit: asyncio.Semaphore) -> Replacement | None:
        async with limit:
            found = await each()
            moved()
            return found

    async def _copy_rows(self, snapshot: SnapshotSource, table: PublishedTable) -> None:
        def advanced(rows: int) -> None:
            self._run.progress.advanced(self._table, rows)

        # a row filter is SQL: it is not given to another program, which would run whatever a file says
        if table.columns and not table.row_filters and isinstance(self._sink, SnapshotTableSink):
            await self._sink.copy_snapshot(await snapshot.order(table), advanced)
            return
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
        first_goal = self._states.handed
        while True:
            moved()
            if isinstance(receiver.peek(), Transaction):
                await self._apply_batch(receiver, tracker)
            elif receiver.peek() is not None:
                receiver.release(receiver.pop()[1])  # a logical message, which changes no rows
            else:
                await receiver.wait(_TICK)
            # if nothing is pending, everything received is applied
            lsn = tracker.received if tracker.idle else tracker.applied
            if lsn >= first_goal:
                self._states.request_handover(self._table)
            if self._states.try_handover(self._table, lsn):
                self._states.storing(self._table)
                crash_points.reached("copy.caught_up")
                await self._sink.finish_sync(lsn)
                self._states.complete_handover(self._table)
                _log.info('table "%s" is synchronized up to %s', self._table, lsn)
                return

    async def _apply_batch(self, receiver: Receiver, tracker: FlushTracker) -> None:
        batch, held = await collect(receiver, self._run.settings, self._gate)
        try:
            await self._sink.apply(batch)
            crash_points.reached("copy.batch_applied")
        finally:
            receiver.release(held)
        tracker.applied_to(batch.end_lsn)
        tracker.flush(batch.end_lsn)
        receiver.report()

    def _gate(self, relation: Relation, final_lsn: Lsn) -> bool:
        return relation.namespace == self._table.namespace and relation.name == self._table.name
