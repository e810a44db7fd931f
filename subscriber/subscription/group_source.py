"""The publisher as a group of tables sees it: :class:`subscriber.apply.groups.GroupSource` over walreceiver."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence

from subscriber.abc import CopyFormat, PublishedTable, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.source import PublisherSource, outdated
from subscriber.walreceiver import copying
from subscriber.walreceiver.snapshot import ExportedSnapshot, SnapshotReader

__all__ = ["PublisherGroupSource"]


class PublishedGroup:
    """A :class:`subscriber.apply.groups.GroupSnapshot`: one session reads all tables.

    Args:
        snapshot: exported.
        source: describes tables.
    """

    def __init__(self, snapshot: ExportedSnapshot, source: PublisherSource) -> None:
        self._snapshot = snapshot
        self._source = source
        self._stack = contextlib.AsyncExitStack()
        self._reader: SnapshotReader | None = None

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot holds exactly what was committed before."""
        return self._snapshot.consistent_point

    async def describe(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """The tables as published now."""
        return await self._source.describe_all(tables)

    async def rows(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> AsyncGenerator[bytes]:
        """The table's published rows, and the checks that they are. See :meth:`subscriber.apply.groups.GroupSnapshot.rows`.

        Raises:
            CopyOutdated: the table was renamed, replaced or rewritten meanwhile.
            PublisherError: or its kin.
        """
        part = copying.CopyPart(table.name, table.relation_id, only=table.kind == "r")
        query = copying.copy_query(table, part, copy_format)
        reader = await self._open_reader()
        try:
            # without the locks of the tables before it: the check asks for those of its own COPY
            ((same, _),) = await reader.execute(f"ROLLBACK TO SAVEPOINT before_table; {copying.check_query(part)}")
            if same != "t":
                raise outdated(table.name)
            async for piece in reader.copy_out(query, copy_format, rows):
                yield piece
            if not await copying.is_whole(reader, table, part):
                raise outdated(table.name)
        except BaseException:
            # in the middle of a COPY, or of a transaction that failed
            await self.close()
            raise

    async def _open_reader(self) -> SnapshotReader:
        if self._reader is None:
            self._reader = await self._stack.enter_async_context(self._snapshot.reader())
            # a table that another session keeps locked does not hold up the others
            await self._reader.execute("SET LOCAL lock_timeout = '1s'; SAVEPOINT before_table")
        return self._reader

    async def close(self) -> None:
        """End the session. Idempotent; the next table gets another."""
        self._reader = None
        await self._stack.aclose()


class PublisherGroupSource:
    """See the module.

    Args:
        source: of the subscription.
    """

    def __init__(self, source: PublisherSource) -> None:
        self._source = source

    @contextlib.asynccontextmanager
    async def group(self, slot_name: str) -> AsyncIterator[PublishedGroup]:
        """Take a snapshot by a temporary slot, after dropping one of that name."""
        async with self._source.exported(slot_name, temporary=True) as snapshot:
            group = PublishedGroup(snapshot, self._source)
            try:
                yield group
            finally:
                await group.close()
