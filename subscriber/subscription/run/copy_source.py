"""The publisher as the source of table synchronization: :class:`subscriber.apply.table_sync.CopySource` over walreceiver."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from subscriber.abc import CopyFormat, Position, PublishedTable, SnapshotOrder, TableName
from subscriber.apply.table_sync import CopyPart
from subscriber.config import SubscriptionOptions
from subscriber.errors import CopyOutdated, PublisherError, SubscriberError
from subscriber.protocol.capabilities import Capabilities, negotiate
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver import table_copy
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.position_check import check_position
from subscriber.walreceiver.publication import published_tables
from subscriber.walreceiver.session import SETUP
from subscriber.walreceiver.snapshot import ExportedSnapshot, SnapshotReader
from subscriber.walreceiver.stream import WalSenderStream

__all__ = ["PublishedSnapshot", "PublisherSource", "copy_format", "outdated"]


def copy_format(capabilities: Capabilities, options: SubscriptionOptions) -> CopyFormat:
    """The format of the initial copy, as in PostgreSQL: binary if requested and if the publisher's version supports it."""
    return CopyFormat.BINARY if options.binary and capabilities.binary_copy else CopyFormat.TEXT


class PublishedSnapshot:
    """A :class:`subscriber.apply.table_sync.SnapshotSource`."""

    def __init__(self, snapshot: ExportedSnapshot, range_size: int) -> None:
        self._snapshot = snapshot
        self._range_size = range_size

    @property
    def consistent_point(self) -> Lsn:
        """The snapshot contains exactly the transactions that were committed before this LSN."""
        return self._snapshot.consistent_point

    async def parts(self, table: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> list[CopyPart]:
        """Divide the table's published rows into parts. Each part is read by its own session."""
        found = await self._find_parts(table)
        return [partial(self._read, table, part, copy_format, rows) for part in found]

    async def order(self, table: PublishedTable) -> SnapshotOrder:
        """Describe the same parts for a sink that reads them in its own sessions."""
        found = await self._find_parts(table)
        return SnapshotOrder(
            snapshot_name=self._snapshot.snapshot_name,
            connection=self._snapshot.address,
            # an error is better than rows that a policy hides, which would be missing for good
            setup=(*SETUP, "SET row_security = off"),
            sources=tuple(table_copy.copy_source(table, part) for part in found),
            checks=tuple(table_copy.check_query(part) for part in found),
            consistent_point=self._snapshot.consistent_point,
        )

    async def verify(self, table: PublishedTable) -> None:
        """Check that the table's storage is the one in the snapshot, and that it was not renamed.

        Raises:
            CopyOutdated: the table was rewritten or renamed in the meantime.
        """
        async with self._snapshot.reader() as reader:
            if await table_copy.is_rewritten(reader, table) or await table_copy.is_renamed(reader, table):
                raise outdated(table.name)

    async def _find_parts(self, table: PublishedTable) -> list[table_copy.CopyPart]:
        async with self._snapshot.reader() as reader:
            return await table_copy.copy_parts(reader, table, self._range_size)

    @contextlib.asynccontextmanager
    async def _read(
        self, table: PublishedTable, part: table_copy.CopyPart, copy_format: CopyFormat, rows: Callable[[int], None]
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._snapshot.reader() as reader:
            try:
                yield _checked(reader, part, reader.copy_out(table_copy.copy_query(table, part, copy_format), copy_format, rows))
            except SubscriberError as error:
                # the statement may have waited for a rename: then a column does not exist, or the target refuses the rows of the other
                # table
                if not isinstance(error, CopyOutdated) and await self._is_outdated(part):
                    raise outdated(part.relation) from error
                raise

    async def _is_outdated(self, part: table_copy.CopyPart) -> bool:
        try:
            async with self._snapshot.reader() as reader:
                return not await table_copy.is_intact(reader, part, read=False)
        except PublisherError:
            # report the first error instead
            return False


async def _checked(reader: SnapshotReader, part: table_copy.CopyPart, data: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of a part. It ends with an error if the data is invalid, so that a sink does not keep it.

    Raises:
        CopyOutdated: the data is of another relation, or the relation was rewritten.
    """
    if not await table_copy.is_intact(reader, part, read=False):
        raise outdated(part.relation)
    async for piece in data:
        pieces = [piece]
        del piece
        # not kept while the reader works on it
        yield pieces.pop()
    if not await table_copy.is_intact(reader, part, read=True):
        raise outdated(part.relation)


def outdated(name: TableName) -> CopyOutdated:
    """The error for a copy that is no longer valid."""
    return CopyOutdated(
        f'table "{name}" was renamed, replaced or rewritten on the publisher while it was copied', hint="it is copied again"
    )


class PublisherSource:
    """The publisher of a subscription. Every call uses its own connections, and checks that they lead to the same publisher.

    Args:
        spec: the subscription.
        main: the subscription's position, which has the system identifier to check.
    """

    def __init__(self, spec: RunSpec, main: Position) -> None:
        self._spec = spec
        self._main = main

    @contextlib.asynccontextmanager
    async def _connect(self, application_name: str) -> AsyncIterator[WalReceiverConnection]:
        connection = await WalReceiverConnection.connect(self._spec.conninfo, application_name=application_name)
        try:
            await connection.require_system(self._main.system_identifier)
            yield connection
        finally:
            await connection.close()

    async def describe(self, table: TableName) -> PublishedTable | None:
        """The table as it is published now. None if it is no longer published."""
        return (await self.describe_all([table])).get(table)

    async def describe_all(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """The tables as they are published now, without those that are no longer published."""
        async with self._connect(session_name(self._main.slot_name, "sync")) as connection:
            return {table.name: table for table in await published_tables(connection, self._spec.publications, *tables)}

    @contextlib.asynccontextmanager
    async def snapshot(self, slot_name: str) -> AsyncIterator[PublishedSnapshot]:
        """Create the slot and keep its snapshot open. A slot of the same name is dropped first."""
        async with self.exported(slot_name, temporary=False) as snapshot:
            yield PublishedSnapshot(snapshot, self._spec.settings.copy_range_size)

    @contextlib.asynccontextmanager
    async def exported(self, slot_name: str, *, temporary: bool) -> AsyncIterator[ExportedSnapshot]:
        """Create the slot and keep its snapshot open. A slot of the same name is dropped first."""
        await self.drop_slot(slot_name)
        async with ExportedSnapshot.create(
            self._spec.conninfo,
            slot_name,
            application_name=slot_name,
            failover=self._spec.options.failover and not temporary,
            temporary=temporary,
            system_identifier=self._main.system_identifier,
        ) as snapshot:
            yield snapshot

    @contextlib.asynccontextmanager
    async def stream(self, position: Position) -> AsyncIterator[WalSenderStream]:
        """Follow the position's slot without two-phase, after checking that it can send everything after the position."""
        async with self._connect(position.slot_name) as connection:
            await check_position(connection, position)
            # without streaming: this stream is short, and a transaction that is streamed and rolled back cannot always be decoded
            options = replace(self._spec.options, streaming="off")
            stream_options = negotiate(connection.capabilities, options, publications=self._spec.publications, two_phase=False)
            stream = await connection.start_replication(position.slot_name, position.lsn, stream_options)
            try:
                yield stream
            finally:
                await stream.close()

    async def drop_slot(self, slot_name: str) -> None:
        """Drop the slot once it is no longer in use. No error if it does not exist."""
        async with self._connect(session_name(self._main.slot_name, "sync")) as connection:
            await connection.drop_slot(slot_name, wait=True, missing_ok=True)
