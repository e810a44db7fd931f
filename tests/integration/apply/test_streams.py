"""Transactions that the publisher streams while they are in progress, by a whole subscription on live servers.

The servers run with ``logical_decoding_work_mem = 64kB``, so that some hundred rows are enough to be streamed.
Native's tests of the same topics: t/015 to t/020 of src/test/subscription.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import Settings
from tests.support.database import Database
from tests.support.observation import acknowledged, all_ready, eventually, slot_of, until
from tests.support.replica import QUICK, Replica, replica

SMALL = 64 * 1024
ROWS = "SELECT id, md5(v) FROM t ORDER BY id"
TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"

STREAMS = pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")
STREAMING = ["off", pytest.param("on", marks=STREAMS), pytest.param("parallel", marks=STREAMS)]


def settings(spool: Path, memory: int = SMALL) -> Settings:
    return replace(QUICK, logical_decoding_work_mem=memory, spool_directory=str(spool))


def fill(first: int, last: int, letter: str) -> str:
    return f"INSERT INTO t SELECT g, repeat('{letter}', 500) FROM generate_series({first}, {last}) AS g"


def spool_files(spool: Path) -> list[Path]:
    found = []
    with contextlib.suppress(FileNotFoundError):  # a directory that was removed in the meantime
        for path in spool.rglob("*.spool"):
            with contextlib.suppress(FileNotFoundError):  # a file that is
                if path.stat().st_size:
                    found.append(path)
    return found


async def streamed(publisher: Database, count: int = 1) -> None:
    """The publisher has sent chunks of this many transactions in progress (or more, counted since the slot was made)."""
    await eventually(
        publisher, f"SELECT stream_txns >= {count} FROM pg_stat_replication_slots WHERE slot_name = '{slot_of(publisher)}'", True
    )


def make_tables(publisher: Database, target: Database, tables: str = TABLE) -> None:
    for database in (publisher, target):
        database.execute(tables)
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")


async def ready(found: Replica) -> None:
    """Synchronized, and the stream to look at is the apply worker's."""
    await all_ready(found)
    await found.caught_up()


@pytest.mark.parametrize(
    ("streaming", "memory"),
    [
        pytest.param("off", SMALL, marks=pytest.mark.endurance),
        pytest.param("on", SMALL, marks=STREAMS),
        pytest.param("parallel", 64 * 1024 * 1024, marks=STREAMS),
    ],
)
async def test_interleaved_with_rollbacks_at_several_depths(
    publisher_db: Database, target_db: Database, streaming: Any, memory: int, tmp_path: Path
) -> None:
    make_tables(publisher_db, target_db)
    async with replica(publisher_db, target_db, streaming=streaming, settings=settings(tmp_path, memory)) as found:
        await ready(found)
        with publisher_db.connect() as one, publisher_db.connect() as two, publisher_db.connect() as three:
            for session in (one, two, three):
                session.execute("BEGIN")
            one.execute(fill(1, 400, "a"))
            two.execute(fill(10_001, 10_400, "b"))
            three.execute(fill(20_001, 20_400, "c"))
            publisher_db.execute("INSERT INTO t VALUES (90001, 'between')")
            if streaming != "off":
                await streamed(publisher_db, 3)
                if memory == SMALL:
                    await until(lambda: bool(spool_files(tmp_path)), "something in the spool")
            one.execute("SAVEPOINT a")
            one.execute(fill(401, 800, "d"))
            two.execute("SAVEPOINT a; INSERT INTO t VALUES (10401, 'kept')")
            two.execute("SAVEPOINT b; UPDATE t SET v = repeat('e', 500) WHERE id BETWEEN 10001 AND 10200")
            one.execute("SAVEPOINT b")
            one.execute(fill(801, 1200, "f"))
            two.execute("SAVEPOINT c; DELETE FROM t WHERE id BETWEEN 10300 AND 10400")
            three.execute("SAVEPOINT a; UPDATE t SET v = v || 'x' WHERE id > 20000 AND id <= 20400")
            two.execute("ROLLBACK TO c; RELEASE c; DELETE FROM t WHERE id = 10350")
            one.execute("SAVEPOINT c; INSERT INTO t VALUES (1201, 'gone')")
            one.execute("ROLLBACK TO b; RELEASE b")
            publisher_db.execute("INSERT INTO t VALUES (90002, 'between')")
            one.execute(fill(801, 900, "g"))
            one.execute("SAVEPOINT d")
            one.execute(fill(901, 1300, "h"))
            one.execute("RELEASE d; ROLLBACK TO a; INSERT INTO t VALUES (1400, 'after the rollback')")
            one.execute("SAVEPOINT e")
            one.execute(fill(1401, 1800, "i"))
            two.execute("ROLLBACK TO b; UPDATE t SET id = id + 5000 WHERE id BETWEEN 10001 AND 10100")
            two.execute("SAVEPOINT f; DELETE FROM t; ROLLBACK TO f")
            three.execute("ROLLBACK")
            two.execute("COMMIT")
            one.execute("COMMIT")
        rows = dict(await found.same(ROWS))
        # 400 of one's first part, one row, 400 of its last; 401 of two's; what came between
        assert len(rows) == 400 + 1 + 400 + 401 + 2
        assert {1, 400, 1400, 1401, 1800, 15001, 15100, 10101, 10401, 90001, 90002} <= rows.keys()
        assert not {401, 801, 1201, 10001, 20001} & rows.keys()
        if publisher_db.version >= 14:
            sent = publisher_db.fetch(
                f"SELECT stream_txns > 0, spill_txns > 0 FROM pg_stat_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
            )
            assert sent[0][0 if streaming != "off" else 1]
            assert sent[0][0] == (streaming != "off")
        await until(lambda: not spool_files(tmp_path), "the spool empty")
        # nothing was applied twice and passed over by a conflict
        assert found.subscription.status.last_error is None
        statistics = found.subscription.status.statistics
        assert (statistics.confl_update_missing, statistics.confl_delete_missing) == (0, 0)


