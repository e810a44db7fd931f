"""Serves Prometheus metrics, and collects those of the subscriptions that this process runs.

Needs prometheus-client (``pg-subscriber[metrics]``).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from subscriber.errors import ConfigurationError
from subscriber.interfaces import TableState
from subscriber.printable import printable
from subscriber.subscription.subscription import Subscription

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

__all__ = ["SubscriptionCollector", "served"]

_log = logging.getLogger(__name__)

Subscriptions = Callable[[], Mapping[str, Subscription]]

_CHANGES: Final = ("inserts", "updates", "deletes", "truncates")


@contextlib.contextmanager
def served(address: str | None, collector: Collector) -> Iterator[None]:
    """Serve ``GET /metrics`` at ``HOST:PORT`` inside the block. None: do not serve.

    Raises:
        ConfigurationError: the address is invalid or in use, or prometheus-client is not installed.
    """
    if address is None:
        yield
        return
    host, port = _parse(address)
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError("metrics need prometheus_client, which is not installed", hint="pip install 'pg-subscriber[metrics]'")
    from prometheus_client import CollectorRegistry, start_http_server  # noqa: PLC0415 -- an optional dependency

    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigurationError(
            f"cannot serve metrics at {address}: {error.strerror or error}", hint="choose another HOST:PORT"
        ) from error
    _log.info("serving metrics at http://%s:%d/metrics", f"[{host}]" if ":" in host else host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigurationError(
            f'"{address}" is not a valid address for metrics', hint="use HOST:PORT, for example 127.0.0.1:9187, or a port alone"
        )
    return host.strip("[]") or "127.0.0.1", int(port)


class SubscriptionCollector:
    """Collects the metrics for each scrape. Runs in the server's thread, and reads the event loop thread's values one by one."""

    def __init__(self, subscriptions: Subscriptions) -> None:
        self._subscriptions = subscriptions

    def describe(self) -> Iterable[Metric]:
        """Return no families: nothing is known in advance."""
        return []

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415

        def gauge(name: str, text: str, *labels: str) -> Any:
            return GaugeMetricFamily(f"subscriber_{name}", text, labels=["subscription", *labels])

        def counter(name: str, text: str, *labels: str) -> Any:
            return CounterMetricFamily(f"subscriber_{name}", text, labels=["subscription", *labels])

        streaming = gauge("streaming", "1 while a connection follows the slot, else 0.")
        lsn = gauge(
            "lsn_bytes", "Positions in the publisher's WAL: received, applied (visible in the target), flushed (durable there).", "position"
        )
        behind = gauge("pending_bytes", "WAL received that is not durable in the target yet.")
        silence = gauge("seconds_since_last_message", "Seconds since the last message from the publisher.")
        relay_bytes = gauge("relay_log_bytes", "Size of the relay log.")
        relay_paused = gauge("relay_log_paused", "1 while the relay log is full, so that nothing is received.")
        tables = gauge("tables", "Tables by state, as in pg_subscription_rel.", "state")
        parked = gauge("table_parked", "When the table was parked, in seconds since 1970.", "table", "lsn", "error")
        left_out = gauge("tables_left_out", "Published tables that the subscription does not replicate.")
        verified = gauge("table_verified_timestamp_seconds", "When a table was last compared with the publisher's, since 1970.", "table")
        verified_lsn = gauge("table_verified_lsn_bytes", "The position in the publisher's WAL as of which it was compared.", "table")
        differences = gauge("table_differences", "How many of its rows were found to differ; 0: it is equal.", "table")
        transactions = counter("transactions", "Transactions applied since the start.")
        changes = counter("changes", "Changes applied since the start.", "kind")
        rolled_back = counter(
            "rolled_back_changes", "Changes left out since the start: the publisher sent them although it had rolled them back."
        )
        conflicts = counter("conflicts", "Conflicts found, as in pg_stat_subscription_stats.", "conflict")
        errors = counter("errors", "Errors since the start.", "worker")
        for given, subscription in self._subscriptions().items():
            # the format of Prometheus escapes only quotes and line feeds
            name = printable(given)
            status, counted = subscription.status, subscription.status.statistics
            streaming.add_metric([name], status.streaming)
            for position in ("received", "applied", "flushed"):
                lsn.add_metric([name, position], int(getattr(status, position)))
            behind.add_metric([name], max(status.received - status.flushed, 0))
            if status.last_message is not None:
                silence.add_metric([name], max(time.time() - status.last_message, 0.0))
            if status.relay_log is not None:
                relay_bytes.add_metric([name], status.relay_log.size)
                relay_paused.add_metric([name], status.relay_log.paused)
            states = [entry.state for entry in status.tables.values()]
            for state in TableState:
                tables.add_metric([name, state.value], states.count(state))
            for table, entry in status.tables.items():
                if entry.state is TableState.PARKED:
                    parked.add_metric([name, printable(str(table)), str(entry.lsn), printable(entry.error or "")], entry.since or 0.0)
            left_out.add_metric([name], len(status.left_out))
            for found in status.verifications.values():
                labels = [name, printable(str(found.table))]
                verified.add_metric(labels, found.verified_at)
                verified_lsn.add_metric(labels, int(found.lsn))
                differences.add_metric(labels, max(found.differences, found.more))
            transactions.add_metric([name], counted.transactions)
            for kind in _CHANGES:
                changes.add_metric([name, kind.removesuffix("s")], getattr(counted, kind))
            rolled_back.add_metric([name], counted.rolled_back_changes)
            for conflict in (field for field in type(counted).__slots__ if field.startswith("confl_")):
                conflicts.add_metric([name, conflict.removeprefix("confl_")], getattr(counted, conflict))
            for worker in ("apply", "sync"):
                errors.add_metric([name, worker], getattr(counted, f"{worker}_error_count"))
        yield from (
            streaming,
            lsn,
            behind,
            silence,
            relay_bytes,
            relay_paused,
            tables,
            parked,
            left_out,
            verified,
            verified_lsn,
            differences,
            transactions,
            changes,
            rolled_back,
            conflicts,
            errors,
        )
