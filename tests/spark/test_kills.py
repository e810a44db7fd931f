"""Subscriber, applier, its Java process and executors are killed at random on a cluster, under load, while a reader reads every snapshot.

``SUBSCRIBER_SPARK_KILLS`` says how many times: forty in ``make crash-spark``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.lake import Lake
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.crash.test_lake import LEFT, RIGHT, Transfers, check_files, check_histories, check_logs, check_snapshot, tidy
from tests.spark import programs
from tests.spark.cluster import Cluster, bare_python, build_wheel, cluster
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.lakes import apply_all, assert_same, storage

KILLS = int(os.environ.get("SUBSCRIBER_SPARK_KILLS", "4"))
VICTIMS = ("subscriber", "applier", "java", "executor")
NAMES = [LEFT, RIGHT, *(TableName("load", table) for table in TABLES)]


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    with cluster(tmp_path / "cluster") as found:
        yield found


class Reader:
    """Reads each snapshot as it is published: the money of both tables is the same in all of them."""

    def __init__(self, lake: Path) -> None:
        self.reads = 0
        self.failure: BaseException | None = None
        self._lake = lake
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before = 0
        while not self._stop.wait(0.2):
            try:
                snapshot = read_snapshot(storage(self._lake))
                if snapshot is not None and snapshot.lsn != before:
                    assert snapshot.lsn > before
                    before = snapshot.lsn
                    self.reads += check_snapshot(self._lake, snapshot)
            except BaseException as error:
                self.failure = error
                raise


@pytest.mark.endurance
@pytest.mark.timeout(1200 + 120 * KILLS)
async def test_killed_at_random_on_a_cluster(publisher18_db: Database, tmp_path: Path, standalone: Cluster) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    publisher, lake = publisher18_db, tmp_path / "lake"
    wheel, python = await asyncio.to_thread(build_wheel, tmp_path), await asyncio.to_thread(bare_python, tmp_path)
    await create_tables(publisher.dsn, rows=1000)
    transfers = Transfers(publisher)
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    more = ("-o", "two_phase=true", "-c", "copy_range_size=128kB")
    subscriber = programs.subscriber(publisher, tmp_path, f"?batch_delay=100ms&history.{LEFT}=scd2&history.{RIGHT}=scd2", *more)
    applier = programs.applier(tmp_path, standalone.master, wheel, python, {}, "--target-rows", "2000")
    load = MixedLoad(publisher.dsn, seed=seed, rate=8, sessions=2, huge_rows=500)
    met: Counter[str] = Counter()
    # of a machine with much else to do: Java alone has taken 150 s to start there
    patience = 600.0
    reader = Reader(lake)
    let_slots_be_created(publisher, load)
    enough = asyncio.Event()

    def tell() -> str:
        return f"seed {seed}, {dict(met)}\n{subscriber.log()}\n{applier.log()}\n{standalone.log()}"

    async def there(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patience
        while not condition():
            assert reader.failure is None, reader.failure
            assert time.monotonic() < deadline, tell()
            await asyncio.sleep(0.1)

    def beyond(lsn: int) -> bool:
        snapshot = read_snapshot(storage(lake))
        return snapshot is not None and snapshot.lsn > lsn

    def all_published() -> bool:
        snapshot = read_snapshot(storage(lake))
        return snapshot is not None and set(NAMES) <= snapshot.tables.keys()

    try:
        with transfers, reader:
            running = asyncio.create_task(load.run(enough))
            subscriber.start()
            await there((lake / "subscriber.json").exists)
            applier.start()
            began = time.monotonic()
            await there(lambda: beyond(0))
            patience = max(180.0, 5 * (time.monotonic() - began))
            victims = [VICTIMS[number % len(VICTIMS)] for number in range(KILLS)]
            dice.shuffle(victims)
            for number, victim in enumerate(victims):
                if number == KILLS // 4:
                    # these kills were amid the copies; all others are amid rounds over all tables
                    await there(all_published)
                # chance, not synchronisation: somewhere in what it does
                await asyncio.sleep(dice.uniform(0, 3))
                await _kill(victim, subscriber, applier, standalone, dice, there)
                met[victim] += 1
                print(f"{time.strftime('%H:%M:%S')} {sum(met.values())} {victim}", flush=True)
                snapshot = read_snapshot(storage(lake))
                assert snapshot is not None
                if all_published():
                    # all copied: no slot will be created any more
                    let_small_transactions_stream(publisher, load)
                assert subscriber.runs(), tell()
                await there(partial(beyond, snapshot.lsn))
            enough.set()
            await running
        await load.finish()
        assert reader.failure is None
        subscriber.kill()
        status = await asyncio.to_thread(subscriber.start("--until-caught-up").wait, 120)
        assert status == 0, tell()
        found = Lake.find(storage(lake))
        goal = found.landed() if found is not None else None
        assert goal is not None
        await there(partial(beyond, goal - 1))
        assert await asyncio.to_thread(applier.end) == 0, tell()
    finally:
        enough.set()
        subscriber.end()
        applier.end()
    snapshot = await asyncio.to_thread(apply_all, lake)
    assert await asyncio.to_thread(check_snapshot, lake, snapshot)
    await asyncio.to_thread(assert_same, lake, snapshot, publisher, NAMES)
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, snapshot)
    await asyncio.to_thread(check_histories, lake, snapshot)
    await asyncio.to_thread(check_files, lake)
    print(f"{dict(met)}, {transfers.count} transfers, {load.report.transactions} transactions, {reader.reads} snapshots read")
    assert reader.reads >= KILLS // 2


async def _kill(
    victim: str,
    subscriber: programs.Running,
    applier: programs.Running,
    standalone: Cluster,
    dice: random.Random,
    there: Callable[..., Awaitable[None]],
) -> None:
    match victim:
        case "subscriber":
            subscriber.kill()
            subscriber.start()
        case "applier":
            applier.kill()
            applier.start()
        case "java":
            await there(lambda: applier.java() is not None)
            java = applier.java()
            assert java is not None
            os.kill(java, 9)
            # it notices that, and a supervisor would start it again
            await there(lambda: not applier.runs())
            assert applier.process is not None
            assert applier.process.returncode == 1
            assert "Spark has ended" in applier.log() or "could not start Spark" in applier.log()
            applier.start()
        case _:
            await there(standalone.executors)
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(standalone.executors()), 9)
