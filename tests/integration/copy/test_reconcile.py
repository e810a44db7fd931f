"""A table whose rows are compared with the publisher's, instead of being copied."""

from __future__ import annotations

import re
from dataclasses import replace as changed

import pytest

from subscriber import crash_points
from subscriber.errors import PublisherUnavailable
from subscriber.subscription.run import reconciliation
from subscriber.verification import compare, tables
from tests.support.database import Database
from tests.support.observation import until
from tests.support.replica import QUICK, replica

RECONCILED = re.compile(r'table "public\.(\w+)" was reconciled: (\d+) rows were kept, (\d+) copied')
SETTINGS = changed(QUICK, max_sync_workers_per_subscription=4)
ROWS = 3000


def both(publisher: Database, target: Database, *statements: str) -> None:
    for statement in statements:
        publisher.execute(statement)
        target.execute(statement)


def reconciled(log: str) -> dict[str, tuple[int, int]]:
    return {table: (int(kept), int(written)) for table, kept, written in RECONCILED.findall(log)}


async def test_only_what_differs_is_written(
    publisher_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tables, "_RANGE_ROWS", 300)
    monkeypatch.setattr(reconciliation, "_RANGE_KEYS", 40)
    monkeypatch.setattr(reconciliation, "_ROWS", 7)
    some = f"generate_series(1, {ROWS}) AS i"
    both(
        publisher_db,
        target_db,
        # in ranges: a key of three types, unique values, an enum
        "CREATE TYPE kind AS ENUM ('a', 'b')",
        "CREATE TABLE ranges (id int, kind kind DEFAULT 'a', v text, u int UNIQUE, PRIMARY KEY (id, kind))",
        f"INSERT INTO ranges SELECT i, 'a', 'v' || i, i FROM {some}",
        # keys that only a comparison as a whole finds; those of the same collation, and floats
        "CREATE TABLE texts (id text PRIMARY KEY, f float8, r real)",
        f"INSERT INTO texts SELECT 'Kö' || i, i / 7.0::float8, 'NaN' FROM {some}",
        "CREATE TABLE uuids (id uuid PRIMARY KEY, v int)",
        f"INSERT INTO uuids SELECT md5(i::text)::uuid, i FROM {some}",
        # no key
        "CREATE TABLE bag (v text, n numeric); ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT 'b', i % 3 FROM generate_series(1, 100) AS i",
        # what is equal, and what is empty on one side
        f"CREATE TABLE same (id int PRIMARY KEY); INSERT INTO same SELECT i FROM {some}",
        "CREATE TABLE gone (id int PRIMARY KEY); CREATE TABLE missing (id int PRIMARY KEY, v text)",
        "CREATE TABLE parent (id int PRIMARY KEY, v text); CREATE TABLE child (id int PRIMARY KEY, p int REFERENCES parent)",
        "INSERT INTO parent SELECT i, 'p' FROM generate_series(1, 20) AS i; INSERT INTO child SELECT i, i FROM generate_series(1, 20) AS i",
        "CREATE TABLE made (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v int, twice int GENERATED ALWAYS AS (v * 2) STORED)",
        "INSERT INTO made (v) SELECT i FROM generate_series(1, 50) AS i",
    )
    publisher_db.execute(f"""
        ANALYZE; CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO missing SELECT i, E'tab\\t\\\\ line\\n' FROM {some}
    """)
    target_db.execute("""
        ALTER TABLE ranges ADD own int GENERATED ALWAYS AS IDENTITY, ADD note text; UPDATE ranges SET note = 'n' || id;
        UPDATE ranges SET v = NULL WHERE id = 5; DELETE FROM ranges WHERE id IN (6, 1234);
        INSERT INTO ranges VALUES (-4, 'a', 'extra', -4), (7, 'b', 'extra', -7), (999999, 'a', 'extra', -8);
        UPDATE ranges SET v = 'many' WHERE id BETWEEN 2000 AND 2100;
        -- two that exchange a unique value, far from each other
        UPDATE ranges SET u = -1 WHERE id = 10; UPDATE ranges SET u = 10 WHERE id = 2900; UPDATE ranges SET u = 2900 WHERE id = 10;
        -- a chain over ranges
        UPDATE ranges SET u = -100 WHERE id = 600; UPDATE ranges SET u = 600 WHERE id = 20;
        UPDATE texts SET f = '-0' WHERE id = 'Kö3'; UPDATE texts SET r = 'Infinity' WHERE id = 'Kö4'; DELETE FROM texts WHERE id = 'Kö5';
        INSERT INTO texts VALUES ('kö5', 1, 1);
        UPDATE uuids SET v = -v WHERE v % 50 = 0;
        DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE n = 1 LIMIT 2); INSERT INTO bag VALUES ('c', NULL);
        INSERT INTO gone SELECT generate_series(1, 30);
        UPDATE parent SET v = 'other' WHERE id = 7; DELETE FROM child WHERE id = 8; INSERT INTO parent VALUES (77, 'extra');
        INSERT INTO child VALUES (77, 77); UPDATE made SET v = 0 WHERE id = 3; DELETE FROM made WHERE id = 4
    """)
    names = ("texts", "uuids", "same", "gone", "missing", "parent", "child", "made")
    ctids = target_db.fetch("SELECT ctid::text FROM same ORDER BY id")
    points = [point for point in crash_points.POINTS if point.startswith("reconcile.")]

    def fail(point: str) -> None:
        # each attempt ends once more at each step; never is a table empty for readers
        if points and point == points[0]:
            points.pop(0)
            raise PublisherUnavailable("by the test")
        assert target_db.value("SELECT count(*) FROM ranges") > ROWS - 10
        assert target_db.value("SELECT count(*) FROM bag") > 90

    with crash_points.watched(fail), caplog.at_level("INFO"):
        async with replica(publisher_db, target_db, settings=SETTINGS, copy_data="reconcile") as running:
            await running.same("SELECT id, kind, v, u FROM ranges ORDER BY id, kind")
            await running.same("SELECT v, n FROM bag ORDER BY v, n")
            for name in names:
                await running.same(f"SELECT {name}::text FROM {name} ORDER BY {name}::text")
            publisher_db.execute("UPDATE ranges SET v = 'later' WHERE id < 100; DELETE FROM parent WHERE id = 20 AND v = 'none'")
            await running.same("SELECT id, kind, v, u FROM ranges ORDER BY id, kind")
    assert points == []
    # rows that were replaced keep what the publisher does not have
    assert target_db.value("SELECT count(*) FROM ranges WHERE note = 'n' || id") == ROWS - 2
    assert target_db.value("SELECT note FROM ranges WHERE id = 2050") == "n2050"
    # what was equal was not touched
    assert target_db.fetch("SELECT ctid::text FROM same ORDER BY id") == ctids
    found = reconciled(caplog.text)
    print(found)
    assert found["same"] == (ROWS, 0)
    assert found["gone"] == (0, 0)
    assert sum(found["missing"]) == ROWS
    assert found["uuids"][1] <= ROWS // 50
    assert found["texts"][1] <= 3
    assert found["made"][1] <= 2
    assert sum(found["bag"]) == 100
    assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0
    assert target_db.value("SELECT bool_or(srmode <> 'c') FROM subscriber.pg_subscription_rel") is False