@pytest.mark.parametrize("streaming", ["off", pytest.param("parallel", marks=STREAMS)])
async def test_columns_added_inside_a_stream(publisher_db: Database, target_db: Database, streaming: Any, tmp_path: Path) -> None:
    publisher_db.execute("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)")
    for table in ("t", "u"):
        target_db.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, v text, c int, d text, e int DEFAULT 7)")
    publisher_db.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    columns = "SELECT id, md5(v), c, d FROM t ORDER BY id"
    async with replica(publisher_db, target_db, streaming=streaming, settings=settings(tmp_path)) as found:
        await ready(found)
        publisher_db.execute("INSERT INTO t VALUES (0, 'described before')")
        with publisher_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(1, 300, "a"))
            session.execute("SAVEPOINT a; ALTER TABLE t ADD COLUMN c int")
            session.execute("INSERT INTO t SELECT g, repeat('b', 500), g FROM generate_series(301, 600) AS g")
            session.execute("SAVEPOINT b; ALTER TABLE t ADD COLUMN d text")
            session.execute("INSERT INTO t SELECT g, repeat('c', 500), g, 'gone' FROM generate_series(601, 900) AS g")
            session.execute("ROLLBACK TO b")
            session.execute("INSERT INTO t SELECT g, repeat('d', 500), g FROM generate_series(601, 900) AS g")
            session.execute(
                "ALTER TABLE t ADD COLUMN d text; INSERT INTO t VALUES (901, 'x', 901, 'd'); UPDATE t SET d = 'e' WHERE id < 10"
            )
            session.execute("COMMIT")
        publisher_db.execute("INSERT INTO t VALUES (902, 'described in the stream', 902, 'f')")
        rows = await found.same(columns)
        assert len(rows) == 903
        assert rows[1][2:] == (None, "e")
        assert rows[601][2:] == (601, None)
        assert rows[902][2:] == (902, "f")
        assert target_db.value("SELECT count(*) FROM t WHERE e = 7") == 903

        # described only inside what is rolled back: a subtransaction, a whole transaction, one that others overtake
        with publisher_db.connect() as session, publisher_db.connect() as other:
            session.execute("BEGIN; INSERT INTO t VALUES (1000, 'kept', 1, 'x')")
            session.execute("SAVEPOINT a; ALTER TABLE t DROP COLUMN c; INSERT INTO u VALUES (1, 'gone')")
            session.execute("INSERT INTO t SELECT g, repeat('e', 500), 'gone' FROM generate_series(1001, 1300) AS g")
            session.execute("ROLLBACK TO a")
            session.execute("INSERT INTO t SELECT g, repeat('f', 500), g, 'kept' FROM generate_series(1001, 1300) AS g")
            other.execute("INSERT INTO u VALUES (2, 'overtakes')")
            session.execute("INSERT INTO u VALUES (3, 'kept'); COMMIT")
            other.execute("BEGIN; ALTER TABLE u ADD COLUMN c int")
            other.execute("INSERT INTO u SELECT g, repeat('g', 500), g FROM generate_series(10, 310) AS g")
            other.execute("ROLLBACK")
            other.execute("INSERT INTO u VALUES (4, 'after'); INSERT INTO t VALUES (1400, 'after', 1400, NULL)")
        rows = await found.same(columns)
        assert len(rows) == 903 + 302
        assert await found.same("SELECT id, v FROM u ORDER BY id") == [(2, "overtakes"), (3, "kept"), (4, "after")]
        # decoding an ALTER TABLE while it is being rolled back, a publisher (14 to 18) may lose sight of the table and end the stream
        error = found.subscription.status.last_error
        assert error is None or (streaming != "off" and "could not map file" in str(error))


