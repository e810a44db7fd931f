"""Exactly once, under everything that can go wrong: the real workers in a simulated servers.

Apply worker, table synchronizations, launcher, receiver and the loop of attempts are the product's; publisher, target and clock are in
memory. Every call to the outside may let other tasks run, take time, fail before it took effect or after; the target's server may
lose what is not on disk; the process may be killed at any moment. Then all is calm, and every table must hold each of its transactions
once, in order, as the apply worker's. A hang is a failure as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Collection
from typing import Any, cast

import pytest
from hypothesis import strategies as st

from subscriber.apply.progress import Quiet
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.tables.parking import Parking
from subscriber.apply.tables.table_sync_launcher import SyncLauncher
from subscriber.apply.tables.table_synchronization import SyncRun, TableSynchronization
from subscriber.apply.tasks import Stopped, task_group
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.interfaces import CopyFormat, Position, TableEntry, TableName, TableState
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.lsn import Lsn
from subscriber.rate_limit import RateLimit
from subscriber.stream_session import FollowedSlot
from subscriber.subscription.run import slot_follower
from subscriber.subscription.run.run_state import RunState
from subscriber.subscription.run.slot_follower import SlotFollower
from subscriber.subscription.run.status_reports import KnownProgress, StatusReports
from subscriber.subscription.run.watchdog import Watchdog
from subscriber.subscription.setup.setup import Prepared
from subscriber.subscription.spec import RunSpec
from subscriber.subscription.target_session import TargetSession
from subscriber.transaction.feedback import FlushTracker
from tests.support.examples import property_test
from tests.unit.apply.crashable_target import CrashableSink, State, TargetServer
from tests.unit.apply.memory_publisher import History, MemorySource, MemoryStream, table
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.virtual_time import run

CALM_SECONDS = 300.0
PUBLISHER_CALLS = frozenset({"receive", "describe", "snapshot", "stream", "copy", "drop_slot", "connect"})


class SimulatedServers:
    """Everything outside the process under test, and the dice."""

    def __init__(self, seed: int) -> None:
        dice = self.dice = random.Random(seed)
        self.settings = Settings(
            wal_retrieve_retry_interval=dice.choice([0.05, 0.5, 5.0]),
            max_sync_workers_per_subscription=dice.choice([1, 2, 4]),
            batch_rows=dice.choice([1, 3, 1000]),
            batch_delay=dice.choice([0.0, 0.0, 0.3]),
        )
        self.tables = dice.randint(1, 4)
        self.lazy = dice.random() < 0.4
        self.fault_rate = dice.choice([0.0, 0.01, 0.05])
        self.slow_rate = dice.choice([0.0, 0.05, 0.3])
        self.history = History()
        self.confirmed = self.history.end
        self.source = MemorySource(self.history, self.step)
        position = Position("main", "system", 1, self.history.end)
        entries = {table(number): TableEntry(TableState.INIT) for number in range(self.tables)}
        self.server = TargetServer(State(position=position, entries=entries))
        self.calm = False

    async def step(self, name: str) -> None:
        dice = self.dice
        for _ in range(dice.choice([0, 0, 0, 1, 1, 2, 5])):
            await asyncio.sleep(0)
        if dice.random() < self.slow_rate:
            await asyncio.sleep(dice.random() * dice.choice([0.01, 0.3, 2.0]))
        if self.calm or dice.random() >= self.fault_rate:
            return
        if name in PUBLISHER_CALLS:
            raise PublisherUnavailable("connection to the publisher was lost")
        if dice.random() < 0.2:
            self.server.crash()
        raise TargetUnavailable("connection to the target was lost")

    async def write(self, count: int) -> None:
        """The publisher's load."""
        dice = self.dice
        for _ in range(count):
            await asyncio.sleep(dice.choice([0.0, 0.0, 0.01, 0.2, 1.5]))
            if dice.random() < 0.25:
                await self.history.grow(dice.randint(1, 40))
            else:
                await self.history.commit(dice.sample(range(self.tables), dice.randint(1, self.tables)))


class Stream(MemoryStream):
    """The main stream: durable before acknowledged."""

    def __init__(self, servers: SimulatedServers, lsn: Lsn) -> None:
        super().__init__(servers.history, lsn, servers.step)
        self._world = servers

    async def send(self, message: bytes) -> None:
        await super().send(message)
        stored = self._world.server.flushed.position
        flush = self.statuses[-1].flush
        assert stored is not None
        assert flush <= stored.lsn, "acknowledged what the target may still lose"
        self._world.confirmed = max(self._world.confirmed, flush)


class Session:
    """In place of StreamSession."""

    capabilities = capabilities(180000)

    def __init__(self, servers: SimulatedServers, position: Position) -> None:
        assert position.lsn >= servers.confirmed, "the slot is ahead of the target: changes are lost"
        self.position = position
        self.tracker = FlushTracker(position.lsn)
        self.receiver = Receiver(Stream(servers, position.lsn), self.tracker, MemorySpool(), servers.settings)

    async def close(self) -> None:
        with contextlib.suppress(SubscriberError):
            await self.receiver.report_now()
        await self.receiver.close()


