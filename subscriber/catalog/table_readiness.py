"""Which tables of a target have exactly the publisher's transactions up to an LSN."""

from __future__ import annotations

from collections.abc import Iterable

from subscriber.abc import TableName, TableState
from subscriber.catalog.model import PG_SUBSCRIPTION_REL
from subscriber.catalog.store import Store
from subscriber.catalog.subscription_rows import entry_of
from subscriber.protocol.lsn import Lsn

__all__ = ["not_ready"]


async def not_ready(store: Store, oid: int, tables: Iterable[TableName], lsn: Lsn) -> dict[TableName, str]:
    """Return the tables that do not, each with the reason. The target has applied everything up to the LSN.

    Raises:
        TargetUnavailable, TargetError
    """
    async with store.reading() as rows:
        entries = {
            TableName(row["srnspname"], row["srrelname"]): entry_of(row)
            for row in await rows.select(PG_SUBSCRIPTION_REL, {"srsubid": oid})
            if row["srrelname"] is not None
        }
    reasons: dict[TableName, str] = {}
    for table in tables:
        entry = entries.get(table)
        if entry is None:
            reasons[table] = "it is not part of the subscription"
        elif entry.state not in {TableState.SYNCDONE, TableState.READY} or (entry.lsn is not None and entry.lsn > lsn):
            reasons[table] = "it is still being synchronized"
    return reasons
