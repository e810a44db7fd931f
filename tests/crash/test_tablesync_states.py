"""A process killed in each state of a table's synchronization, and what the next one makes of it.

The tables have no key: a row that came twice would be there twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.process import QUICK, SubscriberProcess
from tests.support.database import Database
from tests.support.row_gates import closed_gates, make_row_gate, open_transaction, wait_for_state, waiting_at_gate

SECONDS = 45.0
SYNC_SLOTS = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database() AND slot_name LIKE 'pg\\_%\\_sync\\_%'"
ROWS = "SELECT id, v, count(*) FROM {} GROUP BY id, v ORDER BY id, v"


def made(publisher: Database, target: Database, directory: Path) -> SubscriberProcess:
    """A subscription of the tables a (1500 rows, some 40 blocks) and b, one table at a time, a in parts of eight blocks."""
    for database in (publisher, target):
        database.execute("CREATE TABLE a (id int, v text); CREATE TABLE b (id int, v text)")
    publisher.execute("INSERT INTO a SELECT i, repeat('x', 200) FROM generate_series(1, 1500) AS i; INSERT INTO b VALUES (1, 'copied')")
    publisher.execute("ALTER TABLE a REPLICA IDENTITY FULL; ALTER TABLE b REPLICA IDENTITY FULL; CREATE PUBLICATION pub FOR ALL TABLES")
    settings = (*QUICK, "copy_range_size=64kB", "max_copy_workers_per_table=2", "max_sync_workers_per_subscription=1")
    return SubscriberProcess(publisher, target, directory, options=(), settings=settings)


@pytest.fixture
def process(publisher18_db: Database, target_db: Database, tmp_path: Path) -> Iterator[SubscriberProcess]:
    found = made(publisher18_db, target_db, tmp_path)
    yield found
    found.end()


def assert_recovers(process: SubscriberProcess) -> None:
    """The next run brings the right rows, none twice, and leaves nothing behind."""
    process.catch_up(SECONDS)
    for table in ("a", "b"):
        rows = process.publisher.fetch(ROWS.format(table))
        assert process.target.fetch(ROWS.format(table)) == rows
        assert {count for *_, count in rows} == {1}
    slots = "SELECT slot_name::text FROM pg_replication_slots WHERE database = current_database()"
    assert process.publisher.fetch(slots) == [(process.name,)]
    assert process.target.fetch('SELECT srrelid::int FROM subscriber."position"') == [(0,)]
    assert process.target.value("SELECT count(*) FROM subscriber.copy_part") == 0
    assert process.target.value("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate IN ('s', 'r')") == 2


def change_both_tables(publisher: Database) -> None:
    publisher.execute("UPDATE a SET v = 'changed' WHERE id IN (1, 1400); DELETE FROM a WHERE id = 2; INSERT INTO a VALUES (2000, 'new')")
    publisher.execute("INSERT INTO b VALUES (2, 'new'); UPDATE b SET v = 'changed' WHERE id = 1")


@pytest.mark.endurance
def test_killed_in_init_and_in_datasync(process: SubscriberProcess) -> None:
    """Table a is copied in parts, of which some are committed; b waits for its turn."""
    publisher, target = process.publisher, process.target
    make_row_gate(target, "a", "NEW.id = 1300", 1)
    with closed_gates(target, 1):
        process.start()
        target.wait(waiting_at_gate(1), 1)
        wait_for_state(target, "a", "d")
        wait_for_state(target, "b", "i")
        target.wait("SELECT count(*) >= 3 FROM subscriber.copy_part", True)
        change_both_tables(publisher)
        process.kill()
        assert 0 < target.value("SELECT count(*) FROM a") < 1500
        assert publisher.value(SYNC_SLOTS) == 1
    assert_recovers(process)
    assert target.value("SELECT srcopyattempt FROM subscriber.pg_subscription_rel WHERE srrelid = 'a'::regclass") == 2


def test_killed_while_the_slot_is_created(process: SubscriberProcess) -> None:
    """An open transaction holds up the snapshot; its row is committed later."""
    publisher, target = process.publisher, process.target
    publisher.execute("DROP PUBLICATION pub; CREATE PUBLICATION pub FOR TABLE a")
    process.catch_up(SECONDS)
    publisher.execute("ALTER PUBLICATION pub ADD TABLE b")
    with open_transaction(publisher, "INSERT INTO b VALUES (3, 'open')") as commit:
        process.start()
        wait_for_state(target, "b", "d")
        publisher.wait(SYNC_SLOTS, 1)
        change_both_tables(publisher)
        process.kill()
        commit()
    assert_recovers(process)
    assert publisher.value("SELECT count(*) FROM b") == 3


def test_killed_in_finishedcopy(process: SubscriberProcess) -> None:
    """All rows are copied, and a change that arrived during the copy is being applied: nothing is copied again."""
    publisher, target = process.publisher, process.target
    make_row_gate(target, "a", "NEW.id = 1300", 1)
    make_row_gate(target, "a", "NEW.id = 2000", 2)
    untouched = "SELECT DISTINCT xmin::text FROM a WHERE id BETWEEN 3 AND 1399 ORDER BY 1"
    with closed_gates(target, 1, 2) as release:
        process.start()
        target.wait(waiting_at_gate(1), 1)
        change_both_tables(publisher)
        release(1)
        wait_for_state(target, "a", "f")
        target.wait(waiting_at_gate(2), 1)
        copied = target.fetch(untouched)
        process.kill()
        publisher.execute("UPDATE a SET v = 'later' WHERE id IN (1, 2000)")
    assert_recovers(process)
    # before 14 one session copies it
    assert len(copied) > 3 if publisher.version >= 14 else len(copied) == 1
    assert target.fetch(untouched) == copied


@pytest.mark.endurance
def test_killed_in_syncdone(process: SubscriberProcess) -> None:
    """The apply worker is behind: the synchronization applies exactly the changes before the handover, the apply worker those after it."""
    publisher, target = process.publisher, process.target
    process.settings = (*QUICK, "copy_range_size=64kB")
    make_row_gate(target, "a", "NEW.id = 1300", 1)
    make_row_gate(target, "b", "NEW.id = 3", 2)
    with closed_gates(target, 1, 2) as release:
        process.start()
        target.wait(waiting_at_gate(1), 1)
        wait_for_state(target, "b", "sr")
        change_both_tables(publisher)
        publisher.execute("BEGIN; INSERT INTO a VALUES (2001, 'with b'); INSERT INTO b VALUES (3, 'held'); COMMIT")
        target.wait(waiting_at_gate(2), 1)
        publisher.execute("INSERT INTO a VALUES (2002, 'somewhere')")
        release(1)
        wait_for_state(target, "a", "s")
        publisher.execute("INSERT INTO a VALUES (2003, 'behind the handover'); UPDATE a SET v = 'behind it' WHERE id IN (1, 2001)")
        publisher.wait(SYNC_SLOTS, 0)
        assert target.value("SELECT srsubstate::text FROM subscriber.pg_subscription_rel WHERE srrelid = 'a'::regclass") == "s"
        # the apply worker has it in hand with the table gated off: so the table's synchronization must have gone at least so far
        assert target.value("SELECT count(*) FROM a WHERE id = 2001") == 1
        process.kill()
        # as if it had been killed a moment earlier, before the table's slot was dropped
        subscription, relation, identifier = _slot_parts(process)
        publisher.execute(f"SELECT pg_create_logical_replication_slot('pg_{subscription}_sync_{relation}_{identifier}', 'pgoutput')")
    assert_recovers(process)


def _slot_parts(process: SubscriberProcess) -> tuple[int, int, str]:
    oid = process.target.value("SELECT oid::int8 FROM subscriber.pg_subscription")
    relation = process.target.value("SELECT 'a'::regclass::oid::int8")
    return oid, relation, process.target.value("SELECT system_identifier::text FROM pg_control_system()")


def test_killed_amid_a_group(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    """Some tables of a group are synchronized, one is being copied, the others wait: nothing has to be undone."""
    publisher, target = publisher18_db, target_db
    names = [f"t{number}" for number in range(8)]
    for database in (publisher, target):
        database.execute(";".join(f"CREATE TABLE {name} (id int, v text)" for name in names))
    publisher.execute(";".join(f"ALTER TABLE {name} REPLICA IDENTITY FULL; INSERT INTO {name} VALUES (1, 'a'), (2, 'b')" for name in names))
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    make_row_gate(target, "t4", "NEW.id = 2", 1)
    settings = (*QUICK, "max_sync_workers_per_subscription=1")
    process = SubscriberProcess(publisher, target, tmp_path, options=(), settings=settings)
    try:
        with closed_gates(target, 1):
            process.start()
            target.wait(waiting_at_gate(1), 1)
            assert target.value("SELECT count(*) FROM subscriber.pg_subscription_rel WHERE srsubstate IN ('s', 'r')") >= 4
            for name in names:
                publisher.execute(f"INSERT INTO {name} VALUES (3, 'new'); UPDATE {name} SET v = 'changed' WHERE id = 1")
            process.kill()
        process.catch_up(SECONDS)
        for name in names:
            rows = publisher.fetch(ROWS.format(name))
            assert target.fetch(ROWS.format(name)) == rows
            assert {count for *_, count in rows} == {1}
        publisher.wait(SYNC_SLOTS, 0)
        assert target.fetch('SELECT srrelid::int FROM subscriber."position"') == [(0,)]
    finally:
        process.end()
