"""Verification of a lake at a published snapshot."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber import ConfigurationError, Settings, Subscription, TargetError, VerificationLimits, VerificationReport, repair, verify
from subscriber.sinks.spark.reading import compared_lake
from subscriber.subscription.management.status import subscription_status
from tests.support.database import WAIT_SECONDS, Database
from tests.support.every_type import SETUP, SPECIMENS, create_table, fill
from tests.support.lakes import applied
from tests.support.program import running as running_program
from tests.support.replica import QUICK, at_work

TABLES = """
CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10, 2), "a b" timestamptz, f float4[], s text[], c char(4));
CREATE TABLE bag (v text, n int); ALTER TABLE bag REPLICA IDENTITY FULL;
INSERT INTO t SELECT i, 'v' || i, i / 7.0, timestamptz '2024-01-01 00:00:00.5+01' + i * interval '1 s', ARRAY[i / 3.0],
    ARRAY['a ' || i, NULL], 'ab' FROM generate_series(1, 3000) AS i;
INSERT INTO t (id, n) VALUES (-1, 'NaN');
INSERT INTO bag VALUES ('a', 1), ('a', 1), (NULL, 2);
CREATE PUBLICATION pub FOR ALL TABLES
"""


@contextlib.asynccontextmanager
async def running(
    publisher: Database, lake: Path, parameters: str = "?apply=local&batch_delay=20ms", settings: Settings = QUICK
) -> AsyncIterator[Subscription]:
    """A subscription that has caught up."""
    subscription = Subscription(
        f"lake_{publisher.name}",
        connection=publisher.conninfo(),
        publications=["pub"],
        target=f"spark://{lake}{parameters}",
        settings=settings,
    )
    async with at_work(subscription):
        await subscription.wait_for(publisher.current_lsn(), WAIT_SECONDS)
        yield subscription


async def verified(publisher: Database, lake: Path, *, show_values: bool = False) -> VerificationReport:
    return await verify(
        f"lake_{publisher.name}",
        target=f"spark://{lake}",
        connection=publisher.conninfo(),
        limits=VerificationLimits(show_values=show_values),
    )


async def test_a_lake_is_equal_at_one_lsn_under_load(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute(TABLES)
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake):
        stop = asyncio.Event()

        async def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                changes = f"INSERT INTO bag VALUES ('b', {number}); DELETE FROM bag WHERE n = {number - 9}"
                await asyncio.to_thread(publisher18_db.execute, f"UPDATE t SET v = 'w{number}' WHERE id % 500 = 3; {changes}")
                await asyncio.sleep(0.005)

        writer = asyncio.create_task(write())
        try:
            for _ in range(3):
                report = await verified(publisher18_db, lake)
                assert report.equal, str(report.to_json())
                assert report.held_seconds < 2
                assert report.tables[1].target_rows == 3001
        finally:
            stop.set()
            await writer


async def test_tables_are_compared_in_the_background(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute(TABLES)
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake, settings=replace(QUICK, verify_interval=0.2)) as found:
        publisher18_db.execute("INSERT INTO bag VALUES ('b', 3)")
        lsn = publisher18_db.current_lsn()
        async with asyncio.timeout(WAIT_SECONDS):
            while sorted(each.row_count for each in found.status.verifications.values() if each.lsn >= lsn and each.equal) != [4, 3001]:
                await asyncio.sleep(0.05)
    (status,) = await subscription_status(f"spark://{lake}")
    assert [table.verification is not None and table.verification.equal for table in status.observation.tables] == [True, True]


async def test_names_rows_that_differ_in_a_lake(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute(TABLES)
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake, "?apply=local&confirm=applied&batch_delay=20ms"):
        report = await verified(publisher18_db, lake)
        assert report.equal, str(report.to_json())
        assert [table.publisher_rows for table in report.tables] == [3, 3001]
        # changes that are not published
        publisher18_db.execute("ALTER PUBLICATION pub SET (publish = 'truncate')")
        publisher18_db.execute(
            "UPDATE t SET v = 'x', f = '{0.1, NULL}' WHERE id = 10; DELETE FROM t WHERE id = 20; INSERT INTO t (id) VALUES (9999)"
        )
        publisher18_db.execute("INSERT INTO bag VALUES ('b', 3)")
        publisher18_db.execute("ALTER PUBLICATION pub SET (publish = 'insert, update, delete, truncate'); UPDATE t SET n = 7 WHERE id = 30")
        bag, table = (await verified(publisher18_db, lake, show_values=True)).tables
        assert [(each.kind.value, each.publisher) for each in bag.differences] == [("missing", {"v": "b", "n": "3"})]
        assert sorted((each.kind.value, each.key["id"], each.columns) for each in table.differences) == [
            ("different", "10", ("v", "f")),
            ("extra", "20", ()),
            ("missing", "9999", ()),
        ]
        (different,) = (each for each in table.differences if each.columns)
        assert different.target is not None
        assert (different.target["v"], different.target["f"]) == ("v10", "{3.3333333}")
        with pytest.raises(ConfigurationError, match="a lake has no rows that can be repaired one by one"):
            await repair(await verified(publisher18_db, lake), target=f"spark://{lake}")


async def test_the_applier_publishes_a_snapshot_where_apply_was_held(
    publisher18_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake, "?batch_delay=0s") as found:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
        task = asyncio.create_task(verified(publisher18_db, lake))
        while not (lake / "boundary.json").exists():
            assert not task.done()
            await asyncio.sleep(0.02)
        for number in (2, 3):
            publisher18_db.execute(f"INSERT INTO t VALUES ({number})")
            await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
        # everything has been landed before the first round
        snapshot = await applied(lake)
        report = await task
        assert (report.equal, report.tables[0].publisher_rows) == (True, 1), str(report.to_json())
        assert report.lsn is not None
        assert snapshot.lsn > report.lsn
        publisher18_db.execute("INSERT INTO t VALUES (4)")
        monkeypatch.setattr(compared_lake, "_NOT_RUNNING_SECONDS", 1)
        with pytest.raises(TargetError, match="the lake has no applier"):
            await verified(publisher18_db, lake)


async def test_compares_every_type_of_a_lake(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute(SETUP)
    create_table(publisher18_db, "every", specimens=SPECIMENS)
    fill(publisher18_db, "every", specimens=SPECIMENS)
    publisher18_db.execute("CREATE PUBLICATION pub FOR TABLE app.every")
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake):
        report = await verified(publisher18_db, lake, show_values=True)
        assert report.equal, {column for each in report.tables[0].differences for column in each.columns} or report.to_json()


async def test_a_killed_verification_of_a_lake_leaves_nothing_behind(publisher18_db: Database, tmp_path: Path) -> None:
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake, "?batch_delay=0s") as found:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
        arguments = ["verify", f"lake_{publisher18_db.name}", "--connection", publisher18_db.dsn, "--target", f"spark://{lake}"]
        with running_program(*arguments) as program:
            while not (lake / "boundary.json").exists():
                assert program.process.poll() is None
                await asyncio.sleep(0.02)
            program.send(signal.SIGKILL)
            await asyncio.to_thread(program.ended)
        publisher18_db.execute("INSERT INTO t VALUES (2)")
        await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%snapshot'"
        await asyncio.to_thread(publisher18_db.wait, sessions, 0)
        task = asyncio.create_task(verified(publisher18_db, lake))
        while not task.done():
            await applied(lake)
        report = await task
        assert (report.equal, report.tables[0].publisher_rows) == (True, 2), str(report.to_json())


async def test_verification_ends_if_the_applier_fails_again_and_again(
    publisher18_db: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that it waited without end, and did not say why."""
    publisher18_db.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION pub FOR TABLE t")
    lake = tmp_path / "lake"
    async with running(publisher18_db, lake, "?batch_delay=0s") as found:
        publisher18_db.execute("INSERT INTO t VALUES (1)")
        await found.wait_for(publisher18_db.current_lsn(), WAIT_SECONDS)
        landed = next((lake / "landing").glob("*.parquet"))
        moved = landed.rename(tmp_path / "moved")
        monkeypatch.setattr(compared_lake, "_FAILING_SECONDS", 0.5)
        with running_program("spark-apply", str(lake), "--engine=local") as program:
            with pytest.raises(
                TargetError, match=r"has published no snapshot at [0-9A-F/]+, because its applier fails: landed file .* is missing"
            ):
                await verified(publisher18_db, lake)
            assert program.process.poll() is None
            # an old failure is none
            moved.rename(landed)
            assert (await verified(publisher18_db, lake)).equal
