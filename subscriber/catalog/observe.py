"""Reads the state of all subscriptions from a target's catalog. Changes nothing, creates nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from subscriber.catalog.definition import definition_of
from subscriber.catalog.model import COUNTERS, PG_SUBSCRIPTION, PG_SUBSCRIPTION_REL, SUBSCRIPTION_STATS, VERIFICATION, WORKER
from subscriber.catalog.observation import Observation, TableObservation
from subscriber.catalog.statistics import activity_of
from subscriber.catalog.store import Row, Store
from subscriber.catalog.subscription_rows import entry_of
from subscriber.catalog.subscriptions import read_positions
from subscriber.catalog.verifications import since_synchronized, verification_of
from subscriber.interfaces import TableName, WorkerDetails
from subscriber.protocol.lsn import Lsn

__all__ = ["observe"]


async def observe(store: Store) -> Sequence[Observation]:
    """Observe all subscriptions of a target, sorted by name.

    Raises:
        TargetUnavailable, TargetError
    """
    async with store.reading() as rows:
        subscriptions = await rows.select(PG_SUBSCRIPTION, {})
        positions = await read_positions(rows)
        stats = {row["subid"]: row for row in await rows.select(SUBSCRIPTION_STATS, {})}
        entries = await rows.select(PG_SUBSCRIPTION_REL, {})
        workers = await rows.select(WORKER, {})
        verified = {(row["subid"], row["nspname"], row["relname"]): row for row in await rows.select(VERIFICATION, {})}
        conninfos = "subconninfo" not in rows.hidden
    live = await store.live_workers(workers)
    return [
        _observation(
            row,
            positions.get(row["oid"]),
            [entry for entry in entries if entry["srsubid"] == row["oid"]],
            {worker["relid"]: worker for worker in workers if worker["subid"] == row["oid"]},
            {relid: pid for (oid, relid), pid in live.items() if oid == row["oid"]},
            verified=verified,
            stats=stats.get(row["oid"], {}),
            conninfos=conninfos,
        )
        for row in sorted(subscriptions, key=lambda row: str(row["subname"]))
    ]


def _observation(
    row: Row,
    position: Lsn | None,
    entries: Sequence[Row],
    workers: Mapping[int, Row],
    live: Mapping[int, int | None],
    *,
    verified: Mapping[tuple[int, str, str], Row],
    stats: Row,
    conninfos: bool,
) -> Observation:
    definition = definition_of(row, position)
    tables = [
        _table(entry, workers.get(entry["srrelid"]), live, verified.get((row["oid"], entry["srnspname"], entry["srrelname"])))
        for entry in entries
    ]
    return Observation(
        definition=definition,
        pid=live.get(0),
        worker=activity_of(workers[0], None) if 0 in live else None,
        tables=tuple(sorted(tables, key=lambda found: found.table)),
        counters={name: stats[name] for name in COUNTERS if name in stats},
        stats_reset=_time(stats.get("stats_reset")),
        last_error=stats.get("last_error"),
        last_error_time=_time(stats.get("last_error_time")),
        # the details of the latest run, even if it has ended
        details=WorkerDetails.from_json(workers[0]["details"] if 0 in workers else None),
        by_command_line=conninfos and definition.conninfo is None,
    )


def _table(row: Row, worker: Row | None, live: Mapping[int, int | None], verified: Row | None) -> TableObservation:
    name, entry = TableName(row["srnspname"], row["srrelname"]), entry_of(row)
    return TableObservation(
        table=name,
        entry=entry,
        verification=since_synchronized(entry, None if verified is None else verification_of(verified)),
        worker=activity_of(worker, name) if worker is not None and row["srrelid"] in live else None,
        # between two attempts the synchronization has no session: the apply worker's session counts
        retry=WorkerDetails.from_json(worker["details"]).retry if worker is not None and 0 in live else None,
    )


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
