"""Table synchronization while the table is unpublished, rewritten, altered or replaced by another of its name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace as changed
from typing import Any

import pytest

from subscriber import TableName, Until
from subscriber.interfaces import PublishedTable
from subscriber.subscription.run.tables.copy_source import PublisherSource
from subscriber.walreceiver.copying.snapshot import SnapshotReader
from tests.support.database import Database
from tests.support.examples import some_and_others
from tests.support.observation import eventually
from tests.support.replica import QUICK, replica, subscription_of
from tests.support.row_gates import closed_gates, make_row_gate, open_transaction, waiting_at_gate, waiting_for_lock_on
from tests.support.table_swap import ROWS, make_swappable_table, swap_in, swap_out
from tests.support.table_synchronization import IN_PARTS, STATES, only_the_main_slot


async def test_unpublished_in_the_middle_of_its_copy(publisher18_db: Database, target_db: Database) -> None:
    """What was copied is undone with it: published again, no row is there twice. Rows of others stay."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE big (id int, v text); CREATE TABLE other (id int PRIMARY KEY)")
    publisher18_db.execute(
        "INSERT INTO big SELECT i, repeat('v', 100) FROM generate_series(1, 3000) AS i; CREATE PUBLICATION pub FOR ALL TABLES"
    )
    target_db.execute("INSERT INTO big VALUES (-1, 'mine')")
    make_row_gate(target_db, "big", "NEW.id = 3000", 1)
    with closed_gates(target_db, 1):
        async with replica(publisher18_db, target_db, settings=IN_PARTS):
            await eventually(target_db, waiting_at_gate(1), 1)
            await eventually(target_db, "SELECT count(*) > 0 FROM subscriber.copy_part", True)
    assert ("big", "d") in target_db.fetch(STATES)
    publisher18_db.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE other")
    await subscription_of(publisher18_db, target_db).run(Until())
    assert target_db.fetch("SELECT id FROM big") == [(-1,)]
    assert target_db.fetch(STATES) == [("other", "r")] or target_db.fetch(STATES) == [("other", "s")]
    assert only_the_main_slot(publisher18_db)
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE big")
    await subscription_of(publisher18_db, target_db).run(Until())
    assert target_db.fetch("SELECT count(*), count(DISTINCT id) FROM big") == [(3001, 3001)]


@pytest.mark.parametrize(
    ("rewrite", "rows"),
    [
        ("VACUUM FULL big", 5000),
        pytest.param("CLUSTER big USING big_id", 5000, marks=pytest.mark.endurance),
        pytest.param("ALTER TABLE big ALTER id TYPE bigint", 5000, marks=pytest.mark.endurance),
        ("BEGIN; TRUNCATE big; INSERT INTO big VALUES (1, 'new'), (2, 'new'); COMMIT", 2),
    ],
)
async def test_rewritten_between_two_parts(publisher18_db: Database, target_db: Database, rewrite: str, rows: int) -> None:
    """Rows are in other blocks then: the parts do not fit together, and the table is copied again."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE big (id int, v text); CREATE INDEX big_id ON big (id)")
    publisher18_db.execute("INSERT INTO big SELECT 10000 - i, repeat('v', 100) FROM generate_series(1, 6000) AS i")
    publisher18_db.execute("DELETE FROM big WHERE id % 3 = 0 AND id > 7000; CREATE PUBLICATION pub FOR TABLE big")
    make_row_gate(target_db, "big", "NEW.id = 8998", 1)
    with closed_gates(target_db, 1) as release:
        async with replica(publisher18_db, target_db, settings=changed(IN_PARTS, max_copy_workers_per_table=1)) as found:
            await eventually(target_db, waiting_at_gate(1), 1)
            with contextlib.closing(publisher18_db.connect()) as other:
                rewriting = asyncio.create_task(asyncio.to_thread(other.execute, rewrite.encode()))
                await eventually(publisher18_db, waiting_for_lock_on("big"), 1)
                release(1)
                await rewriting
            assert len(await found.same("SELECT id, v FROM big ORDER BY id, v")) == rows
            assert target_db.value("SELECT srcopyattempt FROM subscriber.pg_subscription_rel") > 1
    assert only_the_main_slot(publisher18_db)


async def test_swapped_for_a_table_that_is_newer_than_the_snapshot(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows came by another name, behind the snapshot: the bug was that it was taken for empty."""
    make_swappable_table(publisher18_db, partitioned=False)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE t_new (LIKE t INCLUDING ALL)")
    publisher18_db.execute("DROP TABLE t_new")
    real, described = PublisherSource.describe, 0

    async def describe(self: PublisherSource, table: TableName) -> PublishedTable | None:
        nonlocal described
        described += 1
        if described == 2:
            # the first is before there is a snapshot
            new = (
                f"BEGIN; CREATE TABLE t_new (LIKE t INCLUDING ALL); INSERT INTO t_new SELECT i, 'new' FROM generate_series(1, {ROWS}) AS i"
            )
            await asyncio.to_thread(publisher18_db.execute, f"{new}; ALTER PUBLICATION pub ADD TABLE t_new; COMMIT; {swap_in('t')}")
        return await real(self, table)

    monkeypatch.setattr(PublisherSource, "describe", describe)
    async with replica(publisher18_db, target_db, settings=QUICK) as found:
        assert len(await found.same("SELECT id, v FROM t ORDER BY id")) == ROWS
        assert target_db.value("SELECT max(srcopyattempt) FROM subscriber.pg_subscription_rel") > 1
    assert only_the_main_slot(publisher18_db)


