"""The handover between a table's synchronization and the apply worker, apart from everything around it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import pytest
from hypothesis import strategies as st

from subscriber.apply.tables.table_state import TableStates, Watchers
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Relation
from subscriber.transaction.model import Transaction
from tests.support.examples import property_test
from tests.unit.apply.memory_publisher import relation, table
from tests.unit.apply.virtual_time import Stuck, run

INIT = TableEntry(TableState.INIT)
COPIED = TableEntry(TableState.FINISHEDCOPY)
READY = TableEntry(TableState.READY)
A, B = table(0), table(1)


def synchronized(lsn: int) -> TableEntry:
    return TableEntry(TableState.SYNCDONE, Lsn(lsn))


def states_with(position: int = 100, **entries: TableEntry) -> TableStates:
    states = TableStates()
    states.load({TableName("public", name): entry for name, entry in entries.items()}, Lsn(position))
    return states


def never() -> bool:
    return False


def soon(states: TableStates, end_lsn: int, give_up: Callable[[], bool] = never) -> asyncio.Task[bool]:
    return asyncio.create_task(states.hand(Lsn(end_lsn), give_up))


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# --- who applies what


@pytest.mark.parametrize(
    ("entry", "final_lsn", "applied"),
    [
        (INIT, 500, False),
        (TableEntry(TableState.DATASYNC), 500, False),
        (COPIED, 500, False),
        (synchronized(200), 199, False),
        (synchronized(200), 200, True),
        (synchronized(200), 201, True),
        (READY, 1, True),
    ],
)
def test_the_gate(entry: TableEntry, final_lsn: int, applied: bool) -> None:
    assert states_with(t0=entry).gate(relation(0), Lsn(final_lsn)) is applied


def test_the_gate_is_closed_for_tables_of_others() -> None:
    states = states_with(t0=READY)
    assert not states.gate(Relation(1, "other", "t0", "d", ()), Lsn(500))
    assert not states.gate(relation(1), Lsn(500))


def test_remaining_work_by_state() -> None:
    states = states_with(t0=synchronized(200), t1=COPIED, t2=READY, t3=INIT)
    assert states.unsynchronized == [table(1), table(3)]
    assert (states.all_synchronized, states.all_ready) == (False, False)
    states.set(table(1), synchronized(300))
    states.remove(table(3))
    assert (states.all_synchronized, states.all_ready, states.synchronized_to) == (True, False, 300)
    assert states.passed(Lsn(199)) == {}
    assert states.passed(Lsn(200)) == {A: Lsn(200)}
    assert states.passed(Lsn(300)) == {A: Lsn(200), B: Lsn(300)}
    for name in (A, B):
        states.set(name, READY)
    assert (states.all_ready, states.synchronized_to) == (True, INVALID_LSN)
    assert states.passed(Lsn(1000)) == {}


def test_load_keeps_newer_states() -> None:
    states = states_with(t0=COPIED, t1=COPIED)
    states.request_handover(B)
    states.set(A, synchronized(200))
    states.load({A: COPIED}, Lsn(50))
    assert states.entries() == {A: synchronized(200)}
    assert states.handed == 100, "an older position says nothing new"
    assert run(states.hand(Lsn(300), never)), "a removed table holds up no worker"


# --- the handover


def test_handover_is_not_before_the_apply_worker() -> None:
    async def work() -> None:
        states = states_with(t0=COPIED)
        assert await states.hand(Lsn(150), never)
        assert not states.try_handover(A, Lsn(149))
        assert await states.hand(Lsn(160), never), "a failed attempt holds up no worker"
        assert states.try_handover(A, Lsn(160))

    run(work())


def test_a_request_stops_the_apply_worker_until_it_is_abandoned() -> None:
    async def work() -> None:
        states = states_with(t0=COPIED)
        states.request_handover(A)
        giving = soon(states, 150)
        await turns()
        assert not giving.done()
        assert states.handed == 100
        states.abandon_handover(A)
        states.abandon_handover(A)
        assert await giving
        assert states.handed == 150

    run(work())


def test_nothing_beyond_the_handover_is_applied_until_it_is_stored() -> None:
    async def work() -> None:
        states = states_with(t0=COPIED)
        states.request_handover(A)
        assert states.try_handover(A, Lsn(200))
        assert await states.hand(Lsn(200), never), "what ends at the handover is the synchronization's, stored or not"
        giving = soon(states, 201)
        await turns()
        assert not giving.done()
        states.complete_handover(A)
        assert await giving
        assert states.entries() == {A: synchronized(200)}

    run(work())


def test_two_tables_at_once() -> None:
    async def work() -> None:
        states = states_with(t0=COPIED, t1=COPIED)
        states.request_handover(A)
        states.request_handover(B)
        giving = soon(states, 250)
        assert states.try_handover(B, Lsn(300))
        states.complete_handover(B)
        await turns()
        assert not giving.done(), "the other table still waits"
        assert states.try_handover(A, Lsn(200))
        await turns()
        assert not giving.done()
        states.complete_handover(A)
        assert await giving

    run(work())


def test_gives_up() -> None:
    async def work() -> None:
        states = states_with(t0=COPIED)
        states.request_handover(A)
        stopped = False
        giving = soon(states, 150, lambda: stopped)
        await turns()
        stopped = True
        await turns()
        assert not giving.done(), "it is asked when something changed"
        states.changed.notify()
        assert not await giving
        assert states.handed == 100

    run(work())


def test_give_up_is_not_called_without_a_wait() -> None:
    assert run(states_with(t0=COPIED).hand(Lsn(150), lambda: True))


@pytest.mark.parametrize("later", ["request", "handover"])
def test_second_handover_extends_the_wait(later: str) -> None:
    # the bug was that the apply worker woke up, found the way barred again, and took that for a stop: its batch was dropped
    async def work() -> None:
        states = states_with(t0=COPIED, t1=COPIED)
        assert states.try_handover(A, Lsn(150))
        giving = soon(states, 200)
        await turns()
        states.complete_handover(A)
        states.request_handover(B)
        if later == "handover":
            assert states.try_handover(B, Lsn(160))
        await turns()
        assert not giving.done()
        if later == "request":
            assert states.try_handover(B, Lsn(160))
        states.complete_handover(B)
        assert await giving

    run(work())


def test_a_restart_between() -> None:
    # s ahead of the position: changes in between were applied by the synchronization
    states = states_with(100, t0=synchronized(200))
    assert not states.gate(relation(0), Lsn(150))
    assert states.gate(relation(0), Lsn(200))
    assert states.passed(Lsn(150)) == {}
    assert states.passed(Lsn(208)) == {A: Lsn(200)}
    # s behind the position: ready at the next check
    assert states_with(300, t0=synchronized(200)).passed(Lsn(300)) == {A: Lsn(200)}
    # f: the handover cannot be before the position
    states = states_with(300, t0=COPIED)
    assert not states.try_handover(A, Lsn(299))
    assert states.try_handover(A, Lsn(300))


def test_watchers_forget_cancelled_waits() -> None:
    async def work() -> None:
        watchers = Watchers()
        asked = 0

        def predicate() -> bool:
            nonlocal asked
            asked += 1
            return False

        waiting = asyncio.create_task(watchers.wait(predicate))
        await turns()
        watchers.notify()
        assert asked == 2
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        watchers.notify()
        assert asked == 2

    run(work())


def test_deadlock_is_detected() -> None:
    async def work() -> None:
        states = states_with(t0=COPIED)
        states.request_handover(A)
        await states.hand(Lsn(150), never)

    with pytest.raises(Stuck):
        run(work())


# --- a copy that followed no stream


def changing(end_lsn: int, *relation_ids: int, spilled: int = 0) -> Transaction:
    records = [b"I" + relation_id.to_bytes(4, "big") + b"N" for relation_id in relation_ids]
    lsn = Lsn(end_lsn)
    return Transaction(xid=1, final_lsn=lsn, end_lsn=lsn, commit_time=0, prefixed=False, records=records, spilled=spilled)


def test_copy_is_complete_up_to_the_first_skipped_change() -> None:
    async def work() -> None:
        states = states_with(t0=INIT, t1=INIT)
        assert states.covered(7, Lsn(150)) == 150
        assert await states.hand(Lsn(160), never, [changing(140, 7), changing(160, 8)])
        assert states.covered(7, Lsn(150)) == 160, "what changed it is in the snapshot"
        assert states.covered(8, Lsn(150)) == 150
        assert not states.try_handover(B, states.covered(8, Lsn(150)))
        assert await states.hand(Lsn(170), never, [changing(170, spilled=1)])
        assert states.covered(7, Lsn(150)) == 150, "what a spilled one changed is not known"
        assert states.covered(7, Lsn(170)) == 170

    run(work())


def test_copy_older_than_the_examined_transactions_is_complete_up_to_itself() -> None:
    async def work() -> None:
        # as of a standby that lags behind
        states = states_with(100, t0=READY)
        assert states.covered(7, Lsn(90)) == 90, "an earlier run was given what came behind it"
        assert await states.hand(Lsn(150), never, [changing(150, 7)])
        states.set(A, INIT)
        assert states.covered(7, Lsn(140)) == 140, "no table waited when that was given"
        assert await states.hand(Lsn(160), never, [changing(160, 8)])
        assert states.covered(7, Lsn(150)) == 160

    run(work())


def test_repeated_transactions_do_not_hide_later_changes() -> None:
    async def work() -> None:
        states = states_with(t0=INIT)
        for end, spilled in ((150, 0), (170, 0), (160, 1), (180, 1), (150, 0), (160, 1)):
            assert await states.hand(Lsn(end), never, [changing(end, *([] if spilled else [7]), spilled=spilled)])
        assert states.covered(7, Lsn(165)) == 165
        assert states.covered(8, Lsn(175)) == 175

    run(work())


def test_a_handover_that_may_be_stored_is_not_abandoned() -> None:
    async def work() -> None:
        states = states_with(t0=INIT)
        assert states.try_handover(A, Lsn(200))
        states.storing(A)
        states.abandon_handover(A)
        waiting = soon(states, 300)
        await turns()
        assert not waiting.done()
        states.known(A)
        states.abandon_handover(A)
        assert await waiting

    run(work())


# --- a model: any interleaving of one apply worker and several synchronizations that may crash at any step


class Crash(Exception):
    """The process dies, or a synchronization fails: as the model has it."""


@dataclass
class Durable:
    """What the target holds; a table's rows are the numbers of transactions. Transaction n ends at 10 * n."""

    position: int = 0
    states: list[TableEntry] = field(default_factory=list)
    caught_up: list[int] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