async def test_toast_keys_and_truncate_inside_a_stream(publisher_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(
        publisher_db,
        target_db,
        f"{TABLE}; CREATE TABLE big (id int PRIMARY KEY, n int, data text); ALTER TABLE big ALTER COLUMN data SET STORAGE EXTERNAL;"
        "CREATE TABLE whole (a int, b text); ALTER TABLE whole REPLICA IDENTITY FULL;"
        "CREATE TABLE emptied (id serial PRIMARY KEY, v text)",
    )
    # a value of the target's own shows that an unchanged one was kept and not rewritten
    publisher_db.execute("INSERT INTO big SELECT g, 0, repeat(g::text, 3000) FROM generate_series(1, 20) AS g")
    publisher_db.execute("INSERT INTO emptied (v) SELECT 'before' FROM generate_series(1, 10)")
    async with replica(publisher_db, target_db, streaming="parallel", settings=settings(tmp_path)) as found:
        await ready(found)
        target_db.execute("UPDATE big SET data = 'own' || repeat('x', 3000) WHERE id = 20")
        with publisher_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(1, 300, "a"))
            session.execute(
                "UPDATE big SET n = n + 1; UPDATE big SET id = id + 100 WHERE id <= 10; UPDATE big SET data = 'short' WHERE id = 15"
            )
            session.execute("INSERT INTO whole SELECT g, CASE WHEN g % 2 = 0 THEN repeat('w', 400) END FROM generate_series(1, 200) AS g")
            session.execute("UPDATE whole SET b = 'changed' WHERE a % 3 = 0; DELETE FROM whole WHERE a % 5 = 0")
            session.execute("SAVEPOINT a; TRUNCATE t, whole; INSERT INTO t VALUES (1, 'gone')")
            session.execute("ROLLBACK TO a")
            session.execute("UPDATE t SET id = id + 1000 WHERE id <= 100; UPDATE t SET v = 'x' WHERE id > 1050")
            session.execute(
                "TRUNCATE emptied RESTART IDENTITY; INSERT INTO emptied (v) SELECT repeat('z', 500) FROM generate_series(1, 200)"
            )
            session.execute("COMMIT")
        rows = await found.same(ROWS)
        assert len(rows) == 300
        assert await found.same("SELECT a, md5(b) FROM whole ORDER BY a")
        assert len(await found.same("SELECT id, v FROM emptied ORDER BY id")) == 200
        keys = await found.same("SELECT id, n FROM big ORDER BY id")
        assert keys == [(number, 1) for number in (*range(11, 21), *range(101, 111))]
        await found.same("SELECT id, md5(data) FROM big WHERE id <> 20 ORDER BY id")
        assert target_db.value("SELECT left(data, 3) FROM big WHERE id = 20") == "own"
        if publisher_db.version >= 14:  # 13 sends it at its commit
            stats = f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{slot_of(publisher_db)}'"
            assert publisher_db.value(stats) == 1


@pytest.mark.parametrize("streaming", ["off", pytest.param("on", marks=pytest.mark.endurance), "parallel"])
async def test_abort_message_for_what_was_never_streamed(publisher18_db: Database, target_db: Database, streaming: Any) -> None:
    # the bug was PostgreSQL 18's: a large transaction, rolled back, with a subtransaction still in memory is answered with a
    # STREAM ABORT even where nothing was streamed; its own apply worker dies of it. 14 to 17 send empty chunks before
    make_tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, streaming=streaming) as found:
        await ready(found)
        for number in range(3):
            with publisher18_db.connect() as session:
                session.execute("BEGIN; SAVEPOINT a; INSERT INTO t VALUES (1, 'x'); RELEASE SAVEPOINT a")
                session.execute(fill(10, 1000, "y"))
                session.execute("ROLLBACK")
            publisher18_db.execute(f"INSERT INTO t VALUES ({2000 + number}, 'after')")
        assert len(await found.same(ROWS)) == 3
        status = found.subscription.status
        assert status.last_error is None
        await acknowledged(publisher18_db, status.flushed)


async def test_stream_cut_in_its_middle(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher18_db, target_db)
    async with replica(publisher18_db, target_db, streaming="on", settings=settings(tmp_path)) as found:
        await ready(found)
        with publisher18_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(1, 400, "a"))
            session.execute("SAVEPOINT a")
            session.execute(fill(401, 800, "b"))
            await streamed(publisher18_db)
            await until(lambda: bool(spool_files(tmp_path)), "something in the spool")
            cut = f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = '{slot_of(publisher18_db)}'"
            assert publisher18_db.value(cut)
            session.execute("ROLLBACK TO a")
            session.execute(fill(801, 1200, "c"))
            session.execute("COMMIT")
        assert len(await found.same(ROWS)) == 800
        assert found.subscription.status.last_error is not None
        assert found.subscription.status.statistics.inserts == 800
