"""Prometheus metrics of the subscriptions that this process runs. They are read from counters that the run has anyway."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from subscriber.apply.apply_times import BUCKETS
from subscriber.cli.http.sampler import Sampler, Watched
from subscriber.interfaces import TableState
from subscriber.printable import printable
from subscriber.subscription.run_status import Status

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["SubscriptionCollector"]

_CHANGES: Final = ("inserts", "updates", "deletes", "truncates")
_WAL_STATUSES: Final = ("reserved", "extended", "unreserved", "lost")


class SubscriptionCollector:
    """Collects the metrics for each scrape. Runs in the server's thread, and reads the event loop thread's values one by one."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._turn = threading.Lock()

    def describe(self) -> Iterable[Metric]:
        """Return no families: nothing is known in advance."""
        return []

    def collect(self) -> Iterable[Metric]:
        # Prometheus and OpenTelemetry may ask at the same time
        with self._turn:
            return self._collect()

    def _collect(self) -> Iterable[Metric]:
        families = _Families()
        for given, subscription in self._sampler.subscriptions().items():
            # the format of Prometheus escapes only quotes and line feeds
            name, status = printable(given), subscription.status
            families.add_stream(name, status, self._sampler.of(given))
            families.add_tables(name, status)
            families.add_counters(name, status, self._sampler.of(given))
            families.add_slot(name, self._sampler.of(given))
        return families.all


