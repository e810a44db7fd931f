"""Table synchronization of many small tables: a group shares a snapshot, a session with the publisher and one with the target.

Each table of a group is copied by one transaction of the target, which stores its rows and takes it from INIT straight to SYNCDONE. So a
crash leaves a table either untouched or synchronized, and there is nothing to undo: no rows, no notes, no slot (the snapshot comes of a
temporary one).

There is no stream that a table catches up by. None is needed if the table did not change since the snapshot, and the apply worker knows
that, because it has passed over everything that was committed since (:meth:`TableStates.covered`). Then the table is handed over at the
apply worker's position, by the handover of ``table_state.py``.

What cannot be done so *leaves* the group, and is synchronized alone (``tablesync.py``): a table that changed meanwhile, one that is large,
one that either server refuses, or has locked. Its error, if there is one, is met again there, and reported and retried as for any table.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, Protocol

from subscriber.abc import CopyFormat, PublishedTable, TableGroup, TableName
from subscriber.apply.progress import CopyProgress
from subscriber.apply.table_state import TableStates
from subscriber.apply.tablesync import sync_slot_name
from subscriber.config import Settings
from subscriber.errors import CopyOutdated, PublisherError, PublisherUnavailable, SubscriberError
from subscriber.protocol.lsn import Lsn

__all__ = ["GROUP_TABLES", "GroupSnapshot", "GroupSource", "GroupSynchronization"]

_log = logging.getLogger(__name__)

GROUP_TABLES: Final = 500
"""How many tables a group has at most."""
_GROUP_BYTES: Final = 64 * 1024**2
"""How much a group copies at most: the longer it takes, the more of its tables change meanwhile, and the publisher keeps its snapshot."""
_TABLE_BYTES: Final = 4 * 1024**2
"""What is larger has a slot of its own, and parts that are read side by side."""


class GroupSnapshot(Protocol):
    """A snapshot, and a session that reads one table after another under it."""

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot holds exactly what was committed before this LSN."""
        ...

    async def describe(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """The tables as published now; those that no longer are, are left out."""
        ...

    def rows(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> AsyncGenerator[bytes]:
        """The table's published rows as COPY data. ``rows`` is told how many were read.

        Read to the end, they are those of the table of that oid and name.

        Raises:
            PublisherUnavailable: the table was renamed, replaced or rewritten meanwhile.
            PublisherError: or its kin; also if another session has it locked for more than a moment.
        """
        ...


class GroupSource(Protocol):
    """The publisher, as a group sees it."""

    def group(self, slot_name: str) -> AbstractAsyncContextManager[GroupSnapshot]:
        """Take a snapshot by a temporary slot of that name."""
        ...


class GroupSynchronization:
    """Takes tables from INIT to SYNCDONE, those of a group together.

    Args:
        oid, target_identifier: of the subscription (they make the slot's name).
        open_group: of the sink.
        source: the publisher.
        states: shared with the apply worker.
    """

    def __init__(
        self,
        *,
        oid: int,
        target_identifier: str,
        open_group: Callable[[], TableGroup],
        source: GroupSource,
        states: TableStates,
        settings: Settings,
        copy_format: CopyFormat,
        progress: CopyProgress,
    ) -> None:
        self._oid = oid
        self._target_identifier = target_identifier
        self._open_group = open_group
        self._source = source
        self._states = states
        self._table_bytes = min(_TABLE_BYTES, settings.copy_range_size)
        self._copy_format = copy_format
        self._progress = progress

    async def run(self, tables: Sequence[TableName], leave: Callable[[TableName], None]) -> None:
        """Synchronize the tables; those that neither left nor are SYNCDONE afterwards wait for the next group.

        Args:
            tables: in INIT, at most :data:`GROUP_TABLES`.
            leave: told of each that has to be synchronized alone.

        Raises:
            SubscriberError: it was no single table's: a session was lost, the slot could not be made.
        """
        group = self._open_group()
        try:
            relation_ids = await group.begin(tables)
            for table in tables:
                if table not in relation_ids:
                    leave(table)
            members = [table for table in tables if table in relation_ids]
            if members:
                slot = sync_slot_name(self._oid, relation_ids[members[0]], self._target_identifier)
                async with self._source.group(slot) as snapshot:
                    await self._copy(members, group, snapshot, leave)
        finally:
            await group.close()

    async def _copy(
        self, members: Sequence[TableName], group: TableGroup, snapshot: GroupSnapshot, leave: Callable[[TableName], None]
    ) -> None:
        # not before the snapshot: the slot waited for the transactions that were writing, and they may have altered tables
        try:
            published = await snapshot.describe(members)
        except PublisherUnavailable:
            raise
        except PublisherError as error:
            # of one of them: by themselves, the others are not concerned
            _log.info("%d tables are synchronized by themselves: %s", len(members), error.one_line())
            published = {}
        size = 0
        for name in members:
            table = published.get(name)
            if table is None or not table.columns or table.size > self._table_bytes:
                leave(name)
            elif size + table.size <= _GROUP_BYTES:
                size += table.size
                await self._copy_table(table, group, snapshot, leave)

    async def _copy_table(
        self, table: PublishedTable, group: TableGroup, snapshot: GroupSnapshot, leave: Callable[[TableName], None]
    ) -> None:
        name, states = table.name, self._states
        self._progress.started(name, table.estimated_rows)

        def advanced(rows: int) -> None:
            self._progress.advanced(name, rows)

        try:
            async with contextlib.aclosing(snapshot.rows(table, self._copy_format, advanced)) as rows:
                # what the publisher refuses, it mostly refuses before the first row: the target's session is spared then
                first = await anext(rows, b"")
                await group.copy(table, self._copy_format, _chained(first, rows))
            lsn = states.covered(table.relation_id, snapshot.consistent_point)
            if states.try_handover(name, lsn):
                states.storing(name)
                await group.finish(lsn)
                states.complete_handover(name)
                self._progress.finished(name)
                _log.info('table "%s" is copied as of %s and synchronized up to %s', name, snapshot.consistent_point, lsn)
                return
            await group.roll_back()
            _log.info('table "%s" changed while it was copied: it is synchronized by itself', name)
        except SubscriberError as error:
            leave(name)
            if not group.usable or _is_publisher_lost(error):
                raise
            # the target has answered: nothing is stored
            states.known(name)
            _log.info('table "%s" is synchronized by itself: %s', name, error.one_line())
        finally:
            states.abandon_handover(name)
        leave(name)


def _is_publisher_lost(error: SubscriberError) -> bool:
    """Whether it is every table's: by itself, none would fare better."""
    return isinstance(error, PublisherUnavailable) and not isinstance(error, CopyOutdated)


async def _chained(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for piece in rest:
        yield piece
