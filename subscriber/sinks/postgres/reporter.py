"""What the workers do, and what was counted, written where pg_stat_subscription and pg_stat_subscription_stats show it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from subscriber.abc import TableName, WorkerActivity
from subscriber.sinks.postgres.locks import table_key, writer_key
from subscriber.sinks.postgres.reading import CatalogReader
from subscriber.sinks.tally import Tally

__all__ = ["Reporter"]

_RELIDS: Final = """
SELECT n.nspname::text AS namespace, c.relname::text AS name, c.oid::int8 AS relid
FROM ROWS FROM (pg_catalog.unnest($1::text[]::name[]), pg_catalog.unnest($2::text[]::name[])) AS wanted(nspname, relname)
JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.nspname
JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.relname
"""

_WORKERS: Final = """
WITH gone AS (DELETE FROM subscriber.worker WHERE subid = $1::int8::oid AND relid <> ALL ($2::int8[]::oid[]))
INSERT INTO subscriber.worker (subid, relid, lock_key, worker_type, received_lsn, applied_lsn, flushed_lsn, last_msg_send_time,
    last_msg_receipt_time, latest_end_lsn, latest_end_time, transactions, changes, transactions_per_second, changes_per_second,
    copied_rows, estimated_rows, details)
SELECT $1::int8::oid, w.* FROM ROWS FROM (
    pg_catalog.unnest($2::int8[]::oid[]), pg_catalog.unnest($3::int8[]), pg_catalog.unnest($4::text[]),
    pg_catalog.unnest($5::text[]::pg_lsn[]), pg_catalog.unnest($6::text[]::pg_lsn[]), pg_catalog.unnest($7::text[]::pg_lsn[]),
    pg_catalog.unnest($8::timestamptz[]), pg_catalog.unnest($9::timestamptz[]), pg_catalog.unnest($10::text[]::pg_lsn[]),
    pg_catalog.unnest($11::timestamptz[]), pg_catalog.unnest($12::int8[]), pg_catalog.unnest($13::int8[]),
    pg_catalog.unnest($14::float8[]), pg_catalog.unnest($15::float8[]), pg_catalog.unnest($16::int8[]), pg_catalog.unnest($17::int8[]),
    pg_catalog.unnest($18::text[])
) AS w
ON CONFLICT (subid, relid) DO UPDATE SET lock_key = excluded.lock_key, worker_type = excluded.worker_type,
    received_lsn = excluded.received_lsn, applied_lsn = excluded.applied_lsn, flushed_lsn = excluded.flushed_lsn,
    last_msg_send_time = excluded.last_msg_send_time, last_msg_receipt_time = excluded.last_msg_receipt_time,
    latest_end_lsn = excluded.latest_end_lsn, latest_end_time = excluded.latest_end_time, transactions = excluded.transactions,
    changes = excluded.changes, transactions_per_second = excluded.transactions_per_second,
    changes_per_second = excluded.changes_per_second, copied_rows = excluded.copied_rows, estimated_rows = excluded.estimated_rows,
    details = excluded.details
"""

# as natively a table that is dropped leaves the subscription at once; with all that is known of it: a position would keep its slot
_DROPPED: Final = """
WITH gone AS (
    DELETE FROM subscriber.pg_subscription_rel r
    WHERE r.srsubid = $1::int8::oid AND NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = r.srrelid) RETURNING r.srrelid
), positions AS (
    DELETE FROM subscriber."position" AS p USING gone WHERE p.srsubid = $1::int8::oid AND p.srrelid = gone.srrelid
)
DELETE FROM subscriber.copy_part AS c USING gone WHERE c.srsubid = $1::int8::oid AND c.srrelid = gone.srrelid
"""

_COUNTERS: Final = (
    "apply_error_count",
    "sync_error_count",
    "confl_insert_exists",
    "confl_update_origin_differs",
    "confl_update_exists",
    "confl_update_missing",
    "confl_delete_origin_differs",
    "confl_delete_missing",
    "confl_multiple_unique_conflicts",
)
"""Names both of pg_stat_subscription_stats and of ApplyStatistics."""

# names are ours
_COUNT: Final = f"""
UPDATE subscriber.subscription_stats SET {", ".join(f"{name} = {name} + ${number}" for number, name in enumerate(_COUNTERS, 4))},
    last_error = coalesce($2, last_error), last_error_time = CASE WHEN $2 IS NULL THEN last_error_time ELSE $3 END
WHERE subid = $1::int8::oid
"""  # noqa: S608


class Reporter:
    """Writes for one subscription, while its sink is open.

    Args:
        reader: of the sink.
        oid: the subscription's.
        tally: the sink's, which knows how much of its counters was written already.
    """

    def __init__(self, reader: CatalogReader, oid: int, tally: Tally) -> None:
        self._reader = reader
        self._oid = oid
        self._tally = tally

    async def report(self, workers: Sequence[WorkerActivity], last_error: str | None) -> None:
        """Write all of it.

        Raises:
            TargetUnavailable: the session was lost.
        """
        await self._reader.fetch(_DROPPED, self._oid)
        relids = await self._relids([worker.table for worker in workers if worker.table is not None])
        known = [(relids[worker.table], worker) for worker in workers if worker.table in relids]
        columns = list(zip(*(self._row(relid, worker) for relid, worker in known), strict=True)) or [()] * 17
        await self._reader.fetch(_WORKERS, self._oid, *columns)
        await self.count(last_error)

    async def count(self, last_error: str | None) -> None:
        """Write the counters, and the error if there is one.

        Raises:
            TargetUnavailable: the session was lost.
        """
        counted = {name: self._tally.unwritten(name) for name in _COUNTERS}
        if last_error is not None or any(counted.values()):
            text = None if last_error is None else self._reader.storable(last_error)
            await self._reader.fetch(_COUNT, self._oid, text, datetime.now(UTC), *counted.values())
            self._tally.wrote(counted)

    async def _relids(self, tables: Sequence[TableName]) -> dict[TableName | None, int]:
        """The oids of those that there are; None stands for the apply worker."""
        rows = []
        if tables:
            rows = await self._reader.fetch(_RELIDS, [table.namespace for table in tables], [table.name for table in tables])
        return {None: 0, **{TableName(row["namespace"], row["name"]): row["relid"] for row in rows}}

    def _row(self, relid: int, worker: WorkerActivity) -> tuple[object, ...]:
        return (
            relid,
            table_key(self._oid, relid) if relid else writer_key(self._oid),
            "table synchronization" if relid else "apply",
            _text(worker.received),
            _text(worker.applied),
            _text(worker.flushed),
            _time(worker.sent_at),
            _time(worker.received_at),
            _text(worker.latest_end),
            _time(worker.reported_at),
            worker.transactions,
            worker.changes,
            worker.transactions_per_second,
            worker.changes_per_second,
            worker.copied_rows,
            worker.estimated_rows,
            worker.details,
        )


def _text(lsn: object) -> str | None:
    return None if lsn is None else str(lsn)


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
