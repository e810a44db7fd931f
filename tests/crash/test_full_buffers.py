"""Killed while its session waits for a lock, behind more statements than the connection's buffers hold.

A server sees the end of a connection after everything that was written to it, and a backend that waits reads nothing: the bug was that
it kept the writer's lock as long as it waited, and no other process could continue.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from tests.crash.process import SubscriberProcess
from tests.support.database import WAIT_SECONDS, Database

WAITING = (
    "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    " AND application_name LIKE '{}%' AND query NOT LIKE '%advisory%'"
)
LARGE = "INSERT INTO t SELECT i, repeat('x', 2000) FROM generate_series(10, 20000) AS i"


def cannot_send(port: int) -> None:
    """Wait until bytes that were written to the connection with this local port stay behind."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            local, queues = line.split()[1], line.split()[4]
            if int(local.split(":")[1], 16) == port and int(queues.split(":")[0], 16) > 0:
                return
        time.sleep(0.02)
    raise AssertionError("everything could be sent")


@pytest.mark.crash
@pytest.mark.timeout(360)
@pytest.mark.parametrize("streaming", [pytest.param("off", marks=pytest.mark.endurance), "parallel"])
async def test_next_process_resumes(publisher18_db: Database, target_db: Database, tmp_path: Path, streaming: str) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t; INSERT INTO t VALUES (1, 'a')")
    publisher.execute(f"ALTER DATABASE {publisher.name} SET logical_decoding_work_mem = '64kB'")
    process = SubscriberProcess(publisher, target, tmp_path, options=(f"streaming={streaming}",))
    waiting = WAITING.format(process.name)
    try:
        process.start()
        await asyncio.to_thread(target.wait, "SELECT count(*)::int FROM t", 1)
        publisher.execute("INSERT INTO t VALUES (2, 'a')")
        await asyncio.to_thread(target.wait, "SELECT count(*)::int FROM t", 2)
        with contextlib.closing(target.connect()) as other, publisher.connect() as session:
            other.execute("BEGIN")
            # the first row of the large INSERT, whose rows are sent before the UPDATE
            other.execute("INSERT INTO t VALUES (10)")
            # with streaming=parallel it is applied before its end
            session.execute("BEGIN")
            session.execute("UPDATE t SET v = 'b' WHERE id = 1")
            session.execute(LARGE)
            if streaming == "off":
                session.execute("COMMIT")
            await asyncio.to_thread(target.wait, waiting, 1)
            pid, port = target.fetch(waiting.replace("count(*)::int", "pid, client_port"))[0]
            await asyncio.to_thread(cannot_send, port)
            process.kill()
            process.start()
            if streaming != "off":
                # after a restart, a walsender streams a transaction only when it continues beyond the confirmed LSN
                session.execute("INSERT INTO t SELECT i, repeat('x', 2000) FROM generate_series(20001, 20100) AS i")
            again = waiting.replace("count(*)::int", "pid") + f" AND pid <> {pid}"
            await asyncio.to_thread(target.wait, f"SELECT count(*)::int FROM ({again}) AS a", 1, 90)
            process.assert_runs()
            if streaming != "off":
                session.execute("COMMIT")
            other.execute("ROLLBACK")
        await asyncio.to_thread(target.wait, "SELECT count(*)::int FROM t WHERE v <> 'a'", 19992 if streaming == "off" else 20092, 90)
        process.assert_runs()
    finally:
        process.end()
