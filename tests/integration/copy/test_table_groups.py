"""Many small tables, synchronized in groups: each by one transaction of the target, under a snapshot that they share."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from subscriber import Subscription, TableName, TableState
from subscriber.errors import TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.postgres.copy.table_group import PostgresTableGroup
from tests.support.database import WAIT_SECONDS, Database
from tests.support.replica import QUICK, Replica, replica
from tests.support.row_gates import open_transaction
from tests.support.table_groups import BeforeCopy, hook_before_copy, record_snapshot_slots

SLOTS = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
ONE_GROUP = replace(QUICK, max_sync_workers_per_subscription=1)
TABLES = [f"t{number}" for number in range(10)]


@pytest.fixture
def tables(publisher18_db: Database, target_db: Database) -> list[str]:
    """Tables on both sides, published, with two rows each."""
    for database in (publisher18_db, target_db):
        database.execute(";".join(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)" for table in TABLES))
    publisher18_db.execute(";".join(f"INSERT INTO {table} VALUES (1, 'one'), (2, 'two')" for table in TABLES))
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    return TABLES


async def all_ready(running: Replica, but: int = 0) -> None:
    """Wait until all tables are ready but so many."""

    def waiting() -> int:
        return sum(entry.state is not TableState.READY for entry in running.subscription.status.tables.values())

    async with asyncio.timeout(WAIT_SECONDS):
        while not running.subscription.status.tables or waiting() != but:
            assert not running.running.done(), running.running
            await asyncio.sleep(0.02)


async def same_rows(running: Replica, tables: list[str]) -> None:
    await running.caught_up()
    for table in tables:
        query = f"SELECT * FROM {table} ORDER BY 1"
        assert running.target.fetch(query) == running.publisher.fetch(query), table


def assert_nothing_is_left(publisher: Database, target: Database, *, origins: bool = False) -> None:
    assert publisher.fetch(SLOTS) == [(f"replica_{publisher.name}",)]
    assert target.fetch('SELECT srrelid::int FROM subscriber."position"') == [(0,)]
    assert target.value("SELECT count(*) FROM subscriber.copy_part") == 0
    oid = target.value("SELECT oid FROM subscriber.pg_subscription")
    # the next start drops that of a session that was lost
    assert origins or target.value(f"SELECT count(*) FROM pg_replication_origin WHERE roname LIKE 'subscriber_{oid}\\_%'") == 0


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return record_snapshot_slots(monkeypatch)


@pytest.fixture
def before_copy(monkeypatch: pytest.MonkeyPatch) -> BeforeCopy:
    return hook_before_copy(monkeypatch, PostgresTableGroup)


async def test_two_snapshots_for_all_tables(
    publisher18_db: Database, target_db: Database, tables: list[str], snapshots: list[bool]
) -> None:
    """A slot, a snapshot and six sessions a table took 26 s for 200 tables of 500 rows."""
    for database in (publisher18_db, target_db):
        database.execute("CREATE TABLE root (id int PRIMARY KEY, v text) PARTITION BY LIST (id)")
        database.execute("CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1, 2); CREATE TABLE empty (id int PRIMARY KEY)")
    publisher18_db.execute("INSERT INTO root VALUES (1, 'a'), (2, 'b')")
    async with replica(publisher18_db, target_db) as running:
        await all_ready(running)
        publisher18_db.execute(
            ";".join(f"UPDATE {table} SET v = 'changed' WHERE id = 1; DELETE FROM {table} WHERE id = 2" for table in tables)
        )
        await same_rows(running, [*tables, "root", "empty"])
        assert running.subscription.status.last_error is None
    assert snapshots == [True, True]
    assert_nothing_is_left(publisher18_db, target_db)


@contextlib.contextmanager
def writing(publisher: Database, tables: list[str]) -> Iterator[None]:
    """Transactions on several of the tables, one after another, while the block lasts."""
    stop, choose = threading.Event(), random.Random(1)

    def write() -> None:
        with publisher.connect() as connection:
            number = 10
            while not stop.is_set():
                number += 1
                first, second = choose.sample(tables, 2)
                statements = f"INSERT INTO {first} VALUES ({number}, 'new'); UPDATE {second} SET v = v || '+', id = -id WHERE abs(id) <= 2"
                connection.execute(f"BEGIN; {statements}; COMMIT".encode())
                stop.wait(0.002)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def test_tables_that_change_while_they_are_copied(publisher18_db: Database, target_db: Database, tables: list[str]) -> None:
    """Each change comes once, whether its table stayed in the group or left it."""
    with writing(publisher18_db, tables):
        async with replica(publisher18_db, target_db) as running:
            await all_ready(running)
    async with replica(publisher18_db, target_db) as running:
        await same_rows(running, tables)
        assert running.subscription.status.last_error is None
    assert_nothing_is_left(publisher18_db, target_db)


async def applied(subscription: Subscription, lsn: Lsn) -> None:
    while subscription.status.applied < lsn:
        await asyncio.sleep(0.02)


async def test_changes_between_the_snapshot_and_a_tables_copy(
    publisher18_db: Database, target_db: Database, tables: list[str], before_copy: BeforeCopy, snapshots: list[bool]
) -> None:
    """Passed over by the apply worker, they are not in the snapshot; an emptied or altered table may look empty in it."""
    begun: list[str] = []

    async def change(table: str) -> None:
        begun.append(table)
        if len(begun) > 1:
            return
        # tables that wait for their turn
        for late in ("t4", "t9"):
            publisher18_db.execute(f"INSERT INTO {late} VALUES (3, 'late'); DELETE FROM {late} WHERE id = 1")
        publisher18_db.execute("TRUNCATE t3; INSERT INTO t3 VALUES (4, 'behind')")
        publisher18_db.execute("ALTER TABLE t8 ADD COLUMN w int DEFAULT 7")
        target_db.execute("ALTER TABLE t8 ADD COLUMN w int")
        await applied(running.subscription, publisher18_db.current_lsn())

    before_copy(change)
    async with replica(publisher18_db, target_db, settings=ONE_GROUP) as running:
        await all_ready(running)
        publisher18_db.execute(
            "INSERT INTO t8 VALUES (5, 'wide', 1); INSERT INTO t4 VALUES (5, 'after'); INSERT INTO t3 VALUES (5, 'after')"
        )
        await same_rows(running, tables)
    assert begun
    # some were copied by themselves; the group did not begin with them
    assert False in snapshots
    assert {"t3", "t4", "t9"}.isdisjoint(begun)
    assert_nothing_is_left(publisher18_db, target_db)


async def test_a_table_that_fails_does_not_hold_up_the_others(publisher18_db: Database, target_db: Database, tables: list[str]) -> None:
    target_db.execute("ALTER TABLE t1 ADD CHECK (id < 2); ALTER TABLE t6 ADD CHECK (v <> 'one')")
    with open_transaction(target_db, "LOCK TABLE t3 IN SHARE MODE") as release:
        async with replica(publisher18_db, target_db) as running:
            await all_ready(running, but=3)
            target_db.execute("ALTER TABLE t1 DROP CONSTRAINT t1_id_check; ALTER TABLE t6 DROP CONSTRAINT t6_v_check")
            release()
            await all_ready(running)
            await same_rows(running, tables)
    assert_nothing_is_left(publisher18_db, target_db)


@pytest.mark.parametrize("stored", [True, False])
async def test_a_commit_whose_answer_is_lost(
    publisher18_db: Database, target_db: Database, tables: list[str], monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """The apply worker passes over nothing of the table until it is known whether it was stored."""
    finish, lost = PostgresTableGroup.finish, list[str]()

    async def finished(self: PostgresTableGroup, tables: Mapping[TableName, Lsn]) -> None:
        assert self._copied is not None
        name = self._copied.name.name
        if name != "t2" or lost:
            await finish(self, tables)
            return
        lost.append(name)
        connection = self._connection
        if stored:
            await finish(self, tables)
        connection.terminate()
        publisher18_db.execute("INSERT INTO t2 VALUES (3, 'behind the handover'); INSERT INTO t9 VALUES (3, 'after it, too')")
        await asyncio.sleep(0)
        raise TargetUnavailable("connection to the target was lost")

    monkeypatch.setattr(PostgresTableGroup, "finish", finished)
    async with replica(publisher18_db, target_db) as running:
        await all_ready(running)
        await same_rows(running, tables)
    assert lost
    assert_nothing_is_left(publisher18_db, target_db, origins=True)


async def test_a_transaction_that_is_prepared_meanwhile(
    publisher18_db: Database, target_db: Database, tables: list[str], before_copy: BeforeCopy
) -> None:
    done: list[str] = []

    async def prepare(table: str) -> None:
        if not done:
            done.append(table)
            publisher18_db.execute(
                "BEGIN; INSERT INTO t4 VALUES (3, 'new'); INSERT INTO t0 VALUES (3, 'new'); PREPARE TRANSACTION 'groups'"
            )
            publisher18_db.execute("INSERT INTO t9 VALUES (3, 'new')")
            publisher18_db.execute("COMMIT PREPARED 'groups'")

    before_copy(prepare)
    async with replica(publisher18_db, target_db, two_phase=True, settings=ONE_GROUP) as running:
        await all_ready(running)
        await until_two_phase(target_db)
        publisher18_db.execute("BEGIN; INSERT INTO t4 VALUES (4, 'new'); PREPARE TRANSACTION 'later'")
        publisher18_db.execute("COMMIT PREPARED 'later'")
        await same_rows(running, tables)
    assert done
    assert_nothing_is_left(publisher18_db, target_db)


async def until_two_phase(target: Database) -> None:
    await asyncio.to_thread(target.wait, "SELECT subtwophasestate::text FROM subscriber.pg_subscription", "e")


async def test_a_publisher_that_is_lost_between_two_tables(
    publisher18_db: Database, target_db: Database, tables: list[str], snapshots: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the table whose turn it was leaves the group: one by one, 3,000 tables would take minutes."""
    finish, lost = PostgresTableGroup.finish, list[str]()

    async def finished(self: PostgresTableGroup, tables: Mapping[TableName, Lsn]) -> None:
        await finish(self, tables)
        if not lost:
            lost.append("lost")
            publisher18_db.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pg\\_%\\_sync\\_%'")

    monkeypatch.setattr(PostgresTableGroup, "finish", finished)
    async with replica(publisher18_db, target_db, settings=ONE_GROUP) as running:
        await all_ready(running)
        await same_rows(running, tables)
    assert lost
    assert snapshots.count(False) == 1
    assert_nothing_is_left(publisher18_db, target_db)
