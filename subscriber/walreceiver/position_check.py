"""The check at the start: can the publisher still send everything after the target's durable position?

If START_REPLICATION names an LSN below the slot's confirmed_flush_lsn, the server silently starts at the latter. A slot of the same name
may also have been recreated. So before every start, the target's position is compared with the slot, the system identifier and the
timeline. A gap is an error that says what happened, never a silent jump. The comparison is exact because nothing is acknowledged before the
target holds a position at least as high.
Source: PostgreSQL manual, Streaming Replication Protocol (IDENTIFY_SYSTEM, TIMELINE_HISTORY), pg_replication_slots.
"""

from __future__ import annotations

from dataclasses import replace

from subscriber.errors import DataLossError, PublisherError
from subscriber.interfaces import Position
from subscriber.walreceiver.connection import SlotInfo, SystemIdentity, WalReceiverConnection
from subscriber.walreceiver.publisher_errors import START_OVER, invalidation_remedy

__all__ = ["Diverged", "check_position"]


class Diverged(DataLossError):
    """The publisher does not have the changes before the position any more: it was restored, or another server was promoted."""


async def check_position(connection: WalReceiverConnection, position: Position, *, holder: str = "the target") -> Position:
    """Compare the target's position with what the publisher can send.

    Args:
        connection: with the publisher.
        position: of the target, or of its relay log.
        holder: which of the two, for errors.

    Returns:
        The position on the publisher's current timeline. The caller stores it if it differs.

    Raises:
        DataLossError: changes after the position are lost, or the position is of another publisher.
        PublisherError: the slot cannot be used, because its plugin or database is wrong.
    """
    identity = await connection.identify_system()
    if identity.system_identifier != position.system_identifier:
        raise DataLossError(
            f"the publisher's system identifier is {identity.system_identifier}, but {holder} was filled from {position.system_identifier}",
            hint=f"connect to the old publisher; {START_OVER}",
        )
    position = await _check_timeline(connection, position, identity, holder)
    _check_slot(await connection.slot(position.slot_name), position, identity, holder)
    if position.lsn > identity.xlogpos:
        raise Diverged(
            f"the publisher's WAL ends at {identity.xlogpos}, before {holder}'s position {position.lsn}: it was restored"
            " to an earlier time",
            hint=f"find out what the publisher lost; {START_OVER}",
        )
    return position


async def _check_timeline(connection: WalReceiverConnection, position: Position, identity: SystemIdentity, holder: str) -> Position:
    if identity.timeline == position.timeline:
        return position
    if identity.timeline < position.timeline:
        raise DataLossError(
            f"the publisher is on timeline {identity.timeline}, but {holder}'s position {position.lsn} is of timeline {position.timeline}",
            hint=f"connect to the server that was promoted; {START_OVER}",
        )
    history = await connection.timeline_history(identity.timeline)
    switched = next((entry.switchpoint for entry in history if entry.timeline == position.timeline), None)
    if switched is None or switched < position.lsn:
        where = "is not an ancestor of it" if switched is None else f"ended at {switched}"
        raise Diverged(
            f"the publisher is on timeline {identity.timeline}; timeline {position.timeline} of {holder}'s position {position.lsn}"
            f" {where}: {holder} holds changes that the promoted server never had",
            hint=START_OVER,
        )
    return replace(position, timeline=identity.timeline)


def _check_slot(slot: SlotInfo | None, position: Position, identity: SystemIdentity, holder: str) -> None:
    name = position.slot_name
    if slot is None:
        raise DataLossError(
            f'replication slot "{name}" does not exist on the publisher any more: changes after {position.lsn} are lost',
            hint=f"after a failover, make the slot a failover slot (-o failover=true, PostgreSQL 17); {START_OVER}",
        )
    if slot.plugin != "pgoutput" or slot.database != identity.dbname:
        raise PublisherError(
            f'replication slot "{name}" is of plugin "{slot.plugin}" and database "{slot.database}",'
            f' not of pgoutput and "{identity.dbname}"',
            hint="use another slot (-o slot_name=…) or another database in --connection",
        )
    if slot.lost:
        raise DataLossError(
            f'replication slot "{name}" was invalidated ({slot.lost_because}): changes after {position.lsn} are lost',
            hint=f"{invalidation_remedy(slot.lost_because)}; {START_OVER}",
        )
    if slot.confirmed_flush_lsn is None or slot.confirmed_flush_lsn > position.lsn:
        raise DataLossError(
            f'replication slot "{name}" was advanced to {slot.confirmed_flush_lsn}, past position {position.lsn} of {holder}:'
            " the changes in between are lost",
            hint="the slot was recreated, advanced, or used by another subscriber; if the subscription ran with a relay log, start it with"
            f" the same -c relay_log; {START_OVER}",
        )