class Process:
    """One run of a subscription, wired as Subscription does it."""

    def __init__(self, servers: SimulatedServers) -> None:
        self.world = servers
        self.running = RunState()
        self.sink = CrashableSink(servers.server, step=servers.step, lazy=servers.lazy)

    async def run(self) -> None:
        servers, running, sink = self.world, self.running, self.sink
        running.active = False
        running.begin()
        spec = RunSpec(name="sub", conninfo="", publications=("pub",), options=SubscriptionOptions(), settings=servers.settings, sink=sink)
        try:
            target = TargetSession(spec)
            state = (await target.open(running.durable)).state
            tables = await sink.tables()
            # what Setup does: a crash right behind SYNCDONE leaves the slot
            for slot_name in servers.source.slots.keys() - await sink.slot_names():
                await servers.source.drop_slot(slot_name)
        except (TargetUnavailable, PublisherUnavailable):
            return
        assert state.position is not None
        running.tracker = FlushTracker(state.position.lsn)
        running.states.load(tables, state.position.lsn)
        running.prepared = True
        prepared = Prepared(
            state=state,
            position=state.position,
            tables=tables,
            publisher_lsn=servers.history.end,
            capabilities=Session.capabilities,
            first=False,
        )
        launcher = SyncLauncher(running.states, servers.settings, self)
        reporting = StatusReports(target, running, KnownProgress(Quiet()))
        attempts = SlotFollower(target, prepared, running, reporting, Watchdog(spec, running), parking=Parking(running.states))
        attempts._was_streaming = True  # what fails at first is waited for as well
        with contextlib.suppress(Stopped):
            await self.follow(launcher, attempts)

    async def follow(self, launcher: SyncLauncher, attempts: SlotFollower) -> None:
        async with task_group() as group:
            synchronizing = group.create_task(launcher.run())
            flushing = group.create_task(self.flush())
            await attempts.run()
            synchronizing.cancel()
            flushing.cancel()

    def make(self, table: TableName) -> TableSynchronization:
        position = self.world.server.visible.position
        assert position is not None
        shared = SyncRun(
            oid=1,
            target_identifier="target",
            position=position,
            source=self.world.source,
            states=self.running.states,
            settings=self.world.settings,
            copy_format=CopyFormat.TEXT,
            progress=Quiet(),
            reconciled={},
            apply_rate=RateLimit(),
        )
        return TableSynchronization(shared, table, self.sink.open_table(table), MemorySpool())

    def watched(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def is_patient(self, _: Collection[TableName]) -> bool:
        return True

    def ended(self, _: TableName, error: SubscriberError | None) -> None:
        self.running.wake()

    async def flush(self) -> None:
        """The target's WAL writer."""
        while True:
            await asyncio.sleep(0.2)
            with contextlib.suppress(TargetUnavailable):
                self.sink.settle()

    async def open_session(self, _: FollowedSlot, position: Position) -> Session:
        await self.world.step("connect")
        session = Session(self.world, position)
        await session.receiver.start()
        return session


async def killed(process: Process, task: asyncio.Task[None]) -> None:
    process.world.server.sever()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def live(seed: int) -> None:
    servers = SimulatedServers(seed)
    dice = servers.dice
    await servers.write(dice.randint(0, 5))
    writing = asyncio.create_task(servers.write(dice.randint(0, 40)))
    for _ in range(dice.choice([0, 0, 1, 3])):
        process = Process(servers)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slot_follower, "StreamSession", _Opener(process))
            task = asyncio.create_task(process.run())
            await asyncio.wait({task}, timeout=dice.random() * dice.choice([0.001, 0.1, 5.0]))
            if task.done():
                task.result()
            await killed(process, task)
            if dice.random() < 0.3:
                servers.server.crash()
    await calm_down(servers, writing)
    for number in range(servers.tables):
        assert servers.server.visible.rows.get(table(number), []) == servers.history.rows(number)
    assert servers.source.slots == {}, "a table's slot was left behind"


async def calm_down(servers: SimulatedServers, writing: asyncio.Task[None]) -> None:
    """Run to the end."""
    process = Process(servers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_follower, "StreamSession", _Opener(process))
        task = asyncio.create_task(restarting(process))
        await writing
        servers.calm = True
        async with asyncio.timeout(CALM_SECONDS):
            while not done(servers):
                assert not task.done(), task.exception()
                await asyncio.sleep(0.5)
            while servers.source.slots:
                await asyncio.sleep(0.5)
        process.running.stop.set()
        process.running.wake()
        await asyncio.wait_for(task, CALM_SECONDS)


async def restarting(process: Process) -> None:
    while not process.running.stop.is_set():
        await process.run()


def done(servers: SimulatedServers) -> bool:
    state = servers.server.visible
    assert state.position is not None
    return state.position.lsn >= servers.history.end and all(entry.state is TableState.READY for entry in state.entries.values())


class _Opener:
    def __init__(self, process: Process) -> None:
        self._process = process

    async def open(self, slot: FollowedSlot, position: Position) -> Any:
        return cast("Any", await self._process.open_session(slot, position))


@property_test(30, 200, st.integers(0, 2**32))
def test_every_transaction_is_applied_exactly_once(seed: int) -> None:
    run(live(seed))
