"""Lakes in an object store: no rename, no fsync, no lock."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from deltalake import DeltaTable

from subscriber import Subscription, SubscriptionOptions, TableName, Until
from subscriber.errors import SubscriptionInUse, TargetError
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots, read_snapshot
from subscriber.sinks.spark.files.file_errors import AccessDenied
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.testing.load.mixed_load import Kind, MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.crash.process import QUICK as QUICK_SETTINGS
from tests.crash.test_lake import LEFT, RIGHT, Program, Transfers, check_logs, check_snapshot, is_beyond, publishes, there, tidy
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.lakes import applied, apply_all, assert_same, published, storage
from tests.support.object_store import denied
from tests.support.program import confirmed
from tests.support.replica import QUICK, at_work

KILLS = 4
ARGUMENTS = [argument for setting in QUICK_SETTINGS for argument in ("-c", setting)]


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
        async with at_work(found):
            await load.run(transactions=len(Kind))
            await load.finish()
            await found.wait_for(publisher18_db.current_lsn(), 60)
            await applied(lake, ApplierSettings(target_rows=500))
        let_small_transactions_stream(publisher18_db)  # to the next one: all is copied
    snapshot = published(lake)
    assert_same(lake, snapshot, publisher18_db, names)
    landed = storage(lake).files("landing")
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, snapshot)
    assert len(storage(lake).files("landing")) < len(landed), "what is change log is landed no more"


async def test_directory_with_other_files_is_refused(publisher18_db: Database, lake: str) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    storage(lake).write("mine", b"")
    with pytest.raises(TargetError, match="is not empty and is not a lake"):
        await subscription(publisher18_db, lake).run(Until())
    assert publisher18_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0


async def test_missing_permissions_are_named(publisher18_db: Database, lake: str) -> None:
    """The bug was that errors only said that the store cannot be read, and delta-rs' only that it is an error of S3."""
    db = publisher18_db
    db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    await subscription(db, lake, "?batch_delay=50ms").run(Until())
    before = await applied(lake)
    acknowledged = confirmed(db, f"lake_{db.name}")
    db.execute("INSERT INTO t VALUES (1)")
    table = LakeDelta(storage(lake), before.tables[TableName("public", "t")].path)
    with denied():
        said = r"permission denied \((ACCESS_DENIED|INVALID_ACCESS_KEY_ID|403)\)"
        for work in (subscription(db, lake).run(Until()), applied(lake), asyncio.to_thread(table.load)):
            with pytest.raises(TargetError, match=f"^cannot read or write .*{lake}.*: {said}") as error:
                await work
            assert type(error.value) is AccessDenied, "a retry does not help"
            assert "credentials" in error.value.one_line()
    assert confirmed(db, f"lake_{db.name}") == acknowledged
    assert published(lake) == before
    await subscription(db, lake, "?batch_delay=50ms").run(Until())
    assert_same(lake, await applied(lake), db, [TableName("public", "t")])