class Model:
    """Transaction n ends at 10 * n, its commit record is 2 long; table i is changed by each (i + 1)th. Steps take as the schedule says.

    Args:
        tables: number of them.
        last: transaction.
        batch: transactions that the apply worker gives at once.
        schedule: turns of the loop a step takes, and other choices; read again and again.
        crashes: steps that fail: at the apply worker's, the process starts again; at a table's, only its synchronization.
    """

    def __init__(self, tables: int, last: int, batch: int, schedule: list[int], crashes: set[int]) -> None:
        self.durable = Durable(0, [INIT] * tables, [0] * tables, [[] for _ in range(tables)])
        self.last = last
        self.batch = batch
        self.schedule = cycle(schedule)
        self.crashes = crashes
        self.steps = 0

    async def step(self) -> None:
        self.steps += 1
        assert self.steps < 3000, "no end in sight"
        if self.steps in self.crashes:
            raise Crash
        for _ in range(1 + next(self.schedule)):
            await asyncio.sleep(0)

    def changes(self, index: int, number: int) -> bool:
        return number % (index + 1) == 0

    def rows(self, index: int, last: int) -> list[int]:
        """Of a table, once it has the transactions up to the last."""
        return [number for number in range(1, last + 1) if self.changes(index, number)]

    def transaction(self, number: int) -> Transaction:
        records = [
            b"I" + relation(index).relation_id.to_bytes(4, "big") for index in range(len(self.durable.rows)) if self.changes(index, number)
        ]
        end = 10 * number
        return Transaction(xid=number, final_lsn=Lsn(end - 2), end_lsn=Lsn(end), commit_time=0, prefixed=False, records=records)

    def received(self, number: int) -> Lsn:
        """How far the stream is behind a transaction: perhaps amid the next one; behind the last, keepalives take it to the end."""
        return Lsn(10 * number + (4 if number == self.last else next(self.schedule)))

    async def worker(self, states: TableStates) -> None:
        durable = self.durable
        while durable.position < 10 * self.last or not states.all_ready:
            await self.step()
            done = durable.position // 10
            end = min(done + self.batch, self.last)
            if end > done:
                given = [self.transaction(number) for number in range(done + 1, end + 1)]
                assert await states.hand(Lsn(10 * end), never, given)
                changed: list[tuple[int, int]] = []
                for number in range(done + 1, end + 1):
                    await self.step()
                    asked = [index for index in range(len(durable.rows)) if self.changes(index, number)]
                    changed += [(index, number) for index in asked if states.gate(relation(index), Lsn(10 * number - 2))]
                await self.step()
                for index, number in changed:
                    durable.rows[index].append(number)
                durable.position = 10 * end
            await self.step()
            # nothing is pending: the position follows what was received, which ends amid the next transaction
            durable.position = max(durable.position, self.received(end))
            for found, lsn in states.passed(Lsn(durable.position)).items():
                await self.step()
                ready = TableEntry(TableState.READY, lsn)
                durable.states[int(found.name[1:])] = ready
                states.set(found, ready)

    async def synchronization(self, states: TableStates, index: int) -> None:
        name, uncertain = table(index), False
        while True:
            try:
                await self.step()
                entry = self.durable.states[index]
                states.set(name, entry)
                states.known(name)
                states.abandon_handover(name)
                uncertain = False
                if entry.state in {TableState.SYNCDONE, TableState.READY}:
                    return
                if entry.state is TableState.INIT:
                    if next(self.schedule) % 2 and await self.copy_in_a_group(states, index):
                        return
                    await self.copy(index)
                    states.set(name, COPIED)
                goal = states.handed
                while not uncertain:
                    await self.catch_up(index)
                    lsn = self.received(self.durable.caught_up[index])
                    if lsn >= goal:
                        states.request_handover(name)
                    if states.try_handover(name, lsn):
                        uncertain = True
                        await self.step()
                        self.durable.states[index] = synchronized(lsn)
                        await self.step()
                        states.complete_handover(name)
                return
            except Crash:
                if not uncertain:
                    states.abandon_handover(name)

    async def copy_in_a_group(self, states: TableStates, index: int) -> bool:
        """As a group does it: rows and SYNCDONE by one transaction of the target, if the table did not change since the snapshot."""
        name = table(index)
        # it may be of a standby that lags behind
        snapshot = min(self.last, 3 * next(self.schedule))
        await self.step()
        await self.step()
        lsn = states.covered(relation(index).relation_id, Lsn(10 * snapshot))
        if not states.try_handover(name, lsn):
            return False
        states.storing(name)
        await self.step()
        self.durable.rows[index] = self.rows(index, snapshot)
        self.durable.states[index] = synchronized(lsn)
        await self.step()
        states.complete_handover(name)
        return True

    async def copy(self, index: int) -> None:
        # the publisher's WAL ends somewhere after everything that was received
        snapshot = min(self.last, max(self.durable.position // 10, *self.durable.caught_up, next(self.schedule)))
        await self.step()
        await self.step()
        self.durable.rows[index] = self.rows(index, snapshot)
        self.durable.caught_up[index] = snapshot
        self.durable.states[index] = COPIED

    async def catch_up(self, index: int) -> None:
        at = self.durable.caught_up[index]
        end = min(at + 1, self.last)
        for _ in range(1 + next(self.schedule) % 3):
            await self.step()
        self.durable.rows[index] += [number for number in range(at + 1, end + 1) if self.changes(index, number)]
        self.durable.caught_up[index] = end

    async def live(self) -> None:
        """Until all is done, with as many processes as it takes."""
        tables = range(len(self.durable.states))
        while True:
            states = TableStates()
            states.load({table(index): self.durable.states[index] for index in tables}, Lsn(self.durable.position))
            helpers = [asyncio.create_task(self.synchronization(states, index)) for index in tables]
            try:
                await self.worker(states)
            except Crash:
                continue
            else:
                return
            finally:
                for helper in helpers:
                    helper.cancel()
                results = await asyncio.gather(*helpers, return_exceptions=True)
                assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results


@property_test(
    50,
    400,
    tables=st.integers(1, 3),
    last=st.integers(1, 12),
    batch=st.integers(1, 4),
    schedule=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    crashes=st.sets(st.integers(1, 200), max_size=6),
)
def test_each_transaction_once_in_order_and_no_deadlock(tables: int, last: int, batch: int, schedule: list[int], crashes: set[int]) -> None:
    model = Model(tables, last, batch, schedule, crashes)
    run(model.live())
    assert model.durable.rows == [model.rows(index, last) for index in range(tables)]
    assert all(entry.state is TableState.READY for entry in model.durable.states)
