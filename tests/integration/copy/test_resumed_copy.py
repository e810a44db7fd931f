"""A copy that was interrupted continues with what it has stored: a new snapshot is compared with it."""

from __future__ import annotations

import re
from dataclasses import replace as changed

import pytest

from subscriber import crash_points
from subscriber.errors import PublisherUnavailable
from subscriber.verification import tables
from tests.support.database import Database
from tests.support.observation import eventually
from tests.support.replica import QUICK, replica
from tests.support.row_gates import closed_gates, make_row_gate, waiting_at_gate

ROWS = 20_000
FIRST = 15_000
"""The first copy is interrupted at this row."""
SETTINGS = changed(QUICK, copy_range_size=64 * 1024, max_copy_workers_per_table=1)
RESUMED = re.compile(r'copy of table "public\.(\w+)" was resumed: (\d+) rows were kept, (\d+) copied')


async def interrupt(publisher: Database, target: Database, *gates: int) -> None:
    """Begin the copies, and stop where they wait at their gates."""
    with closed_gates(target, *gates):
        async with replica(publisher, target, settings=SETTINGS):
            for gate in gates:
                await eventually(target, waiting_at_gate(gate), 1)


async def test_only_what_differs_is_copied_again(
    publisher_db: Database, target_db: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the bug was that the copy began at row 0
    monkeypatch.setattr(tables, "_RANGE_ROWS", 500)
    columns = "id int {}, v text, u int UNIQUE, at timestamptz[] DEFAULT ARRAY['2026-01-01 00:00+00'::timestamptz]"
    for database in (publisher_db, target_db):
        database.execute(f"CREATE TABLE big ({columns.format('PRIMARY KEY')}); CREATE TABLE mixed ({columns.format('PRIMARY KEY')})")
    publisher_db.execute(f"""
        INSERT INTO big SELECT i, repeat('x', 20), i FROM generate_series(1, {ROWS}) AS i;
        INSERT INTO mixed SELECT i * 7919 % {ROWS + 1}, repeat('y', 20) FROM generate_series(1, {ROWS}) AS i;
        ANALYZE big, mixed; CREATE PUBLICATION pub FOR ALL TABLES
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
        UPDATE big SET u = -1 WHERE id = 9000; UPDATE big SET u = 9000 WHERE id = 100; UPDATE big SET u = 100 WHERE id = 9000
    """)
    # the second attempt fails at each new step
    points = [point for point in crash_points.POINTS if point.startswith("resume.")]

    def fail(point: str) -> None:
        if points and point == points[0]:
            points.pop(0)
            raise PublisherUnavailable("by the test")

    with crash_points.watched(fail), caplog.at_level("INFO"):
        async with replica(publisher_db, target_db, settings=SETTINGS) as second:
            await second.same("SELECT id, v FROM mixed ORDER BY id")
            await second.caught_up()
            everything = "SELECT id, v, u, at FROM big WHERE id <> -5 ORDER BY id"
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
    assert 'the copy of table "public.mixed" was interrupted, and starts again: it has no ranges of a key' in caplog.text
