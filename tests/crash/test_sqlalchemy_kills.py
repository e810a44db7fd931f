"""The subscriber, and then the target, are killed at random moments under the mixed load: both sides end up equal, nothing comes twice."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from subscriber.testing.mariadb import EmbeddedMariaDB
from tests.crash.kills import Killer, assert_it_was_hard, chance, survives
from tests.crash.other_targets import (
    MariaDBReader,
    OtherProcess,
    SqliteReader,
    TargetReader,
    assert_same,
    make_publisher_tables,
    make_specimens_of_text,
)
from tests.crash.scenario import assert_all_arrives, eventually, make_load, prepare_one, under_load
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.mariadb_database import MariaDatabase, fresh_mariadb_database

_RATE = 40.0


async def _survives(publisher: Database, reader: TargetReader, directory: Path, kills: int) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    process = OtherProcess(publisher, reader, directory)
    await make_publisher_tables(publisher)
    killer, load = Killer(process, random.Random(seed)), make_load(publisher, seed, rate=_RATE)
    await survives(killer, load, kills, lambda: assert_all_arrives(process, load, 300, lambda: assert_same(process)))
    assert_it_was_hard(killer, load.report, ("slot", "acknowledged", "prepared", "spilled"))


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(1500)
async def test_twenty_kills_with_mariadb(publisher18_db: Database, mariadb_db: MariaDatabase, tmp_path: Path) -> None:
    await make_specimens_of_text(mariadb_db.url)
    await _survives(publisher18_db, MariaDBReader(mariadb_db), tmp_path, 20)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(1500)
async def test_twenty_kills_with_sqlite(publisher18_db: Database, tmp_path: Path) -> None:
    await _survives(publisher18_db, SqliteReader(tmp_path / "replica.db"), tmp_path, 20)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(1500)
async def test_mariadb_is_killed_twenty_times(
    publisher18_db: Database, make_mariadb: Callable[[], EmbeddedMariaDB], tmp_path: Path
) -> None:
    """The subscriber lives on. The server is one of this test's own: others are not to be killed."""
    publisher = publisher18_db
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    server = make_mariadb()
    with fresh_mariadb_database(server) as database:
        process = OtherProcess(publisher, MariaDBReader(database), tmp_path)
        await make_publisher_tables(publisher)
        await make_specimens_of_text(database.url)
        load = make_load(publisher, seed, rate=_RATE)
        let_slots_be_created(publisher, load)
        progressed = 0
        try:
            async with under_load(load):
                process.start()
                # from here on it waits for servers that are away
                assert await eventually(process.streams, 60, process), process.log()
                for number in range(20):
                    if number == 8:
                        assert await eventually(process.is_ready, 90, process), process.log()
                        let_small_transactions_stream(publisher, load)
                    before = process.acknowledged()
                    # in half of the lives it makes progress; in the others it is killed at any moment
                    if number % 2 and await eventually(lambda before=before: process.acknowledged() != before, 30, process):  # type: ignore[misc]
                        progressed += 1
                    await chance(rng)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                    process.assert_runs()
                for number in range(3):
                    prepare_one(publisher, f"left {number} {publisher.name}", rng)
                process.kill()
            await assert_all_arrives(process, load, 300, lambda: assert_same(process))
        finally:
            process.end()
    print(f"progressed in {progressed} lives")
    assert progressed > 5
    assert_it_was_hard(Killer(process, rng), load.report)
