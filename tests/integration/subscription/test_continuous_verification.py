"""``verify_interval``: the run compares its tables in the background, and stores the results. ``verify --certificate``."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from subscriber import ConfigurationError, Settings, Subscription, TableName, verify
from subscriber.catalog.verifications import TableVerification
from subscriber.cli.monitoring import MaxLag, Severity, judge
from subscriber.cli.status_text import describe
from subscriber.sinks.memory import MemorySink, MemoryTarget
from subscriber.subscription.management.status import subscription_status
from subscriber.subscription.management.status_json import status_as_json
from tests.support.database import Database
from tests.support.program import subscriber
from tests.support.replica import QUICK, Replica
from tests.support.verification import Replicated

CONTINUOUS = replace(QUICK, verify_interval=0.2)
TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE bag (v text); ALTER TABLE bag REPLICA IDENTITY FULL"
ROWS = "INSERT INTO t SELECT i, 'v' FROM generate_series(1, 1000) AS i; INSERT INTO bag VALUES ('a'), ('a')"
T, BAG = TableName("public", "t"), TableName("public", "bag")


async def seen(found: Replica, table: TableName, *, differences: int = 0) -> TableVerification:
    """Wait until a verification that begins now has found so many differences."""
    lsn = found.publisher.current_lsn()
    async with asyncio.timeout(30):
        while True:
            each = found.subscription.status.verifications.get(table)
            if each is not None and each.lsn >= lsn and each.differences == differences:
                return each
            await asyncio.sleep(0.05)


async def test_tables_are_compared_in_the_background(replicated: Replicated, publisher18_db: Database, target_db: Database) -> None:
    async with replicated(TABLES, ROWS, settings=CONTINUOUS) as found:
        assert (await seen(found, T)).row_count == 1000
        publisher18_db.execute("UPDATE t SET v = 'w' WHERE id < 10; INSERT INTO bag VALUES ('b')")
        await found.caught_up()
        changed, whole = await seen(found, T), await seen(found, BAG)
        assert changed.whole_lsn < changed.lsn, "only what changed is read from a table with a key"
        assert (whole.row_count, whole.whole_lsn) == (3, whole.lsn)

        target_db.execute("UPDATE t SET v = 'wrong' WHERE id = 5; DELETE FROM bag WHERE v = 'a'")
        await seen(found, T, differences=1)
        await seen(found, BAG, differences=2)
        status = await subscription_status(target_db.dsn)
        assert judge(status, MaxLag())[0] is Severity.WARNING
        assert "not equal to the publisher: public.bag, public.t" in judge(status, MaxLag())[1]
        assert "verified      0 of 2 tables equal" in describe(status)
        (entry,) = [table for table in status_as_json(status[0])["tables"] if table["name"] == "t"]
        assert (entry["verification"]["equal"], entry["verification"]["differences"]) == (False, 1)

        # a verification that an operator makes does not disturb it
        (report,) = (await verify(found.subscription.name, target=target_db.dsn, connection=publisher18_db.dsn, tables=[T])).tables
        assert report.differing_ranges
        target_db.execute("UPDATE t SET v = 'w' WHERE id = 5; INSERT INTO bag VALUES ('a'), ('a')")
        await seen(found, T)
        await seen(found, BAG)
        assert judge(await subscription_status(target_db.dsn), MaxLag())[0] is Severity.OK


async def test_a_table_that_cannot_be_compared_does_not_stop_the_others(
    replicated: Replicated, publisher18_db: Database, target_db: Database
) -> None:
    async with replicated(TABLES, ROWS, settings=CONTINUOUS) as found:
        await seen(found, T)
        publisher18_db.execute("ALTER TABLE t RENAME TO renamed")
        await seen(found, BAG)
        assert not found.running.done()
        publisher18_db.execute("ALTER TABLE renamed RENAME TO t; INSERT INTO t VALUES (0, 'new')")
        assert (await seen(found, T)).row_count == 1001


async def test_the_results_survive_a_restart(replicated: Replicated, target_db: Database) -> None:
    async with replicated(TABLES, ROWS, settings=CONTINUOUS) as found:
        await seen(found, BAG)
        await seen(found, T)
    (status,) = await subscription_status(target_db.dsn)
    assert all(table.verification is not None and table.verification.equal for table in status.observation.tables)


async def test_certificate(replicated: Replicated, publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    async with replicated(TABLES, ROWS) as found:
        target_db.execute("UPDATE t SET v = 'secret' WHERE id = 5")
        command = ["verify", found.subscription.name, "--target", target_db.dsn, "--connection", publisher18_db.dsn]
        ended = await asyncio.to_thread(subscriber, *command, "--certificate", str(tmp_path / "certificate.json"))
        assert ended.status == 1
        written = (tmp_path / "certificate.json").read_text()
        certificate = json.loads(written)
        assert certificate["publisher_system"] == publisher18_db.value("SELECT system_identifier::text FROM pg_control_system()")
        assert (certificate["equal"], certificate["lsn"] is not None) == (False, True)
        assert [table["equal"] for table in certificate["tables"]] == [True, False]
        assert certificate["tables"][1]["columns"] == ["id", "v"]
        assert certificate["tables"][1]["differences"] == [{"kind": "different", "key": {"id": "5"}, "columns": ["v"]}]
        assert "secret" not in written
        ended = await asyncio.to_thread(subscriber, *command, "--certificate", str(tmp_path / "none" / "certificate.json"))
        assert ended.status == 2
        assert "does not exist" in ended.errors


def test_a_target_without_a_url_cannot_be_compared() -> None:
    with pytest.raises(ConfigurationError, match="verify_interval needs a target that is given as a URL"):
        Subscription(
            "s", connection="host=nowhere", publications=["p"], target=MemorySink(MemoryTarget()), settings=Settings(verify_interval=1)
        )
