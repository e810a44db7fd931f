"""The publisher's tables under an exported snapshot: one table in parallel parts, or a group of tables one after another."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

from subscriber.apply.tables.table_synchronization import CopyPart, ReconciledRows
from subscriber.errors import CopyOutdated, PublisherError, SubscriberError
from subscriber.interfaces import (
    ComparedTables,
    Condition,
    CopyFormat,
    PublishedTable,
    ReconcilingTableGroup,
    ReconcilingTableSink,
    SyncMode,
    TableName,
    TargetRows,
)
from subscriber.protocol.lsn import Lsn
from subscriber.rate_limit import RateLimit
from subscriber.walreceiver.copying import table_copy
from subscriber.walreceiver.copying.snapshot import ExportedSnapshot, SnapshotReader

__all__ = ["PublishedGroup", "PublishedSnapshot"]

Describe = Callable[[Sequence[TableName]], Awaitable[Mapping[TableName, PublishedTable]]]


class PublishedSnapshot:
    """A :class:`subscriber.apply.tables.table_synchronization.SnapshotSource`.

    Args:
        snapshot: the exported snapshot.
        range_size: maximum size of a part in bytes.
        rate: limits what is read here; not what a sink reads in its own sessions.
        copied: the bytes that were read of each table.
    """

    def __init__(self, snapshot: ExportedSnapshot, range_size: int, rate: RateLimit, copied: MutableMapping[TableName, int]) -> None:
        self._rate = rate
        self._bytes = copied
        self._snapshot = snapshot
        self._range_size = range_size

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot contains exactly the transactions that were committed before this LSN."""
        return self._snapshot.consistent_point

    async def parts(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> list[CopyPart]:
        """Divide the table's published rows into parts. Each part is read by its own session."""
        return [partial(self._read, table, part, copy_format, rows) for part in await self._find_parts(table)]

    async def reconcile(
        self,
        table: PublishedTable,
        sink: ReconcilingTableSink,
        rows: TargetRows | ComparedTables,
        copy_format: CopyFormat,
        advanced: Callable[[int], None],
        *,
        workers: int,
        mode: SyncMode,
    ) -> ReconciledRows | None:
        """See :meth:`subscriber.apply.tables.table_synchronization.SnapshotSource.reconcile`."""
        from subscriber.subscription.run.reconciliation import reconcile  # noqa: PLC0415 -- most runs do not need it

        def read(condition: Condition, count: Callable[[int], None]) -> CopyPart:
            part = table_copy.CopyPart(table.publisher_name, table.relation_id, only=table.kind == "r", condition=condition)
            return partial(self._read, table, part, copy_format, count)

        async with contextlib.AsyncExitStack() as stack:
            readers = [await stack.enter_async_context(self._snapshot.reader()) for _ in range(workers)]
            return await reconcile(
                readers,
                table,
                sink,
                rows,
                copy_format=copy_format,
                read=read,
                verify=partial(_verify, table),
                advanced=advanced,
                mode=mode,
                limit=self._rate,
            )

    async def verify(self, table: PublishedTable) -> None:
        """Check that the table's storage is the one in the snapshot, and that it was not renamed.

        Raises:
            CopyOutdated: the table was rewritten or renamed in the meantime.
        """
        async with self._snapshot.reader() as reader:
            await _verify(table, reader)

    async def _find_parts(self, table: PublishedTable) -> list[table_copy.CopyPart]:
        if table.size <= self._range_size:
            return [table_copy.whole_table(table)]
        async with self._snapshot.reader() as reader:
            return await table_copy.copy_parts(reader, table, self._range_size)

    @contextlib.asynccontextmanager
    async def _read(
        self, table: PublishedTable, part: table_copy.CopyPart, copy_format: CopyFormat, rows: Callable[[int], None]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._snapshot.reader() as reader:
            try:
                await reader.set_values(part.condition.values)
                data = reader.copy_out(table_copy.copy_query(table, part, copy_format), copy_format, rows)
                yield _checked(reader, part, data, partial(self._spend, table.name))
            except SubscriberError as error:
                # the statement may have waited for a rename: then a column does not exist, or the target refuses the rows of the other
                # table
                if not isinstance(error, CopyOutdated) and await self._is_outdated(part):
                    raise outdated(part.relation) from error
                raise

    async def _spend(self, table: TableName, size: int) -> None:
        self._bytes[table] = self._bytes.get(table, 0) + size
        await self._rate.spend(size)

    async def _is_outdated(self, part: table_copy.CopyPart) -> bool:
        try:
            async with self._snapshot.reader() as reader:
                return not await table_copy.is_intact(reader, part, read=False)
        except PublisherError:
            # report the first error instead
            return False


async def _verify(table: PublishedTable, reader: SnapshotReader) -> None:
    if await table_copy.is_rewritten(reader, table) or await table_copy.is_renamed(reader, table):
        raise outdated(table.name)


async def _checked(
    reader: SnapshotReader, part: table_copy.CopyPart, data: AsyncIterator[bytes], spend: Callable[[int], Awaitable[None]]
) -> AsyncIterator[bytes]:
    """The data of a part. It ends with an error if the data is invalid, so that a sink does not keep it. ``spend``: after each piece.

    Raises:
        CopyOutdated: the data is of another relation, or the relation was rewritten.
    """
    if not await table_copy.is_intact(reader, part, read=False):
        raise outdated(part.relation)
    async for piece in data:
        pieces, size = [piece], len(piece)
        del piece
        # not kept while the reader works on it
        yield pieces.pop()
        await spend(size)
    if not await table_copy.is_intact(reader, part, read=True):
        raise outdated(part.relation)


def outdated(name: TableName) -> CopyOutdated:
    """The error for a copy that is no longer valid."""
    return CopyOutdated(
        f'table "{name}" was renamed, replaced or rewritten on the publisher while it was copied', hint="it is copied again"
    )


class PublishedGroup:
    """A :class:`subscriber.apply.tables.table_groups.GroupSnapshot`. One session reads all tables.

    Args:
        snapshot: the exported snapshot.
        describe: describes tables as they are published now.
        rate: limits the copies.
        copied: the bytes that were read of each table.
    """

    def __init__(self, snapshot: ExportedSnapshot, describe: Describe, rate: RateLimit, copied: MutableMapping[TableName, int]) -> None:
        self._rate = rate
        self._bytes = copied
        self._snapshot = snapshot
        self._describe = describe
        self._stack = contextlib.AsyncExitStack()
        self._reader: SnapshotReader | None = None
        self._differed = False

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot contains exactly the transactions that were committed before this LSN."""
        return self._snapshot.consistent_point

    async def describe(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """Describe the tables as they are published now."""
        return await self._describe(tables)

    async def rows(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> AsyncGenerator[bytes]:
        """Read the table's published rows, with checks that they are valid.

        See :meth:`~subscriber.apply.tables.table_groups.GroupSnapshot.rows`.

        Raises:
            CopyOutdated: the table was renamed, replaced or rewritten in the meantime.
            PublisherError: the publisher failed, or one of its subclasses.
        """
        async with self._reading(table) as (reader, part):
            async for piece in self._copied(reader, table, part, copy_format, rows):
                yield piece

    async def reconcile(
        self, table: PublishedTable, group: ReconcilingTableGroup, copy_format: CopyFormat, advanced: Callable[[int], None]
    ) -> ReconciledRows:
        """Compare the rows of the target with the snapshot. See :meth:`~subscriber.apply.tables.table_groups.GroupSnapshot.reconcile`.

        Raises:
            CopyOutdated, PublisherError: as :meth:`rows`.
            TargetError: or a subclass.
        """
        from subscriber.subscription.run.reconciliation import reconcile  # noqa: PLC0415 -- as above

        async with self._reading(table) as (reader, whole):

            @contextlib.asynccontextmanager
            async def read(part: table_copy.CopyPart, count: Callable[[int], None]) -> AsyncIterator[AsyncIterator[bytes]]:
                await reader.set_values(part.condition.values)
                async with contextlib.aclosing(self._copied(reader, table, part, copy_format, count)) as data:
                    yield data

            found = await reconcile(
                [reader],
                table,
                group,
                await group.compared(table),
                copy_format=copy_format,
                # one session works on one range at a time, and does nothing else meanwhile
                read=lambda condition, count: partial(read, replace(whole, condition=condition), count),
                verify=partial(_verify, table),
                advanced=advanced,
                mode=SyncMode.RECONCILE,
                limit=self._rate,
                expects=self._differed,
                one_transaction=True,
            )
            assert found is not None
            self._differed = found.written > 0
            return found

    @contextlib.asynccontextmanager
    async def _reading(self, table: PublishedTable) -> AsyncIterator[tuple[SnapshotReader, table_copy.CopyPart]]:
        part = table_copy.CopyPart(table.publisher_name, table.relation_id, only=table.kind == "r")
        reader = await self._open_reader()
        try:
            # release the locks of the previous tables; the check takes the locks that its own COPY needs
            ((same, _),) = await reader.execute(f"ROLLBACK TO SAVEPOINT before_table; {part.check_query()}")
            if same != "t":
                raise outdated(table.name)
            yield reader, part
            if not await table_copy.is_whole(reader, table, part):
                raise outdated(table.name)
        except BaseException:
            # the session is in the middle of a COPY, or in a failed transaction
            await self.close()
            raise

    async def _copied(
        self,
        reader: SnapshotReader,
        table: PublishedTable,
        part: table_copy.CopyPart,
        copy_format: CopyFormat,
        rows: Callable[[int], None],
    ) -> AsyncGenerator[bytes]:
        async for piece in reader.copy_out(table_copy.copy_query(table, part, copy_format), copy_format, rows):
            yield piece
            self._bytes[table.name] = self._bytes.get(table.name, 0) + len(piece)
            await self._rate.spend(len(piece))

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
