"""One connection that follows one slot. It turns a connection string into a stream of whole transactions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self

from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.row_filters import filtered
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import PublisherError, SubscriberError
from subscriber.interfaces import Position, ReplicationStream
from subscriber.protocol.capabilities import Capabilities, capabilities, negotiate
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.feedback import FlushTracker
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.position_check import check_position
from subscriber.walreceiver.publication import missing_publications, publications_missing, published_sources

if TYPE_CHECKING:
    from subscriber.recording.file import Recorder
    from subscriber.recording.relay_stream import RelayStream

__all__ = ["CAUTIOUSLY", "SLOT_SECONDS", "FollowedSlot", "StreamSession", "undecodable"]

_log = logging.getLogger(__name__)

CAUTIOUSLY: Final = (
    "asking the publisher to send only complete transactions, and to decode with more memory, until it has passed this place"
)
SLOT_SECONDS: Final = 10.0
"""How long the first attempt waits for a slot in use. The walsender of a killed process takes a moment to notice."""
_LAST_REPORT_SECONDS: Final = 1.0
_MUCH_MEMORY: Final = 1024**2
"""logical_decoding_work_mem in kB for a publisher that failed to decode with less. A larger value of the publisher is kept."""
_SET_MEMORY: Final = f"""
SELECT pg_catalog.set_config(name, greatest(setting::int8, {_MUCH_MEMORY})::text, false)
FROM pg_catalog.pg_settings WHERE name = 'logical_decoding_work_mem'
"""  # noqa: S608 (ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedSlot:
    """The slot to follow, and the options for it.

    Attributes:
        conninfo: connection string of the publisher.
        name: name of the slot.
        temporary: the session creates the slot, and the slot ends with the session.
        publications: names of the publications.
        options: ``create_slot``, ``failover`` and the options of START_REPLICATION.
        settings: of the receiver.
        messages: whether logical messages are wanted.
        application_name: of the connection. None: the slot's name.
        spool_key: names the spool. None: derived from the slot and the publisher.
        cautiously: the publisher failed to decode the next part of the WAL. The cause is usually a transaction that was rolled back.
            Without streaming, a transaction is decoded only at its end, so this one is not decoded at all. With more memory, the publisher
            keeps it in memory and does not look at it before its end.
        recorder: stores the stream.
        blocks: whether streamed transactions are given in blocks, before their end.
        holder: of the changes up to the position, for errors.
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
    recorder: Recorder | None = None
    blocks: bool = False
    holder: str = "the target"


