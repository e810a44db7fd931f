"""Writes the activity of a subscription's workers, and its counters, to the catalog, where ``status`` reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from subscriber.catalog.model import COUNTERS, PG_SUBSCRIPTION_REL, SUBSCRIPTION_STATS, WORKER
from subscriber.catalog.store import Plus, Row, Rows
from subscriber.interfaces import TableName, WorkerActivity

__all__ = ["Reporter", "Unwritten", "activity_of", "note_error", "reset_statistics"]

_APPLY, _SYNCHRONIZATION = "apply", "table synchronization"

# attributes of WorkerActivity by columns
_COLUMNS: Mapping[str, str] = {
    "received_lsn": "received",
    "applied_lsn": "applied",
    "flushed_lsn": "flushed",
    "last_msg_send_time": "sent_at",
    "last_msg_receipt_time": "received_at",
    "latest_end_lsn": "latest_end",
    "latest_end_time": "reported_at",
    "transactions": "transactions",
    "changes": "changes",
    "transactions_per_second": "transactions_per_second",
    "changes_per_second": "changes_per_second",
    "copied_rows": "copied_rows",
    "estimated_rows": "estimated_rows",
    "details": "details",
}


class Unwritten(Protocol):
    """The sink's counters, and how much of each is already in the catalog."""

    def unwritten(self, name: str) -> int:
        """The part of a counter that was not written yet, see :meth:`wrote`."""
        ...

    def wrote(self, counted: Mapping[str, int]) -> None:
        """Record that these parts of the counters were written to the catalog."""
        ...


class Reporter:
    """Writes the reports of one subscription, while its sink is open.

    Args:
        transaction: opens a transaction.
        now: returns the time, in seconds since 1970.
        oid: the subscription's.
        tally: the sink's counters.
    """

    def __init__(
        self, transaction: Callable[[], AbstractAsyncContextManager[Rows]], now: Callable[[], float], oid: int, tally: Unwritten
    ) -> None:
        self._transaction = transaction
        self._now = now
        self._oid = oid
        self._tally = tally

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write workers, counters and, if there is one, the error, in one transaction.

        Raises:
            TargetUnavailable: the target cannot be reached, or another session keeps it locked.
            TargetError: the target rejected a statement.
        """
        async with self._transaction() as rows:
            relids = await self._relids(rows, [worker.table for worker in workers if worker.table is not None])
            # delete and insert all rows: every kind of target can do that, and there are few
            await rows.delete(WORKER, {"subid": self._oid})
            known = [worker for worker in workers if worker.table in relids]
            await rows.insert(WORKER, [worker_row(self._oid, relids[worker.table], worker) for worker in known])
            counted = await self._count(rows, last_error)
        self._tally.wrote(counted)

    async def count(self, last_error: str | None) -> None:
        """Write the counters, and the error if there is one.

        Raises:
            TargetUnavailable, TargetError
        """
        async with self._transaction() as rows:
            counted = await self._count(rows, last_error)
        self._tally.wrote(counted)

    async def _relids(self, rows: Rows, tables: Sequence[TableName]) -> dict[TableName | None, int]:
        """Return the numbers of those tables that the subscription has. The key None means the apply worker, with the number 0."""
        found: Sequence[Row] = ()
        if tables:
            found = await rows.select(PG_SUBSCRIPTION_REL, {"srsubid": self._oid, "srrelname": [table.name for table in tables]})
        return {None: 0, **{TableName(row["srnspname"], row["srrelname"]): row["srrelid"] for row in found}}

    async def _count(self, rows: Rows, last_error: str | None) -> Mapping[str, int]:
        counted = {name: count for name in COUNTERS if (count := self._tally.unwritten(name))}
        values: dict[str, Any] = {name: Plus(count) for name, count in counted.items()}
        if last_error is not None:
            values |= {"last_error": last_error, "last_error_time": self._now()}
        if values:
            await rows.update(SUBSCRIPTION_STATS, {"subid": self._oid}, values)
        return counted


def worker_row(oid: int, relid: int, worker: WorkerActivity) -> Row:
    kind = _SYNCHRONIZATION if relid else _APPLY
    return {"subid": oid, "relid": relid, "worker_type": kind} | {column: getattr(worker, name) for column, name in _COLUMNS.items()}


def activity_of(row: Row, table: TableName | None) -> WorkerActivity:
    # a row that note_error wrote has only details
    return WorkerActivity(table=table, **{name: row[column] for column, name in _COLUMNS.items() if row[column] is not None})


async def note_error(rows: Rows, oid: int, text: str, details: str | None, now: float) -> None:
    """Store an error. With ``details``, also replace the apply worker's row by one that has only these details, until it reports again."""
    await rows.update(SUBSCRIPTION_STATS, {"subid": oid}, {"last_error": text, "last_error_time": now})
    if details is not None:
        await rows.delete(WORKER, {"subid": oid, "relid": 0})
        await rows.insert(WORKER, [worker_row(oid, 0, WorkerActivity(details=details))])


async def reset_statistics(rows: Rows, oid: int, now: float) -> None:
    """Set the counters to zero and store the time."""
    await rows.update(SUBSCRIPTION_STATS, {"subid": oid}, {**dict.fromkeys(COUNTERS, 0), "stats_reset": now})
