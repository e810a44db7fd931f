"""``subscriber run`` is killed at random moments, again and again, under a load with streams, savepoints and two-phase commit."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from subscriber.testing.load.mixed_load import LoadReport, MixedLoad
from tests.crash.process import RunProcess
from tests.crash.scenario import eventually, prepare_one, under_load
from tests.support.database import let_slots_be_created, let_small_transactions_stream

SMALL = ("logical_decoding_work_mem=128kB", "batch_rows=500", "copy_range_size=512kB", "max_sync_workers_per_subscription=4")
"""Streams spill, batches split, and tables are copied in parts; workers mostly wait for their slots."""

Moment = Callable[[], bool]


async def chance(rng: random.Random) -> None:
    """A random moment, not synchronisation."""
    await asyncio.sleep(rng.choice([0, rng.uniform(0, 0.05), rng.uniform(0, 0.5), rng.uniform(0, 1)]))


class Killer:
    """Starts the process, waits for a moment, kills it.

    Attributes:
        met: how often each moment was reached; a moment that does not come in time is skipped.
    """

    def __init__(self, process: RunProcess, rng: random.Random) -> None:
        self.met: Counter[str] = Counter()
        self.process = process
        self.rng = rng

    async def kill(self, name: str, moment: Moment, patience: float = 60.0) -> None:
        self.process.start()
        self.met[name] += await eventually(moment, patience, self.process)
        await chance(self.rng)
        self.process.kill()

    async def kill_early(self, kills: int) -> None:
        """At moments of the setup and of the copies."""
        process = self.process
        known: list[tuple[str, Moment]] = [
            ("at once", lambda: True),
            ("catalog", process.has_catalog),
            ("slot", lambda: bool(process.acknowledged())),
            ("copying", lambda: "d" in process.states()),
            ("copied", lambda: "f" in process.states()),
            ("synchronized", lambda: "s" in process.states()),
            ("ready", lambda: "r" in process.states()),
        ]
        for name, moment in [*known, *self.rng.choices(known[3:], k=kills)][:kills]:
            await self.kill(name, moment)

    async def kill_late(self, kills: int) -> None:
        """At moments while changes are followed; each kind comes, in any order."""
        process = self.process
        known: list[tuple[str, Moment]] = [
            ("acknowledged", lambda: process.acknowledged() != first),
            ("prepared", process.holds_prepared),
            ("spilled", process.has_spilled),
            ("streaming", process.streams),
            ("at once", lambda: True),
        ]
        chosen = [*known, *self.rng.choices(known[:3], k=kills)][:kills]
        self.rng.shuffle(chosen)
        for name, moment in chosen:
            first = process.acknowledged()
            await self.kill(name, moment)


async def survives(
    killer: Killer,
    load: MixedLoad,
    kills: int,
    arrives: Callable[[], Awaitable[None]],
    *more: Callable[[], Awaitable[None]],
) -> None:
    """Kill it so often under the load; then everything arrives.

    Args:
        killer: kills the process.
        load: on the publisher.
        kills: how often, with those of ``more``.
        arrives: proves it.
        more: further kills.
    """
    process, rng = killer.process, killer.rng
    publisher, early = process.publisher, kills * 2 // 5
    let_slots_be_created(publisher, load)
    try:
        async with under_load(load):
            await killer.kill_early(early)
            # slots are not created while transactions that are prepared now stay so: all tables first, then those that are left
            await killer.kill("two-phase", process.is_ready, patience=90)
            assert killer.met["two-phase"] == 1, process.log()
            let_small_transactions_stream(publisher, load)
            await killer.kill_late(kills - early - 1 - 2 * len(more))
            for step in more:
                await step()
            for number in range(3):
                prepare_one(publisher, f"left {number} {publisher.name}", rng)
        await arrives()
    finally:
        process.end()


def assert_it_was_hard(killer: Killer, report: LoadReport, moments: Sequence[str] = (), *, ended: int = 0, streamed: int = 0) -> None:
    """The kills met these moments, and more transactions than so many ended prepared, each way, and were streamed."""
    process, met = killer.process, killer.met
    name = process.name
    found = process.publisher.value(f"SELECT stream_txns FROM pg_stat_replication_slots WHERE slot_name = '{name}'")
    print(f"moments met {dict(met)}; {report.transactions} transactions, {report.prepared.total()} prepared, {found} streamed")
    if moments:
        assert met["copying"] + met["copied"] + met["synchronized"] > 0, met
        assert min(met[name] for name in moments) > 0, met
    assert min(report.committed_prepared, report.rolled_back_prepared) > ended
    assert found > streamed
