"""Runs and ``recover`` are killed at random moments, while the publisher's rows change and the target is damaged again and again."""

from __future__ import annotations

import random
import secrets
import threading
import time
from pathlib import Path

import pytest

from tests.crash.process import RunProcess
from tests.support.database import Database
from tests.support.program import subscriber

ROUNDS = 8
ROWS = 120_000
SETUP = """
CREATE TABLE t (id int PRIMARY KEY, v int, u int UNIQUE); CREATE TABLE words (word text PRIMARY KEY, v int);
CREATE TABLE bag (v int); ALTER TABLE bag REPLICA IDENTITY FULL
"""
DAMAGES = (
    "UPDATE t SET v = -1 WHERE id % 997 = {0}",
    "DELETE FROM t WHERE id BETWEEN {0} * 1000 AND {0} * 1000 + 700",
    "INSERT INTO t SELECT i, 0, -i FROM generate_series(1000000, 1000000 + {0}) AS i ON CONFLICT DO NOTHING",
    "UPDATE t SET u = -u WHERE id IN ({0}, {0} + 60000)",
    "DELETE FROM words WHERE v % 7 = {0} % 7",
    "INSERT INTO bag VALUES ({0})",
    "DELETE FROM bag WHERE v % 10 = {0} % 10",
)


@pytest.mark.endurance
@pytest.mark.crash
def test_kills_lose_and_repeat_nothing(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    chosen = random.Random(seed)
    for database in (publisher18_db, target_db):
        database.execute(SETUP)
    publisher18_db.execute(f"""
        INSERT INTO t SELECT i, 0, i FROM generate_series(1, {ROWS}) AS i;
        INSERT INTO words SELECT 'w' || i, i FROM generate_series(1, 3000) AS i;
        INSERT INTO bag SELECT i FROM generate_series(1, 500) AS i; ANALYZE; CREATE PUBLICATION pub FOR ALL TABLES
    """)
    run = RunProcess(publisher18_db, target_db.dsn, tmp_path, options=())
    run.catch_up(60)
    stop = threading.Event()
    empty: list[str] = []

    def write() -> None:
        writes = random.Random(seed)
        with publisher18_db.connect() as connection:
            while not stop.is_set():
                number = writes.randrange(1, ROWS)
                connection.execute(f"UPDATE t SET v = v + 1 WHERE id % 5000 = {number % 5000}".encode())
                connection.execute(f"DELETE FROM t WHERE id = {number}; INSERT INTO bag VALUES ({number})".encode())
                connection.execute(f"UPDATE words SET v = v + 1 WHERE v % 100 = {number % 100}".encode())
                time.sleep(0.02)

    def read() -> None:
        with target_db.connect() as connection:
            while not stop.is_set():
                empty.extend(
                    table for table in ("t", "words", "bag") if not connection.execute(f"SELECT FROM {table} LIMIT 1".encode()).fetchall()
                )
                time.sleep(0.01)

    threads = [threading.Thread(target=work) for work in (write, read)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(ROUNDS):
            for damage in chosen.sample(DAMAGES, 3):
                target_db.execute(damage.format(chosen.randrange(1, 100)))
            done = subscriber("recover", run.name, f"--target={target_db.dsn}", f"--connection={publisher18_db.dsn}", "--force")
            assert done.status == 0, done.errors
            for _ in range(chosen.randrange(1, 4)):
                run.start()
                time.sleep(chosen.uniform(0.5, 4))
                run.kill()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        run.end()
    run.catch_up(90)
    for query in ("SELECT id, v, u FROM t ORDER BY id", "SELECT word, v FROM words ORDER BY word", "SELECT v FROM bag ORDER BY v"):
        assert target_db.fetch(query) == publisher18_db.fetch(query)
    assert not empty
    slots = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"
    assert publisher18_db.fetch(slots) == [(run.name,)]
