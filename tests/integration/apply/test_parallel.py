"""Streamed transactions applied before their end (``streaming = parallel``), by a whole subscription on live servers.

The servers run with ``logical_decoding_work_mem = 64kB``, so that some hundred rows are enough to be streamed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from subscriber import Settings
from subscriber.errors import ApplyError, SubscriberError
from tests.support.database import Database, ServerAddress, fresh_database
from tests.support.observation import PREPARED, all_ready, eventually, until
from tests.support.replica import QUICK, Replica, replica
from tests.support.row_gates import closed_gates, make_row_gate, waiting_at_gate, waiting_for_lock_on

ROWS = "SELECT id, u, md5(v) FROM t ORDER BY id"
TABLES = """
    CREATE TABLE t (id int PRIMARY KEY, u int, v text);
    CREATE TABLE emptied (id int PRIMARY KEY);
    CREATE TABLE other (id int PRIMARY KEY)
"""
# more than the publisher keeps in memory
MANY = 400

# what each of the program's sessions does, as part of its name; without the session that asks
PARALLEL = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%parallel apply'"
# with rows of t in it: a session is idle for an instant after its BEGIN too
OPEN = (
    f"{PARALLEL} AND state = 'idle in transaction' AND EXISTS (SELECT FROM pg_locks AS l WHERE l.pid = pg_stat_activity.pid"
    " AND l.relation = 't'::regclass AND l.mode = 'RowExclusiveLock' AND l.granted)"
)
BLOCKED = f"{PARALLEL} AND wait_event_type = 'Lock'"
BUSY = f"{PARALLEL} AND xact_start IS NOT NULL"


def settings(spool: Path, **more: Any) -> Settings:
    return replace(QUICK, spool_directory=str(spool), **more)


def fill(first: int, count: int = MANY, *, u: str = "NULL") -> str:
    return f"INSERT INTO t SELECT g, {u}, repeat('x', 500) FROM generate_series({first}, {first + count - 1}) AS g"


def make_tables(publisher: Database, target: Database) -> None:
    for database in (publisher, target):
        database.execute(TABLES)
    publisher.execute("CREATE PUBLICATION pub FOR ALL TABLES")


@contextlib.asynccontextmanager
async def following(publisher: Database, target: Database, spool: Path, **arguments: Any) -> AsyncIterator[Replica]:
    """A replica whose tables are ready."""
    arguments = {"settings": settings(spool), "streaming": "parallel"} | arguments
    async with replica(publisher, target, **arguments) as found:
        await all_ready(found)
        await found.caught_up()
        yield found


async def applied(target: Database, expected: int = 1) -> None:
    """So many parallel transactions are open, and wait for more."""
    await eventually(target, OPEN, expected)


def parallel(found: Replica) -> int:
    return found.subscription.status.statistics.parallel_transactions


def last_error(found: Replica) -> SubscriberError | None:
    return found.subscription.status.last_error


@pytest.mark.publisher(min=14, lacks="streaming of transactions in progress")
@pytest.mark.matrix
async def test_savepoints_and_rollbacks(publisher_db: Database, any_target_db: Database, tmp_path: Path) -> None:
    target_db = any_target_db
    make_tables(publisher_db, target_db)
    target_db.execute("""
        CREATE TABLE seen (application text, role text, replication_role text, path text, commit text);
        CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql SECURITY INVOKER AS $$ BEGIN
            INSERT INTO public.seen VALUES (current_setting('application_name'), current_user,
                current_setting('session_replication_role'), current_setting('search_path'), current_setting('synchronous_commit'));
            RETURN NEW; END $$;
        CREATE TRIGGER see BEFORE INSERT ON t FOR EACH ROW WHEN (NEW.id % 1000 = 0) EXECUTE FUNCTION see();
        ALTER TABLE t ENABLE ALWAYS TRIGGER see;
    """)
    async with following(publisher_db, target_db, tmp_path) as found:
        with publisher_db.connect() as one, publisher_db.connect() as two:
            for session in (one, two):
                session.execute("BEGIN")
            one.execute(fill(0))
            await applied(target_db)
            # not visible yet
            assert target_db.value("SELECT count(*) FROM t") == 0
            two.execute(fill(10_000))
            await applied(target_db, 2)
            publisher_db.execute("INSERT INTO t VALUES (90000, 1, 'between')")
            one.execute("SAVEPOINT a")
            one.execute(fill(1001))
            one.execute("SAVEPOINT b")
            one.execute(fill(2001))
            one.execute("UPDATE t SET u = 7 WHERE id < 100; UPDATE t SET u = 2 WHERE id = 90000")
            two.execute("SAVEPOINT a; DELETE FROM t WHERE id BETWEEN 10200 AND 20000; ROLLBACK TO a")
            one.execute("RELEASE b; ROLLBACK TO a")
            one.execute(fill(3001))
            one.execute("SAVEPOINT c")
            one.execute(fill(4001))
            one.execute("RELEASE c; UPDATE t SET u = 3 WHERE id = 90000")
            two.execute("ROLLBACK")
            one.execute("COMMIT")
        publisher_db.execute("UPDATE t SET u = u + 1 WHERE id = 90000; INSERT INTO t VALUES (91000, 1, 'after')")
        rows = {number: u for number, u, _ in await found.same(ROWS)}
        assert len(rows) == 3 * MANY + 2
        assert rows[90000] == 4
        assert not {1001, 2001, 10_000} & rows.keys()
        assert parallel(found) == 1
        # no subscriber of the target with origin = none gets it
        oid = target_db.value("SELECT oid FROM subscriber.pg_subscription")
        origins = (
            f"SELECT pg_replication_origin_progress(roname, true) FROM pg_replication_origin WHERE roname ~ '^subscriber_{oid}_parallel_'"
        )
        assert [lsn for (lsn,) in target_db.fetch(origins) if lsn is not None]
        status = found.subscription.status
        assert status.last_error is None
        statistics = status.statistics
        # what was rolled back is not counted
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (3 * MANY + 2, 2, 0)
        assert (statistics.confl_update_missing, statistics.confl_delete_missing) == (0, 0)
        await eventually(target_db, BUSY, 0)
        main, *rest = target_db.fetch("SELECT DISTINCT * FROM seen WHERE application NOT LIKE '% parallel apply'")
        assert not rest
        ours = target_db.fetch("SELECT DISTINCT * FROM seen WHERE application LIKE '% parallel apply'")
        assert ours == [(f"{main[0]} parallel apply", *main[1:])]
        # described in the stream alone, and known to the apply session afterwards
        with publisher_db.connect() as session:
            publisher_db.execute("CREATE TABLE late (id int)")
            session.execute("BEGIN; ALTER TABLE t ADD COLUMN w int")
            session.execute(fill(5001).replace("500)", "500), 8"))
            target_db.execute("ALTER TABLE t ADD COLUMN w int; CREATE TABLE late (id int)")
            session.execute("COMMIT")
        publisher_db.execute("INSERT INTO t VALUES (92000, 1, 'after', 9)")
        assert (92000, 9) in await found.same("SELECT id, w FROM t ORDER BY id")
    # a session's end is the server's business, soon
    await eventually(target_db, PARALLEL, 0)


async def test_depends_on_what_was_committed_before(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher18_db, target_db)
    make_row_gate(target_db, "t", "NEW.id = 90000", 1)
    async with following(publisher18_db, target_db, tmp_path) as found:
        with publisher18_db.connect() as session, closed_gates(target_db, 1) as release:
            session.execute("BEGIN")
            session.execute(fill(1))
            await applied(target_db)
            publisher18_db.execute("INSERT INTO t VALUES (90000, 1, 'not yet in the target')")
            await eventually(target_db, waiting_at_gate(1), 1)
            session.execute("UPDATE t SET u = 2 WHERE id = 90000")
            session.execute(fill(1001))
            publisher18_db.execute("INSERT INTO other VALUES (1)")
            end = publisher18_db.current_lsn()
            await until(lambda: found.subscription.status.received >= end, "the UPDATE received")
            await applied(target_db)
            assert target_db.value("SELECT count(*) FROM t") == 0
            release(1)
            await eventually(target_db, waiting_at_gate(1), 0)
            session.execute("COMMIT")
        assert (90000, 2) in [row[:2] for row in await found.same(ROWS)]
        statistics = found.subscription.status.statistics
        assert (statistics.parallel_transactions, statistics.confl_update_missing) == (1, 0)


async def test_never_a_deadlock(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher18_db, target_db)
    target_db.execute("""
        CREATE UNIQUE INDEX only_here ON t (u);
        CREATE FUNCTION look() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM count(*) FROM public.emptied; RETURN NEW; END';
        CREATE TRIGGER look BEFORE INSERT ON other FOR EACH ROW EXECUTE FUNCTION look();
        ALTER TABLE other ENABLE ALWAYS TRIGGER look;
    """)
    async with following(publisher18_db, target_db, tmp_path) as found:
        # a value that is unique in the target only
        with publisher18_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(1, u="g"))
            await applied(target_db)
            publisher18_db.execute("INSERT INTO t VALUES (5000, 7, 'waits for the stream')")
            await found.caught_up()
            assert target_db.value("SELECT u FROM t WHERE id = 5000") == 7
            publisher18_db.execute("UPDATE t SET u = 5000 WHERE id = 5000")
            session.execute("COMMIT")
        assert len(await found.same(ROWS)) == MANY + 1
        assert parallel(found) == 0

        # TRUNCATE, and a table that is only read in the target
        with publisher18_db.connect() as session:
            session.execute("BEGIN; TRUNCATE emptied")
            session.execute(fill(1001))
            await applied(target_db)
            publisher18_db.execute("INSERT INTO other VALUES (1)")
            assert await found.same("SELECT * FROM other") == [(1,)]
            session.execute("COMMIT")
        await found.caught_up()
        assert parallel(found) == 0

        # through another session: an ALTER TABLE waits for the stream, and all others behind it
        with publisher18_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(2001))
            await applied(target_db)
            altering = asyncio.create_task(asyncio.to_thread(target_db.execute, "ALTER TABLE t ADD COLUMN here int DEFAULT 5"))
            with contextlib.closing(target_db.connect()) as watcher:
                while watcher.execute(waiting_for_lock_on("t").encode()).fetchone() != (1,):
                    await asyncio.sleep(0.02)
            publisher18_db.execute("INSERT INTO t VALUES (5001, 5001, 'behind the ALTER TABLE')")
            await found.caught_up()
            await altering
            session.execute("COMMIT")
        assert len(await found.same(ROWS)) == 3 * MANY + 2
        assert target_db.value("SELECT count(*) FROM t WHERE here = 5") == 3 * MANY + 2
        assert parallel(found) == 0

        # two streams that block each other; the one that waits is committed first
        with publisher18_db.connect() as one, publisher18_db.connect() as two:
            one.execute("BEGIN; INSERT INTO t VALUES (6000, -1, 'x')")
            one.execute(fill(3001))
            await applied(target_db)
            two.execute("BEGIN; INSERT INTO t VALUES (6001, -1, 'x')")
            two.execute(fill(4001))
            await eventually(target_db, BLOCKED, 1)
            two.execute("COMMIT")
            await found.caught_up()
            assert target_db.fetch("SELECT id FROM t WHERE u = -1") == [(6001,)]
            assert parallel(found) == 1
            publisher18_db.execute("UPDATE t SET u = -2 WHERE id = 6001")
            one.execute("COMMIT")
        assert len(await found.same(ROWS)) == 5 * MANY + 4
        assert parallel(found) == 1

        # and after all that
        with publisher18_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(7001))
            await applied(target_db)
            session.execute("COMMIT")
        await found.same(ROWS)
        assert parallel(found) == 2
        assert found.subscription.status.last_error is None
        await eventually(target_db, BUSY, 0)


async def test_never_a_deadlock_with_another_subscription(
    publisher18_db: Database, publisher18: ServerAddress, target_db: Database, tmp_path: Path
) -> None:
    """The workers of two wait for each other's streams, which the server cannot see."""
    with fresh_database(publisher18, "pub") as second_db:
        for database in (publisher18_db, second_db, target_db):
            database.execute(TABLES)
        target_db.execute("CREATE UNIQUE INDEX only_here ON t (u)")
        for database in (publisher18_db, second_db):
            database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
        async with following(publisher18_db, target_db, tmp_path) as first, following(second_db, target_db, tmp_path) as second:
            with publisher18_db.connect() as one, second_db.connect() as two:
                one.execute("BEGIN; INSERT INTO t VALUES (1, -1, 'x')")
                one.execute(fill(1001))
                await applied(target_db)
                two.execute("BEGIN; INSERT INTO t VALUES (2, -2, 'x')")
                two.execute(fill(2001))
                await applied(target_db, 2)
                publisher18_db.execute("INSERT INTO t VALUES (3, -2, 'waits for the other one'); DELETE FROM t WHERE id = 3")
                second_db.execute("INSERT INTO t VALUES (4, -1, 'waits for the other one'); DELETE FROM t WHERE id = 4")
                goals = [(found, found.publisher.current_lsn()) for found in (first, second)]
                await until(lambda: any(found.subscription.status.flushed >= lsn for found, lsn in goals), "one of them goes on")
                # nothing blocks the other one then
                for session in (one, two):
                    session.execute("DELETE FROM t WHERE u < 0; COMMIT")
            await first.caught_up()
            await second.caught_up()
            assert target_db.value("SELECT count(*) FROM t") == 2 * MANY
            assert last_error(first) is None
            assert last_error(second) is None


