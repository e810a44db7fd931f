"""DROP SUBSCRIPTION: remove a subscription and every slot that it has on the publisher.

The order makes an interrupted drop safe to repeat: first the rows of unfinished copies are deleted, then the slots are dropped, then the
entry in the catalog is deleted.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from subscriber.catalog import Catalog, Definition
from subscriber.catalog.subscriptions import StoredCatalog
from subscriber.config import Settings
from subscriber.errors import ConfigurationError, PublisherError, PublisherUnavailable, SlotInUse
from subscriber.interfaces import SubscriptionState, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.recording.relay_directory import discard_relay_log
from subscriber.subscription.setup.setup import spool_key
from subscriber.subscription.setup.table_refresh import drop_leftover_slots, undo_copy
from subscriber.subscription.targets import open_target, opened_catalog
from subscriber.threads import run_in_thread
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.fences.fence_row import fence_owner, is_under_way
from subscriber.walreceiver.session import Session

__all__ = ["drop_subscription", "ignore_durable", "remove"]

_log = logging.getLogger(__name__)

_SLOT_SECONDS: Final = 30.0
"""How long to wait for a slot that the walsender of a killed process may still hold."""


async def drop_subscription(name: str, *, target: str, connection: str | None = None, settings: Settings | None = None) -> None:
    """Drop a subscription: the launcher stops it, its slots are dropped, and its entry is deleted. The rows stay.

    Prepared transactions that it has in the target stay too, with a warning: decide whether to commit them or to roll them back.

    Args:
        name: name of the subscription.
        target: URL or conninfo of the target.
        connection: connection string of the publisher, for a subscription that its command line defines.
        settings: of the process.

    Raises:
        ConfigurationError: a cutover of it is under way.
        TargetError: the subscription does not exist.
        SubscriptionInUse: the process that runs the subscription does not stop.
        PublisherError: its slots cannot be dropped. The subscription still exists and can be dropped later, or after ``slot_name = NONE``.
    """
    async with opened_catalog(target, "subscriber drop") as catalog, catalog.claim(name) as definition:
        await _require_no_cutover(catalog, definition, connection or definition.conninfo)
        await remove(catalog, definition, target=target, connection=connection, settings=settings or Settings())


async def _require_no_cutover(catalog: Catalog, definition: Definition, conninfo: str | None) -> None:
    """Without the subscription, a cutover that was interrupted would leave both databases closed."""
    if not isinstance(catalog, StoredCatalog) or definition.slot_name is None or conninfo is None:
        return
    owner = await fence_owner(catalog.store, definition.oid)
    try:
        async with await Session.connect(conninfo, application_name=session_name(definition.name, "drop")) as session:
            under_way = await is_under_way(session, owner)
    except PublisherUnavailable:
        # its slot cannot be dropped either
        return
    if under_way:
        raise ConfigurationError(
            f'a cutover of subscription "{definition.name}" is under way',
            hint=f"`subscriber cutover {definition.name} --abort` undoes it. If the publisher is lost, disassociate the subscription from"
            " its slot with alter -o slot_name=NONE, and drop it again: a database that is closed stays closed",
        )


async def remove(catalog: Catalog, definition: Definition, *, target: str, connection: str | None = None, settings: Settings) -> None:
    """Remove a subscription that the caller has claimed.

    Raises:
        PublisherError: its slots cannot be dropped.
        TargetError: the target rejected a request.
    """
    sink = await open_target(target, definition.options, settings, defined=True).open(definition.name, ignore_durable)
    try:
        state = sink.state
        for table, entry in (await sink.tables()).items():
            if entry.state is TableState.DATASYNC:
                await undo_copy(sink, table)
    finally:
        # close the sink before writing to the catalog: in a lake both take the writer's lock. The claim blocks launchers and other verbs
        await sink.close()
    conninfo = connection or definition.conninfo
    if definition.slot_name is not None:
        if conninfo is None:
            raise PublisherError(
                f'could not drop replication slot "{definition.slot_name}" on publisher: its connection string is not known',
                hint="give --connection; or disable the subscription, disassociate it from the slot with alter -o slot_name=NONE, and drop"
                " it again: then the slot stays on the publisher",
            )
        # a subscription that was not created completely may have no slot yet, or no longer
        made = definition.made and (definition.conninfo is not None or state.position is not None)
        await _drop_slots(catalog if made else None, conninfo, definition, definition.slot_name, state)
    if settings.relay_log is not None:
        await run_in_thread(partial(discard_relay_log, settings.relay_log, spool_key(state)))
    left = await catalog.remove(definition.oid)
    if left:
        _log.warning(
            "prepared transactions of the subscription remain in the target: %s (hint: end them with COMMIT PREPARED or ROLLBACK PREPARED)",
            ", ".join(left),
        )


async def _drop_slots(catalog: Catalog | None, conninfo: str, definition: Definition, slot_name: str, state: SubscriptionState) -> None:
    """Drop all slots of a subscription. With ``catalog``, its main slot must exist, and the catalog notes the drop before it happens."""
    name = definition.name
    try:
        connection = await WalReceiverConnection.connect(conninfo, application_name=session_name(name, "drop"))
    except PublisherError as error:
        raise type(error)(
            f'could not connect to publisher when attempting to drop replication slot "{slot_name}": {error}',
            hint="disable the subscription, disassociate it from the slot with alter -o slot_name=NONE, and drop it again",
            sqlstate=error.sqlstate,
        ) from error
    try:
        async with asyncio.timeout(_SLOT_SECONDS):
            await drop_leftover_slots(connection, None, state)
            if catalog is not None:
                if await connection.slot(slot_name) is None:
                    raise PublisherError(
                        f'could not drop replication slot "{slot_name}" on publisher: replication slot "{slot_name}" does not exist',
                        hint="check the connection string; if the slot is gone, disable the subscription, disassociate it from the slot"
                        " with alter -o slot_name=NONE, and drop it again",
                        sqlstate="42704",
                    )
                # from here an interrupted drop can be repeated, even if the slot is already gone
                await catalog.update(definition.oid, {"made": False})
            try:
                await connection.drop_slot(slot_name, wait=True, missing_ok=True)
            except BaseException:
                if catalog is not None:
                    await catalog.update(definition.oid, {"made": True})
                raise
    except TimeoutError:
        raise SlotInUse(
            f'could not drop replication slot "{slot_name}" on publisher: it is still in use',
            hint="end the walsender that uses it (pg_replication_slots.active_pid), and try again",
        ) from None
    except PublisherUnavailable as error:
        raise PublisherUnavailable(f'could not drop replication slot "{slot_name}" on publisher: {error}', hint="try again") from error
    finally:
        await connection.close()


def ignore_durable(_: Lsn) -> None:
    """For a sink that is opened without a stream."""
