"""``recover``: begin again at a new slot, with the rows that the target has.

Changes are lost when the publisher can no longer send everything after the target's position. The target is then a consistent copy of an
earlier moment, or of another server. The old slot is dropped. Then one transaction in the target's catalog forgets the position, and lets
all tables be reconciled; a lake copies them into new versions. The rest is the start of a new subscription: it creates the slot (here, if
the catalog defines the subscription), and synchronizes each table at a snapshot of its own. After an interruption, ``recover`` can be
repeated.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from subscriber.apply.all_changes import require_all_changes
from subscriber.catalog import Catalog, Definition, RestartingCatalog
from subscriber.catalog.interface import MovableCatalog
from subscriber.catalog.subscriptions import no_such_subscription
from subscriber.config import Settings
from subscriber.errors import ConfigurationError, DataLossError, PublisherError, SlotInUse
from subscriber.interfaces import Position, PublishedTable, SubscriptionState, TableEntry, TableName
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.setup.setup import Setup
from subscriber.subscription.setup.table_refresh import drop_leftover_slots
from subscriber.subscription.targets import opened_catalog, target_kind
from subscriber.walreceiver.connection import SlotInfo, WalReceiverConnection
from subscriber.walreceiver.position_check import check_position
from subscriber.walreceiver.publication import published_tables

__all__ = ["Recovery", "recover"]


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a recovery does.

    Attributes:
        reason: why changes are lost.
        tables: the tables that are compared with the publisher's, as published now.
        unpublished: tables of the subscription that are not published any more. Their rows stay.
        copies: the tables are not compared, but copied: into new versions of a lake.
    """

    reason: str
    tables: Sequence[PublishedTable]
    unpublished: Sequence[TableName]
    copies: bool


async def recover(
    name: str,
    *,
    target: str,
    connection: str | None = None,
    settings: Settings | None = None,
    dry_run: bool = False,
    force: bool = False,
    accept_target: bool = False,
    accept_publisher: bool = False,
) -> Recovery:
    """Let a subscription that has lost changes begin again. Its next run makes all tables equal to the publisher's.

    Args:
        name: of the subscription.
        target: URL or conninfo of the target.
        connection: connection string of the publisher, for a subscription that its command line defines.
        settings: of the process.
        dry_run: make all checks, but change nothing.
        force: also if nothing seems to be lost, if the slot may be another target's, or with ``origin = none``.
        accept_target: the target was restored or copied from another database, whose place it takes.
        accept_publisher: the publisher is another server than the one that filled the target, and takes its place.

    Returns:
        What happened, and what is compared.

    Raises:
        ConfigurationError: nothing is lost; or the subscription cannot be recovered.
        RelationError: a table also belongs to another subscription, or not all of its changes are published.
        TargetError: the subscription does not exist.
        SubscriptionInUse: the process that runs the subscription does not stop.
        PublisherError: the publisher cannot be reached, or is the wrong one.
    """
    async with opened_catalog(target, "subscriber recover") as catalog:
        restarting: object = catalog
        if not isinstance(restarting, RestartingCatalog):
            raise ConfigurationError(
                f"a subscription of {target_kind(target).noun} cannot be recovered", hint="start over with another name and new tables"
            )
        async with _found(catalog, name, dry_run=dry_run, accept_target=accept_target) as found:
            if connection is not None and found.conninfo is not None:
                raise ConfigurationError(
                    f'subscription "{name}" has its connection string in the target\'s catalog',
                    hint="omit --connection; if the publisher has moved, `subscriber alter NAME --connection …` first",
                )
            conninfo = connection or found.conninfo
            if conninfo is None:
                raise ConfigurationError(f'the publisher of subscription "{name}" is not known', hint="give --connection")
            # first all checks, of both sides: nothing is changed if one of them fails
            state, entries = await restarting.restart(found.oid, accept_target=accept_target, dry_run=True)
            examined = _Examination(found, state, entries, reconciles=restarting.reconciles, force=force, accept_publisher=accept_publisher)
            application_name = session_name(found.name, "recover")
            async with await WalReceiverConnection.connect(conninfo, application_name=application_name) as session:
                recovery = await examined.recovery(session)
                slot = await examined.slot(session, dry_run=dry_run)
                if dry_run:
                    return recovery
                await drop_leftover_slots(session, None, state)
                if slot is not None:
                    await session.drop_slot(slot.slot_name, wait=True, missing_ok=True)
            await restarting.restart(found.oid, accept_target=accept_target)
            if found.conninfo is not None:
                # a launcher creates no slots
                options = replace(found.options, create_slot=True, slot_name=found.slot_name)
                async with Setup.of_definition(found, target, options, settings or Settings()) as setup:
                    await setup.begin_again()
            return recovery