@pytest.mark.endurance
async def test_of_two_appliers_one_ends_and_nothing_wrong_is_published(
    publisher18_db: Database, lake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no lock. One applier is paused before it publishes. The other one publishes, and removes landed files."""
    db = publisher18_db
    db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")

    async def landed(number: int) -> None:
        db.execute(f"INSERT INTO t VALUES ({number})")
        await subscription(db, lake, "?batch_delay=50ms").run(Until())

    await landed(1)
    await applied(lake)
    await landed(2)
    paused, go, real = threading.Event(), threading.Event(), SnapshotPublisher.publish

    def paused_at(self: SnapshotPublisher, snapshot: Snapshot) -> Snapshot:
        if threading.current_thread() is old:
            paused.set()
            assert go.wait(60)
        return real(self, snapshot)

    refused: list[BaseException] = []

    def apply_late() -> None:
        work = Applier(storage(lake), LocalEngine(storage(lake)))
        work.open()
        try:
            work.run_round()
        except SubscriptionInUse as error:
            refused.append(error)

    old = threading.Thread(target=apply_late)
    monkeypatch.setattr(SnapshotPublisher, "publish", paused_at)
    old.start()
    assert await asyncio.to_thread(paused.wait, 60)
    for number in (3, 4, 5):
        await landed(number)
        await applied(lake)
        await asyncio.to_thread(tidy, lake)
    newest = published(lake)
    go.set()
    await asyncio.to_thread(old.join)
    assert published(lake) == newest
    assert [str(error) for error in refused] == [f"the lake in {storage(lake).place} has another applier, which published in the meantime"]
    await landed(6)
    assert_same(lake, await applied(lake), db, [TableName("public", "t")])
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, published(lake))


@pytest.mark.endurance
async def test_two_appliers_race_for_every_publication(publisher18_db: Database, lake: str) -> None:
    """Each is started again when it ends. Every snapshot that was published has the rows of its LSN."""
    db = publisher18_db
    db.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE a, b")
    ended, stop = Counter[str](), threading.Event()

    def keep_applying(which: str) -> None:
        work = Applier(storage(lake), LocalEngine(storage(lake)))
        work.open()
        while not stop.is_set():
            try:
                work.run_round()
                work.tidy()
            except SubscriptionInUse:
                ended[which] += 1
                work = Applier(storage(lake), LocalEngine(storage(lake)))
                work.open()
            except TargetError:
                pass  # a table was changed by the other one, or its round's files are gone: planned again

    found = subscription(db, lake, "?batch_delay=20ms")
    async with at_work(found):
        while storage(lake).read("subscriber.json") is None:
            await asyncio.sleep(0.05)
        threads = [threading.Thread(target=keep_applying, args=[which]) for which in ("first", "second")]
        for thread in threads:
            thread.start()
        number = 0
        async with asyncio.timeout(60):
            while ended.total() < 2:
                number += 1
                db.execute(f"BEGIN; INSERT INTO a VALUES ({number}); INSERT INTO b VALUES ({number}); COMMIT")
                await asyncio.sleep(0.02)
        await found.wait_for(db.current_lsn(), 60)
        stop.set()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    snapshot = await applied(lake)
    assert_same(lake, snapshot, db, [TableName("public", "a"), TableName("public", "b")])
    snapshots, before = Snapshots(storage(lake)), 0
    assert snapshot.publication is not None
    for version in range(1, DeltaTable(f"{lake}/snapshots").version() + 1):
        if (one := snapshots.at(version)) is None:
            continue  # both have created the table
        assert one.lsn >= before
        before = one.lsn
        rows = [
            DeltaTable(f"{lake}/{table.path}", version=table.version).to_pyarrow_table()["id"].to_pylist() for table in one.tables.values()
        ]
        assert len(rows) < 2 or sorted(rows[0]) == sorted(rows[1])


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
                snapshot = read_snapshot(storage(lake))
                assert snapshot is not None
                met["checked"] += await asyncio.to_thread(check_snapshot, lake, snapshot)
                victim.start()
                await there(partial(is_beyond, lake, snapshot), subscriber, applier)
        subscriber.kill()
        applier.kill()
        status = await asyncio.to_thread(subscriber.start("--until-caught-up").wait, 90)
        assert status == 0, subscriber.log()
    finally:
        subscriber.end()
        applier.end()
    snapshot = await asyncio.to_thread(apply_all, lake)
    assert await asyncio.to_thread(check_snapshot, lake, snapshot)
    assert_same(lake, snapshot, publisher18_db, [LEFT, RIGHT])
    await asyncio.to_thread(tidy, lake)
    await asyncio.to_thread(check_logs, lake, snapshot)
    assert met["checked"] == KILLS
    changes = DeltaTable(f"{lake}/log/public/left_side").to_pyarrow_table(columns=["_op"])["_op"].to_pylist()
    assert changes.count("u") >= transfers.count // 2 > KILLS
