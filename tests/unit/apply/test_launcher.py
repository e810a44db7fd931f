"""How table synchronizations are started, and started again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from subscriber.apply.tables.parking import Parking
from subscriber.apply.tables.table_groups import GROUP_TABLES, TABLE_BYTES, GroupSynchronization
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.tables.table_sync_launcher import SyncLauncher
from subscriber.apply.tables.table_synchronization import TableSynchronization
from subscriber.config import Settings
from subscriber.errors import (
    ApplyError,
    CopyOutdated,
    DataLossError,
    PublisherError,
    PublisherUnavailable,
    SlotInUse,
    SubscriberError,
    TargetUnavailable,
)
from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from tests.unit.apply.memory_publisher import table
from tests.unit.apply.virtual_time import run

INIT = TableEntry(TableState.INIT)
DONE = TableEntry(TableState.SYNCDONE, Lsn(200))


class LauncherSetup:
    """In place of the tables' synchronizations: each takes a second, after as many errors as are prepared for it."""

    def __init__(self, tables: int, *, workers: int = 2, patient: bool = True, disable_on_error: bool = False) -> None:
        self.states = TableStates()
        self.states.load({table(number): INIT for number in range(tables)}, Lsn(100))
        self.errors: dict[TableName, list[SubscriberError]] = {}
        self.made: list[TableName] = []
        self.begun: list[tuple[float, TableName]] = []
        self.told: list[tuple[TableName, SubscriberError | None]] = []
        self.running: set[TableName] = set()
        self.most = 0
        self.settings = Settings(max_sync_workers_per_subscription=workers, wal_retrieve_retry_interval=5)
        self.patience: Callable[[Collection[TableName]], bool] = lambda _: patient
        self.disable_on_error = disable_on_error
        self.sizes = dict[TableName, int]()
        self.parking: Parking | None = None
        self.window: Callable[[], float | None] = lambda: None
        self.launcher = self.make_launcher()

    def make_launcher(self, groups: GroupSynchronization | None = None) -> SyncLauncher:
        return SyncLauncher(
            self.states,
            self.settings,
            self,
            disable_on_error=self.disable_on_error,
            groups=groups,
            sizes=self.sizes,
            parking=self.parking,
            opens=self.opens,
        )

    def opens(self) -> float | None:
        return self.window()

    def make(self, name: TableName) -> TableSynchronization:
        self.made.append(name)
        return cast("TableSynchronization", _Work(self, name))

    def watched(self) -> contextlib.AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    def ended(self, name: TableName, error: SubscriberError | None) -> None:
        self.told.append((name, error))

    def is_patient(self, failed: Collection[TableName]) -> bool:
        return self.patience(failed)

    def moments(self, name: TableName) -> list[float]:
        return [moment for moment, found in self.begun if found == name]

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.launcher.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert self.running == set(), "the end of the launcher ends its work"