@contextlib.asynccontextmanager
async def _found(catalog: Catalog, name: str, *, dry_run: bool, accept_target: bool) -> AsyncIterator[Definition]:
    if dry_run:
        # a claim would stop the process that runs it
        defined = [each for each in await catalog.subscriptions() if each.name == name]
        if not defined:
            raise no_such_subscription(name)
        yield defined[0]
        return
    movable: object = catalog
    async with movable.claim_copied(name) if accept_target and isinstance(movable, MovableCatalog) else catalog.claim(name) as found:
        yield found


@dataclass(frozen=True, slots=True)
class _Examination:
    """The checks on the publisher's side: what happened, and whether the target can be recovered from this publisher."""

    found: Definition
    state: SubscriptionState
    entries: Mapping[TableName, TableEntry]
    _: KW_ONLY
    reconciles: bool
    force: bool
    accept_publisher: bool

    async def recovery(self, connection: WalReceiverConnection) -> Recovery:
        found, entries = self.found, self.entries
        publications = self.state.publications or found.publications
        reason = await _loss(connection, self.state.position, entries)
        if reason is None and not self.force:
            raise ConfigurationError(
                f'subscription "{found.name}" has lost nothing: the publisher can send everything after its position',
                hint="start it; `subscriber alter NAME --resync SCHEMA.TABLE` compares one table, and --force all of them",
            )
        another = await self._is_another(connection)
        if not self.reconciles and (another or await self._is_earlier(connection)):
            raise ConfigurationError(
                f"{reason or 'the publisher has other WAL'}: the versions of a lake cannot continue at an earlier position, or on another"
                " server",
                hint="start over with another name and a new directory",
            )
        if another and not self.accept_publisher:
            raise ConfigurationError(
                f"{reason}: rows that this publisher does not have would be deleted",
                hint="correct the connection string; --accept-publisher if this server takes the other one's place",
            )
        if found.options.origin != "any" and not self.force:
            raise ConfigurationError(
                f'subscription "{found.name}" has origin = {found.options.origin}:'
                " rows that were written here and are not on the publisher yet would be deleted",
                hint="wait until the publisher has them, and give --force",
            )
        published = {table.name: table for table in await published_tables(connection, publications, mapping=found.options.mapping)}
        tables = [published[table] for table in sorted(entries) if table in published]
        if entries and not tables:
            raise PublisherError(
                f'the publisher publishes no table of subscription "{found.name}"', hint="check the connection string and the publications"
            )
        if self.reconciles:
            require_all_changes(tables)
        unpublished = sorted(entries.keys() - published.keys())
        return Recovery(reason or "nothing seems to be lost", tables, unpublished, copies=not self.reconciles)

    async def slot(self, connection: WalReceiverConnection, *, dry_run: bool) -> SlotInfo | None:
        """Return the slot that is to be dropped."""
        name, position = self.state.slot_name or self.found.slot_name, self.state.position
        slot = await connection.slot(name) if name is not None else None
        if slot is not None and (slot.plugin != "pgoutput" or slot.database != (await connection.identify_system()).dbname):
            raise PublisherError(
                f'replication slot "{name}" is of plugin "{slot.plugin}" and database "{slot.database}"',
                hint="set slot_name to another name here",
            )
        if slot is None or slot.lost:
            return slot
        if slot.active and not dry_run:
            raise SlotInUse(
                f'replication slot "{name}" is in use by another process',
                hint="if another subscription uses it, set slot_name to another name here; if not, end that process",
            )
        ahead = position is not None and (slot.confirmed_flush_lsn is None or slot.confirmed_flush_lsn > position.lsn)
        another = await self._is_another(connection)
        if not self.force and (ahead or another):
            raise ConfigurationError(
                f'replication slot "{name}" is at {slot.confirmed_flush_lsn}, and was not moved there by this target:'
                " it may be the slot of another target, or a relay log may have the changes",
                hint="if the subscription ran with a relay log, start it with the same -c relay_log; if another subscription uses the slot,"
                " set slot_name to another name here; if neither, --force drops it",
            )
        return slot

    async def _is_earlier(self, connection: WalReceiverConnection) -> bool:
        return await connection.current_wal_lsn() < _furthest(self.state.position, self.entries)

    async def _is_another(self, connection: WalReceiverConnection) -> bool:
        position = self.state.position
        return position is not None and (await connection.identify_system()).system_identifier != position.system_identifier


async def _loss(connection: WalReceiverConnection, position: Position | None, entries: Mapping[TableName, TableEntry]) -> str | None:
    """Why the publisher cannot send everything after the target's position; None: it can."""
    if position is None:
        return "the target has no position"
    furthest = _furthest(position, entries)
    try:
        await check_position(connection, position)
        if furthest > position.lsn:
            await check_position(connection, Position(position.slot_name, position.system_identifier, position.timeline, furthest))
    except DataLossError as error:
        return str(error)
    return None


def _furthest(position: Position | None, entries: Mapping[TableName, TableEntry]) -> Lsn:
    """The highest LSN that the target has of the publisher."""
    known = [entry.lsn for entry in entries.values() if entry.lsn is not None]
    return max([*known, position.lsn if position is not None else INVALID_LSN])
