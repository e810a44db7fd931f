"""The apply worker and prepared transactions, between a scripted stream and a target in memory."""

from __future__ import annotations

import asyncio

import pytest

from subscriber.errors import DataLossError, NeverPrepared
from subscriber.interfaces import TableEntry, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, RollbackPrepared
from tests.unit.apply.memory_publisher import keepalive, table, xlog
from tests.unit.apply.scripted_stream import transaction
from tests.unit.apply.virtual_time import run
from tests.unit.apply.worker_setup import COPIED, prepared, running_worker


def test_prepared_transactions_in_their_place() -> None:
    async def work() -> None:
        async with running_worker(two_phase=TwoPhaseState.ENABLED) as (setup, _):
            frames = [*prepared(1), *transaction(2), *prepared(3)]
            frames.append(xlog(CommitPrepared(0, Lsn(400), Lsn(408), 0, 1, "gid1"), 408))
            frames.append(xlog(LogicalMessage(False, Lsn(420), "prefix", b"unrequested"), 420))
            frames.append(xlog(RollbackPrepared(0, Lsn(308), Lsn(508), 0, 0, 3, "gid3"), 508))
            frames += transaction(6)
            setup.stream.give(frames)
            await asyncio.sleep(1)
            assert setup.rows == ["2", "1", "6"]
            assert setup.server.visible.prepared == {}
            assert [batch.end_lsn for batch in setup.sink.batches] == [208, 608]
            assert setup.stream.last.flush == 608
            assert setup.held == 0

    run(work())


@pytest.mark.parametrize(
    ("keeps", "named", "rows"),
    [
        (True, 400, ["5"]),  # what is refused at COMMIT PREPARED is named by its LSN
        (False, 400, ["1", "5"]),  # it is applied at PREPARE: the name was mistaken
        (True, 300, ["1", "5"]),  # a name that fits nothing is forgotten
        (True, 500, ["1", "5"]),  # before what it would have fitted
        (True, 100, ["5"]),  # its PREPARE may be named too
        (False, 100, ["5"]),
    ],
)
def test_skips_a_prepared_transaction(keeps: bool, named: int, rows: list[str]) -> None:
    """The bug was that what a target refused at COMMIT PREPARED could not be passed over by the LSN that the error named."""

    async def work() -> None:
        async with running_worker(two_phase=TwoPhaseState.ENABLED, keeps=keeps, skip_lsn=Lsn(named)) as (setup, _):
            setup.server.visible.skip_lsn = Lsn(named)
            frames = [*prepared(1), xlog(CommitPrepared(0, Lsn(400), Lsn(408), 0, 1, "gid1"), 408), *transaction(5)]
            setup.stream.give(frames)
            await asyncio.sleep(1)
            assert setup.rows == rows
            assert setup.server.visible.prepared == {}
            assert setup.server.visible.skip_lsn == INVALID_LSN
            assert setup.stream.last.flush == 508

    run(work())


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("error", [NeverPrepared, DataLossError])
def test_commit_prepared_of_an_unknown_transaction(error: type[DataLossError], sends: bool) -> None:
    """A publisher that sends nothing of an empty prepared transaction but its end; and one that sends its PREPARE."""

    async def work() -> None:
        async with running_worker(two_phase=TwoPhaseState.ENABLED, empty_prepares=sends) as (setup, task):

            async def commit_prepared(*_: object) -> None:
                raise error("not there")

            setup.sink.commit_prepared = commit_prepared  # type: ignore[assignment, method-assign]
            setup.stream.give([xlog(CommitPrepared(0, Lsn(400), Lsn(408), 0, 3, "gid3"), 408), *transaction(6)])
            await asyncio.wait({task}, timeout=2)
            if error is NeverPrepared and not sends:
                assert setup.rows == ["6"]
                assert setup.stream.last.flush == 608
                assert setup.sink.advanced[0] == 408
            else:
                assert isinstance(task.exception(), error)
                assert setup.tracker.flushed == 50

    run(work())


def test_ends_to_enable_two_phase_once_all_tables_are_ready() -> None:
    async def work() -> None:
        async with running_worker(entry=TableEntry(TableState.SYNCDONE, Lsn(150)), two_phase=TwoPhaseState.PENDING) as (setup, task):
            setup.stream.give(transaction(1))
            await asyncio.sleep(10)
            assert not task.done()
            setup.stream.give([keepalive(200)])
            await asyncio.wait_for(task, 3)
            assert setup.states.all_ready

    run(work())


def test_two_phase_stays_pending_without_tables() -> None:
    async def work() -> None:
        async with running_worker(two_phase=TwoPhaseState.PENDING, entry=COPIED) as (setup, task):
            setup.states.remove(table(0))
            setup.stream.give([keepalive(200)])
            await asyncio.sleep(100)
            assert not task.done()

    run(work())
