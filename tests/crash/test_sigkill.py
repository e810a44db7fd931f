"""The subscriber's process is killed at random moments, again and again, under a load with streams, savepoints and two-phase commit."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from subscriber.testing.load.mixed_load import Kind, LoadReport
from tests.crash.process import QUICK, SubscriberProcess
from tests.crash.scenario import (
    assert_all_arrives,
    eventually,
    is_ready,
    make_load,
    make_tables,
    prepare_one,
    under_load,
)
from tests.support.database import Database, let_slots_be_created, let_small_transactions_stream

_FIXED_SEED = 20

Moment = Callable[[SubscriberProcess], bool]


def _has_catalog(process: SubscriberProcess) -> bool:
    found: bool = process.target.value("SELECT to_regclass('subscriber.prepared_transaction') IS NOT NULL")
    return found


def _table_in(state: str) -> Moment:
    def reached(process: SubscriberProcess) -> bool:
        return _has_catalog(process) and process.target.value(
            f"SELECT EXISTS (SELECT FROM subscriber.pg_subscription_rel WHERE srsubstate = '{state}')"
        )

    return reached


def _slot_exists(process: SubscriberProcess) -> bool:
    found: bool = process.publisher.value(f"SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '{process.name}')")
    return found


def _streaming(process: SubscriberProcess) -> bool:
    found: bool = process.publisher.value(
        f"SELECT EXISTS (SELECT FROM pg_stat_replication WHERE application_name = '{process.name}' AND state <> 'startup')"
    )
    return found


def _acknowledged_more() -> Moment:
    """What was acknowledged last when we began to look is so no longer."""
    first: list[str] = []

    def reached(process: SubscriberProcess) -> bool:
        lsn = str(process.publisher.value(f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{process.name}'"))
        first.append(lsn)
        return lsn != first[0]

    return reached


def _prepared(process: SubscriberProcess) -> bool:
    found: bool = process.target.value("SELECT EXISTS (SELECT FROM pg_prepared_xacts WHERE database = current_database())")
    return found


def _in_parallel(process: SubscriberProcess) -> bool:
    """A session of parallel apply has written something."""
    found: bool = process.target.value(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE '%parallel apply' "
        "AND backend_xid IS NOT NULL)"
    )
    return found


def _parallel(process: SubscriberProcess) -> int:
    return process.log(10**6).count("was applied in parallel")


def _early(rng: random.Random, kills: int) -> list[tuple[str, Moment]]:
    """Moments of the setup and of the copies."""
    known: list[tuple[str, Moment]] = [
        ("at once", lambda _: True),
        ("catalog", _has_catalog),
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
        ("spilled", lambda: SubscriberProcess.has_spilled),
        ("streaming", lambda: _streaming),
        ("at once", lambda: lambda _: True),
    ]
    chosen = [*known, *rng.choices(known[:3], k=kills)][:kills]
    rng.shuffle(chosen)
    return [(name, make()) for name, make in chosen]


class _Killer:
    """Starts the process, waits for a moment, kills it.

    Attributes:
        met: how often each moment was reached; a moment that does not come in time is skipped.
    """

    def __init__(self, process: SubscriberProcess, rng: random.Random) -> None:
        self.met: Counter[str] = Counter()
        self._process = process
        self._rng = rng

    async def kill(self, moments: list[tuple[str, Moment]], patience: float = 45.0) -> None:
        process, rng = self._process, self._rng
        for name, moment in moments:
            process.start()
            if await eventually(lambda moment=moment: moment(process), patience, process):  # type: ignore[misc]
                self.met[name] += 1
            # a random moment, not synchronisation
            await asyncio.sleep(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5), rng.uniform(0, 1)]))
            process.kill()


async def _kill_in_parallel_apply(process: SubscriberProcess, killer: _Killer) -> None:
    """The load's own transactions are short: whether one is begun before its end is chance. This one stays open until it is."""
    with process.publisher.connect() as session:
        session.execute("BEGIN")
        session.execute("INSERT INTO load.history SELECT i, 0, 0, 0, NULL, 'long' FROM generate_series(1, 3000) AS i")
        await killer.kill([("parallel", _in_parallel)], patience=90)
        process.start()
        assert await eventually(lambda: _in_parallel(process), 90, process), process.log()
        before = _parallel(process)
        session.execute("COMMIT")
    assert await eventually(lambda: _parallel(process) > before, 90, process), process.log()
    process.kill()


async def _survives(publisher: Database, target: Database, directory: Path, seed: int, kills: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    # small enough that streams spill, batches split, and tables are copied in parts; workers mostly wait for their slots
    small = ("logical_decoding_work_mem=128kB", "batch_rows=500", "copy_range_size=512kB", "max_sync_workers_per_subscription=4")
    process = SubscriberProcess(publisher, target, directory, settings=(*QUICK, *small))
    await make_tables(publisher, target)
    killer = _Killer(process, rng)
    early = kills * 2 // 5
    load = make_load(publisher, seed)
    let_slots_be_created(publisher, load)
    try:
        async with under_load(load):
            await killer.kill(_early(rng, early))
            # slots are not created while transactions that are prepared now stay so: all tables first, then those that are left
            await killer.kill([("two-phase", is_ready)], patience=90)
            assert killer.met["two-phase"] == 1, process.log()
            let_small_transactions_stream(publisher, load)
            await killer.kill(_late(rng, kills - early - 3))
            await _kill_in_parallel_apply(process, killer)
            for number in range(3):
                prepare_one(publisher, f"left {number} {publisher.name}", rng)
        await assert_all_arrives(process, load, 120)
    finally:
        process.end()
    _assert_it_was_hard(publisher, process, killer.met, load.report, kills)


def _assert_it_was_hard(publisher: Database, process: SubscriberProcess, met: Counter[str], report: LoadReport, kills: int) -> None:
    streamed = publisher.value(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{process.name}'")
    print(f"{kills} kills, moments met {dict(met)}")
    print(f"{report.transactions} transactions, {report.prepared.total()} prepared, {streamed} streamed")
    assert met["copying"] + met["copied"] + met["synchronized"] > 0, met
    assert min(met[name] for name in ("slot", "acknowledged", "prepared", "spilled", "parallel")) > 0, met
    assert report.kinds.keys() == set(Kind)
    assert min(report.committed_prepared, report.rolled_back_prepared) > 5
    assert streamed > 10
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
