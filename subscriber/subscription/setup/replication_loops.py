"""Detect subscriptions that form a loop: the publisher subscribes to the same tables, and the target publishes them.

The target of the publisher's subscription cannot be read, because only its owner may see the connection string. Its slot name is
visible, though. If the target has a slot of that name, the changes most likely come from there. Loops through a third server are not
detected.

With ``origin = none`` on both sides, changes do not loop (PostgreSQL manual, CREATE SUBSCRIPTION, Notes). A subscription that is disabled
or has no slot receives none: after a cutover, the first subscription is kept for a rollback, and before it, the way back has no slot.
"""

from __future__ import annotations

from subscriber.config import NO_SLOT
from subscriber.interfaces import Finding, PostgresDatabase
from subscriber.protocol.quoting import quote_literal
from subscriber.subscription.spec import RunSpec
from subscriber.walreceiver.connection import WalReceiverConnection
from subscriber.walreceiver.publisher_subscriptions import subscribed_tables

__all__ = ["find_loops"]


async def find_loops(connection: WalReceiverConnection, spec: RunSpec) -> list[Finding]:
    """Return a warning for each subscription of the publisher that leads back to the target.

    Raises:
        PublisherUnavailable, TargetError: one of the two cannot be queried.
    """
    sink = spec.sink
    if not isinstance(sink, PostgresDatabase) or spec.slot_name == NO_SLOT:
        return []
    back = {
        (found.slot_name, found.subscription): str(found.table)
        for found in await subscribed_tables(connection, spec.publications)
        if found.enabled and found.slot_name is not None and (found.takes_any_origin or spec.options.origin != "none")
    }
    if not back:
        return []
    async with sink.querying() as target:
        if target is None:
            return []
        names = ", ".join(quote_literal(slot) for slot, _ in back)
        rows = await target(
            "SELECT slot_name::pg_catalog.text FROM pg_catalog.pg_replication_slots"  # noqa: S608 (quoted)
            f" WHERE database = pg_catalog.current_database() AND slot_name IN ({names})"
        )
    slots = {name for (name,) in rows}
    return [
        Finding(
            "warning",
            f'the publisher replicates table "{table}" from the target, with subscription "{name}" and replication slot "{slot}":'
            " changes will loop between the two servers",
            "set origin = none on both subscriptions, or publish other tables",
        )
        for (slot, name), table in back.items()
        if slot in slots
    ]
