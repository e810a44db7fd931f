"""What ``spark-apply --http`` serves: metrics of the applier of a lake, and its probes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from subscriber.printable import printable
from subscriber.sinks.spark.pipeline.progress import PHASES, ApplierProgress

if TYPE_CHECKING:
    from aiohttp.web import AbstractRouteDef
    from prometheus_client.core import Metric

__all__ = ["ApplierCollector", "ApplierSite"]


class ApplierSite:
    """The applier of this process."""

    def __init__(self) -> None:
        self.collector = ApplierCollector()

    def unready(self) -> Sequence[str]:
        return [] if self.collector.began else ["the applier has not opened the lake yet"]

    def routes(self) -> Sequence[AbstractRouteDef]:
        return []

    async def work(self) -> None:
        await asyncio.Event().wait()


class ApplierCollector:
    """Collects the metrics for each scrape. Runs in the server's thread, and reads the applier's values one by one."""

    def __init__(self) -> None:
        self._progress: ApplierProgress | None = None

    @property
    def began(self) -> bool:
        """Whether there is an applier."""
        return self._progress is not None

    def watch(self, progress: ApplierProgress) -> None:
        """Give the metrics of this applier from now on."""
        self._progress = progress

    def describe(self) -> Iterable[Metric]:
        """Return no families: nothing is known in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 -- an optional dependency

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"subscriber_applier_{name}", text, labels=labels)

        def counter(name: str, text: str, *labels: str) -> Any:
            return CounterMetricFamily(f"subscriber_applier_{name}", text, labels=labels)

        def shared(name: str, text: str) -> Any:
            return GaugeMetricFamily(f"subscriber_{name}", text, labels=["subscription"])

        # the same names as for a subscription, where they mean the same
        lag_seconds = shared("lag_seconds", "Seconds since the oldest landed commit that is not applied was received.")
        behind = shared("lag_bytes", "WAL of the publisher that is landed and not applied.")
        positions = GaugeMetricFamily(
            "subscriber_lsn_bytes",
            "Positions in the publisher's WAL: received (landed), applied (published).",
            labels=["subscription", "position"],
        )
        lag = gauge("lag_seconds", "Of the oldest commit of the last round: its age when it was received, landed and applied.", "phase")
        target = gauge("freshness_target_seconds", "The value of --freshness.")
        waiting = gauge("waiting_seconds", "Seconds since the oldest landed commit that is not applied was received.")
        waiting_bytes = gauge("waiting_bytes", "Size of the landed files that are not applied.")
        held = gauge("held_by_write_rate", "1 while --max-write-rate makes a round wait beyond the target, else 0.")
        lsn = gauge("lsn_bytes", "Positions in the publisher's WAL: landed, applied (published).", "position")
        rounds = counter("rounds", "Rounds since the start.")
        late = counter("late_rounds", "Rounds that missed the freshness target.")
        rows = counter("rows", "Landed changes that were applied.")
        landed = counter("landed_bytes", "Size of the landed files that were applied.")
        written = counter("written_bytes", "Bytes that were written to Delta tables (table) and change logs (log).", "kind")
        files = counter("files", "Files that were written to tables.")
        amplification = gauge("write_amplification", "Bytes written to tables and logs for each byte of landed changes, since the start.")
        phases = counter("phase_seconds", "Duration of the phases of rounds, as in the progress events.", "phase")
        slowest = gauge("table_seconds", "Seconds of work for the slowest tables in the last 100 rounds.", "table")
        stopped = gauge("tables_parked", "Tables that the applier cannot continue.")
        stop = gauge("table_parked", "1 for each table that the applier cannot continue.", "table")
        log = gauge("change_log_stopped", "1 for each table whose change log the applier cannot continue.", "table")
        if self._progress is not None:
            progress = self._progress
            totals, last, waits = progress.totals, progress.last, progress.waiting
            if last is not None:
                for phase, seconds in (("received", last.received), ("landed", last.landed), ("applied", last.freshness)):
                    if seconds is not None:
                        lag.add_metric([phase], seconds)
                lsn.add_metric(["landed"], int(max(last.latest, last.end)))
                lsn.add_metric(["applied"], int(last.end))
            target.add_metric([], progress.freshness)
            age = max(time.monotonic() - waits.since, 0.0) if waits is not None and isfinite(waits.since) else 0.0
            waiting.add_metric([], age)
            lag_seconds.add_metric([progress.lake], age)
            if last is not None:
                behind.add_metric([progress.lake], max(last.latest - last.end, 0))
                positions.add_metric([progress.lake, "received"], int(max(last.latest, last.end)))
                positions.add_metric([progress.lake, "applied"], int(last.end))
            waiting_bytes.add_metric([], waits.size if waits is not None else 0)
            held.add_metric([], progress.held)
            counts = ((rounds, totals.rounds), (late, totals.late), (rows, totals.rows), (landed, totals.size), (files, totals.files))
            for family, value in counts:
                family.add_metric([], value)
            for kind in ("table", "log"):
                written.add_metric([kind], totals.written[kind])
            for phase in PHASES:
                phases.add_metric([phase], totals.seconds[phase])
            if totals.amplification is not None:
                amplification.add_metric([], totals.amplification)
            for name, table in progress.slowest().items():
                slowest.add_metric([printable(str(name))], table.seconds)
            stopped.add_metric([], len(progress.stopped))
            for name in list(progress.stopped):
                stop.add_metric([printable(str(name))], 1)
            for name in list(progress.stopped_logs):
                log.add_metric([printable(str(name))], 1)
        yield from (lag, target, waiting, waiting_bytes, held, lsn, rounds, late, rows, landed, written, files, amplification)
        yield from (phases, slowest, stopped, stop, log, lag_seconds, behind, positions)
