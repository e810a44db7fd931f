"""The publisher as the source of a group of tables: :class:`subscriber.apply.table_groups.GroupSource` over walreceiver."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

from subscriber.abc import CopyFormat, PublishedTable, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.run.copy_source import PublisherSource, outdated
from subscriber.walreceiver import table_copy
from subscriber.walreceiver.snapshot import ExportedSnapshot, SnapshotReader

__all__ = ["PublisherGroupSource"]


class PublishedGroup:
    """A :class:`subscriber.apply.table_groups.GroupSnapshot`. One session reads all tables.

    Args:
        snapshot: the exported snapshot.
        source: describes the tables.
    """

    def __init__(self, snapshot: ExportedSnapshot, source: PublisherSource) -> None:
        self._snapshot = snapshot
        self._source = source
        self._stack = contextlib.AsyncExitStack()
        self._reader: SnapshotReader | None = None

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot contains exactly the transactions that were committed before this LSN."""
        return self._snapshot.consistent_point

    async def describe(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """Describe the tables as they are published now."""
        return await self._source.describe_all(tables)

    async def rows(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> AsyncGenerator[bytes]:
        """Read the table's published rows, with checks that they are valid. See :meth:`~subscriber.apply.table_groups.GroupSnapshot.rows`.

        Raises:
            CopyOutdated: the table was renamed, replaced or rewritten in the meantime.
            PublisherError: the publisher failed, or one of its subclasses.
        """
        part = table_copy.CopyPart(table.name, table.relation_id, only=table.kind == "r")
        query = table_copy.copy_query(table, part, copy_format)
        reader = await self._open_reader()
        try:
            # release the locks of the previous tables; the check takes the locks that its own COPY needs
            ((same, _),) = await reader.execute(f"ROLLBACK TO SAVEPOINT before_table; {table_copy.check_query(part)}")
            if same != "t":
                raise outdated(table.name)
            async for piece in reader.copy_out(query, copy_format, rows):
                yield piece
            if not await table_copy.is_whole(reader, table, part):
                raise outdated(table.name)
        except BaseException:
            # the session is in the middle of a COPY, or in a failed transaction
            await self.close()
            raise

    async def _open_reader(self) -> SnapshotReader:
        if self._reader is None:
            self._reader = await self._stack.enter_async_context(self._snapshot.reader())
            # a table that another session keeps locked must not delay the others
            await self._reader.execute("SET LOCAL lock_timeout = '1s'; SAVEPOINT before_table")
        return self._reader

    async def close(self) -> None:
        """End the session. Idempotent. The next table opens a new one."""
        self._reader = None
        await self._stack.aclose()


class PublisherGroupSource:
    """A :class:`subscriber.apply.table_groups.GroupSource`.

    Args:
        source: the publisher of the subscription.
    """

    def __init__(self, source: PublisherSource) -> None:
        self._source = source

    @contextlib.asynccontextmanager
    async def group(self, slot_name: str) -> AsyncIterator[PublishedGroup]:
        """Take a snapshot with a temporary slot. A slot of the same name is dropped first."""
        async with self._source.exported(slot_name, temporary=True) as snapshot:
            group = PublishedGroup(snapshot, self._source)
            try:
                yield group
            finally:
                await group.close()
