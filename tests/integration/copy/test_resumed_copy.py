"""A copy that was interrupted continues with what it has stored: a new snapshot is compared with it."""

from __future__ import annotations

import re
from dataclasses import replace as changed

import pytest

from subscriber import crash_points
from subscriber.errors import PublisherUnavailable
from subscriber.subscription.run import reconciliation
from subscriber.verification import tables
from tests.support.database import Database
from tests.support.observation import eventually, until
from tests.support.replica import QUICK, replica
from tests.support.row_gates import closed_gates, make_row_gate, waiting_at_gate

ROWS = 20_000
FIRST = 15_000
"""The first copy is interrupted at this row."""
SETTINGS = changed(QUICK, copy_range_size=64 * 1024, max_copy_workers_per_table=1, max_sync_workers_per_subscription=4)
RESUMED = re.compile(r'copy of table "public\.(\w+)" was resumed: (\d+) rows were kept, (\d+) copied')


async def interrupt(publisher: Database, target: Database, *gates: int) -> None:
    """Begin the copies, and stop where they wait at their gates."""
    with closed_gates(target, *gates):
        async with replica(publisher, target, settings=SETTINGS):
            for gate in gates:
                await eventually(target, waiting_at_gate(gate), 1)
    for gate in gates:
        # a trigger would fire for rows that are deleted and stored again
        target.execute(f"DROP FUNCTION gate_{gate} CASCADE")