class StreamSession:
    """A stream, created by :meth:`open`. The caller closes it.

    Attributes:
        receiver: gives the events.
        tracker: positions of this stream.
        position: where the stream started.
        publisher_lsn: the end of the publisher's WAL when the stream started.
        capabilities: of the publisher.
        relations: the relations described so far in this stream, by oid.
    """

    def __init__(
        self,
        receiver: Receiver,
        tracker: FlushTracker,
        position: Position,
        *,
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
    async def open(
        cls, slot: FollowedSlot, position: Position | None, start_lsn: Lsn | None = None, *, tracker: FlushTracker | None = None
    ) -> Self:
        """Connect, check that no change is missing, and start the stream.

        Args:
            slot: the slot to follow.
            position: the position of an earlier session. None for the first session.
            start_lsn: where the first session starts. None: at the slot's position.
            tracker: of the positions. None: a new one.

        Raises:
            PublisherUnavailable, SlotInUse: transient, so a retry may succeed.
            DataLossError: the slot can no longer send everything after the position.
            PublisherError: the publication or slot does not exist, or a privilege is missing.
        """
        connection = await WalReceiverConnection.connect(slot.conninfo, application_name=slot.application_name or slot.name)
        async with contextlib.AsyncExitStack() as starting:
            starting.push_async_callback(connection.close)
            if position is None:
                position = await _first_position(connection, slot, start_lsn)
            position = await check_position(connection, position, holder=slot.holder)
            publisher_lsn = await connection.current_wal_lsn()
            two_phase = slot.options.two_phase
            wanted = slot.options
            if wanted.streaming != "off" and await connection.is_standby():
                _log.info("streaming is off: a standby does not say which subtransactions were rolled back")
                wanted = replace(wanted, streaming="off")
            if slot.cautiously:
                wanted = replace(wanted, streaming="off")
                await connection.execute(_SET_MEMORY)
            options = negotiate(
                connection.capabilities, wanted, publications=slot.publications, two_phase=two_phase, messages=slot.messages
            )
            names = await published_sources(connection, slot.publications, slot.options.mapping)
            stream: ReplicationStream = await connection.start_replication(slot.name, position.lsn, options)
            starting.push_async_callback(stream.close)
            if slot.recorder is not None:
                from subscriber.recording.file import RecordedSession  # noqa: PLC0415 -- few streams are recorded
                from subscriber.recording.streams import RecordedStream  # noqa: PLC0415 -- as above

                slot.recorder.session(
                    RecordedSession(
                        server_version=connection.capabilities.server_version,
                        system_identifier=position.system_identifier,
                        timeline=position.timeline,
                        slot_name=slot.name,
                        start_lsn=position.lsn,
                        options=dict(options.pairs()),
                    )
                )
                stream = RecordedStream(stream, slot.recorder)
            # only now, when we hold the slot: opening the spool deletes the files of another process that still uses the slot
            key = slot.spool_key or f"slot {slot.name} of {position.system_identifier}"
            spool = await starting.enter_async_context(SpoolDirectory(slot.settings.spool_directory, key))
            tracker = tracker or FlushTracker(position.lsn)
            receiver = Receiver(filtered(stream, slot.options, names), tracker, spool, slot.settings, blocks=slot.blocks)
            return await cls._started(
                starting, receiver, tracker, position, publisher_lsn=publisher_lsn, capabilities=connection.capabilities
            )
        raise AssertionError("an exit stack swallows nothing")

    @classmethod
    async def of_relay_log(cls, stream: RelayStream, position: Position, *, publisher_lsn: Lsn, settings: Settings) -> Self:
        """Start the stream of a relay log.

        Args:
            stream: of the relay log.
            position: of the target.
            publisher_lsn: the end of the publisher's WAL, as far as known.
            settings: of the receiver.
        """
        async with contextlib.AsyncExitStack() as starting:
            tracker = FlushTracker(position.lsn)
            receiver = Receiver(stream, tracker, None, settings)
            spoken = capabilities(stream.session.server_version)
            return await cls._started(starting, receiver, tracker, position, publisher_lsn=publisher_lsn, capabilities=spoken)
        raise AssertionError("an exit stack swallows nothing")

    @classmethod
    async def _started(
        cls,
        starting: contextlib.AsyncExitStack,
        receiver: Receiver,
        tracker: FlushTracker,
        position: Position,
        **known: Any,
    ) -> Self:
        await receiver.start()
        starting.push_async_callback(receiver.close)
        return cls(receiver, tracker, position, **known, resources=starting.pop_all())

    async def close(self) -> None:
        """Send the last status update if the connection is still alive, and free everything."""
        async with self._resources:
            with contextlib.suppress(SubscriberError, TimeoutError):
                async with asyncio.timeout(_LAST_REPORT_SECONDS):
                    await self.receiver.report_now()


def undecodable(error: SubscriberError, lsn: Lsn) -> PublisherError:
    """The error for a publisher that failed to decode the WAL after ``lsn`` even cautiously."""
    return PublisherError(
        f"the publisher cannot decode the WAL after {lsn}, not even without streaming and with 1 GB of memory: {error}",
        hint="increase logical_decoding_work_mem on the publisher; if that does not help, drop the subscription and create it again with a"
        " copy of the tables",
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
        raise PublisherError(f'replication slot "{slot.name}" does not exist', hint="create it, or omit create_slot = false")
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
