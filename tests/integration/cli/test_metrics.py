"""run --http: what Prometheus and probes read is what is so."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

from subscriber import Settings, SubscriptionOptions, alter_subscription, drop_subscription
from subscriber.sinks.spark.sink import SparkSink
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import catch_up, create
from tests.support.program import Program, running, subscriber
from tests.unit.sinks.spark.stream import begun

MONITORING = Path(__file__).parents[3] / "docs/monitoring"


def told_port(program: Program) -> int:
    """The port of a program that was started with ``-v --http 127.0.0.1:0``."""
    program.says("/metrics\n")
    found = re.search(r"serving metrics at http://127\.0\.0\.1:(\d+)/metrics$", program.errors, re.MULTILINE)
    assert found is not None
    return int(found[1])


Scraped = dict[tuple[str, tuple[str, ...]], float]


def scrape(port: int) -> Scraped:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, tuple(value for name, value in sorted(sample.labels.items()) if name != "subscription")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def families(port: int) -> set[str]:
    """The names of all samples that there can be, of families without samples too."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = re.findall(r"^# TYPE (\S+) (\S+)$", answer.read().decode(), re.MULTILINE)
    return {name + suffix for name, kind in found for suffix in (("_bucket", "_count", "_sum") if kind == "histogram" else ("",))}


def monitored(*, applier: bool) -> set[str]:
    """The metrics that the alert rules and the dashboard of the documentation use."""
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert all({"summary", "remedy"} == rule["annotations"].keys() for rule in rules)
    dashboard = json.loads((MONITORING / "grafana.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    expressions = [rule["expr"] for rule in rules] + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for expression in expressions for name in re.findall(r"subscriber_\w+", expression)}
    return {name for name in names if name.startswith("subscriber_applier_") is applier}


def probe(port: int, name: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{name}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def scrape_until(port: int, wanted: Callable[[Scraped], bool]) -> Scraped:
    """Poll until what it finds is so; returns that."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not wanted(found := scrape(port)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


async def test_a_launcher_and_its_metrics(publisher18_db: Database, target_db: Database) -> None:
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    name = await create(publisher18_db, target_db, options=SubscriptionOptions(synchronous_commit="on"))
    arguments = ("-v", "--http", "127.0.0.1:0", "-c", "wal_retrieve_retry_interval=200ms")
    with running("run", "--target", target_db.dsn, *arguments) as program:
        port = told_port(program)
        catch_up(publisher18_db, target_db, name)
        publisher18_db.execute("INSERT INTO t VALUES (2, 'b'), (3, 'c'); UPDATE t SET v = 'd' WHERE id = 1")
        target_db.execute("DELETE FROM t WHERE id = 1")
        publisher18_db.execute("DELETE FROM t WHERE id = 1")
        catch_up(publisher18_db, target_db, name)
        # the position is in the target a moment before the process has counted the transaction
        found = scrape_until(
            port, lambda found: found["subscriber_transactions_total", ()] == 2 and ("subscriber_publisher_up", ()) in found
        )
        assert found["subscriber_streaming", ()] == 1
        assert found["subscriber_retry_attempt", ("", "")] == 0
        assert found["subscriber_table_changes_total", ("public.t",)] in {2, 3}  # the UPDATE may come after the DELETE in the target
        assert found["subscriber_table_changes_total", ("other",)] == 0
        assert found["subscriber_copied_rows", ()] == 1
        # COPY has a line, binary COPY a header, too; a message of an INSERT has more than its values
        assert 4 <= found["subscriber_table_copied_bytes_total", ("public.t",)] < 100
        assert 40 < found["subscriber_table_bytes_total", ("public.t",)] < 400
        assert found["subscriber_table_bytes_total", ("other",)] == found["subscriber_table_copied_bytes_total", ("other",)] == 0
        assert (
            found["subscriber_commit_to_durable_seconds_bucket", ("+Inf",)] == found["subscriber_commit_to_durable_seconds_count", ()] >= 1
        )
        assert found["subscriber_commit_to_durable_seconds_sum", ()] < WAIT_SECONDS
        assert found["subscriber_phase_seconds_total", ("apply",)] > 0
        assert found["subscriber_lsn_bytes", ("publisher",)] >= found["subscriber_lsn_bytes", ("received",)]
        assert found["subscriber_lag_bytes", ()] >= 0
        assert found["subscriber_lag_seconds", ()] >= 0
        assert found["subscriber_publisher_up", ()] == found["subscriber_slot_wal_status", ("reserved",)] == 1
        assert found["subscriber_slot_retained_bytes", ()] > 0
        assert probe(port, "healthz") == probe(port, "readyz") == (200, "ok\n")
        assert monitored(applier=False) <= families(port)
        assert found["subscriber_changes_total", ("insert",)] == 2
        missing = found["subscriber_conflicts_total", ("update_missing",)] + found["subscriber_conflicts_total", ("delete_missing",)]
        assert missing >= 1
        assert found["subscriber_tables", ("r",)] + found["subscriber_tables", ("s",)] == 1
        assert found["subscriber_lsn_bytes", ("received",)] >= found["subscriber_lsn_bytes", ("flushed",)] > 0
        second = subscriber("run", "--target", target_db.dsn, "--http", f"127.0.0.1:{port}")
        assert second.status == 1
        assert re.search(rf"cannot serve at 127\.0\.0\.1:{port}: .*in use", second.errors)
        assert len(second.errors.splitlines()) == 1
        async with alter_subscription(name, target=target_db.dsn) as subscription:
            await subscription.disable()
        scrape_until(port, lambda found: not any(key[0] == "subscriber_streaming" for key in found))
        assert probe(port, "healthz") == (200, "ok\n")
        assert probe(port, "readyz") == (503, "no subscription runs\n")
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    assert subscriber("run", "--target", target_db.dsn, "--metrics", "nowhere").status == 1
    await drop_subscription(name, target=target_db.dsn)


def test_metrics_of_an_applier(tmp_path: Path) -> None:
    asyncio.run(_make_lake(tmp_path))
    arguments = ("-v", "--http", "127.0.0.1:0", "--freshness", "1min", "--max-write-rate", "10MB/s", "--retain-hours", "48")
    events = tmp_path / "events"
    with running("spark-apply", str(tmp_path / "lake"), *arguments, "--progress", str(events)) as program:
        port = told_port(program)
        found = scrape_until(port, lambda found: found.get(("subscriber_applier_rounds_total", ()), 0.0) >= 1)
        assert found["subscriber_applier_freshness_target_seconds", ()] == 60
        assert found["subscriber_lag_seconds", ()] >= 0
        assert probe(port, "readyz") == (200, "ok\n")
        assert monitored(applier=True) <= families(port)
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    (event,) = map(json.loads, events.read_text().splitlines())
    assert event["batchId"] == 0


async def _make_lake(path: Path) -> None:
    opened = await begun(SparkSink(f"spark://{path}/lake", options=SubscriptionOptions(), settings=Settings()))
    await opened.close()
