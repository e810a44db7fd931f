"""``recover``: begin again at a new slot, with the rows that the target has.

Changes are lost when the publisher can no longer send everything after the target's position. The target is then a consistent copy of an
earlier moment, or of another server. The old slot is dropped. Then one transaction in the target's catalog forgets the position, and lets
all tables be reconciled. The rest is the start of a new subscription: it creates the slot (here, if the catalog defines the subscription),
and synchronizes each table at a snapshot of its own. After an interruption, ``recover`` can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from subscriber.catalog import Definition, RestartingCatalog
from subscriber.catalog.interface import MovableCatalog
from subscriber.config import Settings
from subscriber.errors import ConfigurationError, DataLossError, PublisherError, SlotInUse
from subscriber.interfaces import OpenedSink, Position, PublishedTable, TableEntry, TableName
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.subscription.setup.setup import Setup
from subscriber.subscription.setup.table_refresh import drop_leftover_slots, require_reconciling
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.target_session import TargetSession
from subscriber.subscription.targets import open_catalog, open_target, target_kind
from subscriber.walreceiver.connection import WalReceiverConnection
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
    """

    reason: str
    tables: Sequence[PublishedTable]
    unpublished: Sequence[TableName]


async def recover(
    name: str,
    *,
    target: str,
    connection: str | None = None,
    settings: Settings | None = None,
    dry_run: bool = False,
    force: bool = False,
    accept_target: bool = False,
) -> Recovery:
    """Let a subscription that has lost changes begin again. Its next run makes all tables equal to the publisher's.

    Args:
        name: of the subscription.
        target: URL or conninfo of the target.
        connection: connection string of the publisher, for a subscription that its command line defines.
        settings: of the process.
        dry_run: change nothing.
        force: also if nothing seems to be lost.
        accept_target: the target was restored or copied from another database, whose place it takes.

    Returns:
        What happened, and what is compared.

    Raises:
        ConfigurationError: nothing is lost; or the subscription cannot be recovered.
        RelationError: a table also belongs to another subscription.
        TargetError: the subscription does not exist.
        SubscriptionInUse: the process that runs the subscription does not stop.
        PublisherError: the publisher cannot be reached, or is the wrong one.
    """
    catalog = await open_catalog(target, "subscriber recover")
    try:
        restarting: object = catalog
        if not isinstance(restarting, RestartingCatalog):
            raise ConfigurationError(
                f"a subscription of {target_kind(target).noun} cannot be recovered", hint="start over with another name and new tables"
            )
        if accept_target and not dry_run:
            movable: object = catalog
            if not isinstance(movable, MovableCatalog):
                raise ConfigurationError("this kind of target can be moved without a command", hint="omit --accept-target")
            await movable.accept_target(name)
        async with catalog.claim(name) as found:
            if await catalog.prepared_transactions(found.oid):
                raise ConfigurationError(
                    f'subscription "{name}" has prepared transactions in the target', hint="end them with ROLLBACK PREPARED, and try again"
                )
            conninfo = connection or found.conninfo
            if conninfo is None:
                raise ConfigurationError(f'the publisher of subscription "{name}" is not known', hint="give --connection")
            sink = await open_target(target, found.options, settings or Settings(), defined=True).open(name, _nothing)
            try:
                recovery = await _examine(sink, found, conninfo, dry_run=dry_run, force=force)
            finally:
                await sink.close()
            if not dry_run:
                await restarting.restart(found.oid)
            if not dry_run and found.conninfo is not None:
                # a launcher creates no slots
                await _begin(replace(found, conninfo=conninfo), target, settings or Settings())
            return recovery
    finally:
        await catalog.close()


async def _begin(found: Definition, target: str, settings: Settings) -> None:
    options = replace(found.options, create_slot=True, slot_name=found.slot_name)
    session = TargetSession(RunSpec.of_definition(found, target, options, settings))
    try:
        await Setup(session).begin_again()
    finally:
        await session.close()


async def _examine(sink: OpenedSink, found: Definition, conninfo: str, *, dry_run: bool, force: bool) -> Recovery:
    """Find out what happened, and whether the target can be recovered from this publisher."""
    state, entries = sink.state, await sink.tables()
    publications = state.publications or found.publications
    application_name = session_name(found.name, "recover")
    async with await WalReceiverConnection.connect(conninfo, application_name=application_name) as connection:
        reason = await _loss(connection, state.position, entries)
        if reason is None and not force:
            raise ConfigurationError(
                f'subscription "{found.name}" has lost nothing: the publisher can send everything after its position',
                hint="start it; `subscriber alter NAME --resync SCHEMA.TABLE` compares one table, and --force all of them",
            )
        published = {table.name: table for table in await published_tables(connection, publications)}
        tables = [published[table] for table in sorted(entries) if table in published]
        if entries and not tables:
            raise PublisherError(
                f'the publisher publishes no table of subscription "{found.name}"', hint="check the connection string and the publications"
            )
        for table in tables[:1]:
            require_reconciling(sink, table.name)
        slot_name = state.slot_name or found.slot_name
        slot = await connection.slot(slot_name) if slot_name is not None else None
        if slot is not None and slot.active:
            raise SlotInUse(
                f'replication slot "{slot_name}" is in use by another process',
                hint="if another subscription uses it, set slot_name to another name here; if not, end that process",
            )
        if not dry_run:
            await drop_leftover_slots(connection, None, state)
            if slot is not None:
                await connection.drop_slot(slot.slot_name, wait=True, missing_ok=True)
        return Recovery(reason or "nothing seems to be lost", tables, sorted(entries.keys() - published.keys()))


async def _loss(connection: WalReceiverConnection, position: Position | None, entries: Mapping[TableName, TableEntry]) -> str | None:
    """Why the publisher cannot send everything after the target's position; None: it can."""
    if position is None:
        return "the target has no position"
    furthest = max((entry.lsn for entry in entries.values() if entry.lsn is not None), default=position.lsn)
    try:
        await check_position(connection, position)
        if furthest > position.lsn:
            await check_position(connection, Position(position.slot_name, position.system_identifier, position.timeline, furthest))
    except DataLossError as error:
        return str(error)
    return None


def _nothing(_: Lsn) -> None:
    """Ignore what is durable."""
