"""What the workers do, and what was counted, written where ``status`` looks for it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from subscriber.abc import TableName, WorkerActivity
from subscriber.sinks.sqlalchemy.engine import Database
from subscriber.sinks.sqlalchemy.tables import COUNTERS

__all__ = ["Reporter", "Unwritten"]


class Unwritten(Protocol):
    """The sink's counters, and how much of them is in the catalog already."""

    def unwritten(self, name: str) -> int:
        """By how much a counter grew since :meth:`wrote`."""
        ...

    def wrote(self, counted: Mapping[str, int]) -> None:
        """So much is in the catalog now."""
        ...


class Reporter:
    """Writes for one subscription, while its sink is open.

    Args:
        database: the sink's.
        oid: the subscription's.
        tally: the sink's.
    """

    def __init__(self, database: Database, oid: int, tally: Unwritten) -> None:
        self._database = database
        self._tables = database.tables
        self._oid = oid
        self._tally = tally

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write all of it, in one transaction.

        Raises:
            TargetUnavailable: the target cannot be reached, or somebody else keeps it locked.
            TargetError: it refused.
        """
        counted = {name: self._tally.unwritten(name) for name in COUNTERS}
        worker = self._tables.worker
        async with self._database.writing() as connection:
            relids = await self._relids(connection)
            rows = [self._row(activity, relids) for activity in workers if activity.table is None or activity.table in relids]
            # all anew: every dialect can do that, and there are few
            await connection.execute(delete(worker).where(worker.c.subid == self._oid))
            if rows:
                await connection.execute(insert(worker), rows)
            if last_error is not None or any(counted.values()):
                await self._count(connection, counted, last_error)
        self._tally.wrote(counted)

    async def _relids(self, connection: AsyncConnection) -> dict[TableName, int]:
        rel = self._tables.pg_subscription_rel
        query = select(rel.c.srnspname, rel.c.srrelname, rel.c.srrelid).where(rel.c.srsubid == self._oid)
        return {TableName(namespace, name): relid for namespace, name, relid in await connection.execute(query)}

    async def _count(self, connection: AsyncConnection, counted: Mapping[str, int], last_error: str | None) -> None:
        stats = self._tables.subscription_stats
        values: dict[str, Any] = {name: stats.c[name] + count for name, count in counted.items() if count}
        if last_error is not None:
            values |= {"last_error": last_error, "last_error_time": time.time()}
        await connection.execute(update(stats).where(stats.c.subid == self._oid).values(values))

    def _row(self, worker: WorkerActivity, relids: Mapping[TableName, int]) -> dict[str, Any]:
        return {
            "subid": self._oid,
            "relid": 0 if worker.table is None else relids[worker.table],
            "worker_type": "apply" if worker.table is None else "table synchronization",
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "reported": time.time(),
            "received_lsn": worker.received,
            "applied_lsn": worker.applied,
            "flushed_lsn": worker.flushed,
            "last_msg_send_time": worker.sent_at,
            "last_msg_receipt_time": worker.received_at,
            "latest_end_lsn": worker.latest_end,
            "latest_end_time": worker.reported_at,
            "transactions": worker.transactions,
            "changes": worker.changes,
            "transactions_per_second": worker.transactions_per_second,
            "changes_per_second": worker.changes_per_second,
            "copied_rows": worker.copied_rows,
            "estimated_rows": worker.estimated_rows,
            "details": worker.details,
        }