@pytest.mark.publisher(min=14, lacks="copies in ranges")
async def test_only_what_differs_is_copied_again(
    publisher_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the bug was that the copy began at row 0
    monkeypatch.setattr(tables, "_RANGE_ROWS", 500)
    # the operators of an extension's type are in no search_path that a session has
    columns = "id int, v text, u int UNIQUE, at timestamptz[] DEFAULT ARRAY['2026-01-01 00:00+00'::timestamptz]"
    available = "SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'ltree')"
    path = "ltree" if publisher_db.value(available) and target_db.value(available) else "text"
    columns += f", kind kind DEFAULT 'a', path {path} DEFAULT 'a.b'"
    for database, labels in ((publisher_db, "'a', 'b'"), (target_db, "'a', 'b', 'c'")):
        database.execute(f"""
            {"CREATE EXTENSION ltree;" if path == "ltree" else ""} CREATE TYPE kind AS ENUM ({labels});
            CREATE TABLE big ({columns}, PRIMARY KEY (id, kind, path)); CREATE TABLE mixed ({columns}, PRIMARY KEY (id))
        """)
    publisher_db.execute(f"""
        INSERT INTO big SELECT i, repeat('x', 20), i FROM generate_series(1, {ROWS}) AS i;
        INSERT INTO mixed SELECT i * 7919 % {ROWS + 1}, repeat('y', 20) FROM generate_series(1, {ROWS}) AS i;
        UPDATE big SET kind = 'b' WHERE id BETWEEN 8000 AND 8010; ANALYZE big, mixed; CREATE PUBLICATION pub FOR ALL TABLES
    """)
    # a row that was there before, and one that the copies must not replace
    target_db.execute("INSERT INTO big VALUES (-5, 'of the target'); SET TimeZone = 'Asia/Tokyo'")
    make_row_gate(target_db, "big", f"NEW.id = {FIRST}", 77)
    make_row_gate(target_db, "mixed", f"NEW.id = {FIRST * 7919 % (ROWS + 1)}", 78)
    await interrupt(publisher_db, target_db, 77, 78)
    stored = target_db.value("SELECT count(*) FROM big")
    assert ROWS / 2 < stored < FIRST
    # in ranges that are stored: updates, deletes, a key that goes to a range that is not stored, and one that comes; unique values that two
    # ranges exchange
    publisher_db.execute(f"""
        UPDATE big SET v = 'changed' WHERE id % 1000 = 7; DELETE FROM big WHERE id = 2001; INSERT INTO big VALUES (0, 'new');
        UPDATE big SET id = {ROWS + 1} WHERE id = 3001; UPDATE big SET id = 3001 WHERE id = {ROWS - 1};
        DELETE FROM big WHERE id BETWEEN 5000 AND 6999;
        ALTER TYPE kind RENAME VALUE 'b' TO 'c'; UPDATE big SET path = 'a.c' WHERE id = 8500;
        UPDATE big SET u = -1 WHERE id = 9000; UPDATE big SET u = 9000 WHERE id = 100; UPDATE big SET u = 100 WHERE id = 9000
    """)
    # the second attempt fails at each new step
    points = [point for point in crash_points.POINTS if point.startswith("reconcile.")]

    def fail(point: str) -> None:
        if points and point == points[0]:
            points.pop(0)
            raise PublisherUnavailable("by the test")

    with crash_points.watched(fail), caplog.at_level("INFO"):
        async with replica(publisher_db, target_db, settings=SETTINGS) as second:
            await second.same("SELECT id, v FROM mixed ORDER BY id")
            await second.caught_up()
            everything = "SELECT id, v, u, at, kind::text, path::text FROM big WHERE id <> -5 ORDER BY id"
            assert await second.same(everything)
            publisher_db.execute("UPDATE big SET v = 'later' WHERE id < 100")
            await second.same(everything)
    assert points == []
    assert target_db.value("SELECT v FROM big WHERE id = -5") == "of the target"
    assert target_db.value("SELECT count(*) FROM subscriber.copy_part") == 0
    ((table, kept, copied),) = RESUMED.findall(caplog.text)
    print(f"{stored} of {ROWS} rows were stored, {kept} kept, {copied} copied")
    assert table == "big"
    # the boundary range, and what a failed attempt has stored of the rest, are between these
    assert int(kept) + int(copied) == publisher_db.value("SELECT count(*) FROM big")
    assert int(copied) < ROWS - stored + 1000
    assert 'the copy of table "public.mixed" was interrupted, and begins again at its first row: it has no ranges of a key' in caplog.text


@pytest.mark.publisher(min=14, lacks="copies in ranges")
async def test_a_copy_that_cannot_be_resumed_begins_again(
    publisher_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the bug was that each attempt failed in the same way. A value of the target cannot be read as text, or the target rejects a new row.
    # In a third table, more rows differ than are replaced one by one. The fourth has a trigger
    monkeypatch.setattr(tables, "_RANGE_ROWS", 500)
    monkeypatch.setattr(reconciliation, "_RANGE_KEYS", 1)
    monkeypatch.setattr(reconciliation, "_FEW", ROWS)
    names = ("compared", "refused", "many", "watched")
    for database in (publisher_db, target_db):
        database.execute("CREATE TYPE kind AS ENUM ('private'); CREATE TABLE compared (id int PRIMARY KEY, v text, kind kind NOT NULL)")
        database.execute("CREATE TABLE refused (id int PRIMARY KEY, v text); CREATE TABLE many (id int PRIMARY KEY, v text)")
        database.execute("CREATE TABLE watched (id int PRIMARY KEY, v text)")
    publisher_db.execute(f"INSERT INTO compared SELECT i, repeat('x', 20), 'private' FROM generate_series(1, {ROWS}) AS i")
    for name in ("refused", "many", "watched"):
        publisher_db.execute(f"INSERT INTO {name} SELECT i, repeat('x', 30) FROM generate_series(1, {ROWS}) AS i")
    publisher_db.execute(f"ANALYZE {', '.join(names)}; CREATE PUBLICATION pub FOR ALL TABLES")
    for gate, name in enumerate(names, 80):
        make_row_gate(target_db, name, f"NEW.id = {FIRST}", gate)
    make_row_gate(target_db, "watched", "false", 90)
    await interrupt(publisher_db, target_db, 80, 81, 82, 83)
    stored = target_db.value("SELECT count(*) FROM many")
    assert target_db.value("SELECT count(*) FROM refused") > 0
    publisher_db.execute(f"""
        INSERT INTO refused VALUES ({ROWS + 1}, 'private'); UPDATE many SET v = 'changed' WHERE id % 1000 = 7 AND id < 8000
    """)
    target_db.execute("""
        ALTER TABLE refused ADD CHECK (v <> 'private');
        CREATE FUNCTION of_kind(kind) RETURNS text LANGUAGE plpgsql AS 'BEGIN RAISE ''%: private'', $1; END';
        CREATE CAST (kind AS text) WITH FUNCTION of_kind(kind)
    """)
    with caplog.at_level("INFO"):
        async with replica(publisher_db, target_db, settings=SETTINGS) as second:
            await until(lambda: 'of table "public.refused" was interrupted' in caplog.text, "the copy begins again")
            publisher_db.execute("DELETE FROM refused WHERE v = 'private'")
            for name in names:
                await second.same(f"SELECT id, v FROM {name} ORDER BY id")
    assert "private" not in caplog.text
    assert 'trigger "gate_90" of table "public.watched" fires' in caplog.text
    for name in ("compared", "refused", "watched"):
        assert f'the copy of table "public.{name}" was interrupted, and begins again' in caplog.text
    ((kept, copied),) = [(int(kept), int(copied)) for name, kept, copied in RESUMED.findall(caplog.text) if name == "many"]
    assert kept + copied == ROWS
    assert copied > ROWS - stored + 7 * 200
