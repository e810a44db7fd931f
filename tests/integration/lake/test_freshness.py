"""A freshness target is met, and a longer one writes fewer bytes: two lakes of one publisher, under the same load."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import pytest

from subscriber import Subscription, TableName
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.catalog.status_files import APPLIER, read_quietly
from tests.support.database import WAIT_SECONDS, Database
from tests.support.lakes import assert_same, storage
from tests.support.replica import QUICK

T = TableName("public", "t")
ROWS = 20_000
SECONDS = 24.0
SHORT, LONG = 0.5, 10.0


def _told(lake: Path) -> dict[str, Any]:
    return read_quietly(storage(lake), APPLIER)


def _events(lake: Path, since: int) -> list[dict[str, Any]]:
    return [event for event in _told(lake)["progress"] if event["batchId"] >= since and event["numInputRows"]]


@pytest.mark.endurance
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_longer_target_is_met_with_fewer_bytes(publisher18_db: Database, tmp_path: Path) -> None:
    publisher = publisher18_db
    publisher.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    publisher.execute(f"INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, {ROWS}) AS g")
    lakes = {SHORT: tmp_path / "short", LONG: tmp_path / "long"}
    running = []
    for target, lake in lakes.items():
        url = f"spark://{lake}?apply=local&freshness={round(target * 1000)}ms"
        name = f"sub_{publisher.name}_{round(target)}"
        subscription = Subscription(name, connection=publisher.dsn, publications=["pub"], target=url, settings=QUICK)
        running.append((subscription, asyncio.create_task(subscription.run())))
    for lake in lakes.values():
        async with asyncio.timeout(WAIT_SECONDS):
            while not (lake / "subscriber.json").exists() or (found := read_snapshot(storage(lake))) is None or T not in found.tables:
                await asyncio.sleep(0.1)
    before = {target: (_told(lake)["batches"], sum(_told(lake)["written_bytes"].values())) for target, lake in lakes.items()}
    end, dice = time.monotonic() + SECONDS, random.Random(1)
    while time.monotonic() < end:
        await asyncio.to_thread(publisher.execute, f"UPDATE t SET v = md5(random()::text) WHERE id % 1000 = {dice.randrange(1000)}")
        await asyncio.sleep(0.1)
    written = {target: sum(_told(lake)["written_bytes"].values()) - before[target][1] for target, lake in lakes.items()}
    rounds = {target: _told(lake)["batches"] - before[target][0] for target, lake in lakes.items()}
    events = _events(lakes[LONG], before[LONG][0])
    for subscription, task in running:
        subscription.stop()
        await task
    for lake in lakes.values():
        found = read_snapshot(storage(lake))
        assert found is not None
        assert_same(lake, found, publisher, [T])
    assert 1 <= rounds[LONG] <= 4 < rounds[SHORT], rounds
    assert written[LONG] < written[SHORT], written
    ages = [event["observedMetrics"]["freshness"]["seconds"] for event in events]
    assert ages
    # it waits, but not too long
    assert all(LONG / 2 < age <= LONG for age in ages), ages
