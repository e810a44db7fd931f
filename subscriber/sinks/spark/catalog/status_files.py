"""``status.json`` has the activity of a subscription's workers, ``error.json`` the last error. Both are for monitoring.

Neither is durable, and nothing else depends on them. Counters survive restarts. Only what a killed process counted after its last report
is lost.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from subscriber.errors import TargetError, TargetUnavailable
from subscriber.interfaces import ApplyStatistics, TableName, WorkerActivity
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.storage import Storage

__all__ = [
    "APPLIER",
    "COUNTERS",
    "ERROR",
    "REPORT_SECONDS",
    "RESET",
    "STATUS",
    "StatusFile",
    "read_counters",
    "read_landed_counters",
    "read_quietly",
    "stopped_logs",
    "write_error",
    "write_reset",
]

STATUS: Final = "status.json"
ERROR: Final = "error.json"
APPLIER: Final = "applier.json"
"""Written by the applier."""
REPORT_SECONDS: Final = 20.0
"""Interval of its reports."""
_STORE_SECONDS: Final = 15.0
"""Interval of changes of ``status.json`` in an object store."""
RESET: Final = "reset.json"
"""The counters as of the last reset. The counters themselves only grow, because the workers write them often."""

WORKER_LSNS: Final = ("received", "latest_end", "applied", "flushed")
"""Of a worker, in ``status.json``."""
COUNTERS: Final = ("apply_error_count", "sync_error_count")
"""The counters of pg_stat_subscription_stats that landing can have."""
_APPLIER_COUNTERS: Final = ("confl_update_missing", "confl_delete_missing")
"""The applier counts changes that find no row."""


def read_quietly(storage: Storage, name: str) -> dict[str, Any]:
    """Read a document that is not durable. The result is empty if it is missing or damaged."""
    try:
        return read_document(storage, name) or {}
    except TargetUnavailable:
        raise
    except TargetError:
        return {}


def stopped_logs(applier: Mapping[str, Any]) -> dict[TableName, str]:
    """The change logs that the applier cannot continue, with the reasons. From ``applier.json``."""
    return {TableName(namespace, name): error for namespace, name, error in applier.get("stopped_logs", ())}


def read_counters(storage: Storage) -> dict[str, int]:
    """The counters of subscriber and applier since the lake was created."""
    counters = read_quietly(storage, APPLIER).get("counters", {})
    return {**read_landed_counters(storage), **{name: int(counters.get(name, 0)) for name in _APPLIER_COUNTERS}}


def read_landed_counters(storage: Storage) -> dict[str, int]:
    """The counters of the subscriber processes."""
    found = read_quietly(storage, STATUS).get("counters", {})
    return {name: int(found.get(name, 0)) for name in COUNTERS}


def write_error(storage: Storage, text: str, details: str | None = None) -> None:
    """Store an error, and the details of a worker that could not report them itself."""
    write_document(storage, ERROR, {"last_error": text, "last_error_time": time.time()}, durable=False)
    if details is not None:
        status = {"workers": [{"table": None, "details": details}]}
        write_document(storage, STATUS, {**read_quietly(storage, STATUS), **status}, durable=False)


def write_reset(storage: Storage, counters: Mapping[str, int]) -> None:
    """Reset the counters: from now on these counts are subtracted."""
    write_document(storage, RESET, {"counters": dict(counters), "stats_reset": time.time()}, durable=False)


class StatusFile:
    """Writes ``status.json`` for a subscriber process.

    It is written only if something has changed. In an object store, where each request has its price, changes wait for some seconds.
    """

    def __init__(self, storage: Storage, before: Mapping[str, int]) -> None:
        self._storage = storage
        self._before = before
        self._written: dict[str, object] = {}
        self._waiting: dict[str, object] | None = None
        self._due = 0.0

    def report(self, workers: Sequence[WorkerActivity], last_error: str | None, statistics: ApplyStatistics) -> None:
        """Take a report. An error is written to ``error.json`` at once."""
        document: dict[str, object] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "workers": [_worker(worker) for worker in workers],
            "counters": {name: self._before.get(name, 0) + getattr(statistics, name) for name in COUNTERS},
        }
        self._waiting = document if document != self._written else None
        if time.monotonic() >= self._due:
            self.flush()
        if last_error is not None:
            write_error(self._storage, last_error)

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting is not None:
            write_document(self._storage, STATUS, self._waiting, durable=False)
            self._written, self._waiting = self._waiting, None
            self._due = time.monotonic() + (_STORE_SECONDS if self._storage.root is None else 0.0)


def _worker(worker: WorkerActivity) -> dict[str, object]:
    values = asdict(worker)
    values["table"] = None if worker.table is None else [worker.table.namespace, worker.table.name]
    for name in WORKER_LSNS:
        lsn = getattr(worker, name)
        values[name] = None if lsn is None else str(lsn)
    return values
