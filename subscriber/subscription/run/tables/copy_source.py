"""The publisher as the source of table synchronizations."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from subscriber.apply.row_filters import copied_rows, filtered
from subscriber.config import SubscriptionOptions
from subscriber.interfaces import CopyFormat, Position, PublishedTable, ReplicationStream, TableName
from subscriber.protocol.capabilities import Capabilities, negotiate
from subscriber.protocol.session_name import session_name
from subscriber.rate_limit import RateLimit
from subscriber.subscription.run.tables.copy_snapshots import PublishedGroup, PublishedSnapshot
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.copying.snapshot import ExportedSnapshot
from subscriber.walreceiver.position_check import check_position
from subscriber.walreceiver.publication import published_sources, published_tables

__all__ = ["PublisherSource", "copy_format"]


def copy_format(capabilities: Capabilities, options: SubscriptionOptions) -> CopyFormat:
    """The format of the initial copy, as in PostgreSQL: binary if requested and if the publisher's version supports it."""
    return CopyFormat.BINARY if options.binary and capabilities.binary_copy else CopyFormat.TEXT


class PublisherSource:
    """A :class:`subscriber.apply.tables.table_synchronization.CopySource` and a :class:`subscriber.apply.tables.table_groups.GroupSource`.

    Every call uses its own connections, and checks that they lead to the same publisher.

    Args:
        spec: the subscription.
        main: the subscription's position, which has the system identifier to check.
        rate: limits the copies.
    """

    def __init__(self, spec: RunSpec, main: Position, rate: RateLimit) -> None:
        self._spec = spec
        self._rate = rate
        self._main = main

    @contextlib.asynccontextmanager
    async def _connect(self, application_name: str) -> AsyncIterator[WalReceiverConnection]:
        async with await WalReceiverConnection.connect(self._spec.conninfo, application_name=application_name) as connection:
            await connection.require_system(self._main.system_identifier)
            yield connection

    async def describe(self, table: TableName) -> PublishedTable | None:
        """The table as it is published now. None if it is no longer published."""
        return (await self.describe_all([table])).get(table)

    async def describe_all(self, tables: Sequence[TableName]) -> Mapping[TableName, PublishedTable]:
        """The tables as they are published now, without those that are no longer published."""
        async with self._connect(session_name(self._main.slot_name, "sync")) as connection:
            found = await published_tables(connection, self._spec.publications, *tables, mapping=self._spec.options.mapping)
            return {table.name: copied_rows(table, self._spec.options) for table in found}

    @contextlib.asynccontextmanager
    async def snapshot(self, slot_name: str) -> AsyncIterator[PublishedSnapshot]:
        """Create the slot and keep its snapshot open. A slot of the same name is dropped first."""
        async with self.exported(slot_name, temporary=False) as snapshot:
            settings = self._spec.settings
            copied = self._spec.sink.statistics.copied_bytes
            yield PublishedSnapshot(snapshot, settings.copy_range_size, self._rate, copied)

    @contextlib.asynccontextmanager
    async def group(self, slot_name: str) -> AsyncIterator[PublishedGroup]:
        """Take a snapshot with a temporary slot. A slot of the same name is dropped first."""
        async with self.exported(slot_name, temporary=True) as snapshot:
            group = PublishedGroup(snapshot, self.describe_all, self._rate, self._spec.sink.statistics.copied_bytes)
            try:
                yield group
            finally:
                await group.close()

    @contextlib.asynccontextmanager
    async def exported(self, slot_name: str, *, temporary: bool) -> AsyncIterator[ExportedSnapshot]:
        """Create the slot and keep its snapshot open. A slot of the same name is dropped first."""
        async with ExportedSnapshot.create(
            self._spec.conninfo,
            slot_name,
            application_name=slot_name,
            failover=self._spec.options.failover and not temporary,
            temporary=temporary,
            system_identifier=self._main.system_identifier,
            replace=True,
        ) as snapshot:
            yield snapshot

    @contextlib.asynccontextmanager
    async def stream(self, position: Position) -> AsyncIterator[ReplicationStream]:
        """Follow the position's slot without two-phase, after checking that it can send everything after the position."""
        async with self._connect(position.slot_name) as connection:
            await check_position(connection, position)
            # without streaming: this stream is short, and a transaction that is streamed and rolled back cannot always be decoded
            options = replace(self._spec.options, streaming="off")
            stream_options = negotiate(connection.capabilities, options, publications=self._spec.publications, two_phase=False)
            names = await published_sources(connection, self._spec.publications, options.mapping)
            stream = await connection.start_replication(position.slot_name, position.lsn, stream_options)
            try:
                yield filtered(stream, self._spec.options, names)
            finally:
                await stream.close()

    async def drop_slot(self, slot_name: str) -> None:
        """Drop the slot once it is no longer in use. No error if it does not exist."""
        async with self._connect(session_name(self._main.slot_name, "sync")) as connection:
            await connection.drop_slot(slot_name, wait=True, missing_ok=True)
