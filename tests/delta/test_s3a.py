"""Lakes on S3 with Spark's own S3 connector: MERGE INTO and readers with Delta's jar open the tables in the JVM, by ``s3a``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from subscriber import ConfigurationError, Subscription, Until
from subscriber.sinks.spark.catalog.snapshots import read_snapshot
from subscriber.sinks.spark.session.object_stores import creates_versions_once
from subscriber.sinks.spark.session.spark_session import DELTA_CONF
from subscriber.sinks.spark.tables.column_mapping import ROUND_DIRECTORY
from tests.crash.process import QUICK as QUICK_SETTINGS
from tests.crash.test_lake import LEFT, RIGHT, Transfers, check_logs, check_snapshot, is_beyond, tidy
from tests.spark import programs
from tests.spark.cluster import CONF, Cluster, cluster
from tests.spark.test_cluster import there
from tests.support.database import Database
from tests.support.lakes import applied, apply_all, assert_same, storage
from tests.support.object_store import Gate
from tests.support.replica import QUICK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest.importorskip("pyspark", reason="pyspark is not installed: pip install '.[spark]'")

_SDK = [f"software.amazon.awssdk:{module}:2.29.52" for module in ("s3", "s3-transfer-manager", "sts")]
S3_CONF = {
    **CONF,
    **DELTA_CONF,
    "spark.jars.packages": ",".join([DELTA_CONF["spark.jars.packages"], "org.apache.hadoop:hadoop-aws:3.4.2", *_SDK]),
    # all of AWS, 600 MB
    "spark.jars.excludes": "software.amazon.awssdk:bundle",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.delta.logStore.s3a.impl": "io.delta.storage.S3SingleDriverLogStore",
}
READ = """
import sys
from subscriber.sinks.spark.session.spark_session import spark_session
from subscriber.spark import snapshot
found = snapshot(spark_session("local[1]", dict(one.split("=", 1) for one in sys.argv[2:])), sys.argv[1])
for name in found.tables:
    print("sum", name, found.table(name).selectExpr("sum(amount)").collect()[0][0])
"""


def operations(lake: str) -> Counter[str]:
    """The operations in the histories of both tables."""
    return Counter(
        entry["operation"] for name in ("left_side", "right_side") for entry in DeltaTable(f"{lake}/tables/public/{name}").history()
    )


async def land(publisher: Database, target: str) -> None:
    """Land what the publisher has."""
    name = f"lake_{publisher.name}"
    await Subscription(name, connection=publisher.conninfo(), publications=["pub"], target=target, settings=QUICK).run(Until())


@pytest.mark.endurance
@pytest.mark.timeout(600)
async def test_merge_and_readers_open_tables_by_s3a(publisher18_db: Database, lake: str, tmp_path: Path) -> None:
    Transfers(publisher18_db)
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    target = f"spark+{lake.replace('s3://', 's3a://')}"

    await land(publisher18_db, target)
    await applied(lake)
    for table in (LEFT, RIGHT):
        # in an object store, only Delta itself writes its Change Data Feed: MERGE INTO applies the changes
        DeltaTable(f"{lake}/tables/public/{table.name}").alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    for name, sign in ((LEFT, -1), (RIGHT, 1)):
        publisher18_db.execute(
            f"BEGIN; UPDATE {name} SET amount = amount + {7 * sign} WHERE id < 11; UPDATE {name} SET id = id + 1000 WHERE id = 20; COMMIT"
        )
    await land(publisher18_db, target)
    applier = programs.program(tmp_path, ["spark-apply", target, "--once", "--master", "local[2]"], S3_CONF, {})
    try:
        status = await asyncio.to_thread(applier.start().wait, 400)
        assert status == 0, applier.log()
    finally:
        applier.end()
    assert operations(lake)["MERGE"] == 2, operations(lake)
    snapshot = read_snapshot(storage(lake))
    assert snapshot is not None
    assert_same(lake, snapshot, publisher18_db, [LEFT, RIGHT])
    assert storage(lake).files(ROUND_DIRECTORY) == []
    settings = [f"{name}={value}" for name, value in S3_CONF.items()]
    read = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", READ, target, *settings], capture_output=True, text=True, timeout=400, check=False
    )
    assert read.stdout.splitlines() == ["sum public.left_side 1930", "sum public.right_side 2070"], read.stderr[-3000:]


def test_merge_on_s3_needs_a_chosen_log_store_and_the_connector(delta: SparkSession) -> None:
    """The session of these tests has Delta's jar, but not the one of S3."""
    uri = "s3://bucket/lake"
    assert not creates_versions_once(delta, uri)
    assert creates_versions_once(delta, "gs://bucket/lake")
    assert creates_versions_once(delta, None)
    delta.conf.set("spark.delta.logStore.s3a.impl", "io.delta.storage.S3SingleDriverLogStore")
    try:
        with pytest.raises(ConfigurationError, match="its jar is missing") as raised:
            creates_versions_once(delta, uri)
    finally:
        delta.conf.unset("spark.delta.logStore.s3a.impl")
    assert raised.value.hint is not None
    assert "org.apache.hadoop:hadoop-aws" in raised.value.hint


