"""docker/spark/compose.yaml: a lake whose applier runs on a standalone cluster of containers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import psycopg
import pytest

from subscriber.testing.ports import free_port
from tests.docker.engine import PROJECT, ROOT, compose_command, run, wait_until
from tests.docker.stack import PASSWORD, Container

IMAGE = "pg-subscriber-spark-test"
TABLES = {"accounts": "balance", "transfers": "amount"}
# nothing writes meanwhile, so the newest versions belong together
_READ = """
import contextlib, json, os
from decimal import Decimal
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
found = {}
with contextlib.suppress(TableNotFoundError):
    for name, column in %r.items():
        rows = DeltaTable("/lake/tables/public/" + name).to_pyarrow_table(columns=["id", column])
        pairs = zip(rows["id"].to_pylist(), rows[column].to_pylist())
        found[name] = [rows.num_rows, str(sum((Decimal(key) * value for key, value in pairs), Decimal(0)))]
print(json.dumps(found), flush=True)
# Arrow's threads may abort the end of an interpreter: github.com/apache/arrow/issues/34314
os._exit(0)
"""


class Lake:
    """The project, while it runs."""

    def __init__(self) -> None:
        self.port = free_port()
        self._words = [*compose_command(), "--project-name", f"{PROJECT}-spark", "--file", str(ROOT / "docker" / "spark" / "compose.yaml")]
        self._environment = os.environ | {
            "POSTGRES_PASSWORD": PASSWORD,
            "SUBSCRIBER_PASSWORD": PASSWORD,
            "SUBSCRIBER_SPARK_IMAGE": IMAGE,
            "PUBLISHER_PORT": str(self.port),
            "SPARK_UI_PORT": str(free_port()),
            "EXECUTOR_MEMORY": "700m",
        }

    def compose(self, *words: str, timeout: float = 900) -> str:
        return run(*self._words, *words, timeout=timeout, env=self._environment)

    def service(self, name: str) -> Container:
        return Container(self.compose("ps", "--all", "--quiet", name).strip())

    def publisher(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(host="127.0.0.1", port=self.port, user="postgres", password=PASSWORD, dbname="app", autocommit=True)

    def wait_until_equal(self) -> None:
        """Wait until the tables have what the publisher has now."""
        with self.publisher() as publisher:
            expected = {}
            for name, column in TABLES.items():
                query = f"SELECT count(*), trim_scale(coalesce(sum(id * {column}), 0)) FROM {name}"
                row = publisher.execute(query.encode()).fetchone()
                assert row is not None
                expected[name] = [row[0], float(str(row[1]))]

        def equal() -> bool:
            found = json.loads(self.service("subscriber").python(_READ % TABLES))
            return {name: [rows, float(total)] for name, (rows, total) in found.items()} == expected

        wait_until(equal, lambda: f"the lake does not get to {expected}: {self.compose('logs', '--no-color', '--tail', '30')}", 600)

    def executors(self) -> int:
        """Alive, by the master."""
        program = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/json/').read().decode())"
        workers = json.loads(self.service("spark-master").python(program))["workers"]
        return sum(worker["coresused"] for worker in workers if worker["state"] == "ALIVE")


@pytest.fixture(scope="module")
def lake(standins: list[str]) -> Iterator[Lake]:
    made = Lake()
    made.compose("build", "subscriber", timeout=3000)
    try:
        made.compose("up", "--wait", "--wait-timeout", "800", "--no-build")
        yield made
    except AssertionError as error:
        error.add_note(made.compose("logs", "--no-color", "--tail", "30"))
        raise
    finally:
        made.compose("down", "--volumes", "--timeout", "1")


@pytest.mark.timeout(5000)
def test_tables_are_equal_through_kills_of_a_worker_and_of_the_applier(lake: Lake) -> None:
    lake.wait_until_equal()
    wait_until(lambda: lake.executors() == 2, lambda: "no executor on each worker", 300)
    change = b"UPDATE accounts SET balance = balance + id WHERE id % 3 = 0"
    insert = b"INSERT INTO transfers (from_account, to_account, amount) SELECT 1, 2, n FROM generate_series(1, 5000) n"
    with lake.publisher() as publisher:
        publisher.execute(change)
        publisher.execute(insert)
    lake.wait_until_equal()

    lake.service("spark-worker1").kill()
    with lake.publisher() as publisher:
        publisher.execute(change)
        publisher.execute(b"DELETE FROM transfers WHERE id % 2 = 0")
    lake.wait_until_equal()
    lake.service("spark-worker1").start()

    lake.service("applier").kill()
    with lake.publisher() as publisher:
        publisher.execute(change)
        publisher.execute(insert)
    lake.service("applier").start()
    lake.wait_until_equal()
    lake.service("applier").wait_for_health("healthy", 600)
    assert lake.service("subscriber").stop() == 0