class _Families:
    """The families of metrics. The order of their declarations is that of the reference."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        gauge, counter = self._gauge, self._counter
        self.streaming = gauge("streaming", "1 while a connection follows the slot, else 0.")
        self.lsn = gauge(
            "lsn_bytes",
            "Positions in the publisher's WAL: its end (publisher), received, applied (visible in the target), flushed (durable there).",
            "position",
        )
        self.lag = gauge("lag_bytes", "WAL of the publisher that is not durable in the target.")
        self.lag_seconds = gauge("lag_seconds", "How long ago the publisher's WAL ended where the target is durable now.")
        self.behind = gauge("pending_bytes", "WAL received that is not durable in the target yet.")
        self.silence = gauge("seconds_since_last_message", "Seconds since the last message from the publisher.")
        self.durable = self._histogram(
            "commit_to_durable_seconds", "From a commit on the publisher until it is durable in the target: of the first one of each batch."
        )
        self.phases = counter(
            "phase_seconds", "Time of the receiver (receive, decode), and of the apply worker (wait, limit, apply, commit).", "phase"
        )
        self.attempt = gauge(
            "retry_attempt", "Number of attempts that failed one after another; 0: the last one did not.", "error", "sqlstate"
        )
        self.last_error = gauge("last_error_timestamp_seconds", "When the last error occurred, since 1970.")
        self.publisher = gauge("publisher_up", "1 if the publisher answered the last question about the slot, else 0.")
        self.active = gauge("slot_active", "1 if a WAL sender uses the slot, else 0.")
        self.wal_status = gauge("slot_wal_status", "1 for the slot's wal_status, 0 for the others.", "wal_status")
        self.retained = gauge("slot_retained_bytes", "WAL that the publisher retains for the slot.")
        self.safe = gauge("slot_safe_wal_bytes", "WAL that can be written before the slot may be lost, if there is a limit.")
        self.until_lost = gauge("slot_seconds_until_lost", "When that is used up at the rate of the last ten minutes, if it shrinks.")
        self.relay_bytes = gauge("relay_log_bytes", "Size of the relay log.")
        self.relay_oldest = gauge("relay_log_oldest_lsn_bytes", "Where the relay log begins.")
        self.relay_paused = gauge("relay_log_paused", "1 while the relay log is full, so that nothing is received.")
        self.tables = gauge("tables", "Tables by state, as in pg_subscription_rel.", "state")
        self.parked = gauge("table_parked", "When the table was parked, in seconds since 1970.", "table", "lsn", "error")
        self.retrying = gauge("tables_retrying", "Tables whose synchronization failed and is retried.")
        self.left_out = gauge("tables_left_out", "Published tables that the subscription does not replicate.")
        self.copied = gauge("copied_rows", "Rows that the copies since the start have read.")
        self.to_copy = gauge("copy_estimated_rows", "Rows of these copies, by the publisher's estimate.")
        self.verified = gauge(
            "table_verified_timestamp_seconds", "When a table was last compared with the publisher's, since 1970.", "table"
        )
        self.verified_lsn = gauge("table_verified_lsn_bytes", "The position in the publisher's WAL as of which it was compared.", "table")
        self.differences = gauge("table_differences", "How many of its rows were found to differ; 0: it is equal.", "table")
        self.transactions = counter("transactions", "Transactions applied since the start.")
        self.changes = counter("changes", "Changes applied since the start.", "kind")
        self.table_changes = counter(
            "table_changes", "Changes by table (PostgreSQL and SQLAlchemy): the 20 tables with the most, and other for the rest.", "table"
        )
        self.table_bytes = counter(
            "table_bytes", "Bytes of these changes, as the publisher sent them: by table, as for subscriber_table_changes_total.", "table"
        )
        self.table_copied_bytes = counter("table_copied_bytes", "Bytes that copies have read since the start, in the same way.", "table")
        self.rolled_back = counter(
            "rolled_back_changes", "Changes left out since the start: the publisher sent them although it had rolled them back."
        )
        self.conflicts = counter("conflicts", "Conflicts found, as in pg_stat_subscription_stats.", "conflict")
        self.errors = counter("errors", "Errors since the start.", "worker")

    def _add(self, kind: str, name: str, text: str, *labels: str) -> Any:
        from prometheus_client import core  # noqa: PLC0415 -- an optional dependency

        family = getattr(core, f"{kind}MetricFamily")(f"subscriber_{name}", text, labels=["subscription", *labels])
        self.all.append(family)
        return family

    def _gauge(self, name: str, text: str, *labels: str) -> Any:
        return self._add("Gauge", name, text, *labels)

    def _counter(self, name: str, text: str, *labels: str) -> Any:
        return self._add("Counter", name, text, *labels)

    def _histogram(self, name: str, text: str) -> Any:
        return self._add("Histogram", name, text)

    def add_stream(self, name: str, status: Status, watched: Watched) -> None:
        self.streaming.add_metric([name], status.streaming)
        for position in ("received", "applied", "flushed"):
            self.lsn.add_metric([name, position], int(getattr(status, position)))
        self.lsn.add_metric([name, "publisher"], int(watched.publisher_lsn(status)))
        lag = watched.lag_bytes(status)
        if lag is not None:
            self.lag.add_metric([name], lag)
        if status.lag_seconds is not None:
            self.lag_seconds.add_metric([name], status.lag_seconds)
        self.behind.add_metric([name], max(status.received - status.flushed, 0))
        if status.last_message is not None:
            self.silence.add_metric([name], max(time.time() - status.last_message, 0.0))
        times = status.times
        counts, reached = list(times.counts), 0
        buckets = []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts, strict=True):
            reached += count
            buckets.append((bound, reached))
        self.durable.add_metric([name], buckets, times.total)
        for phase, seconds in list(times.phases.items()):
            self.phases.add_metric([name, phase], seconds)
        error = status.latest_error
        if status.retry is None:
            self.attempt.add_metric([name, "", ""], 0)
        else:
            self.attempt.add_metric(
                [name, "" if error is None else type(error).__name__, (error and error.sqlstate) or ""], status.retry.attempt
            )
        if status.last_error_time is not None:
            self.last_error.add_metric([name], status.last_error_time)
        relay = status.relay_log
        if relay is not None:
            self.relay_bytes.add_metric([name], relay.size)
            self.relay_paused.add_metric([name], relay.paused)
            if relay.oldest is not None:
                self.relay_oldest.add_metric([name], int(relay.oldest))

    def add_slot(self, name: str, watched: Watched) -> None:
        slot = watched.slot
        if slot is None and watched.slot_error is None:
            return  # not asked yet
        self.publisher.add_metric([name], slot is not None)
        if slot is None:
            return
        self.active.add_metric([name], slot.active)
        for each in _WAL_STATUSES:
            self.wal_status.add_metric([name, each], slot.wal_status == each)
        self.retained.add_metric([name], slot.retained_bytes)
        if slot.safe_wal_size is not None:
            self.safe.add_metric([name], slot.safe_wal_size)
        if watched.seconds_until_lost is not None:
            self.until_lost.add_metric([name], watched.seconds_until_lost)

    def add_tables(self, name: str, status: Status) -> None:
        states = [entry.state for entry in status.tables.values()]
        for state in TableState:
            self.tables.add_metric([name, state.value], states.count(state))
        for table, entry in status.tables.items():
            if entry.state is TableState.PARKED:
                labels = [name, printable(str(table)), str(entry.lsn), printable(entry.error or "")]
                self.parked.add_metric(labels, entry.since or 0.0)
        self.retrying.add_metric([name], len(status.table_retries))
        self.left_out.add_metric([name], len(status.left_out))
        self.copied.add_metric([name], sum(copy.rows for copy in status.copies.values()))
        self.to_copy.add_metric([name], sum(max(copy.estimated_rows or 0, copy.rows) for copy in status.copies.values()))
        for found in status.verifications.values():
            labels = [name, printable(str(found.table))]
            self.verified.add_metric(labels, found.verified_at)
            self.verified_lsn.add_metric(labels, int(found.lsn))
            self.differences.add_metric(labels, max(found.differences, found.more))

    def add_counters(self, name: str, status: Status, watched: Watched) -> None:
        counted = status.statistics
        self.transactions.add_metric([name], counted.transactions)
        for kind in _CHANGES:
            self.changes.add_metric([name, kind.removesuffix("s")], getattr(counted, kind))
        for family, largest, counts in (
            (self.table_changes, watched.changes, counted.tables),
            (self.table_bytes, watched.table_bytes, counted.table_bytes),
            (self.table_copied_bytes, watched.copied_bytes, counted.copied_bytes),
        ):
            for table, count in largest.of(dict(counts)).items():
                family.add_metric([name, table], count)
        self.rolled_back.add_metric([name], counted.rolled_back_changes)
        for conflict in (field for field in type(counted).__slots__ if field.startswith("confl_")):
            self.conflicts.add_metric([name, conflict.removeprefix("confl_")], getattr(counted, conflict))
        for worker in ("apply", "sync"):
            self.errors.add_metric([name, worker], getattr(counted, f"{worker}_error_count"))
