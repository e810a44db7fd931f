"""The start of a new subscription: its slot and its first position.

The target first stores a note that the slot is about to be created. Then the slot is created, then the position is stored. A crash between
the note and the position leaves a slot that was never used. The next start drops it and creates it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from subscriber.abc import Position, Sink, SubscriptionState, TwoPhaseState
from subscriber.config import PARAMETERS, SubscriptionOptions
from subscriber.errors import PublisherError
from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.session_name import session_name
from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = ["Beginning"]

_log = logging.getLogger(__name__)

_DUPLICATE_OBJECT = "42710"


class Beginning:
    """Creates the slot and the first position of a subscription that has none.

    Args:
        state: the subscription's state in the opened sink.
        conninfo: connection string of the publisher.
        slot_name: name of the slot.
        publications: stored together with the note.
        options: ``create_slot``, ``copy_data``, ``two_phase`` and ``failover`` are used.
        sink: the target, opened.
    """

    def __init__(
        self,
        state: SubscriptionState,
        *,
        conninfo: str,
        slot_name: str,
        publications: Sequence[str],
        options: SubscriptionOptions,
        sink: Sink,
    ) -> None:
        self._state = state
        self._conninfo = conninfo
        self._slot_name = slot_name
        self._publications = tuple(publications)
        self._options = options
        self._sink = sink

    async def begin(self, connection: WalReceiverConnection) -> SubscriptionState:
        """Create the slot and store the position. Return the state with its position.

        Raises:
            PublisherError: the slot does not exist, or cannot be created.
            TargetError: the target rejected a write.
        """
        two_phase = self._first_two_phase(connection.capabilities)
        identity = await connection.identify_system()
        if self._options.create_slot:
            lsn = await self._create_slot(connection, two_phase)
        else:
            found = await connection.slot(self._slot_name)
            if found is None or found.confirmed_flush_lsn is None:
                raise PublisherError(
                    f'there is no logical replication slot "{self._slot_name}" on the publisher', hint="omit create_slot = false"
                )
            lsn = found.confirmed_flush_lsn
            if found.two_phase:
                two_phase = TwoPhaseState.ENABLED
            await self._sink.begin_slot(self._slot_name, self._publications, two_phase)
        position = Position(self._slot_name, identity.system_identifier, identity.timeline, lsn)
        await self._sink.set_position(position)
        _log.info('subscription "%s" starts at %s of replication slot "%s"', self._state.name, lsn, self._slot_name)
        state = replace(self._state, slot_name=self._slot_name, publications=self._publications)
        return replace(state, two_phase=two_phase, position=position)

    def _first_two_phase(self, capabilities: Capabilities) -> TwoPhaseState:
        if not self._options.two_phase:
            return TwoPhaseState.DISABLED
        if not capabilities.two_phase:
            _log.warning(
                "two_phase needs a publisher with PostgreSQL %d or later: prepared transactions are received at COMMIT PREPARED",
                PARAMETERS["two_phase"].since,
            )
        elif not self._options.copy_data and self._options.create_slot:
            return TwoPhaseState.ENABLED
        return TwoPhaseState.PENDING

    async def _create_slot(self, connection: WalReceiverConnection, two_phase: TwoPhaseState) -> Lsn:
        if self._state.slot_name is not None:
            # an earlier process ended between its note and its first position, so that slot was never read. Its walsender may still be
            # creating it: a walsender notices only at the end that its client is gone
            await connection.drop_slot(self._state.slot_name, wait=True, missing_ok=True)
        await self._sink.begin_slot(self._slot_name, self._publications, two_phase)
        try:
            slot = await connection.create_slot(
                self._slot_name,
                two_phase=two_phase is TwoPhaseState.ENABLED,
                failover=self._options.failover and connection.capabilities.failover_slots,
            )
        except (PublisherError, asyncio.CancelledError) as error:
            # another client may create a slot of this name later; the next start must not treat it as ours
            if (isinstance(error, PublisherError) and error.sqlstate == _DUPLICATE_OBJECT) or not await self._slot_exists():
                await self._sink.begin_slot(None, self._publications, two_phase)
            raise
        return slot.consistent_point

    async def _slot_exists(self) -> bool:
        """Ask on a new connection, because the other one was left in the middle of a command. True if the answer is unknown."""
        try:
            connection = await WalReceiverConnection.connect(self._conninfo, application_name=session_name(self._state.name, "setup"))
        except PublisherError:
            return True
        try:
            return await connection.slot(self._slot_name) is not None
        except PublisherError:
            return True
        finally:
            await connection.close()
