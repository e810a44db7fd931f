"""The start of a new subscription: its slot and its first position.

The target first stores a note that the slot is about to be created. Then the slot is created, then the position is stored. A crash between
the note and the position leaves a slot that was never used. The next start drops it and creates it again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from subscriber import crash_points
from subscriber.config import PARAMETERS
from subscriber.errors import PublisherError
from subscriber.interfaces import OpenedSink, Position, SubscriptionState, TableState, TwoPhaseState
from subscriber.protocol.capabilities import Capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = ["FirstPosition"]

_log = logging.getLogger(__name__)

_DUPLICATE_OBJECT = "42710"


class FirstPosition:
    """Creates the slot and the first position of a subscription that has none.

    Args:
        spec: the subscription.
        sink: the target, opened.
    """

    def __init__(self, spec: RunSpec, sink: OpenedSink) -> None:
        self._spec = spec
        self._state = sink.state
        self._sink = sink

    async def create(self, connection: WalReceiverConnection) -> SubscriptionState:
        """Create the slot and store the position. Return the state with its position.

        Raises:
            PublisherError: the slot does not exist, or cannot be created.
            TargetError: the target rejected a write.
        """
        # a transaction that is prepared before a table's snapshot and committed after its handover would be in neither
        waiting = any(entry.state in {TableState.INIT, TableState.DATASYNC} for entry in (await self._sink.tables()).values())
        two_phase = self._first_two_phase(connection.capabilities, waiting=waiting)
        identity = await connection.identify_system()
        if self._spec.options.create_slot:
            lsn = await self._create_slot(connection, two_phase)
        else:
            found = await connection.slot(self._spec.slot_name)
            if found is None or found.confirmed_flush_lsn is None:
                raise PublisherError(
                    f'replication slot "{self._spec.slot_name}" does not exist on the publisher', hint="omit create_slot = false"
                )
            lsn = found.confirmed_flush_lsn
            if found.two_phase:
                self._spec.require_two_phase(self._spec.slot_name)
                if waiting:
                    raise PublisherError(
                        f'replication slot "{self._spec.slot_name}" sends prepared transactions: tables cannot be synchronized under it',
                        hint="create the slot without two_phase; it is enabled when all tables are ready",
                    )
                two_phase = TwoPhaseState.ENABLED
            await self._sink.begin_slot(self._spec.slot_name, self._spec.publications, two_phase)
        position = Position(self._spec.slot_name, identity.system_identifier, identity.timeline, lsn)
        crash_points.reached("setup.slot_created")
        await self._sink.set_position(position)
        crash_points.reached("setup.position_stored")
        _log.info('subscription "%s" starts at %s of replication slot "%s"', self._state.name, lsn, self._spec.slot_name)
        state = replace(self._state, slot_name=self._spec.slot_name, publications=self._spec.publications)
        return replace(state, two_phase=two_phase, position=position)

    def _first_two_phase(self, capabilities: Capabilities, *, waiting: bool) -> TwoPhaseState:
        if not self._spec.options.two_phase:
            return TwoPhaseState.DISABLED
        if not capabilities.two_phase:
            _log.warning(
                "two_phase needs a publisher with PostgreSQL %d or later: prepared transactions are received at COMMIT PREPARED",
                PARAMETERS["two_phase"].since,
            )
        elif not self._spec.options.copy_data and self._spec.options.create_slot and not waiting:
            return TwoPhaseState.ENABLED
        return TwoPhaseState.PENDING

    async def _create_slot(self, connection: WalReceiverConnection, two_phase: TwoPhaseState) -> Lsn:
        if self._state.slot_name is not None:
            # an earlier process ended between its note and its first position, so that slot was never read. Its walsender may still be
            # creating it: a walsender notices only at the end that its client is gone
            await connection.drop_slot(self._state.slot_name, wait=True, missing_ok=True)
        await self._sink.begin_slot(self._spec.slot_name, self._spec.publications, two_phase)
        try:
            slot = await connection.create_slot(
                self._spec.slot_name,
                two_phase=two_phase is TwoPhaseState.ENABLED,
                failover=self._spec.options.failover and connection.capabilities.failover_slots,
            )
        except (PublisherError, asyncio.CancelledError) as error:
            # another client may create a slot of this name later; the next start must not treat it as ours
            if (isinstance(error, PublisherError) and error.sqlstate == _DUPLICATE_OBJECT) or not await self._slot_exists():
                await self._sink.begin_slot(None, self._spec.publications, two_phase)
            raise
        return slot.consistent_point

    async def _slot_exists(self) -> bool:
        """Ask on a new connection, because the other one was left in the middle of a command. True if the answer is unknown."""
        try:
            async with await self._spec.connect("setup") as connection:
                return await connection.slot(self._spec.slot_name) is not None
        except PublisherError:
            return True