async def test_many_differences_without_ranges(
    publisher_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the rows do not lie in the order of the key: it is divided into ranges anyway. A text key has none: all rows are replaced at once
    for name, value in (("_RANGE_ROWS", 300), ("_LEAST_BLOCKS", 8192)):
        monkeypatch.setattr(tables, name, value)
    monkeypatch.setattr(compare, "_READ_ROWS", 100)
    both(
        publisher_db,
        target_db,
        "CREATE TABLE uuids (id uuid PRIMARY KEY, v int); CREATE TABLE texts (id text PRIMARY KEY, v int)",
        f"INSERT INTO uuids SELECT md5(i::text)::uuid, i FROM generate_series(1, {ROWS}) AS i",
        f"INSERT INTO texts SELECT md5(i::text), i FROM generate_series(1, {ROWS}) AS i",
    )
    publisher_db.execute("ANALYZE; CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute("UPDATE uuids SET v = -v WHERE v % 10 = 0; UPDATE texts SET v = -v WHERE v % 10 = 0; DELETE FROM texts WHERE v = 11")
    with caplog.at_level("INFO"):
        async with replica(publisher_db, target_db, settings=SETTINGS, copy_data="reconcile") as running:
            for name in ("uuids", "texts"):
                await running.same(f"SELECT id, v FROM {name} ORDER BY id")
    found = reconciled(caplog.text)
    assert found["uuids"][1] <= ROWS // 2
    assert found["texts"] == (0, ROWS)


async def test_what_cannot_be_reconciled(publisher_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    # rows of another subscription, a key that is not unique, NULL in the key, a unique value that the publisher has twice
    publisher_db.execute("""
        CREATE TABLE shared (id int PRIMARY KEY); CREATE TABLE twice (id int PRIMARY KEY, v int);
        CREATE TABLE refused (id int PRIMARY KEY, u int);
        INSERT INTO shared VALUES (1); INSERT INTO twice VALUES (1, 1), (2, 2); INSERT INTO refused VALUES (1, 1), (2, 1), (3, 3);
        CREATE PUBLICATION one FOR TABLE shared; CREATE PUBLICATION pub FOR ALL TABLES
    """)
    target_db.execute("""
        CREATE TABLE shared (id int PRIMARY KEY); CREATE TABLE twice (id int, v int);
        CREATE TABLE refused (id int PRIMARY KEY, u int UNIQUE);
        INSERT INTO twice VALUES (1, 1), (1, 1), (2, 5), (2, 6), (3, 3), (NULL, 1); INSERT INTO refused VALUES (1, 7), (9, 9)
    """)
    async with replica(publisher_db, target_db, name="first", publications=["one"]) as running:
        await running.same("SELECT id FROM shared")
    async with replica(publisher_db, target_db, settings=SETTINGS, copy_data="reconcile"):
        await until(lambda: "also belongs to subscription" in caplog.text and "duplicate key" in caplog.text, "both errors")
        await until(lambda: target_db.fetch("SELECT id, v FROM twice ORDER BY id") == [(1, 1), (2, 2)], "the third table")
        assert f'table "public.shared" also belongs to subscription "first_{publisher_db.name}": its rows would be deleted' in caplog.text
        # nothing was changed, and no value is in the log
        assert target_db.fetch("SELECT id, u FROM refused ORDER BY id") == [(1, 7), (9, 9)]
        assert target_db.fetch("SELECT id FROM shared") == [(1,)]
        assert "(1)" not in caplog.text
        target_db.execute("ALTER TABLE refused DROP CONSTRAINT refused_u_key")
        await until(lambda: target_db.value("SELECT count(*) FROM refused WHERE id < 9") == 3, "the table after its correction")


async def test_rows_that_change_meanwhile(publisher_db: Database, target_db: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The publisher changes rows during the reconciliation; they come from the table's own slot. Another writer changes the target."""
    both(
        publisher_db,
        target_db,
        "CREATE TABLE t (id int PRIMARY KEY, v int)",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 500) AS i",
        "CREATE TABLE other (id int PRIMARY KEY)",
    )
    publisher_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    target_db.execute("UPDATE t SET v = 0 WHERE id % 100 = 0")
    points = 0

    def change(point: str) -> None:
        nonlocal points
        if point in {"copy.slot_created", "reconcile.planned", "reconcile.replaced", "copy.stored"}:
            points += 1
            publisher_db.execute(f"""
                UPDATE t SET v = v + 1000 WHERE id % 100 IN (0, 1); DELETE FROM t WHERE id = {points * 7};
                INSERT INTO t VALUES ({1000 + points}, 1); INSERT INTO other VALUES ({points})
            """)
            # of another program: it may stay wrong, and stops nothing
            target_db.execute(f"INSERT INTO t VALUES ({-points}, 0) ON CONFLICT DO NOTHING")

    with crash_points.watched(change):
        async with replica(publisher_db, target_db, settings=SETTINGS, copy_data="reconcile") as running:
            await running.same("SELECT id, v FROM t WHERE id > 0 ORDER BY id")
            await running.same("SELECT id FROM other ORDER BY id")
    assert points >= 4
