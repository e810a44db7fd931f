"""Lakes in an object store: no rename, no fsync, no lock."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from subscriber import Subscription, SubscriptionOptions, TableName, Until
from subscriber.errors import DataLossError, SubscriptionInUse, TargetError
from subscriber.sinks.spark.catalog.snapshots import read_cut
from subscriber.sinks.spark.pipeline import publisher as publisher_module
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines import LocalEngine
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.crash.process import QUICK as QUICK_SETTINGS
from tests.crash.test_lake import LEFT, RIGHT, Program, Transfers, check_cut, check_logs, is_beyond, publishes, there, tidy
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.lakes import applied, apply_all, assert_same, published, storage
from tests.support.object_store import object_store
from tests.support.replica import QUICK

KILLS = 4
ARGUMENTS = [argument for setting in QUICK_SETTINGS for argument in ("-c", setting)]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with object_store() as uri:
        yield uri


@pytest.fixture
def lake(bucket: str) -> str:
    return f"{bucket}/{secrets.token_hex(5)}"


def subscription(publisher: Database, lake: str, parameters: str = "") -> Subscription:
    return Subscription(
        f"lake_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=f"spark+{lake}{parameters}",
        options=SubscriptionOptions(two_phase=True),
        settings=QUICK,
    )


async def test_every_kind_of_transaction_comes_through(publisher18_db: Database, lake: str) -> None:
    await create_tables(publisher18_db.dsn, rows=300)
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    names = [TableName("load", name) for name in TABLES]
    load = MixedLoad(publisher18_db.dsn, seed=12, sessions=2, huge_rows=1000)
    let_slots_be_created(publisher18_db)
    for _ in range(2):
        found = subscription(publisher18_db, lake, "?batch_delay=50ms")
        running = asyncio.create_task(found.run())
        await load.run(transactions=30)
        await load.finish()
        await found.wait_for(publisher18_db.current_lsn(), 60)
        await applied(lake, ApplierSettings(target_rows=500))
        found.stop()
        await running
        let_small_transactions_stream(publisher18_db)  # to the next one: all is copied
    cut = published(lake)
    assert_same(lake, cut, publisher18_db, names)
    landed = storage(lake).files("landing")
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, cut)
    assert len(storage(lake).files("landing")) < len(landed), "what is change log is landed no more"


async def test_directory_with_other_files_is_refused(publisher18_db: Database, lake: str) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    storage(lake).write("mine", b"")
    with pytest.raises(TargetError, match="is not empty and is not a lake"):
        await subscription(publisher18_db, lake).run(Until())
    assert publisher18_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0


@pytest.mark.parametrize("late", [True, False])
async def test_an_applier_that_was_thought_dead_takes_nothing_back(
    publisher18_db: Database, lake: str, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """There is no lock. The bug was that its old cut took the place of later ones, whose landed files were gone."""
    db, name = publisher18_db, "write_cut" if late else "require_alone"
    db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")

    async def landed(number: int) -> None:
        db.execute(f"INSERT INTO t VALUES ({number})")
        await subscription(db, lake, "?batch_delay=50ms").run(Until())

    await landed(1)
    await applied(lake)
    await landed(2)
    paused, go = threading.Event(), threading.Event()
    place: Any = publisher_module if late else publisher_module.CutPublisher
    real = getattr(place, name)

    def paused_at(*arguments: Any) -> Any:
        # the second time it looks whether it is alone is before it publishes
        if threading.current_thread() is old and (late or paused.is_set() or arguments[0]._mine):
            paused.set()
            assert go.wait(60)
        return real(*arguments)

    refused: list[BaseException] = []

    def apply_late() -> None:
        work = Applier(storage(lake), LocalEngine(storage(lake)))
        work.open()
        try:
            while work.run_round() is not None:
                pass
        except (SubscriptionInUse, DataLossError) as error:
            refused.append(error)

    old = threading.Thread(target=apply_late)
    monkeypatch.setattr(place, name, paused_at)
    old.start()
    assert await asyncio.to_thread(paused.wait, 60)
    for number in (3, 4, 5):
        await landed(number)
        await applied(lake)
        await asyncio.to_thread(tidy, lake)
    newest = published(lake)
    go.set()
    await asyncio.to_thread(old.join)
    if late:
        assert published(lake).lsn < newest.lsn, "it was too late to look"
    else:
        assert published(lake) == newest
        assert [str(error) for error in refused] == [
            f"the lake in {storage(lake).place} has another applier, which published in the meantime"
        ]
    await landed(6)
    assert_same(lake, await applied(lake), db, [TableName("public", "t")])
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, published(lake))


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(480)
async def test_killed_at_random(publisher18_db: Database, lake: str, tmp_path: Path) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    dice = random.Random(seed)
    transfers = Transfers(publisher18_db)
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    target = f"spark+{lake}"
    subscriber = Program(
        tmp_path,
        "subscriber",
        *("run", "--connection", publisher18_db.conninfo(), "--publication", "pub", "--target", f"{target}?batch_delay=50ms"),
        *("--name", f"lake_{publisher18_db.name}", *ARGUMENTS),
    )
    applier = Program(tmp_path, "applier", "spark-apply", target, "--engine", "local", "--target-rows", "20")
    met: Counter[str] = Counter()
    try:
        with transfers:
            subscriber.start()
            await there(lambda: storage(lake).read("subscriber.json") is not None, subscriber)
            applier.start()
            await there(partial(publishes, lake), subscriber, applier)
            for number in range(KILLS):
                victim = (subscriber, applier)[number % 2]
                # chance, not synchronisation: somewhere in what it does
                await asyncio.sleep(dice.uniform(0, 1))
                victim.kill()
                cut = read_cut(storage(lake))
                assert cut is not None
                met["checked"] += await asyncio.to_thread(check_cut, lake, cut)
                victim.start()
                await there(partial(is_beyond, lake, cut), subscriber, applier)
        subscriber.kill()
        applier.kill()
        status = await asyncio.to_thread(subscriber.start("--until-caught-up").wait, 90)
        assert status == 0, subscriber.log()
    finally:
        subscriber.end()
        applier.end()
    cut = await asyncio.to_thread(apply_all, lake)
    assert await asyncio.to_thread(check_cut, lake, cut)
    assert_same(lake, cut, publisher18_db, [LEFT, RIGHT])
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, cut)
    assert met["checked"] == KILLS
    changes = DeltaTable(f"{lake}/log/public/left_side").to_pyarrow_table(columns=["_op"])["_op"].to_pylist()
    assert changes.count("u") >= transfers.count // 2 > KILLS
