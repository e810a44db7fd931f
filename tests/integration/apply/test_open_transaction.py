"""Large transactions that are not streamed are applied while they are received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import ApplyError
from tests.integration.apply.test_parallel import BUSY, PARALLEL, ROWS, following, last_error, make_tables, parallel, settings
from tests.support.database import Database
from tests.support.observation import PREPARED, eventually, until
from tests.support.received import cut_connection
from tests.support.row_gates import closed_gates, make_row_gate, waiting_at_gate

# rows of 500 bytes: together some times the size at which an attempt begins
MANY = 8000


def fill(first: int, count: int = MANY) -> str:
    return f"INSERT INTO t SELECT g, NULL, repeat('x', 500) FROM generate_series({first}, {first + count - 1}) AS g"


def whole(spool: Path, **more: Any) -> dict[str, Any]:
    """Nothing is streamed, and the receiver soon waits for the attempt, so that there is one."""
    return {"settings": settings(spool, logical_decoding_work_mem=1024 * 1024, **more), "streaming": "off"}


async def test_applied_while_it_is_received(publisher_db: Database, any_target_db: Database, tmp_path: Path) -> None:
    target_db = any_target_db
    make_tables(publisher_db, target_db)
    async with following(publisher_db, target_db, tmp_path, **whole(tmp_path)) as found:
        # the relation is described in an earlier transaction
        publisher_db.execute("INSERT INTO t VALUES (0, 1, 'before')")
        # no attempt begins before the events before it are committed
        await found.caught_up()
        publisher_db.execute(fill(1))
        publisher_db.execute("INSERT INTO t VALUES (100000, 1, 'after')")
        assert len(await found.same(ROWS)) == MANY + 2
        assert parallel(found) == 1
        with publisher_db.connect() as session:
            session.execute("BEGIN; SAVEPOINT a; DELETE FROM t; ROLLBACK TO a; ALTER TABLE t ADD COLUMN w int")
            target_db.execute("ALTER TABLE t ADD COLUMN w int")
            session.execute("UPDATE t SET u = 2, w = 3; DELETE FROM t WHERE id > 4000; TRUNCATE emptied; COMMIT")
        publisher_db.execute("INSERT INTO t VALUES (100001, 1, 'after', 4)")
        assert (100001, 4) in await found.same("SELECT id, w FROM t ORDER BY id")
        status = found.subscription.status
        assert parallel(found) == 2
        assert status.last_error is None
        statistics = status.statistics
        assert (statistics.inserts, statistics.updates, statistics.deletes) == (MANY + 3, MANY + 2, MANY - 3999)
        assert (statistics.confl_update_missing, statistics.confl_delete_missing) == (0, 0)
        await eventually(target_db, BUSY, 0)
    async with following(publisher_db, target_db, tmp_path, **whole(tmp_path, max_parallel_apply_workers_per_subscription=0)) as found:
        publisher_db.execute(fill(200_000).replace("500)", "500), 5"))
        await found.same(ROWS)
        assert parallel(found) == 0
        assert target_db.value(PARALLEL) == 0


async def test_failed_attempts_change_nothing(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher18_db, target_db)
    make_row_gate(target_db, "t", "NEW.id % 10000 = 7000", 1)
    async with following(publisher18_db, target_db, tmp_path, **whole(tmp_path)) as found:
        # its session is terminated
        with closed_gates(target_db, 1) as release:
            publisher18_db.execute(fill(0))
            await eventually(target_db, waiting_at_gate(1), 1)
            assert target_db.value("SELECT count(*) FROM t") == 0
            assert target_db.value(PARALLEL.replace("count(*)", "pg_terminate_backend(pid)"))
            release(1)
        assert len(await found.same(ROWS)) == MANY
        assert (parallel(found), last_error(found)) == (0, None)
        # the connection to the publisher is lost before the end is received
        with closed_gates(target_db, 1) as release:
            publisher18_db.execute(fill(10_000, 5 * MANY))
            await eventually(target_db, waiting_at_gate(1), 1)
            cut_connection(publisher18_db)
            # the end may have been received already: then there is no error
            release(1)
        assert len(await found.same(ROWS)) == 6 * MANY
        assert parallel(found) == 1
        # the target rejects a row: the error is that of the commit
        target_db.execute("ALTER TABLE t ADD CONSTRAINT small CHECK (id < 107000)")
        publisher18_db.execute(fill(100_000))
        await until(lambda: isinstance(last_error(found), ApplyError), "an error")
        assert 'violates check constraint "small"' in str(last_error(found))
        assert target_db.value("SELECT count(*) FROM t") == 6 * MANY
        target_db.execute("ALTER TABLE t DROP CONSTRAINT small")
        assert len(await found.same(ROWS)) == 7 * MANY


@pytest.mark.publisher(min=15, lacks="two_phase of the replication protocol")
async def test_prepared(publisher_db: Database, target_db: Database, tmp_path: Path) -> None:
    make_tables(publisher_db, target_db)
    async with following(publisher_db, target_db, tmp_path, two_phase=True, **whole(tmp_path)) as found:
        await eventually(target_db, "SELECT subtwophasestate FROM subscriber.pg_subscription", "e")
        publisher_db.execute("INSERT INTO t VALUES (0, 1, 'before')")
        # no attempt begins before the events before it are committed
        await found.caught_up()
        publisher_db.execute(f"BEGIN; {fill(1)}; PREPARE TRANSACTION 'p'")
        await found.caught_up()
        assert parallel(found) == 1
        assert len(target_db.fetch(PREPARED)) == 1
        publisher_db.execute("COMMIT PREPARED 'p'")
        assert len(await found.same(ROWS)) == MANY + 1
        assert last_error(found) is None
