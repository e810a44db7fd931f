"""A lake as the target: copied, followed, stopped, resumed; compared value by value, by a plain Delta reader."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber import Lsn, Settings, Subscription, SubscriptionOptions, TableName, TargetError, Until
from subscriber.errors import SubscriptionInUse
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.testing.load.mixed_load import MixedLoad
from subscriber.testing.load.tables import TABLES, create_tables
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.lakes import applied, apply_all, assert_same, lake_rows, published, storage
from tests.support.replica import QUICK, at_work


def subscription(publisher: Database, path: Path, *, parameters: str = "", settings: Settings = QUICK, **options: object) -> Subscription:
    return Subscription(
        f"lake_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=f"spark://{path}{parameters}",
        options=replace(SubscriptionOptions(), **options),  # type: ignore[arg-type]
        settings=settings,
    )


T = TableName("public", "t")


async def test_copies_follows_and_resumes_after_a_stop(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text, d numeric(10,2), at timestamptz)")
    publisher18_db.execute(
        "INSERT INTO t SELECT i, 'copied' || i, i / 4.0, timestamptz '2024-01-01 00:00+00' FROM generate_series(1, 5000) AS i;"
        "CREATE PUBLICATION pub FOR TABLE t"
    )
    lake = tmp_path / "lake"
    await subscription(publisher18_db, lake).run(Until())
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    publisher18_db.execute(
        "UPDATE t SET v = 'followed' WHERE id <= 10; DELETE FROM t WHERE id > 4990; UPDATE t SET id = id + 100000 WHERE id < 5"
    )
    second = subscription(publisher18_db, lake)
    await second.run(Until())
    assert second.status.statistics.updates == 14
    assert second.status.statistics.deletes == 10
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert publisher18_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 1


async def test_the_applier_is_a_thread_of_the_same_process(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t")
    publisher18_db.execute("INSERT INTO t SELECT i, 'copied' || i FROM generate_series(1, 2000) AS i")
    lake = tmp_path / "lake"
    for confirm in ("landed", "applied"):
        replica = subscription(publisher18_db, lake, parameters=f"?apply=local&target_rows=300&batch_delay=50ms&confirm={confirm}")
        async with at_work(replica):
            for round_ in range(3):
                publisher18_db.execute(
                    f"UPDATE t SET v = '{confirm} {round_}' WHERE id % 7 = {round_}; DELETE FROM t WHERE id = {round_ + 10}"
                )
                await replica.wait_for(Lsn.parse(str(publisher18_db.value("SELECT pg_current_wal_flush_lsn()::text"))), timeout=60)
                if confirm == "applied":
                    assert_same(lake, published(lake), publisher18_db, [T])
            with pytest.raises(SubscriptionInUse, match="already has an applier"):
                apply_all(lake)
        # waiting batches were applied before the end, and by no other applier
        assert_same(lake, published(lake), publisher18_db, [T])
    status = json.loads((lake / "applier.json").read_text())["document"]
    assert (status["engine"], status["last_error"]) == ("local", None)
    assert status["counters"] == {"confl_update_missing": 0, "confl_delete_missing": 0}


@pytest.mark.parametrize("confirm", ["landed", "applied"])
async def test_table_removed_from_the_publication_while_no_subscriber_runs(publisher18_db: Database, tmp_path: Path, confirm: str) -> None:
    """The bug was that what is durable was reported as the table went, before anything was received: that ended the run, each time."""
    publisher18_db.execute(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t, u"
    )
    lake, parameters = tmp_path / "lake", f"?apply=local&confirm={confirm}"
    for statement in (
        "INSERT INTO t VALUES (1); INSERT INTO u VALUES (1)",
        "INSERT INTO t VALUES (2); INSERT INTO u VALUES (2); ALTER PUBLICATION pub DROP TABLE u",
        "INSERT INTO t VALUES (3); INSERT INTO u VALUES (3)",
        "INSERT INTO t VALUES (4); ALTER PUBLICATION pub ADD TABLE u",
    ):
        publisher18_db.execute(statement)
        await subscription(publisher18_db, lake, parameters=parameters).run(Until())
    assert_same(lake, published(lake), publisher18_db, [T, TableName("public", "u")])


async def test_an_applier_that_cannot_be_ends_the_run(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    lake = tmp_path / "lake"
    await subscription(publisher18_db, lake).run(Until())
    other = Applier(storage(lake), LocalEngine(storage(lake)))
    other.open()
    publisher18_db.execute("INSERT INTO t VALUES (2, 'b')")
    with pytest.raises(SubscriptionInUse, match="already has an applier"):
        await subscription(publisher18_db, lake, parameters="?apply=local").run()
    other.close()


async def test_every_type_and_every_kind_of_transaction_comes_through(publisher18_db: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    await create_tables(publisher18_db.dsn, rows=300)
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES WITH (publish_via_partition_root = true)")
    names = [TableName("load", name) for name in TABLES]
    load = MixedLoad(publisher18_db.dsn, seed=5, sessions=2, huge_rows=2000)
    let_slots_be_created(publisher18_db)
    for _ in range(2):
        found = subscription(publisher18_db, lake, parameters="?batch_delay=50ms", two_phase=True)
        async with at_work(found):
            await load.run(transactions=40)
            await load.finish()
            await found.wait_for(publisher18_db.current_lsn(), 60)
            await applied(lake)
        let_small_transactions_stream(publisher18_db)  # to the next one: all is copied
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, names)


async def test_keys_that_are_toasted(publisher18_db: Database, tmp_path: Path) -> None:
    """The bug was that the publisher sends such a key in the old row alone, and all rows of it became one."""
    text = "(SELECT string_agg(md5(i::text || g::text || '{}'), '') FROM generate_series(1, 13) i)"
    columns = ", ".join(text.format(column) for column in "abcde")
    publisher18_db.execute(f"""
        CREATE TABLE t (url text PRIMARY KEY, a text, b text, c text, d text, e text, v int);
        CREATE PUBLICATION pub FOR TABLE t;
        INSERT INTO t SELECT {text.format("url")}, {columns}, 1 FROM generate_series(1, 20) g
    """)
    lake = tmp_path / "lake"
    await subscription(publisher18_db, lake).run(Until())
    assert_same(lake, await applied(lake), publisher18_db, [T])
    publisher18_db.execute("UPDATE t SET v = 2; UPDATE t SET v = 3, a = 'short' WHERE url < '5'; DELETE FROM t WHERE url > 'd'")
    publisher18_db.execute("UPDATE t SET url = 'x' || url WHERE url > '9'; UPDATE t SET v = 4 WHERE url > 'x'")
    await subscription(publisher18_db, lake).run(Until())
    assert_same(lake, await applied(lake), publisher18_db, [T])


async def test_a_second_subscriber_of_a_lake_is_refused(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    lake = tmp_path / "lake"
    first = subscription(publisher18_db, lake)
    async with at_work(first):
        await first.wait_for(publisher18_db.current_lsn(), 30)
        with pytest.raises(SubscriptionInUse, match="in use by another process"):
            await subscription(publisher18_db, lake).run(Until())


async def test_a_directory_that_is_no_lake_is_refused_before_anything_is_made(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    (tmp_path / "mine").write_text("")
    with pytest.raises(TargetError, match="is not empty and is not a lake"):
        await subscription(publisher18_db, tmp_path).run(Until())
    assert publisher18_db.value("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()") == 0


async def test_columns_come_and_go_while_it_runs(publisher18_db: Database, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, a text); INSERT INTO t VALUES (1, 'x'); CREATE PUBLICATION pub FOR TABLE t")
    await subscription(publisher18_db, lake).run(Until())
    publisher18_db.execute("ALTER TABLE t ADD COLUMN b int; INSERT INTO t VALUES (2, 'y', 7)")
    publisher18_db.execute("ALTER TABLE t ALTER COLUMN b TYPE bigint; INSERT INTO t VALUES (3, 'z', 5000000000)")
    await subscription(publisher18_db, lake).run(Until())
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    publisher18_db.execute("ALTER TABLE t DROP COLUMN a; UPDATE t SET b = 0 WHERE id = 1")
    await subscription(publisher18_db, lake).run(Until())
    snapshot = await applied(lake)
    assert_same(lake, snapshot, publisher18_db, [T])
    assert set(lake_rows(lake, snapshot, T, ["a"])) == {(None,)}