class _Work:
    def __init__(self, setup: LauncherSetup, name: TableName) -> None:
        self.office, self.name = setup, name

    async def run(self) -> None:
        setup = self.office
        setup.begun.append((asyncio.get_running_loop().time(), self.name))
        setup.running.add(self.name)
        setup.most = max(setup.most, len(setup.running))
        try:
            await asyncio.sleep(1)
            if setup.errors.get(self.name):
                raise setup.errors[self.name].pop(0)
            setup.states.set(self.name, DONE)
        finally:
            setup.running.discard(self.name)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_few_tables_at_a_time_and_each_once(workers: int) -> None:
    async def work() -> None:
        setup = LauncherSetup(5, workers=workers)
        async with setup.open() as task:
            await asyncio.sleep(100)
            assert not task.done(), "tables may be added"
        assert [name for _, name in setup.begun] == [table(number) for number in range(5)]
        assert setup.most == workers
        assert setup.begun[-1][0] == pytest.approx((5 - 1) // workers)
        assert setup.told == [(table(number), None) for number in range(5)]
        assert setup.states.all_synchronized

    run(work())


def test_copies_begin_only_in_their_window() -> None:
    async def work() -> None:
        setup, clock = LauncherSetup(4, workers=1), asyncio.get_running_loop().time
        setup.states.set(table(0), TableEntry(TableState.FINISHEDCOPY))
        # open from 10 to 11.5, and from 20 on
        setup.window = lambda: 10.0 if clock() < 10 else 20.0 if 11.5 <= clock() < 20 else None
        async with setup.open():
            await asyncio.sleep(5)
            waited = [setup.states.copies_begin]
            await asyncio.sleep(10)
            waited.append(setup.states.copies_begin)
            # the user removes the window
            setup.window = lambda: None
            await asyncio.sleep(5)
            assert [*waited, setup.states.copies_begin] == [10, 20, None]
        # what is copied catches up at any time, and a copy that has begun is completed
        assert setup.begun == [(0, table(0)), (10, table(1)), (11, table(2)), (pytest.approx(15, abs=1.1), table(3))]
        assert setup.states.all_synchronized

    run(work())


def test_a_lost_connection_parks_no_table() -> None:
    async def work() -> None:
        setup = LauncherSetup(1)
        setup.parking = Parking(setup.states, after=2)
        setup.launcher = setup.make_launcher()
        lost = [PublisherUnavailable("gone"), TargetUnavailable("gone")]
        setup.errors[table(0)] = [*lost, ApplyError("rejected"), *lost, *lost]
        async with setup.open():
            await asyncio.sleep(100)
        assert (setup.states.all_synchronized, setup.states.parking) == (True, {})
        # attempts are counted from one again
        setup.states.set(table(0), INIT)
        setup.errors[table(0)] = [ApplyError("rejected"), *lost, ApplyError("rejected")]
        async with setup.open():
            await asyncio.sleep(100)
        assert set(setup.states.parking) == {table(0)}

    run(work())


def test_a_table_that_is_added_later() -> None:
    async def work() -> None:
        setup = LauncherSetup(1)
        async with setup.open():
            await asyncio.sleep(10)
            setup.states.set(table(7), INIT)
            await asyncio.sleep(10)
        assert setup.begun == [(0, table(0)), (pytest.approx(10), table(7))]

    run(work())


def test_failed_table_is_retried_with_growing_pauses_while_others_continue() -> None:
    async def work() -> None:
        setup = LauncherSetup(4, workers=1)
        away = [TargetUnavailable("away") for _ in range(8)]
        setup.errors = {table(0): [*away]}
        async with setup.open():
            await asyncio.sleep(200)
        moments = setup.moments(table(0))
        pauses = [later - earlier - 1 for earlier, later in pairwise(moments)]
        # first all others have their turn: a table that failed must not take the only worker from them
        assert pauses == pytest.approx([3, 0.2, 0.4, 0.8, 1, 1, 1, 1], abs=0.01)
        assert setup.made.count(table(0)) == 1, "it remembers what it could not tell"
        assert [setup.moments(table(number)) for number in (1, 2, 3)] == [[pytest.approx(second, abs=0.3)] for second in (1, 2, 3)]
        assert [error for name, error in setup.told if name == table(0)] == [*away, None]
        assert setup.states.all_synchronized

    run(work())


def test_pauses_are_per_table_and_reset_by_success() -> None:
    async def work() -> None:
        setup = LauncherSetup(2)
        setup.errors = {table(0): [TargetUnavailable("away") for _ in range(3)], table(1): [TargetUnavailable("away")]}
        async with setup.open():
            await asyncio.sleep(50)
            assert setup.moments(table(0)) == pytest.approx([0, 1.1, 2.3, 3.7], abs=0.01)
            assert setup.moments(table(1)) == pytest.approx([0, 1.1], abs=0.01)
            setup.errors = {table(0): [TargetUnavailable("away")]}
            setup.states.set(table(0), INIT)
            await asyncio.sleep(50)
            assert setup.moments(table(0))[4:] == pytest.approx([50, 51.1], abs=0.01)

    run(work())


def test_error_after_the_handover_is_retried_too() -> None:
    async def work() -> None:
        setup = LauncherSetup(1)
        setup.errors = {table(0): [TargetUnavailable("away")]}
        async with setup.open():
            await asyncio.sleep(0.5)
            setup.states.set(table(0), DONE)  # stored, but its slot could not be dropped
            await asyncio.sleep(50)
        assert len(setup.begun) == 2
        assert setup.told[-1] == (table(0), None)

    run(work())


@pytest.mark.parametrize(
    ("errors", "timeout", "said"),
    [
        ([], 3, None),
        ([PublisherUnavailable("lost again")], 3, "lost again"),
        ([], 0.5, "they were not dropped within 0 s"),
    ],
    ids=["dropped", "failed again", "late"],
)
def test_end_drops_slot_of_table_whose_attempt_failed(
    errors: list[SubscriberError], timeout: float, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        setup = LauncherSetup(2)
        setup.errors = {table(0): [ApplyError("refused"), *errors]}
        async with setup.open():
            await asyncio.sleep(0.5)
            setup.states.set(table(0), DONE)  # stored, but its slot could not be dropped
            await asyncio.sleep(1)
            assert setup.running == set(), "it waits for its retry"
            await setup.launcher.leave(timeout)
            assert setup.moments(table(0)) == [0, 1.5]

    run(work())
    warnings = [record.getMessage() for record in caplog.records if "slots" in record.getMessage()]
    assert [message.partition("the next start drops them: ")[2] for message in warnings] == ([] if said is None else [said])


@pytest.mark.parametrize(
    ("error", "patient", "ends"),
    [
        (TargetUnavailable("away"), True, False),
        (TargetUnavailable("away"), False, False),
        (ApplyError("refused"), True, False),
        (ApplyError("refused"), False, True),
        (DataLossError("gone"), True, True),
        (DataLossError("gone"), False, True),
    ],
)
def test_errors_that_end_the_launcher(error: SubscriberError, patient: bool, ends: bool) -> None:
    async def work() -> None:
        setup = LauncherSetup(3, patient=patient)
        setup.errors = {table(0): [error]}
        async with setup.open() as task:
            await asyncio.wait({task}, timeout=100)
            if ends:
                assert task.exception() is error
                assert not setup.states.all_synchronized
            else:
                assert not task.done()
                assert setup.states.all_synchronized
                expected = 5 if isinstance(error, ApplyError) else 0.1
                assert setup.moments(table(0))[1] >= 1 + expected

    run(work())


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        # natively: errors of the worker
        (PublisherUnavailable("lost"), True),
        (ApplyError("refused"), True),
        (TargetUnavailable("deadlock detected", sqlstate="40P01"), True),
        # of the target's server, or waits and beginnings that natively are none
        (TargetUnavailable("away"), False),
        (TargetUnavailable("a row is locked", sqlstate="55P03"), False),
        (SlotInUse("of a walsender that has not gone yet"), False),
        (CopyOutdated("rewritten"), False),
    ],
)
def test_errors_that_disable_the_subscription(error: SubscriberError, ends: bool) -> None:
    async def work() -> None:
        setup = LauncherSetup(3, disable_on_error=True)
        setup.errors = {table(0): [error]}
        async with setup.open() as task:
            await asyncio.wait({task}, timeout=100)
            assert task.done() == ends
            assert setup.states.all_synchronized != ends
            if ends:
                assert task.exception() is error

    run(work())


