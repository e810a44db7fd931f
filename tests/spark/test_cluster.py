"""A real master and two workers: rounds by executors, this program from a wheel; by spark-apply, and by spark-submit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from subscriber.interfaces import TableName
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.crash.test_lake import LEFT, RIGHT, Transfers, check_snapshot
from tests.spark import programs
from tests.spark.cluster import Cluster, bare_python, build_wheel, cluster
from tests.support.database import Database
from tests.support.lakes import assert_same, storage

NAMES = [LEFT, RIGHT, *(TableName("load", table) for table in TABLES)]


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")
    with cluster(tmp_path / "cluster") as found:
        yield found


async def there(condition: Callable[[], bool], tell: Callable[[], str], patience: float = 120) -> None:
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, tell()
        await asyncio.sleep(0.1)


@pytest.mark.timeout(900)
async def test_a_cluster_copies_and_follows(publisher18_db: Database, tmp_path: Path, standalone: Cluster) -> None:
    publisher, lake = publisher18_db, tmp_path / "lake"
    wheel, python = await asyncio.to_thread(build_wheel, tmp_path), await asyncio.to_thread(bare_python, tmp_path)
    await create_tables(publisher.dsn, rows=2000)
    transfers = Transfers(publisher)
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    more = ("-o", "two_phase=true", "-c", "copy_range_size=128kB")
    subscriber = programs.subscriber(publisher, tmp_path, "?batch_delay=100ms", *more)
    applier = programs.applier(tmp_path, standalone.master, wheel, python, {}, "--target-rows", "2000")
    load = MixedLoad(publisher.dsn, seed=3, sessions=2, huge_rows=500)

    def tell() -> str:
        return f"{subscriber.log()}\n{applier.log()}\n{standalone.log()}"

    def published() -> bool:
        snapshot = read_snapshot(storage(lake))
        return snapshot is not None and set(NAMES) <= snapshot.tables.keys()

    try:
        with transfers:
            subscriber.start()
            await there((lake / "subscriber.json").exists, tell)
            applier.start()
            await there(published, tell)
            assert standalone.executors(), tell()
            await load.run(transactions=60)
            seen = 0
            for _ in range(10):
                snapshot = read_snapshot(storage(lake))
                assert snapshot is not None
                seen += await asyncio.to_thread(check_snapshot, lake, snapshot)
            assert seen == 10
        await load.finish()
        goal = publisher.current_lsn()
        await there(lambda: (snapshot := read_snapshot(storage(lake))) is not None and snapshot.lsn >= goal, tell)
        snapshot = read_snapshot(storage(lake))
        assert snapshot is not None
        await asyncio.to_thread(assert_same, lake, snapshot, publisher, NAMES)
        assert await asyncio.to_thread(applier.end) == 0, tell()

        # the same by spark-submit: it resumes where that one ended
        await load.run(transactions=30)
        await load.finish()
        goal = publisher.current_lsn()
        await there(lambda: subscriber.runs() and _landed(lake, goal), tell)
        applier = programs.submitted(tmp_path, standalone.master, wheel, python, {}, "--once")
        status = await asyncio.to_thread(applier.start().wait, 240)
        assert status == 0, tell()
        snapshot = read_snapshot(storage(lake))
        assert snapshot is not None
        assert snapshot.lsn >= goal
        await asyncio.to_thread(assert_same, lake, snapshot, publisher, NAMES)
    finally:
        subscriber.end()
        applier.end()


def _landed(lake: Path, goal: int) -> bool:
    from subscriber.sinks.spark.catalog.lake import Lake

    found = Lake.find(storage(lake))
    return found is not None and (found.landed() or 0) >= goal