async def test_errors_are_those_of_the_commit(
    publisher18_db: Database, target_db: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="subscriber")
    make_tables(publisher18_db, target_db)
    target_db.execute("ALTER TABLE t ADD CONSTRAINT small CHECK (u < 100)")
    async with following(publisher18_db, target_db, tmp_path) as found:
        with publisher18_db.connect() as session:
            session.execute("BEGIN; SAVEPOINT a; INSERT INTO t VALUES (0, 100, 'refused by the target')")
            session.execute(fill(1))
            await until(lambda: "is not applied in parallel" in caplog.text, "the refusal")
            publisher18_db.execute("INSERT INTO t VALUES (5000, 1, 'goes on')")
            await found.caught_up()
            assert last_error(found) is None
            session.execute("ROLLBACK TO a")
            session.execute(fill(1001))
            session.execute("COMMIT")
        assert len(await found.same(ROWS)) == MANY + 1
        assert parallel(found) == 0

        # by a session that was terminated
        with publisher18_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(2001))
            await applied(target_db)
            assert target_db.value(PARALLEL.replace("count(*)", "pg_terminate_backend(pid)"))
            session.execute("COMMIT")
        assert len(await found.same(ROWS)) == 2 * MANY + 1
        assert last_error(found) is None

        # one that stays
        with publisher18_db.connect() as session:
            session.execute("BEGIN")
            session.execute(fill(3001))
            await applied(target_db)
            session.execute("INSERT INTO t VALUES (6000, 100, 'refused by the target')")
            session.execute("COMMIT")
        await until(lambda: last_error(found) is not None, "an error")
        error = last_error(found)
        assert isinstance(error, ApplyError)
        assert 'violates check constraint "small"' in str(error)
        assert target_db.value("SELECT count(*) FROM t") == 2 * MANY + 1
        target_db.execute("ALTER TABLE t DROP CONSTRAINT small")
        assert len(await found.same(ROWS)) == 3 * MANY + 2


