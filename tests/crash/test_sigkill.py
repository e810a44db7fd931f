"""The subscriber's process is killed at random moments, again and again, under a load with streams, savepoints and two-phase commit."""

from __future__ import annotations

import random
import secrets
from pathlib import Path

import pytest

from subscriber.testing.load.mixed_load import Kind
from tests.crash.kills import SMALL, Killer, assert_it_was_hard, survives
from tests.crash.process import QUICK, SubscriberProcess
from tests.crash.scenario import assert_all_arrives, assert_same, eventually, make_load, make_tables
from tests.support.database import Database

_FIXED_SEED = 20


def _in_parallel(process: SubscriberProcess) -> bool:
    """A session of parallel apply has written something."""
    found: bool = process.target.value(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%parallel apply' "
        "AND backend_xid IS NOT NULL)"
    )
    return found


def _parallel(process: SubscriberProcess) -> int:
    return process.log(10**6).count("was applied in parallel")


async def _kill_in_parallel_apply(process: SubscriberProcess, killer: Killer) -> None:
    """The load's own transactions are short: whether one is begun before its end is chance. This one stays open until it is."""
    with process.publisher.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO load.history SELECT i, 0, 0, 0, NULL, 'long' FROM generate_series(1, 3000) AS i")
        await killer.kill("parallel", lambda: _in_parallel(process), patience=90)
        process.start()
        assert await eventually(lambda: _in_parallel(process), 90, process), process.log()
        before = _parallel(process)
        session.execute("COMMIT")
    assert await eventually(lambda: _parallel(process) > before, 90, process), process.log()
    process.kill()


async def _survives(publisher: Database, target: Database, directory: Path, seed: int, kills: int) -> None:
    print(f"seed {seed}")
    process = SubscriberProcess(publisher, target, directory, settings=(*QUICK, *SMALL))
    await make_tables(publisher, target)
    killer, load = Killer(process, random.Random(seed)), make_load(publisher, seed)
    arrives = lambda: assert_all_arrives(process, load, 120, lambda: assert_same(process))  # noqa: E731
    await survives(killer, load, kills, arrives, lambda: _kill_in_parallel_apply(process, killer))
    moments = ("slot", "acknowledged", "prepared", "spilled", "parallel")
    assert_it_was_hard(killer, load.report, moments, ended=5, streamed=10)
    assert load.report.kinds.keys() == set(Kind)
    print(f"{_parallel(process)} applied in parallel")


# with fewer than ten some moments would be missing
@pytest.mark.endurance
@pytest.mark.parametrize("kills", [20])
@pytest.mark.timeout(1200)
async def test_kills(publisher18_db: Database, target_db: Database, tmp_path: Path, kills: int) -> None:
    await _survives(publisher18_db, target_db, tmp_path, secrets.randbelow(10**6), kills)


@pytest.mark.crash
@pytest.mark.endurance
@pytest.mark.timeout(1200)
async def test_some_kills_with_an_older_publisher(publisher16_db: Database, target_db: Database, tmp_path: Path) -> None:
    await _survives(publisher16_db, target_db, tmp_path, _FIXED_SEED, 11)
