"""Verification of targets that do not compute the checksums themselves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from subscriber import Settings, Subscription, TableName, TargetUnavailable, VerificationLimits, VerificationReport, repair, verify
from subscriber.catalog.snapshot_requests import StoredRequests
from subscriber.sinks.sqlalchemy import snapshots
from subscriber.sinks.sqlalchemy.session import locks
from subscriber.sinks.sqlalchemy.snapshots import SnapshotSessions, SnapshotTable
from subscriber.subscription.management.status import subscription_status
from subscriber.subscription.targets import stored_catalog
from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import at_work
from tests.support.sqlalchemy_targets import IN_BOTH_ALIKE, OtherTarget

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10, 2), at timestamptz, f float8, b bytea, ok boolean, c char(4));
CREATE TABLE words (word text PRIMARY KEY, u int UNIQUE);
CREATE TABLE bag (v text, n int); ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO t SELECT i, 'v' || i, i / 7.0, timestamptz '2024-01-01 00:00:00.5+01' + i * interval '1 s', i / 3.0, int4send(i), i % 2 = 0,
    'ab' FROM generate_series(1, 3000) AS i;
INSERT INTO t (id) VALUES (-1); INSERT INTO t VALUES (-2, '', 0, '1999-12-31 23:59:59.999999+00', '-0', '', false, ''),
    (-3, chr(228) || chr(10) || chr(34) || chr(39), 1e6, 'epoch', 1e300, 'x', true, 'ä');
INSERT INTO words SELECT 'w' || i, i FROM generate_series(1, 20) AS i;
INSERT INTO bag VALUES ('a', 1), ('a', 1), (NULL, 2);
CREATE PUBLICATION pub FOR ALL TABLES
"""


@contextlib.asynccontextmanager
async def running(publisher: Database, target: OtherTarget, **settings: Any) -> AsyncIterator[Subscription]:
    """A subscription that has caught up."""
    subscription = Subscription(
        f"other_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=target.url,
        settings=Settings(wal_retrieve_retry_interval=0.2, create_tables=True, **settings),
    )
    async with at_work(subscription):
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        yield subscription


async def verified(subscription: Subscription, publisher: Database, target: OtherTarget, *tables: str) -> VerificationReport:
    return await verify(
        f"other_{publisher.name}",
        target=target.url,
        connection=publisher.conninfo(),
        tables=[TableName("public", table) for table in tables],
        limits=VerificationLimits(show_values=True),
    )


