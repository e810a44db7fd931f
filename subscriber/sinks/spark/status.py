"""``status.json``: what the workers of a subscription do, for who looks into the lake. Not durable, and of no meaning for anything else."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from subscriber.abc import ApplyStatistics, WorkerActivity
from subscriber.sinks.spark.manifest import write_document
from subscriber.sinks.spark.storage import Storage

__all__ = ["STATUS", "write_status"]

STATUS: Final = "status.json"


def write_status(storage: Storage, workers: Sequence[WorkerActivity], last_error: str | None, statistics: ApplyStatistics) -> None:
    """Write it.

    Raises:
        TargetError: it cannot be written.
    """
    counters = asdict(statistics)
    counters["skipped_tables"] = sorted(statistics.skipped_tables)
    document = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "workers": [_worker(worker) for worker in workers],
        "last_error": last_error,
        "counters": counters,
    }
    write_document(storage, STATUS, document, durable=False)


def _worker(worker: WorkerActivity) -> dict[str, object]:
    values = asdict(worker)
    values["table"] = None if worker.table is None else [worker.table.namespace, worker.table.name]
    for name in ("received", "latest_end", "applied", "flushed"):
        lsn = getattr(worker, name)
        values[name] = None if lsn is None else str(lsn)
    return values
