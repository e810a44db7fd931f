"""Killed while a streamed transaction is applied before its end, around its commit and its prepare; and while groups are applied."""

from __future__ import annotations

import asyncio
import random
import secrets
from pathlib import Path

import pytest

from tests.crash.process import QUICK, SubscriberProcess
from tests.crash.scenario import eventually
from tests.support.database import Database

ROUNDS = 9
ROWS = 3000
SESSIONS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%parallel apply'"
IN_GROUPS = """
import sys
import pytest
from subscriber.cli.main import main
from tests.support.apply_workers import always_in_groups

always_in_groups(pytest.MonkeyPatch())
sys.exit(main())
"""
SAME = "SELECT round, count(*), count(DISTINCT n) FROM log GROUP BY round ORDER BY round"


@pytest.mark.endurance
@pytest.mark.crash
@pytest.mark.timeout(180)
async def test_killed_in_parallel_apply(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    process = SubscriberProcess(publisher18_db, target_db, tmp_path)
    for database in (publisher18_db, target_db):
        # without a key: a row that came twice is seen
        database.execute("CREATE TABLE log (round int, n int, v text)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    write = "INSERT INTO log SELECT {0}, g, repeat('x', 100) FROM generate_series({1}, {1} + {2}) AS g"
    try:
        process.start()
        assert await eventually(process.is_ready, 60, process), process.log()
        for number in range(ROUNDS):
            with publisher18_db.connect() as session:
                session.execute("BEGIN")
                session.execute(write.format(number, 0, ROWS - 1).encode())
                session.execute("SAVEPOINT a")
                session.execute(write.format(number, ROWS, ROWS - 1).encode())
                session.execute("ROLLBACK TO a")
                assert await eventually(
                    lambda: bool(target_db.value(f"SELECT EXISTS (SELECT {SESSIONS} AND backend_xid IS NOT NULL)")), 30, process
                ), process.log()
                session.execute(write.format(number, ROWS, 499).encode())
                if number % 3 == 0:
                    process.kill()
                session.execute("COMMIT" if number % 3 < 2 else f"PREPARE TRANSACTION 'p{number}'")
            # a random moment, not synchronisation
            await asyncio.sleep(rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.3))))
            if number % 3:
                process.kill()
            if number % 3 == 2:
                publisher18_db.execute(f"COMMIT PREPARED 'p{number}'")
            process.start()
        process.kill()
        await asyncio.to_thread(process.catch_up, 60)
    finally:
        process.end()
    rows = [(number, ROWS + 500, ROWS + 500) for number in range(ROUNDS)]
    assert publisher18_db.fetch(SAME) == rows
    assert target_db.fetch(SAME) == rows
    assert target_db.fetch("SELECT gid FROM pg_prepared_xacts WHERE database = current_database()") == []
    target_db.wait(f"SELECT count(*) {SESSIONS}", 0)


@pytest.mark.endurance
@pytest.mark.crash
@pytest.mark.timeout(180)
async def test_killed_while_groups_are_applied(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    rng = random.Random(secrets.randbelow(10**6))
    process = SubscriberProcess(publisher18_db, target_db, tmp_path, settings=(*QUICK, "apply_workers=3"))
    process.code = IN_GROUPS
    for database in (publisher18_db, target_db):
        # without a key: a row that came twice is seen
        database.execute("CREATE TABLE log (round int, n int, v text); CREATE TABLE t (id int PRIMARY KEY, u int UNIQUE, n int)")
    publisher18_db.execute("CREATE PUBLICATION pub FOR ALL TABLES; INSERT INTO t SELECT g, g, 0 FROM generate_series(1, 2000) AS g")
    writes = (
        "INSERT INTO log VALUES ({0}, i, 'x'); UPDATE t SET n = n + 1 WHERE id = 1 + (i * 7919) % 2000; UPDATE t SET u = -u WHERE id = i"
    )
    try:
        process.start()
        assert await eventually(process.is_ready, 60, process), process.log()
        for number in range(ROUNDS):
            process.kill()
            publisher18_db.execute(f"DO $$ BEGIN FOR i IN 1..600 LOOP {writes.format(number)}; COMMIT; END LOOP; END $$")
            process.start()
            assert await eventually(
                lambda: bool(target_db.value(f"SELECT EXISTS (SELECT {SESSIONS} AND backend_xid IS NOT NULL)")), 30, process
            ), process.log()
            # a random moment, not synchronisation
            await asyncio.sleep(rng.uniform(0, 0.3))
        process.kill()
        await asyncio.to_thread(process.catch_up, 60)
    finally:
        process.end()
    for query in (SAME, "SELECT * FROM t ORDER BY id"):
        assert target_db.fetch(query) == publisher18_db.fetch(query)
    assert not process.conflicts()
    target_db.wait(f"SELECT count(*) {SESSIONS}", 0)