def test_program_errors_are_not_retried() -> None:
    async def work() -> None:
        setup = LauncherSetup(1)
        setup.errors = {table(0): [cast("SubscriberError", KeyError("ours"))]}
        async with setup.open() as task:
            await asyncio.wait({task}, timeout=100)
            assert isinstance(task.exception(), KeyError)

    run(work())


# --- groups


class _Groups:
    """In place of the synchronization of groups: each takes a second; tables with an error leave it, and a group's own errors end it."""

    def __init__(self, setup: LauncherSetup, errors: list[SubscriberError]) -> None:
        self.office, self.errors = setup, errors
        self.taken: list[tuple[float, int]] = []

    async def run(self, tables: Sequence[TableName], leave: Callable[[TableName], None]) -> None:
        self.taken.append((asyncio.get_running_loop().time(), len(tables)))
        await asyncio.sleep(1)
        if self.errors:
            raise self.errors.pop(0)
        for name in tables:
            if self.office.errors.get(name):
                leave(name)
            else:
                self.office.states.set(name, DONE)


def grouping(tables: int, *errors: SubscriberError, workers: int = 2) -> tuple[LauncherSetup, _Groups]:
    setup = LauncherSetup(tables, workers=workers)
    groups = _Groups(setup, list(errors))
    setup.launcher = setup.make_launcher(cast("GroupSynchronization", groups))
    return setup, groups


def test_many_tables_are_divided_among_the_workers() -> None:
    async def work() -> None:
        setup, groups = grouping(2 * GROUP_TABLES + 100)
        async with setup.open():
            await asyncio.sleep(10)
        assert groups.taken == [(0, GROUP_TABLES), (0, GROUP_TABLES), (1, 50), (1, 50)]
        assert setup.begun == []
        assert setup.states.all_synchronized

    run(work())


def test_the_largest_tables_come_first_and_alone() -> None:
    async def work() -> None:
        setup, groups = grouping(20)
        # the smallest of these fits into a group
        setup.sizes |= {table(7): 10 * TABLE_BYTES, table(3): 2 * TABLE_BYTES, table(9): 30 * TABLE_BYTES, table(1): TABLE_BYTES}
        async with setup.open():
            await asyncio.sleep(10)
        assert [name for _, name in setup.begun] == [table(9), table(7), table(3)]
        assert groups.taken == [(1, 17)]
        assert setup.states.all_synchronized

    run(work())