@some_and_others(["partitioned", "back"], [(False, True), (True, False)], [(False, False), (True, True)])
async def test_swapped_between_two_parts(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, partitioned: bool, back: bool
) -> None:
    """The bug was that parts that were read while another table had the name were that one's."""
    name = make_swappable_table(publisher18_db, partitioned=partitioned)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE t_new (LIKE t INCLUDING ALL)")
    real, readers = SnapshotReader.open, 0

    async def opened(conninfo: str, snapshot_name: str, *, application_name: str) -> SnapshotReader:
        nonlocal readers
        readers += 1
        # the first finds the parts, the second reads one of them, and so on
        if readers == 3:
            await asyncio.to_thread(publisher18_db.execute, swap_in(name))
        if readers == 4 and back:
            await asyncio.to_thread(publisher18_db.execute, swap_out(name))
        return await real(conninfo, snapshot_name, application_name=application_name)

    monkeypatch.setattr(SnapshotReader, "open", opened)
    settings = changed(IN_PARTS, max_copy_workers_per_table=1, max_sync_workers_per_subscription=1)
    async with replica(publisher18_db, target_db, settings=settings) as found:
        assert len(await found.same("SELECT id, v FROM t ORDER BY id")) == ROWS
        assert target_db.value("SELECT max(srcopyattempt) FROM subscriber.pg_subscription_rel") > 1
    assert only_the_main_slot(publisher18_db)


async def test_swapped_while_a_part_waits_to_be_read_and_back(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the part itself can notice that."""
    make_swappable_table(publisher18_db, partitioned=False)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE t_new (LIKE t INCLUDING ALL)")
    real_read, real_open, done = SnapshotReader.copy_out, SnapshotReader.open, list[str]()

    async def once(statements: str) -> None:
        if statements not in done:
            done.append(statements)
            await asyncio.to_thread(publisher18_db.execute, statements)

    async def swapped(self: SnapshotReader, *arguments: Any) -> AsyncIterator[bytes]:
        await once(swap_in("t"))
        async for piece in real_read(self, *arguments):
            yield piece

    async def opened(*arguments: Any, **named: Any) -> SnapshotReader:
        # the next who looks, behind the part
        if done:
            await once(swap_out("t"))
        return await real_open(*arguments, **named)

    monkeypatch.setattr(SnapshotReader, "copy_out", swapped)
    monkeypatch.setattr(SnapshotReader, "open", opened)
    async with replica(publisher18_db, target_db, settings=changed(QUICK, max_sync_workers_per_subscription=1)) as found:
        assert len(await found.same("SELECT id, v FROM t ORDER BY id")) == ROWS
    assert done == [swap_in("t"), swap_out("t")]


@pytest.mark.parametrize("columns", ["id int PRIMARY KEY, v text", "id text PRIMARY KEY, v text", "id int PRIMARY KEY"])
async def test_swapped_while_a_part_waits_to_be_read(
    publisher18_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """The statement then reads the other table, which may not even have its columns, or values that the target takes."""
    publisher18_db.execute(f"""
        CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1, 'old');
        CREATE TABLE t_new ({columns}); INSERT INTO t_new (id) VALUES ('{"a" if "id text" in columns else "2"}');
        CREATE PUBLICATION pub FOR TABLE t
    """)
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    real, reads = SnapshotReader.copy_out, 0

    async def swapped(self: SnapshotReader, *arguments: Any) -> AsyncIterator[bytes]:
        nonlocal reads
        reads += 1
        if reads == 1:
            await asyncio.to_thread(publisher18_db.execute, swap_in("t"))
        async for piece in real(self, *arguments):
            yield piece

    monkeypatch.setattr(SnapshotReader, "copy_out", swapped)
    subscription = subscription_of(publisher18_db, target_db)
    await subscription.run(Until())
    # what has the name now is not published
    assert reads == 1
    assert subscription.status.tables == {}
    assert target_db.value("SELECT count(*) FROM t") == 0


async def test_altered_while_the_slot_is_created(publisher18_db: Database, target_db: Database) -> None:
    """The slot waits for transactions that write; what they do to the table before its snapshot counts."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 5); CREATE TABLE other (id int)")
    target_db.execute("CREATE TABLE t (id int PRIMARY KEY, extra int); CREATE TABLE other (id int)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE other")
    subscription = subscription_of(publisher18_db, target_db)
    await subscription.run(Until())
    publisher18_db.execute("ALTER PUBLICATION pub ADD TABLE t")
    with open_transaction(publisher18_db, "INSERT INTO other VALUES (1)") as release:
        async with replica(publisher18_db, target_db) as found:
            await eventually(
                publisher18_db,
                "SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pg%sync%' AND confirmed_flush_lsn IS NULL",
                1,
            )
            publisher18_db.execute("ALTER TABLE t ADD extra int; UPDATE t SET extra = id * 10")
            release()
            assert await found.same("SELECT id, extra FROM t ORDER BY id") == [(n, n * 10) for n in range(1, 6)]