@IN_BOTH_ALIKE
async def test_finds_and_repairs_what_differs(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute(TABLES)
    async with running(publisher18_db, other_target) as found:
        report = await verified(found, publisher18_db, other_target)
        assert report.equal, str(report.to_json())
        assert [table.publisher_rows for table in report.tables] == [3, 3003, 20]
        for statement in (
            "UPDATE t SET v = 'wrong', n = NULL WHERE id = 10",
            "DELETE FROM t WHERE id = 20",
            "UPDATE t SET id = 9999 WHERE id = 30",
            "DELETE FROM bag WHERE n = 2",
            "INSERT INTO bag VALUES ('b', 3)",
            "UPDATE words SET u = 1000 + u",
            "UPDATE words SET u = 1021 - u",
        ):
            # in a thread: the subscription runs in this loop, and may hold SQLite's lock
            await asyncio.to_thread(other_target.execute, statement)
        report = await verified(found, publisher18_db, other_target)
        bag, t, words = report.tables
        assert sorted((each.kind.value, each.count) for each in bag.differences) == [("extra", 1), ("missing", 1)]
        assert sorted((each.kind.value, each.key["id"], each.columns) for each in t.differences) == [
            ("different", "10", ("v", "n")),
            ("extra", "9999", ()),
            ("missing", "20", ()),
            ("missing", "30", ()),
        ]
        assert len(words.differences) == 20
        report = await verified(found, publisher18_db, other_target, "t", "words")
        publisher18_db.execute("UPDATE t SET v = 'later' WHERE id IN (10, 20); DELETE FROM t WHERE id = 30")
        await repair(report, target=other_target.url)
        await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
        assert (await verified(found, publisher18_db, other_target, "t", "words")).equal
        assert other_target.fetch("SELECT v FROM t WHERE id IN (10, 20, 30)") == [("later",), ("later",)]


@pytest.mark.parametrize("other_target", ["mariadb"], indirect=True)
async def test_repair_does_not_wait_for_a_locked_row(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t VALUES (1, 1); CREATE PUBLICATION pub FOR TABLE t")
    async with running(publisher18_db, other_target) as found:
        await asyncio.to_thread(other_target.execute, "UPDATE t SET v = 2")
        report = await verified(found, publisher18_db, other_target)
        async with SnapshotSessions.open(other_target.url, 1) as sessions, sessions.connection() as connection:
            await connection.exec_driver_sql("SELECT * FROM t FOR UPDATE")
            began = asyncio.get_running_loop().time()
            with pytest.raises(TargetUnavailable, match="lock"):
                await repair(report, target=other_target.url)
            assert asyncio.get_running_loop().time() - began < 9, "a session that applies waits for ten seconds"
        await repair(report, target=other_target.url)
        assert (await verified(found, publisher18_db, other_target)).equal


async def test_is_equal_at_one_lsn_under_load(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) AS i")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    async with running(publisher18_db, other_target) as found:
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                await asyncio.to_thread(publisher18_db.execute, "UPDATE t SET v = v + 1 WHERE id % 10 = 3")
                await asyncio.sleep(0.005)

        writer = asyncio.create_task(write())
        try:
            for _ in range(3):
                report = await verified(found, publisher18_db, other_target)
                assert report.equal, str(report.to_json())
                assert report.tables[0].target_rows == 100
        finally:
            stop.set()
            await writer


async def test_a_target_without_snapshots_and_locks_is_compared_in_two_passes(
    publisher18_db: Database, other_target: OtherTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "_BEGIN", {})
    monkeypatch.setattr(locks, "_backend", lambda *_: locks._NoLocks())
    publisher18_db.execute("""
        CREATE TABLE t (id int PRIMARY KEY, v int); INSERT INTO t SELECT i, 0 FROM generate_series(1, 100) AS i;
        CREATE TABLE bag (v int); ALTER TABLE bag REPLICA IDENTITY FULL; INSERT INTO bag VALUES (-1), (-2);
        CREATE PUBLICATION pub FOR ALL TABLES
    """)
    reads = 0
    async with running(publisher18_db, other_target) as found:
        read = SnapshotTable.rows

        async def read_after_a_change(table: SnapshotTable, *arguments: Any) -> AsyncIterator[Sequence[Sequence[object]]]:
            nonlocal reads
            reads += 1
            publisher18_db.execute(
                f"UPDATE t SET v = v + 1 WHERE id IN (7, 8); INSERT INTO bag VALUES ({reads}); DELETE FROM t WHERE id = {reads}"
            )
            await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
            async for part in read(table, *arguments):
                yield part

        monkeypatch.setattr(SnapshotTable, "rows", read_after_a_change)
        report = await verified(found, publisher18_db, other_target)
        assert report.equal, str(report.to_json())
        assert report.lsn is None
        assert reads > 2, "each read has made a difference"
        await asyncio.to_thread(other_target.execute, "UPDATE t SET v = -1 WHERE id = 50")
        await asyncio.to_thread(other_target.execute, "DELETE FROM t WHERE id = 51")
        await asyncio.to_thread(other_target.execute, "DELETE FROM bag WHERE v = -2")
        bag, table = (await verified(found, publisher18_db, other_target)).tables
        assert [(each.kind.value, each.count, each.publisher) for each in bag.differences] == [("missing", 1, {"v": "-2"})]
        assert [(each.kind.value, each.key, each.target) for each in table.differences] == [
            ("different", {"id": "50"}, {"id": "50", "v": "-1"}),
            ("missing", {"id": "51"}, None),
        ]


@pytest.mark.parametrize("other_target", ["sqlite"], indirect=True)
async def test_compares_large_tables_by_ranges(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute("""
        CREATE TABLE in_order (id int PRIMARY KEY, v text); CREATE TABLE shuffled (id text PRIMARY KEY, v text);
        INSERT INTO in_order SELECT i, md5(i::text) FROM generate_series(1, 120000) AS i;
        INSERT INTO shuffled SELECT v, v FROM in_order ORDER BY v DESC;
        ANALYZE in_order, shuffled; CREATE PUBLICATION pub FOR ALL TABLES
    """)
    async with running(publisher18_db, other_target) as found:
        await asyncio.to_thread(other_target.execute, "UPDATE in_order SET v = 'x' WHERE id = 77777")
        await asyncio.to_thread(other_target.execute, "DELETE FROM shuffled WHERE v = (SELECT min(v) FROM shuffled)")
        in_order, shuffled = (await verified(found, publisher18_db, other_target)).tables
        assert in_order.ranges > 1
        assert [(each.key, each.columns) for each in in_order.differences] == [({"id": "77777"}, ("v",))]
        assert [each.kind.value for each in shuffled.differences] == ["missing"]


@IN_BOTH_ALIKE
async def test_apply_continues_if_the_requester_does_not_answer(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    async with running(publisher18_db, other_target) as found:
        async with stored_catalog(other_target.url, "test") as catalog:
            requests = StoredRequests(catalog.store, (await catalog.find(f"other_{publisher18_db.name}")).oid, "the test")
            await requests.take_lock()
            await requests.put("1", {"kind": "snapshot"})
            held = other_target.ours("snapshot_request")
            await asyncio.to_thread(other_target.wait, f"SELECT state FROM {held}", [("h",)])
            publisher18_db.execute("INSERT INTO t VALUES (1)")
            await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
            assert other_target.fetch(f"SELECT state FROM {held}")[0][0] in {"e", "f"}
        assert (await verified(found, publisher18_db, other_target)).equal


async def test_tables_are_compared_in_the_background(publisher18_db: Database, other_target: OtherTarget) -> None:
    publisher18_db.execute(TABLES)
    async with running(publisher18_db, other_target, verify_interval=0.2) as found:

        async def differences(expected: dict[str, int]) -> None:
            async with asyncio.timeout(WAIT_SECONDS):
                while {table.name: each.differences for table, each in found.status.verifications.items()} != expected:
                    await asyncio.sleep(0.05)

        await differences({"bag": 0, "t": 0, "words": 0})
        await asyncio.to_thread(other_target.execute, "UPDATE t SET v = 'wrong' WHERE id = 10")
        await differences({"bag": 0, "t": 1, "words": 0})
        (status,) = await subscription_status(other_target.url)
        stored = {table.table.name: table.verification for table in status.observation.tables}
        assert stored["t"] is not None
        assert not stored["t"].equal