@pytest.fixture
def gate(bucket: str) -> Iterator[Gate]:
    found = Gate()
    found.start()
    try:
        yield found
    finally:
        found.kill()


@pytest.fixture
def programs_environment(bucket: str, gate: Gate) -> dict[str, str]:
    """Of the programs, which reach the store through the gate."""
    return {"AWS_ENDPOINT_URL": gate.endpoint}


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("engine", ["local", "spark"])
async def test_every_program_is_killed(
    engine: str, publisher18_db: Database, lake: str, tmp_path: Path, gate: Gate, programs_environment: Mapping[str, str]
) -> None:
    """Every snapshot that is found after a kill has all the money."""
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    transfers = Transfers(publisher18_db)
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    target = f"spark+{lake}"
    await land(publisher18_db, target)
    # in one file
    await applied(lake)
    arguments = ["run", "--connection", publisher18_db.conninfo(), "--publication", "pub", "--target", f"{target}?batch_delay=50ms"]
    arguments += ["--name", f"lake_{publisher18_db.name}", *(part for setting in QUICK_SETTINGS for part in ("-c", setting))]
    subscriber = programs.program(tmp_path, arguments, {}, programs_environment)
    with contextlib.ExitStack() as stack:
        standalone: Cluster | None = None
        if engine == "spark":
            with pytest.MonkeyPatch.context() as patch:
                # executors have the environment of their worker
                for name, value in programs_environment.items():
                    patch.setenv(name, value)
                standalone = stack.enter_context(cluster(tmp_path / "cluster"))
            more, conf = ["--master", standalone.master], S3_CONF
        else:
            more, conf = ["--engine", "local", "--target-rows", "20"], {}
        victims = ["subscriber", "applier", "store"] * 2 + (["java", "executor"] if engine == "spark" else [])
        dice.shuffle(victims)
        applier = programs.program(tmp_path, ["spark-apply", target, *more], conf, programs_environment)
        met: Counter[str] = Counter()

        def tell() -> str:
            return f"seed {seed}, {dict(met)}\n{subscriber.log()}\n{applier.log()}"

        try:
            with transfers:
                subscriber.start()
                applier.start()
                for victim in victims:
                    before = read_snapshot(storage(lake))
                    assert before is not None
                    await there(partial(is_beyond, lake, before), tell, 240)
                    # chance, not synchronisation: somewhere in what it does
                    await asyncio.sleep(dice.uniform(0, 1))
                    await _kill(victim, subscriber, applier, gate, standalone, tell)
                    met[victim] += 1
                    snapshot = read_snapshot(storage(lake))
                    assert snapshot is not None
                    met["checked"] += await asyncio.to_thread(check_snapshot, lake, snapshot)
                before = read_snapshot(storage(lake))
                assert before is not None
                await there(partial(is_beyond, lake, before), tell, 240)
            subscriber.kill()
            status = await asyncio.to_thread(subscriber.start("--until-caught-up").wait, 90)
            assert status == 0, tell()
        finally:
            subscriber.end()
            applier.end()
    snapshot = await asyncio.to_thread(apply_all, lake)
    assert await asyncio.to_thread(check_snapshot, lake, snapshot)
    assert_same(lake, snapshot, publisher18_db, [LEFT, RIGHT])
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, snapshot)
    assert storage(lake).files(ROUND_DIRECTORY) == []
    assert met["checked"] == len(victims)
    print(f"{engine}: {dict(met)}, {transfers.count} transfers, {dict(operations(lake))}")


async def _kill(
    victim: str, subscriber: programs.Running, applier: programs.Running, gate: Gate, standalone: Cluster | None, tell: Callable[[], str]
) -> None:
    match victim:
        case "subscriber":
            subscriber.kill()
            subscriber.start()
        case "applier":
            applier.kill()
            applier.start()
        case "store":
            gate.kill()
            gate.start()
            # what ends for lack of the store is started again, as by a supervisor
            for program in (subscriber, applier):
                if not program.runs():
                    program.start()
        case "java":
            await there(lambda: applier.java() is not None, tell)
            java = applier.java()
            assert java is not None
            os.kill(java, 9)
            await there(lambda: not applier.runs(), tell)
            applier.start()
        case _:
            assert standalone is not None
            await there(lambda: bool(standalone.executors()), tell)
            with contextlib.suppress(ProcessLookupError):
                os.kill(standalone.executors()[0], 9)
