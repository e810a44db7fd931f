"""Ask the publisher what became of a transaction or a table that the stream is about.

Source: PostgreSQL manual, pg_xact_status.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = ["is_dropped", "was_rolled_back"]

# xmax is past the last ended transaction, so none from there on has ended; pg_xact_status rejects future ids. NULL: it ended long ago
_STATUS: Final = """
WITH snapshot AS (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::int8 AS next),
     found AS (SELECT next, (next - xid) & 4294967295 AS age FROM snapshot, pg_catalog.unnest('{{{xids}}}'::int8[]) AS asked (xid))
SELECT pg_catalog.pg_xact_status((next - age)::text::xid8) FROM found WHERE age BETWEEN 1 AND 2147483647 AND age < next
"""


async def was_rolled_back(conninfo: str, xid: int, *, system_identifier: str, timeline: int, application_name: str) -> bool:
    """Whether a transaction was rolled back; a prepared one by ROLLBACK PREPARED. It must be among the last two billion transactions.

    False if this is not known any more. False also if another server answers than the one that sent the transaction: there the id may
    belong to another transaction.

    Args:
        conninfo: of the publisher.
        xid: without an epoch, as in messages.
        system_identifier: of the server that sent it.
        timeline: of that server.
        application_name: of the session for the query.

    Raises:
        ConfigurationError, PublisherUnavailable, PublisherError: the query failed.
    """
    async with await WalReceiverConnection.connect(conninfo, application_name=application_name) as connection:
        identity = await connection.identify_system()
        if (identity.system_identifier, identity.timeline) != (system_identifier, timeline):
            return False
        return await _statuses(connection, [xid]) == ["aborted"]


async def is_dropped(
    conninfo: str, relation_id: int, xids: Collection[int], *, system_identifier: str, timeline: int, application_name: str
) -> bool:
    """Whether the publisher has certainly dropped a table.

    A walsender sends a transaction before others see it, for example while its commit waits for a synchronous standby. But a transaction
    that has changed the table has seen it. So after that one has ended, a later query sees the table, too.

    Args:
        conninfo: see :func:`was_rolled_back`, as the others and the errors.
        relation_id: the table's oid.
        xids: transactions of the stream, at least one of which has changed the table.
        system_identifier: of the server that sent them.
        timeline: of that server.
        application_name: of the session for the query.
    """
    async with await WalReceiverConnection.connect(conninfo, application_name=application_name) as connection:
        identity = await connection.identify_system()
        if (identity.system_identifier, identity.timeline) != (system_identifier, timeline):
            return False
        statuses = await _statuses(connection, xids)
        if len(statuses) < len(xids) or "in progress" in statuses:
            return False
        # in a snapshot of its own, after the transactions have ended
        return not await connection.execute(f"SELECT FROM pg_catalog.pg_class WHERE oid = {relation_id:d}")


async def _statuses(connection: WalReceiverConnection, xids: Collection[int]) -> list[str | None]:
    """The statuses of those transactions that the server knows to have begun."""
    return [status for (status,) in await connection.execute(_STATUS.format(xids=",".join(map(str, xids))))]