def test_few_tables_are_synchronized_alone() -> None:
    async def work() -> None:
        setup, groups = grouping(4)
        async with setup.open():
            await asyncio.sleep(10)
        assert groups.taken == []
        assert len(setup.begun) == 4

    run(work())


def test_table_that_left_its_group_is_synchronized_alone() -> None:
    async def work() -> None:
        setup, groups = grouping(20)
        setup.errors[table(3)] = [ApplyError("refused")]
        async with setup.open():
            await asyncio.sleep(20)
        assert groups.taken == [(0, 10), (0, 10)]
        assert setup.moments(table(3)) == [1, 7], "and again, as it failed alone"
        assert {name for _, name in setup.begun} == {table(3)}
        assert setup.states.all_synchronized

    run(work())


def test_failed_group_is_retried() -> None:
    async def work() -> None:
        setup, groups = grouping(20, TargetUnavailable("lost"), TargetUnavailable("lost"))
        async with setup.open():
            await asyncio.sleep(10)
        assert [count for _, count in groups.taken] == [10, 10, 10, 10]
        assert [isinstance(error, TargetUnavailable) for _, error in setup.told] == [True, True, False, False]
        assert setup.begun == []
        assert setup.states.all_synchronized

    run(work())


def test_a_table_that_the_apply_worker_waits_for_comes_first() -> None:
    async def work() -> None:
        setup = LauncherSetup(20, workers=1)
        groups, last = _Groups(setup, [TargetUnavailable("lost")]), table(19)

        async def run_group(tables: Sequence[TableName], leave: Callable[[TableName], None]) -> None:
            # its COMMIT had no answer; others left because they are large
            if not groups.taken:
                setup.states.storing(last)
                for name in (table(0), table(1), last):
                    leave(name)
            await groups.run(tables, leave)

        setup.launcher = setup.make_launcher(cast("GroupSynchronization", SimpleNamespace(run=run_group)))
        async with setup.open():
            await asyncio.sleep(20)
        assert setup.moments(last) == [1]
        assert setup.states.all_synchronized

    run(work())


def test_failures_of_all_groups_are_counted_together() -> None:
    # a first run ends when nothing can be copied: two groups have half of the tables each
    async def work() -> None:
        setup, groups = grouping(20, *(PublisherError("all replication slots are in use") for _ in range(2)))
        asked: list[int] = []

        def ask(failed: Collection[TableName]) -> bool:
            asked.append(len(failed))
            return True

        setup.patience = ask
        setup.launcher = setup.make_launcher(cast("GroupSynchronization", groups))
        async with setup.open():
            await asyncio.sleep(20)
        assert asked == [10, 20]
        assert setup.states.all_synchronized

    run(work())


def test_tables_are_synchronized_alone_after_repeated_group_failures() -> None:
    # as they do while the apply worker fails, which closes the sink each time
    async def work() -> None:
        setup, _ = grouping(100, *(TargetUnavailable("the sink is not open") for _ in range(1000)))
        async with setup.open():
            await asyncio.sleep(120)
        assert setup.states.all_synchronized
        assert setup.most == 2

    run(work())


def test_tables_stay_in_groups_while_the_target_is_unavailable() -> None:
    async def work() -> None:
        away = [TargetUnavailable("away") for _ in range(1000)]
        setup, _ = grouping(100, *away)
        setup.errors = {table(number): list(away) for number in range(100)}
        async with setup.open():
            await asyncio.sleep(20)
        assert len(setup.made) <= 12

    run(work())


def test_the_turns_of_many_tables_are_not_looked_for_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start and each change of a state sorted all tables that wait: a minute of computing for 3,000 tables."""
    asked: list[TableName] = []
    is_due = SyncLauncher._is_due

    def counted(self: SyncLauncher, name: TableName) -> bool:
        asked.append(name)
        return is_due(self, name)

    monkeypatch.setattr(SyncLauncher, "_is_due", counted)
    counts = []
    for tables in (50, 150):
        asked.clear()
        setup = LauncherSetup(tables)

        async def scenario(setup: LauncherSetup = setup) -> None:
            async with setup.open():
                await setup.states.changed.wait(lambda: setup.states.all_synchronized)

        run(scenario())
        assert len(setup.begun) == tables
        counts.append(len(asked))
    assert counts[1] < 4 * counts[0]
