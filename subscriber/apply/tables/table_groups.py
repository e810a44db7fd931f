"""Synchronize many small tables together: a group shares a snapshot, and one session with each server.

Each table of a group is copied in one transaction of the target, which stores its rows and its state, straight from INIT to SYNCDONE. So a
crash leaves a table either untouched or synchronized, and there is nothing to undo: no rows, no state, no slot (the snapshot's slot is
temporary). A table that is reconciled is compared and changed in the same way, in its transaction.

A group has no stream by which a table could catch up. A table needs none if it did not change since the snapshot. The apply worker knows
this, because it received everything that was committed since (:meth:`TableStates.covered`). Then the table is handed over at the apply
worker's position, by the handover of ``table_state.py``.

Other tables *leave* the group, and are synchronized alone (``table_synchronization.py``): a table that changed meanwhile, a large one, one
that either server rejects, or one that is locked. If its error persists, ``table_synchronization.py`` reports and retries it as for any
table.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from subscriber import crash_points
from subscriber.apply.all_changes import require_all_changes
from subscriber.apply.tables.table_synchronization import ReconciledRows, SyncRun
from subscriber.errors import CopyOutdated, PublisherError, PublisherUnavailable, SubscriberError
from subscriber.interfaces import CopyFormat, GroupingSink, PublishedTable, ReconcilingTableGroup, SyncMode, TableGroup, TableName
from subscriber.protocol.lsn import Lsn

__all__ = ["GROUP_TABLES", "TABLE_BYTES", "GroupSnapshot", "GroupSource", "GroupSynchronization", "most_bytes"]

_log = logging.getLogger(__name__)

GROUP_TABLES: Final = 500
"""Maximum number of tables in a group."""
_GROUP_BYTES: Final = 256 * 1024**2
"""Maximum size of a group. While it is copied, more of its tables change, and its snapshot holds back the publisher."""
TABLE_BYTES: Final = 32 * 1024**2
"""Larger tables get their own slot, and are copied in parallel parts. Smaller ones have a single part anyway."""
_COMPARED: Final = 4
"""A table that is compared may be so many times larger: that is faster."""


def most_bytes(mode: SyncMode) -> int:
    """The size of the largest tables that a group may have."""
    return TABLE_BYTES * (1 if mode is SyncMode.COPY else _COMPARED)


class GroupSnapshot(Protocol):
    """A snapshot, and a session that copies one table after another under it."""

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot holds exactly what was committed before this LSN."""
        ...

    async def describe(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """Describe the tables as published now. Tables that are not published any more are left out."""
        ...

    def rows(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> AsyncGenerator[bytes]:
        """The table's published rows as COPY data. ``rows`` is called with the number of rows read.

        If the data is read to its end, it belongs to the table with that oid and name.

        Raises:
            PublisherUnavailable: the table was renamed, replaced or rewritten meanwhile.
            PublisherError: or a subclass; also if another session has locked the table for more than a moment.
        """
        ...

    async def reconcile(
        self, table: PublishedTable, group: ReconcilingTableGroup, copy_format: CopyFormat, advanced: Callable[[int], None]
    ) -> ReconciledRows:
        """Compare the rows of the target with the snapshot, and replace those that differ.

        Args:
            table: as published.
            group: the target.
            copy_format: of rows that are copied.
            advanced: called with the number of rows that are done.

        Raises:
            SubscriberError: as :meth:`rows`, or of the target.
        """
        ...


class GroupSource(Protocol):
    """The publisher, for a group."""

    def group(self, slot_name: str) -> AbstractAsyncContextManager[GroupSnapshot]:
        """Create a temporary slot of that name, with a snapshot."""
        ...


class GroupSynchronization:
    """Takes the tables of a group from INIT to SYNCDONE.

    Args:
        run: what all synchronizations share.
        sink: the target.
        source: the publisher.
    """

    def __init__(self, run: SyncRun, sink: GroupingSink, source: GroupSource) -> None:
        self._run = run
        self._sink = sink
        self._source = source

    async def run(self, tables: Sequence[TableName], leave: Callable[[TableName], None]) -> None:
        """Synchronize the tables. Tables that neither left nor are SYNCDONE afterwards wait for another group.

        Args:
            tables: in INIT, at most :data:`GROUP_TABLES`.
            leave: called for each table that must be synchronized alone.

        Raises:
            SubscriberError: an error that concerns no single table: a session was lost, or the slot could not be created.
        """
        group = self._sink.open_group()
        if not isinstance(group, ReconcilingTableGroup):
            for table in tables:
                if self._run.states.mode(table) is not SyncMode.COPY:
                    leave(table)
            tables = [table for table in tables if self._run.states.mode(table) is SyncMode.COPY]
            if not tables:
                return
        try:
            relation_ids = await group.begin(tables)
            for table in tables:
                if table not in relation_ids:
                    leave(table)
            members = [table for table in tables if table in relation_ids]
            if members:
                slot = self._run.slot_name(relation_ids[members[0]])
                async with self._source.group(slot) as snapshot:
                    await self._copy(members, group, snapshot, leave)
        finally:
            await group.close()

    async def _copy(
        self, members: Sequence[TableName], group: TableGroup, snapshot: GroupSnapshot, leave: Callable[[TableName], None]
    ) -> None:
        # after the snapshot, because the slot waited for transactions that were writing and may have altered tables
        try:
            published = await snapshot.describe(members)
        except PublisherUnavailable:
            raise
        except PublisherError as error:
            # an error of one table does not concern the others
            _log.info("%d tables are synchronized one by one: %s", len(members), error.one_line())
            published = {}
        size = 0
        copied: list[PublishedTable] = []
        for name in members:
            table = published.get(name)
            if (
                table is None
                or not table.columns
                or table.size > min(most_bytes(self._run.states.mode(name)), self._run.settings.copy_range_size)
            ):
                leave(name)
            elif size + table.size <= _GROUP_BYTES:
                size += table.size
                if await self._copy_table(table, group, snapshot, leave):
                    copied.append(table)
            if len(copied) >= group.at_once:
                await self._finish(copied, group, snapshot.consistent_point, leave)
                copied = []
        await self._finish(copied, group, snapshot.consistent_point, leave)

    async def _copy_table(
        self, table: PublishedTable, group: TableGroup, snapshot: GroupSnapshot, leave: Callable[[TableName], None]
    ) -> bool:
        """Copy a table. False: it left the group."""
        name, states = table.name, self._run.states
        if states.covered(table.relation_id, snapshot.consistent_point) < states.handed:
            _log.info('table "%s" changed before it was copied: it is synchronized alone', name)
            leave(name)
            return False
        self._run.progress.started(name, table.estimated_rows)

        def advanced(rows: int) -> None:
            self._run.progress.advanced(name, rows)

        try:
            if states.mode(name) is SyncMode.RECONCILE and isinstance(group, ReconcilingTableGroup):
                require_all_changes([table])
                found = await snapshot.reconcile(table, group, self._run.copy_format, advanced)
                self._run.note_reconciled(name, found)
            else:
                async with contextlib.aclosing(snapshot.rows(table, self._run.copy_format, advanced)) as rows:
                    # the publisher rejects most tables before the first row: then the target's session is not used
                    first = await anext(rows, b"")
                    await group.copy(table, self._run.copy_format, _chained(first, rows))
            crash_points.reached("group.copied")
        except SubscriberError as error:
            leave(name)
            if not group.usable or _is_publisher_lost(error):
                raise
            # also after an error outside of copy(), for example at the end of the publisher's rows
            await group.roll_back(name)
            _log.info('table "%s" is synchronized alone: %s', name, error.one_line())
            return False
        return True

    async def _finish(self, copied: Sequence[PublishedTable], group: TableGroup, snapshot: Lsn, leave: Callable[[TableName], None]) -> None:
        """Hand over copied tables, and store their states together."""
        states = self._run.states
        done: dict[TableName, Lsn] = {}
        changed: list[TableName] = []
        # without a wait in between: all of them at the apply worker's position
        for table in copied:
            lsn = states.covered(table.relation_id, snapshot)
            if states.try_handover(table.name, lsn):
                states.storing(table.name)
                done[table.name] = lsn
            else:
                changed.append(table.name)
        try:
            for name in changed:
                await group.roll_back(name)
                _log.info('table "%s" changed while it was copied: it is synchronized alone', name)
                leave(name)
            if not done:
                return
            await group.finish(done)
            crash_points.reached("group.stored")
            for name, lsn in done.items():
                states.complete_handover(name)
                self._run.progress.finished(name)
                _log.info('table "%s" is complete as of %s and synchronized up to %s', name, snapshot, lsn)
        except SubscriberError as error:
            for name in done:
                leave(name)
            if not group.usable or _is_publisher_lost(error):
                raise
            for name in done:
                await group.roll_back(name)
                # the target has answered, so nothing is stored
                states.known(name)
                _log.info('table "%s" is synchronized alone: %s', name, error.one_line())
        finally:
            for name in done:
                states.abandon_handover(name)


def _is_publisher_lost(error: SubscriberError) -> bool:
    """Whether the error concerns all tables, so that copying them one by one would not help."""
    return isinstance(error, PublisherUnavailable) and not isinstance(error, CopyOutdated)


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in rest:
        yield piece
