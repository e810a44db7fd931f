"""``applier.json``: the status of the applier, for monitoring. It is not durable, and nothing else depends on it.

While the applier runs, a thread renews the time of the last report. So ``status`` finds it also where it cannot see its lock: on another
host, or in an object store.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from typing import Final

from subscriber.errors import TargetError
from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.status_files import APPLIER, REPORT_SECONDS, stopped_logs
from subscriber.sinks.spark.files.documents import read_document, write_document
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.pipeline.progress import ApplierProgress

__all__ = ["ROUND", "ApplierStatus"]

ROUND: Final = "round"
"""Of what the applier does, in :meth:`ApplierStatus.failed`."""


class ApplierStatus:
    """The status of the applier, see the module. Counters are taken over from an earlier applier of the lake.

    So are its last error, until a round succeeds, and the change logs that it could not continue.
    """

    def __init__(self, storage: Storage, progress: ApplierProgress, missing: MissingRows) -> None:
        self._storage = storage
        self._progress = progress
        self._missing = missing
        self._before = MissingRows()
        self._errors: dict[str, tuple[str, float]] = {}
        self._written: dict[str, object] | None = None
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._reports: threading.Thread | None = None
        self.stopped_logs: dict[TableName, str] = {}

    def begin(self) -> int:
        """Take over the counters of an earlier applier. Return the number of its rounds and those before."""
        batches = 0
        try:
            found = read_document(self._storage, APPLIER) or {}
            counters = found.get("counters", {})
            self._before = MissingRows(int(counters.get("confl_update_missing", 0)), int(counters.get("confl_delete_missing", 0)))
            if found.get("last_error") is not None:
                self._errors[ROUND] = found["last_error"], float(found["last_error_time"])
            batches = int(found.get("batches", 0))
            self.stopped_logs = stopped_logs(found)
        except (TargetError, ValueError, TypeError, AttributeError):
            pass  # nothing depends on it
        self._stop.clear()
        self._reports = threading.Thread(target=self._report, name="applier status", daemon=True)
        self._reports.start()
        return batches

    def _report(self) -> None:
        while not self._stop.wait(REPORT_SECONDS):
            self._write(time.time())

    def end(self) -> None:
        """Report that the applier has ended."""
        if self._reports is not None:
            self._stop.set()
            self._reports.join(REPORT_SECONDS)
            self._reports = None
            self._write(None)

    def _write(self, now: float | None) -> None:
        with self._writing, contextlib.suppress(TargetError):
            if self._written is not None:
                write_document(self._storage, APPLIER, {**self._written, "last_report": now}, durable=False)

    def failed(self, what: str, error: str | None) -> None:
        """Report a failed attempt of something. None: it succeeded."""
        if error is not None:
            self._errors[what] = error, time.time()
        else:
            self._errors.pop(what, None)
        self.tell()

    def tell(self) -> None:
        """Write the document if it changed. Errors of writing are ignored."""
        progress, missing = self._progress, self._missing
        totals, last = progress.totals, progress.last
        error, error_time = max([*self._errors.values()], key=lambda found: found[1], default=(None, None))
        document: dict[str, object] = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "engine": progress.engine,
            "last_error": error,
            "last_error_time": error_time,
            "batches": progress.batches,
            "freshness": {
                "target": progress.freshness,
                "last": last.freshness if last is not None else None,
                "held": progress.held,
                "rounds": totals.rounds,
                "late": totals.late,
            },
            "stopped_logs": [[name.namespace, name.name, error] for name, error in sorted(progress.stopped_logs.items())],
            "landed_bytes": totals.size,
            "written_bytes": dict(totals.written),
            "progress": list(progress.recent),
            "counters": {
                "confl_update_missing": self._before.updates + missing.updates,
                "confl_delete_missing": self._before.deletes + missing.deletes,
            },
        }
        if document != self._written:
            self._written = document
            self._write(time.time())
