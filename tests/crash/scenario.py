"""What the crash tests share: tables under a mixed load, and the proof at the end that nothing was lost and nothing came twice."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from subscriber.testing.comparison import compare, compare_prepared
from subscriber.testing.load.mixed_load import Kind, MixedLoad
from subscriber.testing.load.plans import WEIGHTS
from subscriber.testing.load.tables import create_tables, table_names
from tests.crash.process import RunProcess, SubscriberProcess
from tests.support.database import Database

ROWS = 30_000
HUGE_ROWS = 2_000
RATE = 60.0
_HUGE = (Kind.HUGE, Kind.HUGE_ROLLBACK, Kind.HUGE_SAVEPOINTS, Kind.HUGE_PREPARED)
_WEIGHTS = {**WEIGHTS, **dict.fromkeys(_HUGE, 1.5), Kind.PREPARED: 10, Kind.SAVEPOINTS: 10}
_POLL = 0.01


async def make_tables(publisher: Database, target: Database) -> None:
    """The load's tables on both sides, ``history`` and ``tags`` among them, which have no key and would show a row that came twice."""
    await create_tables(publisher.dsn, rows=ROWS)
    await create_tables(target.dsn)
    publisher.execute("CREATE PUBLICATION pub FOR TABLES IN SCHEMA load")


@contextlib.asynccontextmanager
async def under_load(load: MixedLoad) -> AsyncIterator[None]:
    """The load runs while the block does; its failure is the test's."""
    enough = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.run(enough))
        try:
            yield
        finally:
            enough.set()


def make_load(publisher: Database, seed: int, *, reconnect: bool = False, rate: float = RATE) -> MixedLoad:
    """Everything the load has, with more streams, savepoints and prepared transactions than usual."""
    return MixedLoad(publisher.dsn, seed=seed, rate=rate, sessions=3, huge_rows=HUGE_ROWS, weights=_WEIGHTS, reconnect=reconnect)


async def eventually(condition: Callable[[], bool], timeout: float, process: RunProcess) -> bool:
    """Poll until it is true; False after so many seconds. Fails if the process ends before."""
    deadline = asyncio.get_running_loop().time() + timeout
    while not condition():
        process.assert_runs()
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(_POLL)
    return True


def prepare_one(publisher: Database, gid: str, rng: random.Random) -> None:
    """A prepared transaction that stays."""
    publisher.execute(
        "BEGIN; INSERT INTO load.history SELECT i, 0, 0, 0, NULL, 'prepared' FROM generate_series(1, "
        f"{rng.randint(1, 2000)}) AS i; PREPARE TRANSACTION '{gid}'"
    )


async def assert_same(process: SubscriberProcess) -> None:
    """The rows of all tables, what is prepared, that nothing temporary is left, and that no change met a conflict."""
    publisher, target = process.publisher, process.target
    found = await compare(publisher.dsn, target.dsn, table_names("load"))
    assert [table for table in found if not table.equal] == [], process.log()
    assert min(table.publisher_rows for table in found if table.table.name in {"accounts", "history"}) > 0
    prepared = await compare_prepared(publisher.dsn, target.dsn)
    assert prepared.equal, prepared
    slots = publisher.fetch("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()")
    assert slots == [(process.name,)]
    assert target.fetch("SELECT count(*) FROM subscriber.copy_part") == [(0,)]
    assert target.fetch('SELECT count(*) FROM subscriber."position" WHERE srrelid <> 0') == [(0,)]
    # of a transaction still prepared one row is not visible; another tells that its PREPARE was received
    seen = target.fetch("SELECT xid, gid LIKE 'received %' FROM subscriber.prepared_transaction")
    assert all(received and xid in prepared.target for xid, received in seen), seen
    assert list(process.spool.iterdir()) == []
    assert process.conflicts() == []
    target.wait("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'crash%'", 0)


async def assert_all_arrives(process: RunProcess, load: MixedLoad, timeout: float, same: Callable[[], Awaitable[None]]) -> None:
    """Catch up with transactions left prepared; then end them, and catch up again. Each time both sides are the same."""
    publisher = process.publisher
    await asyncio.to_thread(process.catch_up, timeout)
    await same()
    left = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
    assert publisher.fetch(left)
    await load.finish()
    for number, (gid,) in enumerate(publisher.fetch(left)):
        publisher.execute(f"{'ROLLBACK' if number else 'COMMIT'} PREPARED '{gid}'")
    await asyncio.to_thread(process.catch_up, timeout)
    await same()
    assert not process.holds_prepared()
