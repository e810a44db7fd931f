"""The apply worker between a scripted stream and a target in memory. Time is simulated."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from subscriber.config import Settings
from subscriber.errors import (
    ApplyError,
    MissingColumns,
    PublisherUnavailable,
    RelationError,
    TargetError,
    TargetUnavailable,
)
from subscriber.interfaces import Batch, Position, RelationGate, TableEntry, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.transaction.model import PreparedTransaction
from tests.unit.apply.memory_publisher import keepalive, table, xlog
from tests.unit.apply.scripted_stream import transaction
from tests.unit.apply.virtual_time import run
from tests.unit.apply.worker_setup import COPIED, QUIET, READY, WorkerSetup, prepared, running_worker


def test_applies_waiting_transactions_as_one_batch_and_acknowledges_it() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            setup.stream.give([frame for xid in (1, 2, 3) for frame in transaction(xid)])
            await asyncio.sleep(1)
            assert setup.rows == ["1", "2", "3"]
            assert [batch.end_lsn for batch in setup.sink.batches] == [308]
            assert (setup.stream.last.write, setup.stream.last.flush, setup.stream.last.apply) == (308, 308, 308)
            assert setup.held == 0
            assert setup.progress

    run(work())


def test_limit_of_the_rate_follows_each_transaction_and_can_be_changed() -> None:
    async def work() -> None:
        async with running_worker() as (setup, task):
            setup.rate.limit = 1.0
            setup.stream.give(transaction(1))
            await asyncio.sleep(0.1)
            size = setup.sink.batches[0].transactions[0].size
            assert (size > 10, setup.rows) == (True, ["1"])
            setup.stream.give([frame for xid in (2, 3) for frame in transaction(xid)])
            await asyncio.sleep(size - 1)
            # the publisher hears of the position meanwhile
            assert (setup.rows, setup.stream.last.flush) == (["1"], 108)
            await asyncio.sleep(1)
            assert setup.rows == ["1", "2"]
            await asyncio.sleep(size)
            assert setup.rows == ["1", "2", "3"]
            setup.stream.give(transaction(4))
            await asyncio.sleep(size - 2)
            assert setup.rows == ["1", "2", "3"]
            setup.rate.limit = 0.0
            await asyncio.sleep(1.1)
            assert setup.rows == ["1", "2", "3", "4"]
            assert setup.applied.times.phases["limit"] == pytest.approx(3 * size, abs=3)
            # a stop does not wait for the limit
            setup.rate.limit = 0.001
            setup.stream.give(transaction(5))
            await asyncio.sleep(0.1)
            setup.stop()
            await asyncio.sleep(0)
            await asyncio.sleep(0.1)
            assert task.done()

    run(work())


def test_waiting_transactions_are_not_put_together_beyond_the_limit() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            setup.stream.give(transaction(1))
            await asyncio.sleep(0.1)
            setup.rate.limit = setup.sink.batches[0].transactions[0].size * 2.0
            setup.stream.give([frame for xid in range(2, 12) for frame in transaction(xid)])
            await asyncio.sleep(2.5)
            assert len(setup.rows) == 7
            await asyncio.sleep(2)
            assert len(setup.rows) == 11
            assert [len(batch.transactions) for batch in setup.sink.batches] == [1, 2, 2, 2, 2, 2]

    run(work())


@pytest.mark.parametrize("ends", [True, False])
def test_what_ends_a_prepared_transaction_does_not_wait_for_the_limit(ends: bool) -> None:
    async def work() -> None:
        async with running_worker(two_phase=TwoPhaseState.ENABLED) as (setup, _):
            setup.rate.limit = 0.001
            end = CommitPrepared(0, Lsn(400), Lsn(408), 0, 1, "gid1") if ends else RollbackPrepared(0, Lsn(158), Lsn(408), 0, 0, 1, "gid1")
            setup.stream.give([*prepared(1), xlog(end, 408), *transaction(5)])
            await asyncio.sleep(2)
            # its locks are held until then
            assert setup.rows == (["1"] if ends else [])
            assert setup.tracker.applied == 408

    run(work())


@pytest.mark.parametrize("waits", [False, True])
def test_lost_stream_is_noticed_while_the_limit_holds_up(waits: bool) -> None:
    async def work() -> None:
        async with running_worker() as (setup, task):
            setup.rate.limit = 0.001
            setup.stream.give(transaction(1))
            await asyncio.sleep(0.1)
            if waits:
                setup.stream.give(transaction(2))
                await asyncio.sleep(0.1)
            setup.stream.fail(PublisherUnavailable("lost"))
            await asyncio.sleep(2)
            assert setup.rows == ["1"]
            with pytest.raises(PublisherUnavailable, match="lost"):
                task.result()

    run(work())


def test_applied_is_not_flushed() -> None:
    async def work() -> None:
        async with running_worker(lazy=True) as (setup, _):
            setup.stream.give([*transaction(1), keepalive(200)])
            await asyncio.sleep(0.9)
            setup.receiver.report()
            await asyncio.sleep(0.01)
            assert setup.rows == ["1"]
            assert (setup.stream.last.write, setup.stream.last.flush, setup.stream.last.apply) == (200, 50, 108)
            assert setup.sink.advanced == [], "nothing is idle while a commit may still be lost"
            setup.sink.settle()
            setup.receiver.report()
            await asyncio.sleep(0.01)
            assert setup.stream.last.flush == 108
            await asyncio.sleep(2)
            assert setup.sink.advanced == [200]
            assert setup.stream.last.flush == 200

    run(work())


def test_missing_durability_report_is_requested() -> None:
    async def work() -> None:
        async with running_worker(lazy=True) as (setup, _):
            setup.stream.give(transaction(1))
            await asyncio.sleep(0.9)
            assert setup.sink.advanced == []
            await asyncio.sleep(2)
            assert setup.sink.advanced == [108]
            assert setup.server.flushed.rows[table(0)] == setup.server.visible.rows[table(0)]
            assert setup.stream.last.flush == setup.tracker.flushed == 108
            await asyncio.sleep(100)
            assert setup.sink.advanced == [108], "it is durable now"

    run(work())


def test_busy_stream_requests_durability_too() -> None:
    async def work() -> None:
        async with running_worker(lazy=True) as (setup, _):
            for xid in range(1, 20):
                setup.stream.give(transaction(xid))
                await asyncio.sleep(0.3)
            assert setup.sink.advanced
            assert setup.tracker.flushed >= 1408

    run(work())


def test_reported_durability_is_not_requested() -> None:
    async def work() -> None:
        async with running_worker(lazy=True) as (setup, _):
            for xid in range(1, 20):
                setup.stream.give(transaction(xid))
                await asyncio.sleep(0.5)
                setup.sink.settle()
            assert setup.sink.advanced == []
            assert setup.tracker.flushed == 1908

    run(work())


def test_sink_that_cannot_report_durability_ends_an_idle_stream() -> None:
    async def work() -> None:
        async with running_worker(lazy=True) as (setup, task):

            async def refuse(_: Lsn) -> None:
                raise TargetUnavailable("the session that watches was lost")

            setup.sink.advance = refuse  # type: ignore[method-assign, assignment]
            setup.stream.give(transaction(1))
            await asyncio.wait({task}, timeout=3)
            assert isinstance(task.exception(), TargetUnavailable)
            assert setup.tracker.flushed == setup.stream.last.flush == 50

    run(work())


def test_the_idle_position_is_stored_before_it_is_acknowledged() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            stored = asyncio.Event()
            advance = setup.sink.advance

            async def slow(lsn: Lsn) -> None:
                await stored.wait()
                await advance(lsn)

            setup.sink.advance = slow  # type: ignore[method-assign]
            setup.stream.give([keepalive(200, reply_requested=True)])
            await asyncio.sleep(20)
            assert setup.stream.last.write == 200
            assert all(status.flush == 50 for _, status in setup.stream.sent)
            stored.set()
            await asyncio.sleep(0.01)
            assert setup.server.flushed.position == Position("slot", "system", 1, Lsn(200))
            assert setup.stream.last.flush == 200

    run(work())


def test_idle_position_is_stored_in_growing_pauses_or_at_once_if_awaited() -> None:
    async def work() -> None:
        async with running_worker() as (setup, _):
            await asyncio.sleep(5.5)
            setup.stream.give([keepalive(60)])
            await asyncio.sleep(0.01)
            assert setup.sink.advanced == [60]
            setup.stream.give([keepalive(61)])
            await asyncio.sleep(0.03)
            assert setup.sink.advanced == [60]
            await asyncio.sleep(0.03)
            assert setup.sink.advanced == [60, 61], "without another message"
            for lsn in range(1000, 2000):
                setup.stream.give([keepalive(lsn)])
                await asyncio.sleep(0.01)
            busy = len(setup.sink.advanced) - 2
            assert 10 <= busy <= 14, "once a second in the end"
            await asyncio.sleep(1)
            assert setup.sink.advanced[-1] == 1999
            del setup.sink.advanced[:]
            setup.stream.give([keepalive(2000)])
            setup.stream.give([keepalive(2001, reply_requested=True)])
            await asyncio.sleep(0.01)
            assert setup.sink.advanced[-1] == 2001, "the publisher waits, it may want to shut down"
            setup.goal = Lsn(2080)
            setup.stream.give([keepalive(2079)])
            await asyncio.sleep(0.01)
            setup.stream.give([keepalive(2080)])
            await asyncio.sleep(0.01)
            assert setup.sink.advanced[-1] == 2080
            del setup.sink.advanced[:]
            await asyncio.sleep(100)
            assert setup.sink.advanced == [], "nothing new, nothing stored"

    run(work())


def test_stop_while_waiting_for_a_handover() -> None:
    async def work() -> None:
        async with running_worker(entry=COPIED) as (setup, task):
            setup.states.request_handover(table(0))
            setup.stream.give(transaction(1))
            await asyncio.sleep(100)
            assert setup.sink.batches == []
            setup.stop()
            await asyncio.wait_for(task, 1)
            assert setup.sink.batches == []
            assert setup.stream.last.flush == 50
            assert setup.tracker.applied < 108
            assert setup.held == 0

    run(work())


def test_waits_for_a_handover_and_then_applies_later_transactions() -> None:
    async def work() -> None:
        async with running_worker(entry=COPIED, settings=Settings(batch_rows=1)) as (setup, _):
            setup.stream.give(transaction(1))
            await asyncio.sleep(1)
            assert setup.rows == [], "the table's own synchronization does that"
            setup.states.request_handover(table(0))
            setup.stream.give([*transaction(2), *transaction(3)])
            await asyncio.sleep(1)
            assert setup.states.try_handover(table(0), Lsn(208))
            await asyncio.sleep(1)
            assert setup.tracker.flushed == 208
            setup.server.visible.entries[table(0)] = TableEntry(TableState.SYNCDONE, Lsn(208))
            setup.states.complete_handover(table(0))
            await asyncio.sleep(1)
            assert setup.rows == ["3"]
            assert setup.server.visible.entries == setup.states.entries() == {table(0): TableEntry(TableState.READY, Lsn(208))}

    run(work())


def test_a_table_becomes_ready_when_the_durable_position_passed_it() -> None:
    async def work() -> None:
        async with running_worker(entry=TableEntry(TableState.SYNCDONE, Lsn(150)), lazy=True) as (setup, _):
            setup.stream.give([*transaction(1), *transaction(2)])
            await asyncio.sleep(0.9)
            assert setup.rows == ["2"]
            assert setup.states.entries()[table(0)].state is TableState.SYNCDONE, "it could still be lost"
            setup.sink.settle()
            await asyncio.sleep(2)
            assert setup.states.entries()[table(0)] == TableEntry(TableState.READY, Lsn(150))

    run(work())


@pytest.mark.parametrize("error", [ApplyError("refused"), TargetUnavailable("away")])
def test_error_releases_all_memory(error: Exception) -> None:
    async def work() -> None:
        async with running_worker() as (setup, task):

            async def refuse(_: Batch) -> NoReturn:
                raise error

            setup.sink.apply = refuse  # type: ignore[assignment,method-assign]
            setup.stream.give(transaction(1, size=5000))
            await asyncio.wait({task}, timeout=10)
            assert task.exception() is error
            assert setup.held == 0
            assert setup.tracker.applied == setup.tracker.flushed == 50
            assert setup.stream.last.flush == 50

    run(work())


def test_transactions_before_a_broken_stream_are_applied() -> None:
    async def work() -> None:
        async with running_worker(settings=Settings(batch_delay=30)) as (setup, task):
            setup.stream.give([*transaction(1), *transaction(2)])
            await asyncio.sleep(1)
            setup.stream.fail(PublisherUnavailable("lost"))
            await asyncio.wait({task}, timeout=100)
            assert isinstance(task.exception(), PublisherUnavailable)
            assert setup.rows == ["1", "2"]
            assert setup.tracker.flushed == 208

    run(work())


def test_stop_ends_it_soon_and_reports() -> None:
    async def work() -> None:
        async with running_worker() as (setup, task):
            setup.stream.give([*transaction(1), keepalive(200)])
            await asyncio.sleep(5)
            before = len(setup.stream.sent)
            setup.stop()
            await asyncio.wait_for(task, 0.01)
            assert len(setup.stream.sent) == before + 1

    run(work())


@pytest.mark.parametrize(
    ("error", "rolled_back", "passes"),
    [
        (ApplyError("refused"), {3}, True),
        (RelationError("its columns are others"), {3}, True),
        (ApplyError("refused"), {1}, False),
        (TargetUnavailable("away"), {3}, False),
        (TargetError("not what its rows are about"), {3}, False),
    ],
)
def test_rejected_transaction_that_the_publisher_rolled_back_is_skipped(error: TargetError, rolled_back: set[int], passes: bool) -> None:
    """The bug was that a part of a prepared transaction, all that is sent of one that is rolled back, ended the stream for ever."""

    async def work() -> None:
        async with running_worker(two_phase=TwoPhaseState.ENABLED) as (setup, task):
            apply, setup.rolled_back = setup.sink.prepare, rolled_back

            async def prepare(event: PreparedTransaction, gate: RelationGate) -> None:
                if event.transaction.xid == 3:
                    raise error
                await apply(event, gate)

            setup.sink.prepare = prepare  # type: ignore[method-assign, assignment]
            frames = [*prepared(1), *prepared(3), xlog(CommitPrepared(0, Lsn(400), Lsn(408), 0, 1, "gid1"), 408)]
            setup.stream.give(frames)
            await asyncio.wait({task}, timeout=2)
            if passes:
                assert not task.done()
                # so that a COMMIT PREPARED, which must not come, would be noticed
                assert setup.server.visible.prepared == {}
                assert setup.stream.last.flush == 408
                setup.stream.give([xlog(RollbackPrepared(0, Lsn(308), Lsn(508), 0, 0, 3, "gid3"), 508), *transaction(6)])
                await asyncio.wait({task}, timeout=2)
                assert setup.rows == ["1", "6"]
                assert setup.stream.last.flush == 608
                assert setup.held == 0
            else:
                assert task.exception() is error
                assert setup.rows == []
                assert setup.tracker.flushed == 108

    run(work())


def test_columns_that_cannot_be_added_are_an_error_of_the_table() -> None:
    class Owner(WorkerSetup):
        async def add_columns(self, missing: MissingColumns) -> bool:
            raise RelationError("the role may not add them")

    async def reject() -> None:
        error = RelationError("column missing")
        error.missing_columns, error.of_table, error.finish_lsn = MissingColumns(1, "public", "t", (("c", 23, -1),)), ("public", "t"), 200
        raise error

    async def work() -> None:
        owner = Owner(
            settings=QUIET,
            entry=READY,
            lazy=False,
            two_phase=TwoPhaseState.DISABLED,
            keeps=False,
            skip_lsn=INVALID_LSN,
            empty_prepares=True,
        )
        with pytest.raises(RelationError, match="may not add") as caught:
            await owner.worker._call([], reject)
        assert (caught.value.of_table, caught.value.finish_lsn) == (("public", "t"), 200)

    run(work())
