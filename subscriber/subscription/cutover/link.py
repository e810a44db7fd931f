"""The two subscriptions of a cutover: forward, from the old database to the new one, and back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal

from subscriber import crash_points
from subscriber.apply.tables.parking import RESYNC_HINT
from subscriber.catalog import Definition
from subscriber.catalog.store import LAUNCHER_KEY, writer_key
from subscriber.catalog.subscriptions import StoredCatalog
from subscriber.config import NO_SLOT, Settings, SubscriptionOptions
from subscriber.config.mapping import NO_MAPPING, TableMapping
from subscriber.errors import ConfigurationError, PublisherError, SubscriptionInUse
from subscriber.interfaces import Position, TableName, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.quoting import quote_identifier, quote_literal
from subscriber.protocol.session_name import session_name
from subscriber.subscription.management.create import create_subscription
from subscriber.subscription.management.drop import drop_subscription, ignore_durable
from subscriber.subscription.subscription import Subscription
from subscriber.subscription.targets import observed, open_target, stored_catalog
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.fences.fence_row import drop_row
from subscriber.walreceiver.session import Session

__all__ = ["BackLink", "ForwardLink", "Link", "drop_unused_catalog", "opened_catalog"]

_log = logging.getLogger(__name__)

_POLL: Final = 0.02
_LOOK: Final = 0.25
_LAUNCHER_SECONDS: Final = 3.0
_UNATTENDED: Final = 3.0
"""A worker that is between two connections has no lock for a moment."""


def opened_catalog(target: str) -> AbstractAsyncContextManager[StoredCatalog[Any]]:
    """The catalog of a database, until the block ends."""
    return stored_catalog(target, "subscriber cutover")


class Link:
    """One subscription.

    Args:
        name: of the subscription.
        publisher: connection string of its publisher.
        target: URL of its target.
        admin: connection string of a role that may create publications in the publisher.
        slot: name of its slot.
        publications: their names.
        mapping: the names of the target's tables.
    """

    def __init__(
        self,
        name: str,
        *,
        publisher: str,
        target: str,
        admin: str,
        slot: str,
        publications: Sequence[str],
        mapping: TableMapping = NO_MAPPING,
    ) -> None:
        self.name = name
        self.publisher = publisher
        self.target = target
        self.slot = slot
        self.publications = publications
        self.mapping = mapping
        self._admin = admin

    async def find(self) -> Definition | None:
        """Its definition, or None if it does not exist."""
        found = await observed(self.target, self.name)
        return None if found is None else found.definition

    async def is_running(self) -> bool:
        """Whether a process applies its changes."""
        async with opened_catalog(self.target) as catalog:
            oid = (await catalog.find(self.name)).oid
            return bool(await catalog.store.held_locks([writer_key(oid)]))

    async def wait(self, lsn: Lsn, found: Definition | None = None) -> None:
        """Wait until everything up to ``lsn`` is durable in the target. If no process runs the subscription, run it here meanwhile.

        Args:
            lsn: of the publisher.
            found: its definition, if it was read just now.

        Raises:
            ConfigurationError: a table is parked: the target does not have its changes.
            SubscriberError: the subscription was run here, and ended with an error.
        """
        found = found or await self.find()
        if found is None or found.slot_name is None:
            raise ConfigurationError(f'subscription "{self.name}" has no replication slot', hint="`subscriber status` shows it")
        running = asyncio.create_task(self._keep_running(found))
        waiting = asyncio.create_task(self._confirmed(found.slot_name, lsn))
        try:
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                running.result()
            await waiting
        finally:
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
        # perhaps only now, by one of the last changes
        known = await observed(self.target, self.name)
        for table in known.tables if known is not None else ():
            if table.parked:
                raise ConfigurationError(f"table {table.table} is parked {table.parked}", hint=RESYNC_HINT)

    async def _confirmed(self, slot: str, lsn: Lsn) -> None:
        async with (
            await Session.connect(self.publisher, application_name=session_name(self.name, "cutover")) as session,
            opened_catalog(self.target) as catalog,
        ):
            while await self.confirmed(session, slot, catalog) < lsn:  # noqa: ASYNC110 (another server)
                await asyncio.sleep(_POLL)

    async def confirmed(self, session: Session, slot: str, catalog: StoredCatalog[Any]) -> Lsn:
        """Up to where the slot's changes are durable in the target.

        With a relay log, the publisher has confirmations of what is not in the target yet, so the target's position counts, too. Without
        one, the position is never behind.

        Raises:
            PublisherError: the slot does not exist.
        """
        rows = await session.execute(
            f"SELECT confirmed_flush_lsn FROM pg_catalog.pg_replication_slots WHERE slot_name = {quote_literal(slot)}"  # noqa: S608
        )
        if not rows:
            hint = "it was dropped, or the publisher has failed over without it: the subscription must be created again"
            raise PublisherError(f'replication slot "{slot}" does not exist on the publisher', hint=hint, sqlstate="42704")
        return min(Lsn.parse(rows[0][0] or "0/0"), (await catalog.find(self.name)).position or INVALID_LSN)

    async def _keep_running(self, definition: Definition) -> None:
        """Run the subscription here while no other process does."""
        await asyncio.sleep(_UNATTENDED)
        async with opened_catalog(self.target) as catalog:
            now = asyncio.get_running_loop().time
            seen = now()
            while now() - seen < _UNATTENDED:
                if await catalog.store.held_locks([writer_key(definition.oid)]):
                    seen = now()
                await asyncio.sleep(_LOOK)
            definition = await catalog.find(self.name)
        _log.info('no process runs subscription "%s": it is run here, without a relay log; if it has one, start its launcher', self.name)
        subscription = Subscription.of_definition(definition, self.target, Settings())
        running = asyncio.create_task(subscription.run())
        try:
            await asyncio.shield(running)
        except SubscriptionInUse:
            # its launcher was faster
            await asyncio.Event().wait()
        finally:
            subscription.stop()
            await asyncio.wait([running])

    async def stop(self) -> None:
        """Let no process run it. Idempotent."""
        async with opened_catalog(self.target) as catalog, catalog.claim(self.name) as definition:
            await catalog.update(definition.oid, {"enabled": False})

    async def enable(self) -> None:
        """Let a launcher run it. Idempotent."""
        async with opened_catalog(self.target) as catalog:
            found = await catalog.find(self.name)
            if not found.enabled:
                await catalog.update(found.oid, {"enabled": True})

    async def prepare(self) -> None:
        """Make what :meth:`establish` needs, while writers still write. May be repeated."""

    async def establish(self) -> None:
        """Make a new slot, while both databases are closed and hold the same rows. The subscription continues there, and stays disabled."""
        async with opened_catalog(self.target) as catalog, catalog.claim(self.name) as definition:
            slot = self.slot
            async with await WalReceiverConnection.connect(self.publisher, application_name=session_name(self.name, "cutover")) as session:
                await session.drop_slot(slot, wait=True, missing_ok=True)
                identity = await session.identify_system()
                await catalog.update(definition.oid, {"slot_name": slot, "enabled": False})
                created = await session.create_slot(
                    slot,
                    two_phase=definition.two_phase is TwoPhaseState.ENABLED,
                    failover=definition.options.failover and session.capabilities.failover_slots,
                )
            position = Position(slot, identity.system_identifier, identity.timeline, created.consistent_point)
            sink = await open_target(self.target, definition.options, Settings(), defined=True).open(self.name, ignore_durable)
            try:
                await sink.set_position(position)
            finally:
                await sink.close()

    async def remove(self) -> None:
        """Remove what :meth:`prepare` and :meth:`establish` make. May be repeated."""
        raise NotImplementedError

    async def clean(self) -> None:
        """Remove what :meth:`remove` leaves in a closed database."""


class ForwardLink(Link):
    """The subscription that is cut over. A rollback makes a new slot for it."""

    async def remove(self) -> None:
        """Drop the slot, so that the publisher keeps no WAL for it. The subscription stays, disabled."""
        async with opened_catalog(self.target) as catalog, catalog.claim(self.name) as definition:
            async with await WalReceiverConnection.connect(self.publisher, application_name=session_name(self.name, "cutover")) as session:
                await session.drop_slot(self.slot, wait=True, missing_ok=True)
            await catalog.update(definition.oid, {"slot_name": None, "enabled": False})


class BackLink(Link):
    """The way back: a subscription and a publication of the same name.

    Args:
        name, publisher, target, admin: as :class:`Link`. The slot and the publication have its name.
        target_admin: connection string of a role that may drop the catalog in the target.
        tables: the tables that it replicates.
    """

    def __init__(self, name: str, *, publisher: str, target: str, admin: str, target_admin: str, tables: Sequence[TableName]) -> None:
        super().__init__(name, publisher=publisher, target=target, admin=admin, slot=name, publications=[name])
        self._target_admin = target_admin
        self._tables = tables

    async def prepare(self) -> None:
        """Make the publication, and the subscription without its slot. What an interrupted attempt has left is removed first."""
        await self.remove()
        async with self._session() as session:
            listed = ", ".join(each.quoted for each in self._tables)
            await session.execute(
                f"CREATE PUBLICATION {quote_identifier(self.name)} FOR TABLE {listed} WITH (publish_via_partition_root = true)"
            )
            origin: Literal["none", "any"] = "none" if session.capabilities.origin else "any"
        options = SubscriptionOptions(copy_data=False, enabled=False, create_slot=False, slot_name=NO_SLOT, origin=origin)
        await create_subscription(
            self.name, connection=self.publisher, publications=self.publications, target=self.target, options=options, settings=Settings()
        )

    async def remove(self) -> None:
        """Drop the subscription with its slot, the publication, and the catalog if it was only for them and the database is open."""
        if (found := await self.find()) is not None:
            async with opened_catalog(self.target) as catalog:
                # its slot may be missing
                await catalog.update(found.oid, {"made": False})
            await drop_subscription(self.name, target=self.target)
            crash_points.reached("cutover.removed")
        async with self._session() as session:
            await session.execute(f"DROP PUBLICATION IF EXISTS {quote_identifier(self.name)}")
        crash_points.reached("cutover.removed")
        await self.clean()

    async def clean(self) -> None:
        """Drop the catalog if it was only for this subscription."""
        await drop_unused_catalog(self.target, self._target_admin)

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Session]:
        async with await Session.connect(self._admin, application_name=session_name(self.name, "cutover")) as session:
            await session.execute("SET default_transaction_read_only = off; SET client_min_messages = warning")
            yield session


async def drop_unused_catalog(target: str, admin: str, place: str | None = None, *, closed: bool = False) -> bool:
    """Drop the catalog in a database if it has no subscription and no launcher.

    Args:
        target: the database.
        admin: connection string of a role that may drop it.
        place: what the database is. If it is given, a launcher is an error.
        closed: drop it also if the database is closed: the fence's table is in the same schema.

    Returns:
        Whether it was dropped.

    Raises:
        SubscriptionInUse: a launcher uses it.
    """
    async with await Session.connect(admin, application_name="subscriber cutover") as session:
        await session.execute("SET default_transaction_read_only = off; SET client_min_messages = warning")
        ((catalog, fence),) = await session.execute(
            "SELECT pg_catalog.to_regclass('subscriber.pg_subscription'), pg_catalog.to_regclass('subscriber.fence')"
        )
        if fence is not None and not closed:
            return False
        if catalog is None:
            if fence is not None:
                await drop_row(session)
            return False
        async with opened_catalog(target) as opened:
            if await opened.subscriptions():
                return False
            until = asyncio.get_running_loop().time() + _LAUNCHER_SECONDS
            while await opened.store.held_locks([LAUNCHER_KEY]):
                if place is None:
                    return False
                # `subscriber migrate` ends by itself
                if asyncio.get_running_loop().time() > until:
                    raise SubscriptionInUse(
                        f"a launcher uses the catalog of {place}, which has no subscription any more",
                        hint="stop that `subscriber run --target`, and use --complete again: it removes the catalog",
                    )
                await asyncio.sleep(_LOOK)
        await session.execute("DROP SCHEMA subscriber CASCADE")
    crash_points.reached("cutover.removed")
    return True
