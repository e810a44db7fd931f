"""OpenTelemetry: the metrics under the names that Prometheus has, and a trace for each batch; nothing without the variables of its SDK."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricsData
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from subscriber.apply.apply_times import BUCKETS
from subscriber.cli.http.subscription_site import SubscriptionSite
from subscriber.cli.telemetry import ENDPOINT, exported
from subscriber.cli.telemetry_export import Telemetry
from tests.support.database import WAIT_SECONDS, Database
from tests.support.observation import until
from tests.support.program import Program, running
from tests.support.replica import subscription_of

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text)"


def named(data: MetricsData | None) -> dict[str, list[object]]:
    """The data points of each metric that has some."""
    assert data is not None
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


async def test_metrics_and_a_trace_for_each_batch(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute(TABLES)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t")
    spans, reader = InMemorySpanExporter(), InMemoryMetricReader()
    subscription = subscription_of(publisher18_db, target_db, synchronous_commit="on")
    site = SubscriptionSite(lambda: {subscription.name: subscription})
    telemetry = Telemetry(site.collector, reader, SimpleSpanProcessor(spans))
    with telemetry.watching():
        run = asyncio.create_task(subscription.run())
    await until(lambda: subscription.status.streaming, "it streams")
    began = time.time()
    publisher18_db.execute("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    lsn = publisher18_db.current_lsn()
    await subscription.wait_for(lsn, WAIT_SECONDS)
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found.keys() == {"batch", "receive", "decode", "apply", "commit"}
    batch = found["batch"]
    assert batch.attributes is not None
    assert batch.context is not None
    assert {name: batch.attributes[name] for name in ("subscription", "transactions")} == {
        "subscription": subscription.name,
        "transactions": 1,
    }
    assert batch.attributes["messages"] == 3  # two rows, and their table
    assert batch.parent is None
    for phase in ("receive", "decode", "apply", "commit"):
        span = found[phase]
        assert span.parent is not None
        assert span.parent.span_id == batch.context.span_id
        assert span.start_time is not None
        assert span.end_time is not None
        assert began - 5 < span.start_time / 1e9 <= span.end_time / 1e9 < time.time() + 5
    order = [found[phase].start_time or 0 for phase in ("receive", "decode", "apply", "commit")]
    assert order == sorted(order)
    # all metrics of Prometheus with a value, and no other
    telemetry._collected_at = -1e9  # the values are up to a second old
    expected = {sample.name for family in site.collector.collect() if family.type != "histogram" for sample in family.samples}
    metrics = named(reader.get_metrics_data())
    assert metrics.keys() == expected | {"subscriber_commit_to_durable_seconds"}
    (streaming,) = metrics["subscriber_streaming"]
    assert (streaming.value, dict(streaming.attributes)) == (1, {"subscription": subscription.name})  # type: ignore[attr-defined]
    (durable,) = metrics["subscriber_commit_to_durable_seconds"]
    assert durable.count >= 1  # type: ignore[attr-defined]
    assert tuple(durable.explicit_bounds) == BUCKETS  # type: ignore[attr-defined]
    subscription.stop()
    await run
    telemetry.close()


@pytest.fixture
def collector() -> Iterator[tuple[str, list[str]]]:
    """An endpoint for OTLP over HTTP, and the paths that were posted to."""
    posted: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            posted.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", posted
    server.shutdown()
    thread.join()
    server.server_close()


@contextlib.contextmanager
def replicating(publisher: Database, target: Database, env: Mapping[str, str]) -> Iterator[Program]:
    """``subscriber run`` that has applied a change."""
    for database in (publisher, target):
        database.execute(TABLES)
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    arguments = (f"--connection={publisher.dsn}", "--publication=pub", f"--target={target.dsn}", f"--name=s_{publisher.name}")
    with running("run", *arguments, env=env) as program:
        target.wait("SELECT count(*) FROM t", 1)
        publisher.execute("INSERT INTO t VALUES (2, 'b')")
        target.wait("SELECT count(*) FROM t", 2)
        yield program


@pytest.mark.parametrize("answers", [True, False])
def test_program(publisher18_db: Database, target_db: Database, collector: tuple[str, list[str]], answers: bool) -> None:
    endpoint, posted = collector
    env = {ENDPOINT: endpoint if answers else "http://127.0.0.1:9", "OTEL_METRIC_EXPORT_INTERVAL": "200", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with replicating(publisher18_db, target_db, env) as program:
        if answers:
            deadline = time.monotonic() + WAIT_SECONDS
            while {*posted} != {"/v1/metrics", "/v1/traces"}:
                assert time.monotonic() < deadline, posted
                time.sleep(0.05)
        else:
            program.says("could not be exported to OpenTelemetry; replication continues")
        program.send(signal.SIGTERM)
        done = program.ended()
    assert done.status == 0
    assert done.seconds < 8
    assert "Traceback" not in done.errors
    assert ("OpenTelemetry" in done.errors) is not answers


def test_collector_that_accepts_and_never_answers(publisher18_db: Database, target_db: Database) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        env = {ENDPOINT: f"http://127.0.0.1:{silent.getsockname()[1]}", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
        with replicating(publisher18_db, target_db, env) as program:
            program.send(signal.SIGTERM)
            done = program.ended()
    assert done.status == 0
    # by itself the SDK waits for 15 s and more
    assert done.seconds < 8
    assert "Traceback" not in done.errors


def test_only_what_has_an_endpoint_is_exported(publisher18_db: Database, target_db: Database, collector: tuple[str, list[str]]) -> None:
    endpoint, posted = collector
    env = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{endpoint}/own", "OTEL_METRIC_EXPORT_INTERVAL": "200", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with replicating(publisher18_db, target_db, env) as program:
        program.send(signal.SIGTERM)
        done = program.ended()
    assert (done.status, "OpenTelemetry" in done.errors, {*posted}) == (0, False, {"/own"})


def test_variable_that_the_sdk_refuses(publisher18_db: Database, target_db: Database) -> None:
    with replicating(publisher18_db, target_db, {ENDPOINT: "http://127.0.0.1:9", "OTEL_BSP_MAX_QUEUE_SIZE": "-1"}) as program:
        program.send(signal.SIGTERM)
        done = program.ended()
    assert done.status == 0
    assert "nothing is exported to OpenTelemetry: max_queue_size must be a positive integer" in done.errors
    assert "Traceback" not in done.errors


def test_defect_is_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    # the bug was a traceback of the thread, and another one at the end
    class Defective(SubscriptionSite):
        async def work(self) -> None:
            raise ZeroDivisionError("value-of-a-row")

    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    with caplog.at_level("ERROR"), exported(Defective(dict), served=False):
        deadline = time.monotonic() + WAIT_SECONDS
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    (line,) = [each.getMessage() for each in caplog.records if each.name.startswith("subscriber.cli.http")]
    assert "show old values from now on, replication continues: ZeroDivisionError in " in line
    assert "value-of-a-row" not in caplog.text


def test_nothing_is_imported_without_an_endpoint() -> None:
    script = (
        "import sys\nfrom subscriber.cli.http.serving import served\nimport subscriber.cli.verbs.run\n"
        "with served(None, None):\n    assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
