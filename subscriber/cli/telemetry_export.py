"""What is exported to OpenTelemetry: the metrics under the names of :mod:`subscriber.cli.http.subscription_metrics`, and a trace per batch.

The SDK exports in threads of its own. Replication only puts a span into a queue, which drops spans when it is full.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Self

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricReader, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NoOpTracerProvider, SpanKind, set_span_in_context

from subscriber import __version__
from subscriber.apply.apply_times import BUCKETS
from subscriber.batch_times import AppliedBatch, watcher
from subscriber.log_fields import current_fields
from subscriber.printable import printable
from subscriber.repeated_errors import RepeatedErrors

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

__all__ = ["Telemetry"]

_log = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 1.0
"""The metrics are collected once for all instruments."""
_CLOSE_SECONDS: Final = 3.0
"""How long the end of the program may wait for the last export."""
_HISTOGRAM: Final = "subscriber_commit_to_durable_seconds"


class Telemetry:
    """Exports until it is closed.

    Args:
        collector: of the metrics for Prometheus.
        reader: of the metrics; None: they are not exported.
        processor: of the spans; None: there are none.
    """

    def __init__(self, collector: Collector, reader: MetricReader | None, processor: SpanProcessor | None) -> None:
        resource = Resource.create({"service.name": "subscriber", "service.version": __version__})
        # close ends them: at the exit of Python they would wait for a collector that does not answer
        self._meters = MeterProvider([] if reader is None else [reader], resource=resource, shutdown_on_exit=False)
        self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        if processor is not None:
            self._tracers.add_span_processor(processor)
        self._tracer = (NoOpTracerProvider() if processor is None else self._tracers).get_tracer("subscriber", __version__)
        self._collector = collector
        self._lock = threading.Lock()
        self._collected: Mapping[str, Metric] = {}
        self._collected_at = -_FRESH_SECONDS
        meter = self._meters.get_meter("subscriber", __version__)
        self._durable = meter.create_histogram(_HISTOGRAM, explicit_bucket_boundaries_advisory=BUCKETS)
        for family in self._families().values():
            observe: Callable[[CallbackOptions], Iterable[Observation]] = _Observe(self, family.name)
            if family.type == "counter":
                meter.create_observable_counter(f"{family.name}_total", [observe], description=family.documentation)
            elif family.type == "gauge":
                meter.create_observable_gauge(family.name, [observe], description=family.documentation)

    @classmethod
    def from_environment(cls, collector: Collector, *, metrics: bool, traces: bool) -> Self:
        """Export as the variables of the SDK say.

        Args:
            collector: of the metrics for Prometheus.
            metrics: whether to export metrics.
            traces: whether to export traces.

        Raises:
            Exception: the SDK refuses a variable.
        """
        # what it would log about a collector that does not answer is told once, below
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        processor = BatchSpanProcessor(_Spans()) if traces else None
        return cls(collector, PeriodicExportingMetricReader(_Metrics()) if metrics else None, processor)

    def _families(self) -> Mapping[str, Metric]:
        with self._lock:
            if time.monotonic() - self._collected_at >= _FRESH_SECONDS:
                self._collected, self._collected_at = {each.name: each for each in self._collector.collect()}, time.monotonic()
            return self._collected

    def observations(self, name: str) -> Iterator[Observation]:
        """The present values of a metric."""
        family = self._families().get(name)
        for sample in () if family is None else family.samples:
            yield Observation(float(sample.value), sample.labels)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of the batches of tasks that are started inside the block."""
        token = watcher.set(self)
        try:
            yield
        finally:
            watcher.reset(token)

    def durable(self, seconds: float) -> None:
        self._durable.record(seconds, {"subscription": _subscription()})

    def applied(self, batch: AppliedBatch) -> None:
        offset = time.time() - asyncio.get_running_loop().time()
        arrival = batch.arrival
        received = (batch.taken if arrival is None else arrival.read) + offset
        # by the publisher's clock
        began = min(batch.commit_time, received)
        attributes: dict[str, str | int] = {
            "subscription": _subscription(),
            "lsn": str(batch.end_lsn),
            "xid": batch.xid,
            "transactions": batch.transactions,
            "messages": batch.messages,
            "bytes": batch.size,
        }
        root = self._tracer.start_span("batch", Context(), SpanKind.CONSUMER, attributes, start_time=_nanoseconds(began))
        if root.is_recording():
            committing = batch.done if batch.committing is None else batch.committing
            phases = [("receive", began, received), ("apply", batch.taken + offset, committing + offset)]
            phases += [] if arrival is None else [("decode", received, arrival.decoded + offset)]
            phases += [] if batch.committing is None else [("commit", committing + offset, batch.done + offset)]
            inside = set_span_in_context(root, Context())
            for name, begin, end in phases:
                self._tracer.start_span(name, inside, start_time=_nanoseconds(begin)).end(_nanoseconds(max(begin, end)))
        root.end(_nanoseconds(batch.done + offset))

    def close(self) -> None:
        """Export what is left, and end. A collector that does not answer is not waited for."""
        ending = threading.Thread(target=self._shut_down, name="end of telemetry", daemon=True)
        ending.start()
        ending.join(_CLOSE_SECONDS)

    def _shut_down(self) -> None:
        self._tracers.shutdown()
        self._meters.shutdown(timeout_millis=_CLOSE_SECONDS * 1000)


class _Observe:
    """The callback of one instrument."""

    def __init__(self, telemetry: Telemetry, name: str) -> None:
        self._telemetry = telemetry
        self._name = name

    def __call__(self, options: CallbackOptions) -> Iterable[Observation]:
        return self._telemetry.observations(self._name)


def _subscription() -> str:
    return printable(str(current_fields().get("subscription", "")))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


class _Spans(SpanExporter):
    """Exports spans as the environment says, and logs less and less often that this fails."""

    def __init__(self) -> None:
        self._to = OTLPSpanExporter()
        self._errors = RepeatedErrors(_log)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._to.export(spans)
        if result is not SpanExportResult.SUCCESS:
            _tell(self._errors, "traces")
        return result

    def shutdown(self) -> None:
        self._to.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._to.force_flush(timeout_millis)


class _Metrics(MetricExporter):
    """Exports metrics in the same way."""

    def __init__(self) -> None:
        super().__init__()
        self._to = OTLPMetricExporter()
        self._errors = RepeatedErrors(_log)
        self._preferred_temporality = self._to._preferred_temporality  # noqa: SLF001 -- as PeriodicExportingMetricReader reads it
        self._preferred_aggregation = self._to._preferred_aggregation  # noqa: SLF001

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        result = self._to.export(metrics_data, timeout_millis, **kwargs)
        if result is not MetricExportResult.SUCCESS:
            _tell(self._errors, "metrics")
        return result

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._to.shutdown(timeout_millis, **kwargs)

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._to.force_flush(timeout_millis)


def _tell(errors: RepeatedErrors, what: str) -> None:
    errors.tell(
        logging.WARNING,
        what,
        f"{what} could not be exported to OpenTelemetry; replication continues (hint: is the endpoint of the OTEL_EXPORTER_OTLP variables"
        " right, and does it take OTLP over HTTP, by default at port 4318?)",
    )
