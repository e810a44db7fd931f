"""Ask the publisher what became of a transaction or a table that the stream is about.

Source: PostgreSQL manual, pg_xact_status.
"""

from __future__ import annotations

from subscriber.walreceiver.connection import WalReceiverConnection

__all__ = ["is_dropped", "was_rolled_back"]


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
        # xmax is past the last ended transaction, so none from there on was rolled back; pg_xact_status rejects future ids
        rows = await connection.execute(
            f"""
            WITH snapshot AS (SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text::int8 AS next),
                 found AS (SELECT next, (next - {xid:d}) & 4294967295 AS age FROM snapshot)
            SELECT pg_catalog.pg_xact_status((next - age)::text::xid8) FROM found
             WHERE age BETWEEN 1 AND 2147483647 AND age < next"""  # noqa: S608 (a number)
        )
    return bool(rows) and rows[0][0] == "aborted"


async def is_dropped(conninfo: str, relation_id: int, *, system_identifier: str, timeline: int, application_name: str) -> bool:
    """Whether the publisher has dropped a table. Arguments and errors are those of :func:`was_rolled_back`, but ``relation_id``: its oid.

    False also if another server answers than the one that sent the table's changes.
    """
    async with await WalReceiverConnection.connect(conninfo, application_name=application_name) as connection:
        identity = await connection.identify_system()
        if (identity.system_identifier, identity.timeline) != (system_identifier, timeline):
            return False
        return not await connection.execute(f"SELECT FROM pg_catalog.pg_class WHERE oid = {relation_id:d}")
