"""A day in short: thousands of small transactions, a lost connection every few seconds, refreshes; memory and descriptors stay flat.

``SUBSCRIBER_SOAK_SECONDS`` (``make soak``: 600) says how long; the test run of every day takes less.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from pathlib import Path

import psycopg
import pytest

from subscriber import alter_subscription, drop_subscription
from tests.support.database import Database
from tests.support.managed import catch_up, create
from tests.support.program import Program, running
from tests.support.replica import QUICK

SECONDS = float(os.environ.get("SUBSCRIBER_SOAK_SECONDS", "40"))
TABLES = 6
ENDS = (
    "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE '{name}%'"
)


class Writer(threading.Thread):
    """Small transactions, one after another, on its own session."""

    def __init__(self, publisher: Database, seed: int) -> None:
        super().__init__()
        self._conninfo = publisher.conninfo()
        self._rng = random.Random(seed)
        self.enough = threading.Event()
        self.transactions = 0

    def run(self) -> None:
        with psycopg.connect(self._conninfo, autocommit=True, application_name="writer") as session:
            while not self.enough.is_set():
                table, key = f"t{self._rng.randrange(TABLES)}", self._rng.randrange(500)
                session.execute(
                    f"INSERT INTO {table} VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET v = excluded.v", (key, str(self._rng.random()))
                )
                if self._rng.random() < 0.1:
                    session.execute(f"DELETE FROM {table} WHERE id = %s", (key,))
                self.transactions += 1
                # no faster than a subscriber on a busy machine can follow
                self.enough.wait(0.01)


def used(program: Program) -> tuple[int, int]:
    """Resident memory in kB, and open descriptors."""
    directory = Path(f"/proc/{program.process.pid}")
    (resident,) = (line.split()[1] for line in (directory / "status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(resident), len(list((directory / "fd").iterdir()))


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(max(300, SECONDS * 4))
async def test_small_transactions_lost_connections_and_refreshes(publisher18_db: Database, target_db: Database, tmp_path: Path) -> None:
    publisher, target = publisher18_db, target_db
    for database in (publisher, target):
        for number in range(TABLES):
            database.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, v text)")
    publisher.execute("CREATE PUBLICATION pub FOR TABLE t0, t1, t2, t3, t4")
    name = await create(publisher, target)
    writers = [Writer(publisher, seed) for seed in (1, 2)]
    samples: list[tuple[int, int]] = []
    reconnects = refreshes = 0
    settings = ("-c", "wal_retrieve_retry_interval=200ms", "-c", f"spool_directory={tmp_path}")
    loop = asyncio.get_running_loop()
    with running("run", "--target", target.dsn, *settings) as program:
        for writer in writers:
            writer.start()
        try:
            await asyncio.to_thread(catch_up, publisher, target, name)
            until = loop.time() + SECONDS
            while loop.time() < until or min(reconnects, refreshes) <= 2:
                side = (publisher, target)[reconnects % 2]
                reconnects += side.value(ENDS.format(name=name)) > 0
                if reconnects % 3 == 0:
                    # t5 comes and goes: copied each time
                    publisher.execute(f"ALTER PUBLICATION pub {('ADD', 'DROP')[refreshes % 2]} TABLE t5")
                    target.execute("TRUNCATE t5") if refreshes % 2 == 0 else None
                    async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
                        await subscription.refresh()
                    refreshes += 1
                await asyncio.to_thread(catch_up, publisher, target, name)
                samples.append(used(program))
        finally:
            for writer in writers:
                writer.enough.set()
            for writer in writers:
                writer.join()
        if refreshes % 2 == 0:
            publisher.execute("ALTER PUBLICATION pub ADD TABLE t5")
            target.execute("TRUNCATE t5")
            async with alter_subscription(name, target=target.dsn, settings=QUICK) as subscription:
                await subscription.refresh()
        await asyncio.to_thread(catch_up, publisher, target, name)
        for number in range(TABLES):
            query = f"SELECT id, v FROM t{number} ORDER BY id"
            assert publisher.fetch(query) == target.fetch(query)
        program.send(signal.SIGTERM)
        assert program.ended().status == 0, program.errors
    await drop_subscription(name, target=target.dsn, settings=QUICK)
    done = sum(writer.transactions for writer in writers)
    third = max(len(samples) // 3, 1)
    first, last = samples[:third], samples[-third:]
    print(f"{done} transactions, {reconnects} reconnects, {refreshes} refreshes; memory {samples[0][0]} to {samples[-1][0]} kB")
    assert done > 10 * SECONDS
    # what the allocator keeps for itself apart
    assert max(memory for memory, _ in last) < max(memory for memory, _ in first) * 1.1 + 8192
    assert max(descriptors for _, descriptors in last) <= max(descriptors for _, descriptors in first) + 4
