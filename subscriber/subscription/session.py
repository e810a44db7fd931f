"""One connection that follows one slot: from the connection string to whole transactions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from subscriber.abc import Position
from subscriber.apply.receiver import Receiver
from subscriber.apply.spool import SpoolDirectory
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import PublisherError, SubscriberError
from subscriber.protocol.capabilities import Capabilities, negotiate
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.subscription.loss import check_position
from subscriber.transaction.feedback import FlushTracker
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publication import missing_publications, publications_missing

__all__ = ["FollowedSlot", "StreamSession", "undecodable"]

_log = logging.getLogger(__name__)

_LAST_REPORT_SECONDS: Final = 1.0
_MUCH_MEMORY: Final = 1024**2
"""kB of what it decodes that a publisher may keep in memory, where it failed with less; more if it may keep more anyway."""
_SET_MEMORY: Final = f"""
SELECT pg_catalog.set_config(name, greatest(setting::int8, {_MUCH_MEMORY})::text, false)
FROM pg_catalog.pg_settings WHERE name = 'logical_decoding_work_mem'
"""  # noqa: S608 (ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSlot:
    """What is followed, and how.

    Attributes:
        conninfo: of the publisher.
        name: of the slot.
        temporary: the slot is made by the session and gone with it.
        publications: names.
        options: ``create_slot``, ``failover`` and what START_REPLICATION takes.
        settings: of the receiver.
        messages: whether logical messages are wanted.
        application_name: of the connection; None: the slot's name.
        spool_key: names the spool; None: made from the slot and the publisher.
        cautiously: the publisher failed to decode what comes next. Mostly it is a transaction that was rolled back: sent only at its end,
            it is not decoded; kept in memory as a whole, it is not looked at before.
    """

    conninfo: str
    name: str
    temporary: bool
    publications: tuple[str, ...]
    options: SubscriptionOptions
    settings: Settings
    messages: bool = False
    application_name: str | None = None
    spool_key: str | None = None
    cautiously: bool = False


class StreamSession:
    """Made by :meth:`open`; to be closed.

    Attributes:
        receiver: gives the events.
        tracker: positions of this stream.
        position: where it started.
        publisher_lsn: where the publisher's WAL ended when it started.
        capabilities: the publisher's.
        relations: described so far in this stream, by their ids.
    """

    def __init__(
        self,
        *,
        receiver: Receiver,
        tracker: FlushTracker,
        position: Position,
        publisher_lsn: Lsn,
        capabilities: Capabilities,
        resources: contextlib.AsyncExitStack,
    ) -> None:
        self.receiver = receiver
        self.tracker = tracker
        self.position = position
        self.publisher_lsn = publisher_lsn
        self.capabilities = capabilities
        self.relations: dict[int, Relation] = {}
        self._resources = resources

    @classmethod
    async def open(cls, slot: FollowedSlot, position: Position | None, start_lsn: Lsn | None = None) -> Self:
        """Connect, see that nothing is missing, and start.

        Args:
            slot: what to follow.
            position: where an earlier session came to; None for the first one.
            start_lsn: where the first one shall start; None: where the slot stands.

        Raises:
            PublisherUnavailable, SlotInUse: it may pass.
            DataLossError: the slot can no longer give everything behind the position.
            PublisherError: no such publication, no such slot, no privilege.
        """
        connection = await WalReceiverConnection.connect(slot.conninfo, application_name=slot.application_name or slot.name)
        async with contextlib.AsyncExitStack() as starting:
            starting.push_async_callback(connection.close)
            if position is None:
                position = await _first_position(connection, slot, start_lsn)
            position = await check_position(connection, position)
            publisher_lsn = await connection.current_wal_lsn()
            two_phase = slot.options.two_phase
            wanted = slot.options
            if slot.cautiously:
                wanted = replace(wanted, streaming="off")
                await connection.execute(_SET_MEMORY)
            options = negotiate(
                connection.capabilities, wanted, publications=slot.publications, two_phase=two_phase, messages=slot.messages
            )
            stream = await connection.start_replication(slot.name, position.lsn, options)
            starting.push_async_callback(stream.close)
            # not before the slot is ours: the spool of another process that has it would be swept away
            key = slot.spool_key or f"slot {slot.name} of {position.system_identifier}"
            spool = await starting.enter_async_context(SpoolDirectory(slot.settings.spool_directory, key))
            tracker = FlushTracker(position.lsn)
            receiver = Receiver(stream, tracker, spool, slot.settings)
            await receiver.start()
            starting.push_async_callback(receiver.close)
            return cls(
                receiver=receiver,
                tracker=tracker,
                position=position,
                publisher_lsn=publisher_lsn,
                capabilities=connection.capabilities,
                resources=starting.pop_all(),
            )
        raise AssertionError("an exit stack swallows nothing")

    async def close(self) -> None:
        """Report the last status if the connection still lives, and free everything."""
        async with self._resources:
            with contextlib.suppress(SubscriberError, TimeoutError):
                async with asyncio.timeout(_LAST_REPORT_SECONDS):
                    await self.receiver.report_now()


def undecodable(error: SubscriberError, lsn: Lsn) -> PublisherError:
    """The publisher failed to decode what comes behind ``lsn``, also where it was followed cautiously."""
    return PublisherError(
        f"the publisher cannot decode the WAL after {lsn}, not even without streaming and with 1 GB of memory: {error}",
        hint="if more logical_decoding_work_mem on the publisher does not help, its slot cannot go on: drop the subscription, and make it"
        " anew with a copy of the tables",
        sqlstate=error.sqlstate,
    )


async def _first_position(connection: WalReceiverConnection, slot: FollowedSlot, start_lsn: Lsn | None) -> Position:
    await _check_publications(connection, slot.publications)
    identity = await connection.identify_system()
    found = None if slot.temporary else await connection.slot(slot.name)
    if found is not None:
        stands_at = found.confirmed_flush_lsn
    elif slot.temporary or slot.options.create_slot:
        created = await connection.create_slot(
            slot.name,
            two_phase=slot.options.two_phase and connection.capabilities.two_phase,
            failover=slot.options.failover,
            temporary=slot.temporary,
        )
        stands_at = created.consistent_point
        _log.info('created replication slot "%s" at %s', slot.name, stands_at)
    else:
        raise PublisherError(f'replication slot "{slot.name}" does not exist', hint="create it, or leave out create_slot=false")
    return Position(
        slot_name=slot.name,
        system_identifier=identity.system_identifier,
        timeline=identity.timeline,
        lsn=start_lsn or stands_at or INVALID_LSN,
    )


async def _check_publications(connection: WalReceiverConnection, publications: Sequence[str]) -> None:
    missing = await missing_publications(connection, publications)
    if missing:
        raise PublisherError(publications_missing(missing), hint="CREATE PUBLICATION there, in the database of the connection string")
