"""Spark maintains the tables while an applier is killed again and again under load: nothing stops, and the feeds equal the logs.

``SUBSCRIBER_MAINTENANCE_SECONDS`` says for how long; ``make crash-spark`` sets it to five minutes (``SECONDS=``).
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.delta.test_change_data_feed import spark_feed
from tests.delta.test_engines_on_one_lake import engine_of
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_change_data_feed import assert_fed
from tests.unit.sinks.spark.stream import batch, begun, make

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECONDS = float(os.environ.get("SUBSCRIBER_MAINTENANCE_SECONDS", "20"))
pytestmark = [pytest.mark.timeout(600 + 5 * SECONDS), pytest.mark.endurance, pytest.mark.filterwarnings("ignore")]


class Maintenance(threading.Thread):
    """OPTIMIZE of a random table at intervals, and CLUSTER BY of one table once."""

    def __init__(self, spark: SparkSession, path: Path, dice: random.Random) -> None:
        super().__init__(name="maintenance")
        self.done: Counter[str] = Counter()
        self.failure: BaseException | None = None
        self.stop = threading.Event()
        self._spark, self._path, self._dice = spark.newSession(), path, dice

    def run(self) -> None:
        try:
            self._execute("ALTER TABLE {} CLUSTER BY (id)", "keyed")
            while not self.stop.wait(min(10.0, SECONDS / 8)):
                self._execute("OPTIMIZE {}", self._dice.choice(NAMES).name)
        except BaseException as error:  # noqa: BLE001 -- the test raises it
            self.failure = error

    def require_success(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _execute(self, statement: str, table: str) -> None:
        from py4j.protocol import Py4JJavaError
        from pyspark.errors import PySparkException

        while not self.stop.is_set():
            try:
                self._spark.sql(statement.format(f"delta.`{self._path}/tables/public/{table}`")).collect()
                self.done[statement] += 1
                return
            except (PySparkException, Py4JJavaError) as error:
                # a maintainer may lose against a commit of the applier, and repeats it
                if "CONCURRENT" not in str(error).upper():
                    raise
                self.done["lost"] += 1


async def test_nothing_stops_and_feeds_equal_logs(tmp_path: Path, delta: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    dice, publisher = random.Random(seed), Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    settings = ApplierSettings(target_rows=10, log_files=20)

    def applier() -> Applier:
        return Applier(storage(tmp_path), engine_of("spark", delta, tmp_path), settings)

    await sink.apply(batch(publisher.transaction(80)))
    await sink.advance(Lsn(publisher.end))
    await asyncio.to_thread(all_rounds, applier())
    for table in NAMES:
        DeltaTable(str(tmp_path / "tables/public" / table.name)).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    real, met = LakeDelta.commit, Counter[str]()

    def fragile(table: LakeDelta, *arguments: Any, **named: Any) -> None:
        before = dice.random() < 0.05
        if not before:
            real(table, *arguments, **named)
        if before or dice.random() < 0.05:
            raise Killed

    def rounds(work: Applier) -> Snapshot:
        snapshot = all_rounds(work)
        work.tidy()
        return snapshot

    maintenance, work = Maintenance(delta, tmp_path, random.Random(seed)), applier()
    maintenance.start()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(LakeDelta, "commit", fragile)
            end = time.monotonic() + SECONDS
            while time.monotonic() < end or not (maintenance.done["OPTIMIZE {}"] and met["kills"] and met["compared"]):
                maintenance.require_success()
                await sink.apply(batch(publisher.transaction(dice.randrange(5, 40))))
                await sink.advance(Lsn(publisher.end))
                try:
                    snapshot = await asyncio.to_thread(rounds, work)
                    assert not snapshot.stopped, snapshot.stopped
                    assert await asyncio.to_thread(read, tmp_path, snapshot) == publisher.rows()
                    met["compared"] += 1
                except Killed:
                    met["kills"] += 1
                    work = applier()
    finally:
        maintenance.stop.set()
        await asyncio.to_thread(maintenance.join)
        await sink.close()
    maintenance.require_success()
    work = applier()
    snapshot = await asyncio.to_thread(all_rounds, work)
    assert not snapshot.stopped
    assert read(tmp_path, snapshot) == publisher.rows()
    work.tidy(now=True)
    assert not work.progress.stopped_logs
    print(f"{dict(met)}, maintenance {dict(maintenance.done)}")
    assert_fed(tmp_path, spark_feed(delta))
