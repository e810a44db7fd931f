"""The subscriber, and then the target, are killed at random moments under the mixed load: both sides end up equal, nothing comes twice."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from subscriber.testing.load.mixed_load import LoadReport
from subscriber.testing.mariadb import EmbeddedMariaDB
from tests.crash.other_targets import (
    MariaDBReader,
    OtherProcess,
    SqliteReader,
    TargetReader,
    assert_all_arrives,
    make_publisher_tables,
    make_specimens_of_text,
)
from tests.crash.scenario import (
    eventually,
    make_load,
    prepare_one,
    under_load,
)
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream
from tests.support.mariadb_database import MariaDatabase, fresh_mariadb_database

Moment = Callable[[OtherProcess], bool]

_RATE = 40.0


def _table_in(state: str) -> Moment:
    return lambda process: state in process.states()


def _slot_exists(process: OtherProcess) -> bool:
    return bool(process.acknowledged())


def _streams(process: OtherProcess) -> bool:
    found: bool = process.publisher.value(
        f"SELECT EXISTS (SELECT FROM pg_stat_replication WHERE application_name = '{process.name}' AND state <> 'startup')"
    )
    return found


def _acknowledged_more() -> Moment:
    """What was acknowledged last when we began to look is so no longer."""
    first: list[str] = []

    def reached(process: OtherProcess) -> bool:
        first.append(process.acknowledged())
        return first[-1] != first[0]

    return reached


def _prepared(process: OtherProcess) -> bool:
    return bool(process.reader.value("SELECT count(*) FROM subscriber_prepared_transaction"))


def _early(rng: random.Random, kills: int) -> list[tuple[str, Moment]]:
    """Moments of the setup and of the copies."""
    known: list[tuple[str, Moment]] = [
        ("at once", lambda _: True),
        ("catalog", lambda process: process.reader.value("SELECT count(*) FROM subscriber_pg_subscription") is not None),
        ("slot", _slot_exists),
        ("copying", _table_in("d")),
        ("copied", _table_in("f")),
        ("synchronized", _table_in("s")),
        ("ready", _table_in("r")),
    ]
    return [*known, *rng.choices(known[3:], k=kills)][:kills]


def _late(rng: random.Random, kills: int) -> list[tuple[str, Moment]]:
    """Moments while changes are followed; each kind comes, in any order."""
    known: list[tuple[str, Callable[[], Moment]]] = [
        ("acknowledged", _acknowledged_more),
        ("prepared", lambda: _prepared),
        ("spilled", lambda: OtherProcess.has_spilled),
        ("at once", lambda: lambda _: True),
    ]
    chosen = [*known, *rng.choices(known[:3], k=kills)][:kills]
    rng.shuffle(chosen)
    return [(name, make()) for name, make in chosen]


async def _chance(rng: random.Random) -> None:
    """A random moment, not synchronisation."""
    await asyncio.sleep(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5), rng.uniform(0, 1)]))


async def _kill(process: OtherProcess, moments: list[tuple[str, Moment]], met: Counter[str], rng: random.Random, patience: float) -> None:
    for name, moment in moments:
        process.start()
        if await eventually(lambda moment=moment: moment(process), patience, process):  # type: ignore[misc]
            met[name] += 1
        await _chance(rng)
        process.kill()


def _assert_it_was_hard(publisher: Database, process: OtherProcess, report: LoadReport) -> None:
    streamed = publisher.value(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{process.name}'")
    print(f"{report.transactions} transactions, {report.prepared.total()} prepared, {streamed} streamed")
    assert min(report.committed_prepared, report.rolled_back_prepared) > 0
    assert streamed > 0


async def _survives(publisher: Database, reader: TargetReader, directory: Path, kills: int) -> None:
    seed = secrets.randbelow(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    process = OtherProcess(publisher, reader, directory)
    await make_publisher_tables(publisher)
    met: Counter[str] = Counter()
    load = make_load(publisher, seed, rate=_RATE)
    let_slots_be_created(publisher, load)
    early = kills * 2 // 5
    try:
        async with under_load(load):
            await _kill(process, _early(rng, early), met, rng, 60)
            await _kill(process, [("two-phase", lambda _: process.is_ready())], met, rng, 90)
            assert met["two-phase"] == 1, process.log()
            let_small_transactions_stream(publisher, load)
            await _kill(process, _late(rng, kills - early - 1), met, rng, 60)
            for number in range(3):
                prepare_one(publisher, f"left {number} {publisher.name}", rng)
        await assert_all_arrives(process, load, 300)
    finally:
        process.end()
    print(f"{kills} kills, moments met {dict(met)}")
    assert met["copying"] + met["copied"] + met["synchronized"] > 0, met
    assert min(met[name] for name in ("slot", "acknowledged", "prepared", "spilled")) > 0, met
    _assert_it_was_hard(publisher, process, load.report)


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
                assert await eventually(lambda: _streams(process), 60, process), process.log()
                for number in range(20):
                    if number == 8:
                        assert await eventually(process.is_ready, 90, process), process.log()
                        let_small_transactions_stream(publisher, load)
                    before = process.acknowledged()
                    # in half of the lives it makes progress; in the others it is killed at any moment
                    if number % 2 and await eventually(lambda before=before: process.acknowledged() != before, 30, process):  # type: ignore[misc]
                        progressed += 1
                    await _chance(rng)
                    await asyncio.to_thread(server.kill)
                    await asyncio.to_thread(server.start)
                    process.assert_runs()
                for number in range(3):
                    prepare_one(publisher, f"left {number} {publisher.name}", rng)
                process.kill()
            await assert_all_arrives(process, load, 300)
        finally:
            process.end()
    print(f"progressed in {progressed} lives")
    assert progressed > 5
    _assert_it_was_hard(publisher, process, load.report)