async def test_as_many_as_are_allowed(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher18_db, target_db)
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(publisher18_db.connect()) for _ in range(3)]

        async def stream_all(found: Replica, first: int, expected: int) -> None:
            for number, session in enumerate(sessions):
                session.execute("BEGIN")
                session.execute(fill(first + 1000 * number))
                await applied(target_db, min(number + 1, expected))
            for session in reversed(sessions):
                session.execute("COMMIT")
            assert len(await found.same(ROWS)) % (3 * MANY) == 0

        async with following(publisher18_db, target_db, tmp_path) as found:
            await stream_all(found, 0, 2)
            # the first to commit had no session
            assert parallel(found) >= 2
        none = settings(tmp_path, max_parallel_apply_workers_per_subscription=0)
        async with following(publisher18_db, target_db, tmp_path, settings=none) as found:
            await stream_all(found, 10_000, 0)
            assert parallel(found) == 0
            assert target_db.value(PARALLEL) == 0


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_prepared(publisher_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher_db, target_db)
    async with following(publisher_db, target_db, tmp_path, two_phase=True) as found:
        await eventually(target_db, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
        for number, end in enumerate(("COMMIT", "ROLLBACK")):
            with publisher_db.connect() as session:
                session.execute("BEGIN")
                session.execute(fill(1 + 1000 * number))
                await applied(target_db)
                session.execute("SAVEPOINT a; DELETE FROM t; ROLLBACK TO a")
                session.execute(f"PREPARE TRANSACTION 'p{number}'")
            await found.caught_up()
            assert parallel(found) == number + 1
            assert len(target_db.fetch(PREPARED)) == 1
            assert target_db.value("SELECT count(*) FROM t") == MANY * number
            # without blocking another session
            publisher_db.execute(f"INSERT INTO other VALUES ({number})")
            await found.caught_up()
            publisher_db.execute(f"{end} PREPARED 'p{number}'")
            assert len(await found.same(ROWS)) == MANY
            assert target_db.fetch(PREPARED) == []
        assert target_db.value("SELECT count(*) FROM subscriber.prepared_transaction") == 0
        assert found.subscription.status.last_error is None
