"""run --metrics: what Prometheus reads is what is so."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from subscriber import Settings, SubscriptionOptions, alter_subscription, drop_subscription
from subscriber.sinks.spark.sink import SparkSink
from tests.support.database import WAIT_SECONDS, Database
from tests.support.managed import catch_up, create
from tests.support.program import Program, running, subscriber
from tests.unit.sinks.spark.stream import begun


def told_port(program: Program) -> int:
    """The port of a program that was started with ``-v --metrics 127.0.0.1:0``."""
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
    arguments = ("-v", "--metrics", "127.0.0.1:0", "-c", "wal_retrieve_retry_interval=200ms")
    with running("run", "--target", target_db.dsn, *arguments) as program:
        port = told_port(program)
        catch_up(publisher18_db, target_db, name)
        publisher18_db.execute("INSERT INTO t VALUES (2, 'b'), (3, 'c'); UPDATE t SET v = 'd' WHERE id = 1")
        target_db.execute("DELETE FROM t WHERE id = 1")
        publisher18_db.execute("DELETE FROM t WHERE id = 1")
        catch_up(publisher18_db, target_db, name)
        # the position is in the target a moment before the process has counted the transaction
        found = scrape_until(port, lambda found: found["subscriber_transactions_total", ()] == 2)
        assert found["subscriber_streaming", ()] == 1
        assert found["subscriber_changes_total", ("insert",)] == 2
        missing = found["subscriber_conflicts_total", ("update_missing",)] + found["subscriber_conflicts_total", ("delete_missing",)]
        assert missing >= 1
        assert found["subscriber_tables", ("r",)] + found["subscriber_tables", ("s",)] == 1
        assert found["subscriber_lsn_bytes", ("received",)] >= found["subscriber_lsn_bytes", ("flushed",)] > 0
        second = subscriber("run", "--target", target_db.dsn, "--metrics", f"127.0.0.1:{port}")
        assert second.status == 1
        assert re.search(rf"cannot serve metrics at 127\.0\.0\.1:{port}: .*in use", second.errors)
        async with alter_subscription(name, target=target_db.dsn) as subscription:
            await subscription.disable()
        scrape_until(port, lambda found: not any(key[0] == "subscriber_streaming" for key in found))
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    assert subscriber("run", "--target", target_db.dsn, "--metrics", "nowhere").status == 1
    await drop_subscription(name, target=target_db.dsn)


def test_metrics_of_an_applier(tmp_path: Path) -> None:
    asyncio.run(_make_lake(tmp_path))
    arguments = ("-v", "--metrics", "127.0.0.1:0", "--freshness", "1min", "--max-write-rate", "10MB/s", "--retain-hours", "48")
    events = tmp_path / "events"
    with running("spark-apply", str(tmp_path / "lake"), *arguments, "--progress", str(events)) as program:
        port = told_port(program)
        found = scrape_until(port, lambda found: found.get(("subscriber_applier_rounds_total", ()), 0.0) >= 1)
        assert found["subscriber_applier_freshness_target_seconds", ()] == 60
        program.send(signal.SIGTERM)
        assert program.ended().status == 0
    (event,) = map(json.loads, events.read_text().splitlines())
    assert event["batchId"] == 0


async def _make_lake(path: Path) -> None:
    opened = await begun(SparkSink(f"spark://{path}/lake", options=SubscriptionOptions(), settings=Settings()))
    await opened.close()
