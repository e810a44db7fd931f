"""One round: storms and calms over one subscription, then the proof."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from subscriber.protocol.lsn import Lsn
from subscriber.testing.load.mixed_load import Kind
from tests.chaos import forgeries, network, other_refusals, refusals
from tests.chaos.environments import Environment, Servers, in_thread, make_environment
from tests.chaos.refusals import CannotNow, Refusal
from tests.crash.scenario import under_load
from tests.support.database import let_slots_be_created, let_small_transactions_stream
from tests.support.proxy import Fault, Proxy

_PREPARED = {Kind.PREPARED, Kind.HUGE_PREPARED}
_STORM_SECONDS = (15.0, 45.0)
_PAUSE = (0.0, 1.5)
STANDSTILL_SECONDS = 75.0
"""Without any progress, in a calm."""
_CALM_SECONDS = 400.0
_STARTS = 8
_END_SECONDS = 40.0
_POLL = 0.2
REFUSALS: dict[str, dict[str, tuple[float, float, Refusal]]] = {
    "postgres15": refusals.POSTGRES,
    "postgres18": refusals.POSTGRES,
    "sqlite": other_refusals.SQLITE,
    "mariadb": other_refusals.MARIADB,
}


class Failure(Exception):
    """What chaos looks for."""


@dataclass
class Result:
    """Of one round, or of several.

    Attributes:
        faults: that happened, by name.
        ends: of the program, by how.
        transactions: of the load.
        rows: compared at the end, of all tables.
        failures: what was found.
    """

    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    checks: Counter[str] = field(default_factory=Counter)
    transactions: int = 0
    rows: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.seconds += other.seconds
        self.transactions += other.transactions
        self.rows += other.rows
        self.failures += other.failures
        for mine, theirs in ((self.faults, other.faults), (self.ends, other.ends), (self.checks, other.checks)):
            mine.update(theirs)


class Round:
    """See the module."""

    def __init__(self, environment: Environment, rng: random.Random, result: Result, without: frozenset[str]) -> None:
        self._environment = environment
        self._rng = rng
        self._result = result
        self._process = environment.process
        self._without = without
        self._kills = rng.random() < 0.6

    async def run(self, seconds: float) -> None:
        """Storms and calms for so long, then the proof."""
        until = time.monotonic() + seconds
        self._begin()
        async with under_load(self._environment.load):
            copied = False
            while not copied or time.monotonic() < until:
                await self._storm()
                if self._kills and self._rng.random() < 0.5:
                    await self._kill()
                await self._calm()
                if not copied:
                    copied = True
                    self._is_copied()
        await self._end()

    async def strike_each(self, faults: Sequence[tuple[Proxy, Fault]]) -> None:
        """These faults, one after another, each at the next message that it fits,, while changes are followed; then the proof."""
        self._begin()
        async with under_load(self._environment.load):
            await self._calm()
            self._is_copied()
            for proxy, fault in faults:
                proxy.begin_storm()
                fault.skip = 0
                proxy.arm(fault)
                async with asyncio.timeout(STANDSTILL_SECONDS):
                    while not proxy.struck[fault.name]:
                        self._keep_running()
                        await asyncio.sleep(_POLL / 10)
                proxy.be_calm()
            await self._calm()
        await self._end()

    def _begin(self) -> None:
        load = self._environment.load
        let_slots_be_created(self._environment.publisher, load)
        if self._rng.random() < 0.7:
            # each slot waits for the end of what is prepared: copying takes several times as long
            load.held |= _PREPARED
        self._process.start()

    def _is_copied(self) -> None:
        load = self._environment.load
        let_small_transactions_stream(self._environment.publisher, load)
        load.held -= _PREPARED

    async def _end(self) -> None:
        # what was prepared before two_phase was enabled comes with its end
        await self._environment.load.finish()
        await self._calm()
        await self._proof()
        self._result.transactions += self._environment.load.report.transactions

    # --- a storm

    async def _storm(self) -> None:
        for proxy in self._environment.proxies:
            proxy.begin_storm()
        end = time.monotonic() + self._rng.uniform(*_STORM_SECONDS)
        storms = [
            asyncio.create_task(self._network(end)),
            asyncio.create_task(self._refusals(end)),
            asyncio.create_task(self._keep_alive(end)),
        ]
        try:
            await asyncio.gather(*storms)
        finally:
            for storm in storms:
                storm.cancel()
            await asyncio.gather(*storms, return_exceptions=True)
            for proxy in self._environment.proxies:
                proxy.be_calm()

    async def _network(self, end: float) -> None:
        environment, rng = self._environment, self._rng
        while time.monotonic() < end:
            proxy = rng.choice(environment.proxies)
            if rng.random() < 0.05:
                self._process.note("fault: outage")
                await proxy.be_away(rng.uniform(0.1, 6))
            elif proxy is environment.to_publisher:
                self._arm(proxy, forgeries.draw(rng) if rng.random() < 0.6 else network.draw(network.POSTGRES, rng))
            else:
                self._arm(proxy, network.draw(network.MARIADB if environment.kind == "mariadb" else network.POSTGRES, rng))
            await asyncio.sleep(rng.uniform(*_PAUSE))

    def _arm(self, proxy: Proxy, fault: Fault) -> None:
        if fault.name not in self._without:
            proxy.arm(fault)

    async def _refusals(self, end: float) -> None:
        environment, rng = self._environment, self._rng
        known = REFUSALS[environment.kind]
        while time.monotonic() < end:
            await asyncio.sleep(rng.uniform(0, 4))
            name = rng.choices(list(known), [weight for weight, _, _ in known.values()])[0]
            if name in self._without:
                continue
            _, most, refusal = known[name]
            with contextlib.suppress(CannotNow):
                async with _entered_in_thread(refusal(environment, rng)):
                    self._process.note(f"refusal: {name}")
                    self._result.faults[name] += 1
                    await asyncio.sleep(rng.uniform(most / 4, most))
                self._process.note(f"end of refusal: {name}")

    async def _keep_alive(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self._rng.uniform(0.1, 1.0))
            self._keep_running()

    def _keep_running(self) -> None:
        if not self._process.runs():
            self._process.start()

    # --- between storms

    async def _kill(self) -> None:
        sent = self._rng.choice((signal.SIGKILL, signal.SIGTERM))
        if not await in_thread(self._process.stop, sent, _END_SECONDS):
            raise Failure(f"did not end within {_END_SECONDS:.0f} s of {sent.name}")
        # in this order: the target's position only grows
        confirmed, position = await in_thread(self._environment.confirmed), await in_thread(self._environment.position)
        self._result.checks["slot not ahead of the target"] += 1
        if confirmed > position and position > 0:
            raise Failure(f"the slot is at {confirmed}, the target at {position}")

    async def _calm(self) -> None:
        """All that was committed when it began arrives."""
        environment = self._environment
        self._process.note("calm")
        aim = await in_thread(environment.publisher.current_lsn)
        begun = moved = time.monotonic()
        position, starts = Lsn(0), 0
        while True:
            if not self._process.runs():
                if starts == _STARTS:
                    raise Failure(f"ended {starts} times in a calm")
                starts += 1
                self._process.start()
            now = await in_thread(environment.position)
            if now > aim and now > (end := await in_thread(environment.publisher.current_lsn)):
                raise Failure(f"the target is at {now}, beyond the publisher's WAL, which ends at {end}")
            tables_ready = await in_thread(environment.are_tables_ready)
            if now >= aim and tables_ready:
                break
            if now != position:
                moved, position = time.monotonic(), now
            if time.monotonic() - moved > STANDSTILL_SECONDS or time.monotonic() - begun > _CALM_SECONDS:
                await in_thread(self._process.dump)
                raise Failure(f"stands still at {now}; {aim} is expected")
            await asyncio.sleep(_POLL)
        self._result.checks["caught up in a calm"] += 1

    async def _proof(self) -> None:
        """Rows and remains are as they must be. The program is stopped for it; the load does nothing."""
        if not await in_thread(self._process.stop, signal.SIGTERM, _END_SECONDS):
            raise Failure(f"did not end within {_END_SECONDS:.0f} s of SIGTERM")
        await in_thread(self._environment.forget_forged)
        try:
            await self._environment.assert_same()
        except AssertionError as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise Failure(f"not the same: {where.line}: {str(error)[:1500]}") from error
        self._result.checks["all rows equal"] += 1
        self._result.rows += sum(
            self._environment.publisher.value(f"SELECT count(*) FROM load.{table}")
            for table in ("accounts", "history", "documents", "measurements")
        )


def _visible(text: str) -> str:
    return "\n    ".join(ascii(line)[1:-1] for line in text.split("\n"))


@contextlib.asynccontextmanager
async def _entered_in_thread(refusal: contextlib.AbstractContextManager[None]) -> AsyncIterator[None]:
    await in_thread(refusal.__enter__)
    try:
        yield
    finally:
        # also if we are cancelled: what was begun has to be ended
        await asyncio.shield(asyncio.ensure_future(in_thread(refusal.__exit__, None, None, None)))


async def play(kind: str, servers: Servers, seed: str, seconds: float, rate: float, without: frozenset[str]) -> Result:
    """One round with everything new but the servers. Keeps the log if something was found."""
    result, rng = Result(), random.Random(seed)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        directory = Path(name)
        try:
            async with make_environment(kind, servers, rng, directory, rate) as environment:
                try:
                    await Round(environment, rng, result, without).run(seconds)
                except* Failure as found:
                    result.failures += [f"{kind}, seed {seed}: {failure}" for failure in found.exceptions]
                finally:
                    for proxy in environment.proxies:
                        result.faults.update(proxy.struck)
                    await in_thread(environment.process.end)
                    result.ends.update(environment.process.ends)
                    result.failures += [f"{kind}, seed {seed}: {_visible(line)}" for line in environment.process.distinct_bad()]
        finally:
            if result.failures:
                kept = Path(tempfile.gettempdir()) / f"chaos-{kind}-{seed.replace('/', '-')}.log"
                shutil.copy(directory / "log", kept)
                result.failures[-1] += f"\n    its log: {kept}"
    result.seconds = time.monotonic() - begun
    return result
