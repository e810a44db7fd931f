"""Monitoring of a lake: its subscription and its applier. Nothing is changed or created."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from subscriber.catalog import ApplierObservation, Observation, TableObservation
from subscriber.catalog.verifications import since_synchronized
from subscriber.errors import TargetError
from subscriber.interfaces import TableEntry, TableName, TableState, WorkerActivity, WorkerDetails
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.lake import APPLIER_LOCK, COPY_DOCUMENT, LANDING, WRITER_LOCK, Lake, LakeTable, copy_directory
from subscriber.sinks.spark.catalog.snapshots import NOT_PUBLISHED, Snapshot, StoppedTable, read_snapshot
from subscriber.sinks.spark.catalog.status_files import (
    APPLIER,
    ERROR,
    REPORT_SECONDS,
    RESET,
    STATUS,
    WORKER_LSNS,
    read_counters,
    read_quietly,
    stopped_logs,
)
from subscriber.sinks.spark.catalog.subscriptions import defined
from subscriber.sinks.spark.catalog.verifications import read_verifications
from subscriber.sinks.spark.files.file_lock import is_held
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import read_manifests
from subscriber.threads import run_in_thread

__all__ = ["observe"]

_LATE_REPORTS: Final = 3
"""An applier that has not reported for so many intervals does not run, or cannot write."""


async def observe(target: str) -> Sequence[Observation]:
    """Observe the subscription. The result is empty if there is no lake, or if the subscription was dropped.

    Raises:
        ConfigurationError: the URL is invalid.
        TargetError: the directory contains something else, or the lake is damaged.
    """
    storage = Storage.open(Location.parse(target))
    return await run_in_thread(lambda: _observe(storage))


def _observe(storage: Storage) -> Sequence[Observation]:
    if storage.root is not None and not storage.root.exists():
        raise TargetError(f"directory {storage.place} does not exist", hint="`subscriber create` or `subscriber run` creates the lake")
    lake = Lake.find(storage)
    if lake is None or lake.dropped:
        return []
    status = read_quietly(storage, STATUS)
    error = read_quietly(storage, ERROR)
    running = is_held(storage.local(WRITER_LOCK))
    activities = [_activity(values) for values in status.get("workers", [])]
    workers = {worker.table: worker for worker in activities} if running else {}
    reset = read_quietly(storage, RESET)
    definition = defined(storage, lake)
    stopped = _stopped(storage)
    ours = {
        name: TableEntry(TableState.PARKED, stop.lsn, error=stop.error, since=stop.since)
        for name, stop in stopped.items()
        if _is_of(lake.state.tables.get(name), stop)
    }
    others = {str(name): stop.error for name, stop in stopped.items() if name not in lake.state.tables}
    verified = read_verifications(storage)
    tables = tuple(
        TableObservation(
            table=name,
            entry=ours.get(name, table.entry),
            worker=workers.get(name),
            retry=WorkerDetails.from_json(workers[name].details).retry if name in workers else None,
            verification=since_synchronized(table.entry, verified.get(name)),
        )
        for name, table in sorted(lake.state.tables.items(), key=lambda item: item[0])
    )
    return [
        Observation(
            definition=definition,
            pid=status.get("pid") if running else None,
            worker=workers.get(None),
            tables=tables,
            counters={name: max(count - int(reset.get("counters", {}).get(name, 0)), 0) for name, count in read_counters(storage).items()},
            stats_reset=_time(reset.get("stats_reset")),
            last_error=error.get("last_error"),
            last_error_time=_time(error.get("last_error_time")),
            applier=_applier(storage, lake, read_quietly(storage, APPLIER), others),
            details=WorkerDetails.from_json(next((worker.details for worker in activities if worker.table is None), None)),
            by_command_line=definition.conninfo is None,
        )
    ]


def _stopped(storage: Storage) -> Mapping[TableName, StoppedTable]:
    try:
        snapshot = read_snapshot(storage)
    except TargetError:
        return {}  # the applier's error says that
    return {} if snapshot is None else snapshot.stopped


def _is_of(table: LakeTable | None, stop: StoppedTable) -> bool:
    return table is not None and table.generation == stop.generation


def _applier(storage: Storage, lake: Lake, report: Mapping[str, Any], stopped: Mapping[str, str]) -> ApplierObservation:
    locked = is_held(storage.local(APPLIER_LOCK))
    reported, host = report.get("last_report"), report.get("host")
    if locked or (storage.root is not None and host == socket.gethostname()):
        reported = None  # the lock alone tells
    running = locked or (reported is not None and time.time() < reported + _LATE_REPORTS * REPORT_SECONDS)
    who = ApplierObservation(
        pid=report.get("pid") if running else None,
        host=host if running or reported is not None else None,
        last_report=_time(reported),
        engine=report.get("engine") if running else None,
        last_error=report.get("last_error"),
        last_error_time=_time(report.get("last_error_time")),
        freshness=report.get("freshness"),
        landed_bytes=report.get("landed_bytes"),
        written_bytes=sum(report["written_bytes"].values()) if "written_bytes" in report else None,
        progress=report.get("progress", ()),
        stopped={**stopped, **{f"change log of {name}": error for name, error in stopped_logs(report).items()}},
    )
    try:
        snapshot = read_snapshot(storage)
        waiting = read_manifests(storage, LANDING, (snapshot or NOT_PUBLISHED).landed)
    except TargetError as error:
        # the error that a running applier would report
        return replace(who, last_error=error.one_line(), last_error_time=None)
    return replace(
        who,
        lsn=None if snapshot is None else snapshot.lsn,
        waiting_batches=len(waiting),
        waiting_bytes=sum(file.size for manifest in waiting for file in manifest.files),
        waiting_since=waiting[0].since if waiting else None,
        waiting_copies=_waiting_copies(storage, lake, snapshot),
    )


def _waiting_copies(storage: Storage, lake: Lake, snapshot: Snapshot | None) -> int:
    """The number of finished copies that are not in the snapshot yet, and can be applied."""
    there, count = {f"copy/{name}" for name in storage.entries("copy")}, 0
    for name, table in lake.state.tables.items():
        directory = copy_directory(table)
        if directory not in there or not table.is_synchronized:
            continue
        if snapshot is not None and name in snapshot.stopped and _is_of(table, snapshot.stopped[name]):
            continue
        copied = read_quietly(storage, f"{directory}/{COPY_DOCUMENT}").get("lsn")
        published = snapshot.tables.get(name) if snapshot is not None else None
        # the snapshot may still have the table from before it was copied again
        if copied is not None and (published is None or published.applied < Lsn.parse(copied)):
            count += 1
    return count


def _activity(values: Mapping[str, Any]) -> WorkerActivity:
    table = values.get("table")
    lsns = {name: None if values.get(name) is None else Lsn.parse(values[name]) for name in WORKER_LSNS}
    return WorkerActivity(**{**values, **lsns, "table": None if table is None else TableName(*table)})


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
