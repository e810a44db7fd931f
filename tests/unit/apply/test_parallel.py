"""Parallel apply between a scripted stream and a target in memory. Time is simulated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest

from subscriber.apply.parallel import LARGE, PATIENCE, ParallelApply
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.skip import Skipping
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.worker import ApplyWorker
from subscriber.config import Settings
from subscriber.errors import ApplyError, PublisherUnavailable, TargetUnavailable
from subscriber.interfaces import Position, TableEntry, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import StreamAbort, StreamCommit
from subscriber.transaction.feedback import FlushTracker
from tests.unit.apply.crashable_target import CrashableSink, State, TargetServer
from tests.unit.apply.memory_publisher import relation, table, xlog
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import EndlessRun, ScriptedStream, chunk, stream_commit, transaction
from tests.unit.apply.virtual_time import run

READY = TableEntry(TableState.READY)


class WorkerSetup:
    """A worker with parallel apply, and all around it."""

    def __init__(self, limit: int, settings: Settings) -> None:
        entries = {table(0): READY}
        self.server = TargetServer(State(position=Position("slot", "system", 1, Lsn(50)), entries=dict(entries)))
        self.steps: list[str] = []
        self.before: dict[str, Callable[[], object]] = {}
        self.slow: dict[str, asyncio.Event] = {}
        self.sink = CrashableSink(self.server, step=self._step)
        self.stream = ScriptedStream()
        self.tracker = FlushTracker(Lsn(50))
        self.states = TableStates()
        self.states.load(entries, Lsn(50))
        self.spool = MemorySpool()
        self.receiver = Receiver(self.stream, self.tracker, self.spool, settings)
        self.paused = False
        self.parallel = ParallelApply(self.receiver, self.sink, self.states, limit, whole=True, paused=lambda: self.paused)
        self.worker = ApplyWorker(
            self.receiver,
            self.sink,
            self.states,
            EndlessRun(),
            two_phase=TwoPhaseState.DISABLED,
            skipping=Skipping(INVALID_LSN, "sub"),
            parallel=self.parallel,
        )

    async def _step(self, name: str) -> None:
        self.steps.append(name)
        if name in self.before:
            self.before.pop(name)()
        if name in self.slow:
            await self.slow[name].wait()

    @property
    def rows(self) -> list[str]:
        return [value.strip() for value in self.server.visible.rows.get(table(0), [])]

    def ended(self) -> list[str | None]:
        return [attempt.ended for attempt in self.sink.parallel]


@contextlib.asynccontextmanager
async def running_worker(limit: int = 2, memory: int = 64 * 1024**2) -> AsyncIterator[WorkerSetup]:
    found = WorkerSetup(limit, Settings(wal_receiver_timeout=0, logical_decoding_work_mem=memory))
    await found.sink.open("sub", found.tracker.flush)
    await found.receiver.start()
    async with found.parallel:
        task = asyncio.create_task(found.worker.run())
        found.stream.give(transaction(1))
        await asyncio.sleep(0.1)
        try:
            yield found
            assert not task.done(), task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    await found.receiver.close()
    assert None not in found.ended()
    assert found.spool.parts == {}
    assert found.spool.readers == []


def first(xid: int, rows: int = 3, size: int = 1) -> list[bytes]:
    """The first chunk, with the description of the table."""
    start, *rest = chunk(xid, first=True, rows=rows, size=size)
    return [start, xlog(replace(relation(0), xid=xid)), *rest]


def test_applied_before_its_end_and_committed_in_order() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            assert [attempt.calls for attempt in setup.sink.parallel] == [[4]]
            setup.stream.give([*transaction(2), *chunk(9, first=False, rows=2, size=1)])
            await asyncio.sleep(0.01)
            assert setup.sink.parallel[0].calls == [4, 2]
            assert setup.rows == ["1", "2"]
            setup.stream.give([*transaction(3), *stream_commit(9), *transaction(10)])
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", "2", "3", *["9"] * 5, "10"]
            # a batch never holds it, nor goes over it
            assert [[t.xid for t in batch.transactions] for batch in setup.sink.batches] == [[1], [2], [3], [10]]
            assert setup.ended() == ["committed"]
            assert setup.tracker.flushed == 1008

    run(work())


def test_waits_for_the_commit_of_earlier_events() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            setup.slow["apply"] = asyncio.Event()
            setup.stream.give([*transaction(2), *chunk(9, first=False, rows=2, size=1)])
            setup.stream.give([*first(8)])
            await asyncio.sleep(5)
            assert setup.sink.parallel[0].calls == [4]
            assert len(setup.sink.parallel) == 1, "all of it is behind what is not committed"
            setup.slow.pop("apply").set()
            await asyncio.sleep(0.01)
            assert [attempt.calls for attempt in setup.sink.parallel] == [[4, 2], [4]]

    run(work())


def test_aborted_subtransactions_are_cut_off() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(9, rows=2))
            await asyncio.sleep(0.01)
            sub = [xlog_with(9, 11, frame) for frame in chunk(9, first=False, rows=3, size=1)]
            setup.stream.give(sub)
            await asyncio.sleep(0.01)
            setup.stream.give([xlog(StreamAbort(9, 11))])
            await asyncio.sleep(0.01)
            assert setup.sink.parallel[0].calls == [3, 3, -3]
            # one that was not reached needs no cut: it waits for transaction 2
            setup.slow["apply"] = asyncio.Event()
            setup.stream.give([*transaction(2), *[xlog_with(9, 12, frame) for frame in chunk(9, first=False, rows=1, size=1)]])
            setup.stream.give([xlog(StreamAbort(9, 12)), *chunk(9, first=False, rows=1, size=1), *stream_commit(9)])
            await asyncio.sleep(0.01)
            setup.slow.pop("apply").set()
            await asyncio.sleep(0.01)
            assert setup.sink.parallel[0].calls == [3, 3, -3, 1]
            assert setup.rows == ["1", "2", "9", "9", "9"]
            setup.stream.give([*first(20), xlog(StreamAbort(20, 20))])
            setup.stream.give(first(21))
            await asyncio.sleep(0.01)
            setup.stream.give([xlog(StreamAbort(21, 21))])
            await asyncio.sleep(0.01)
            assert setup.ended()[0] == "committed"
            assert set(setup.ended()[1:]) == {"rolled back"}

    run(work())


def xlog_with(top: int, subxid: int, frame: bytes) -> bytes:
    """The frame with another xid, if it is a row."""
    header, payload = frame[:25], frame[25:]
    return header + payload[:1] + subxid.to_bytes(4) + payload[5:] if payload[1:5] == top.to_bytes(4) and payload[:1] == b"I" else frame


def test_read_back_from_the_spool() -> None:
    async def work() -> None:
        async with running_worker(limit=1, memory=64 * 1024) as setup:
            setup.stream.give(first(9, rows=10, size=100))
            setup.stream.give(first(8, rows=500, size=100))
            setup.stream.give(chunk(8, first=False, rows=500, size=100))
            await asyncio.sleep(0.01)
            assert sum(count for spool_id, count in setup.spool.appended if spool_id == 3) > 500
            assert [attempt.xid for attempt in setup.sink.parallel] == [9]
            # its turn comes when the first one is done
            setup.stream.give(stream_commit(9))
            await asyncio.sleep(0.01)
            setup.stream.give(chunk(8, first=False, rows=1, size=1))
            await asyncio.sleep(0.01)
            assert sum(setup.sink.parallel[1].calls) == 1002
            setup.stream.give(stream_commit_of(8, 20))
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", *["9"] * 10, *["8"] * 1001]
            assert setup.ended() == ["committed", "committed"]

    run(work())


def stream_commit_of(xid: int, place: int) -> list[bytes]:
    """As stream_commit, at another place."""
    final, end = Lsn(100 * place), Lsn(100 * place + 8)
    return [xlog(StreamCommit(xid, 0, final, end, 0), end)]


def test_error_ends_only_the_attempt() -> None:
    def refuse() -> None:
        raise ApplyError("refused")

    async def work() -> None:
        for step in ("open_parallel", "parallel apply", "parallel cut"):
            async with running_worker() as setup:
                setup.before[step] = refuse
                setup.stream.give(first(9))
                await asyncio.sleep(0.01)
                setup.stream.give([xlog_with(9, 11, frame) for frame in chunk(9, first=False, rows=2, size=1)])
                await asyncio.sleep(0.01)
                setup.stream.give([xlog(StreamAbort(9, 11))])
                await asyncio.sleep(0.01)
                assert step not in setup.before
                setup.stream.give([*chunk(9, first=False, rows=2, size=1), *stream_commit(9)])
                await asyncio.sleep(0.01)
                assert setup.rows == ["1", *["9"] * 5], step
                assert "committed" not in setup.ended()

    run(work())


def test_ends_when_a_table_is_not_ready() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            setup.states.set(table(1), TableEntry(TableState.INIT))
            setup.stream.give([*chunk(9, first=False, rows=1, size=1), *first(8)])
            await asyncio.sleep(0.01)
            assert setup.ended() == ["rolled back"]
            setup.stream.give(stream_commit(9))
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", *["9"] * 4]
            # seen no earlier than at the end: the gate has another answer
            setup.states.set(table(1), READY)
            setup.stream.give(first(30))
            await asyncio.sleep(0.01)
            attempt = setup.sink.parallel[-1]
            setup.states.set(table(0), TableEntry(TableState.SYNCDONE, Lsn(5000)))
            setup.stream.give(stream_commit(30))
            await asyncio.sleep(0.01)
            assert attempt.xid == 30
            assert attempt.ended == "rolled back"
            assert setup.rows == ["1", *["9"] * 4]

    run(work())


def test_a_slow_rollback_has_one_task() -> None:
    """The bug was a task more for each piece that arrived while a table was not ready."""

    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            rolling = setup.slow["parallel roll back"] = asyncio.Event()
            setup.states.set(table(1), TableEntry(TableState.INIT))
            for _ in range(20):
                setup.stream.give(chunk(9, first=False, rows=1, size=1))
                await asyncio.sleep(0.001)
            ending = [task for task in asyncio.all_tasks() if task.get_name() == "end of parallel apply"]
            rolling.set()
            await asyncio.sleep(0.01)
            assert setup.ended() == ["rolled back"]
            assert len(ending) == 1

    run(work())


def test_no_attempts_while_a_transaction_is_to_be_skipped() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.paused = True
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            assert setup.ended() == []
            setup.paused = False
            setup.stream.give(transaction(2))
            await asyncio.sleep(0.01)
            assert setup.ended() == [None]

    run(work())


def test_attempt_that_holds_up_the_worker_is_rolled_back() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give([*first(9), *first(8)])
            await asyncio.sleep(0.01)
            setup.sink.held_up_by.append(setup.sink.parallel[0])
            free = setup.slow["apply"] = asyncio.Event()
            setup.before["parallel roll back"] = free.set
            setup.stream.give(transaction(2))
            await asyncio.sleep(PATIENCE / 2)
            assert setup.ended() == [None, None]
            await asyncio.sleep(3 * PATIENCE)
            assert setup.ended() == ["rolled back", None]
            assert setup.rows == ["1", "2"]
            # the same while the commit of another one is waited for
            setup.slow.clear()
            setup.stream.give(first(7))
            await asyncio.sleep(0.01)
            setup.sink.held_up_by.append(setup.sink.parallel[2])
            free = setup.slow["parallel commit"] = asyncio.Event()
            setup.before["parallel roll back"] = free.set
            setup.stream.give([*stream_commit(8), *stream_commit(9)])
            await asyncio.sleep(4 * PATIENCE)
            assert setup.ended() == ["rolled back", "committed", "rolled back"]
            assert setup.rows == ["1", "2", *["8"] * 3, *["9"] * 3]

    run(work())


def test_deadlock_victim_is_repeated() -> None:
    def deadlock() -> None:
        raise TargetUnavailable("deadlock detected", sqlstate="40P01")

    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            setup.before["apply"] = deadlock
            setup.stream.give([*transaction(2), *stream_commit(9)])
            await asyncio.sleep(0.01)
            assert setup.ended() == ["rolled back"]
            assert setup.rows == ["1", "2", "9", "9", "9"]

    run(work())


async def _turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def _after(turns: int, work: Callable[[], Awaitable[None]]) -> None:
    await _turns(turns)
    await work()


def test_no_rollback_in_the_middle_of_a_commit() -> None:
    """Its stream has ended: it is given up in the moment at which its commit begins. Only one of the two happens."""

    async def work() -> None:
        outcomes = set()
        for turns in range(-10, 20):
            async with running_worker() as setup:
                setup.stream.give(first(9))
                await asyncio.sleep(0.01)
                applying = setup.slow["apply"] = asyncio.Event()
                setup.stream.give([*transaction(2), *stream_commit(9)])
                await asyncio.sleep(0.01)
                (attempt,) = setup.parallel._attempts.values()
                assert attempt.task.done()
                committing = setup.slow["parallel commit"] = asyncio.Event()
                setup.slow.pop("apply")
                abandoning = asyncio.create_task(_after(max(turns, 0), attempt.abandon))
                await _turns(max(-turns, 0))
                applying.set()
                await asyncio.sleep(0.01)
                committing.set()
                await abandoning
                await asyncio.sleep(0.01)
                assert not setup.sink.parallel[0].interrupted, turns
                assert setup.rows == ["1", "2", "9", "9", "9"]
                outcomes.update(setup.ended())
        assert outcomes == {"committed", "rolled back"}

    run(work())


def test_a_rollback_is_never_cut_off() -> None:
    """The bug was that an interrupted rollback stayed incomplete: its session was unusable until the sink was closed."""

    def refuse() -> None:
        raise ApplyError("refused")

    async def work() -> None:
        async with running_worker() as setup:
            setup.before["parallel apply"] = refuse
            rolling = setup.slow["parallel roll back"] = asyncio.Event()
            setup.stream.give(first(9))
            await asyncio.sleep(0.01)
            assert "parallel roll back" in setup.steps
            setup.states.set(table(1), TableEntry(TableState.INIT))
            setup.stream.give(chunk(9, first=False, rows=1, size=1))
            await asyncio.sleep(0.01)
            rolling.set()
            await asyncio.sleep(0.01)
            assert setup.ended() == ["rolled back"]
            assert not setup.sink.parallel[0].cut_off

    run(work())


def test_rollback_interrupted_by_the_end_is_repeated() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give([*first(9), *first(8)])
            await asyncio.sleep(0.01)
            # both have followed to the end, so that the one that resolves the wait rolls back itself
            setup.slow["apply"] = asyncio.Event()
            setup.stream.give([*transaction(2), *stream_commit(9)])
            await asyncio.sleep(0.01)
            rolling = setup.slow["parallel roll back"] = asyncio.Event()
            setup.sink.held_up_by.append(setup.sink.parallel[0])
            await asyncio.sleep(3 * PATIENCE)
            assert setup.ended() == [None, None]
            ending = asyncio.create_task(setup.parallel.__aexit__())
            await asyncio.sleep(0.01)
            rolling.set()
            await ending
            assert setup.ended() == ["rolled back", "rolled back"]
            setup.slow.pop("apply").set()

    run(work())


def test_attempts_stay_within_the_limit() -> None:
    async def work() -> None:
        for limit in (0, 1, 3):
            async with running_worker(limit) as setup:
                for xid in (11, 12, 13, 14):
                    setup.stream.give(first(xid))
                await asyncio.sleep(0.01)
                assert len(setup.sink.parallel) == limit
                assert [attempt.xid for attempt in setup.sink.parallel] == [11, 12, 13][:limit]

    run(work())


# --- transactions that are not streamed

ROW = 10_000


def large(xid: int, size: int = LARGE * 3 // 2) -> tuple[list[bytes], bytes, int]:
    """A transaction whose relation is known: all but its commit, its commit, and the number of its rows."""
    rows = size // ROW + 1
    begin, _, *inserts, commit = transaction(xid, rows=rows, size=ROW)
    return [begin, *inserts], commit, rows


def test_open_transaction_is_applied_while_it_is_received() -> None:
    async def work() -> None:
        async with running_worker(limit=0) as setup:
            received, commit, rows = large(9)
            setup.stream.give(received)
            await asyncio.sleep(0.01)
            assert [len(attempt.records) for attempt in setup.sink.parallel] == [rows]
            assert setup.rows == ["1"]
            setup.stream.give([commit, *transaction(10)])
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", *["9"] * rows, "10"]
            assert setup.ended() == ["committed"]
            assert [[t.xid for t in batch.transactions] for batch in setup.sink.batches] == [[1], [10]]
            assert setup.tracker.flushed == 1008

    run(work())


def test_small_open_transaction_waits_for_its_end() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            *received, commit = transaction(9, rows=3)
            setup.stream.give(received)
            await asyncio.sleep(1)
            setup.stream.give([commit])
            await asyncio.sleep(0.01)
            assert setup.sink.parallel == []
            assert setup.rows == ["1", "9", "9", "9"]

    run(work())


def test_open_transaction_waits_for_earlier_ones_and_for_tables() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.slow["apply"] = asyncio.Event()
            received, commit, rows = large(9)
            setup.stream.give([*transaction(2), *received])
            await asyncio.sleep(5)
            assert setup.sink.parallel == []
            setup.slow.pop("apply").set()
            await asyncio.sleep(0.01)
            assert [len(attempt.records) for attempt in setup.sink.parallel] == [rows]
            setup.states.set(table(1), TableEntry(TableState.INIT))
            setup.stream.give(large(9)[0][1:3])
            await asyncio.sleep(0.01)
            assert setup.ended() == ["rolled back"]
            setup.stream.give([commit])
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", "2", *["9"] * (rows + 2)]

    run(work())


def test_error_of_an_open_transaction_ends_only_the_attempt() -> None:
    def refuse() -> None:
        raise ApplyError("refused")

    async def work() -> None:
        for step in ("open_parallel", "parallel apply", "parallel commit"):
            async with running_worker() as setup:
                setup.before[step] = refuse if step != "parallel commit" else lambda: None
                received, commit, rows = large(9)
                setup.stream.give(received)
                await asyncio.sleep(0.01)
                setup.stream.give([commit])
                await asyncio.sleep(0.01)
                assert step not in setup.before
                assert setup.rows == ["1", *["9"] * rows], step

    run(work())


def test_applied_records_are_spilled_and_not_read_again() -> None:
    async def work() -> None:
        async with running_worker(memory=4 * LARGE) as setup:
            received, commit, rows = large(9, 8 * LARGE)
            for place in range(0, len(received), 20):
                setup.stream.give(received[place : place + 20])
            await asyncio.sleep(0.1)
            assert sum(count for _, count in setup.spool.appended) > rows // 2
            assert setup.receiver._reassembly.memory <= 2 * LARGE
            assert len(setup.sink.parallel[0].records) == rows
            # one that does not go on is waited for once
            applying = setup.slow["parallel apply"] = asyncio.Event()
            for _ in range(100):
                setup.stream.give(received[1:20])
            await asyncio.sleep(0.9)
            assert setup.stream.unread
            await asyncio.sleep(0.2)
            assert not setup.stream.unread
            assert setup.receiver._reassembly.memory <= 2 * LARGE
            setup.slow.pop("parallel apply")
            applying.set()
            setup.stream.give([commit])
            await asyncio.sleep(1)
            assert setup.rows == ["1", *["9"] * (rows + 100 * 19)]
            assert setup.ended() == ["committed"]

    run(work())


def test_open_transaction_does_not_wait_for_a_streamed_one() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.give(first(8))
            await asyncio.sleep(0.01)
            setup.sink.held_up_by.append(setup.sink.parallel[0])
            free = setup.slow["parallel apply"] = asyncio.Event()
            setup.before["parallel roll back"] = free.set
            received, commit, rows = large(9)
            setup.stream.give(received)
            await asyncio.sleep(4 * PATIENCE)
            assert setup.ended() == ["rolled back", None]
            assert len(setup.sink.parallel[1].records) == rows
            setup.stream.give([commit, *stream_commit_of(8, 20)])
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", *["9"] * rows, *["8"] * 3]

    run(work())


def test_open_transaction_of_a_lost_connection_is_rolled_back() -> None:
    async def work() -> None:
        setup = WorkerSetup(2, Settings(wal_receiver_timeout=0))
        await setup.sink.open("sub", setup.tracker.flush)
        await setup.receiver.start()
        setup.stream.give([*transaction(1), *large(9)[0]])
        async with setup.parallel:
            task = asyncio.create_task(setup.worker.run())
            await asyncio.sleep(0.1)
            assert setup.ended() == [None]
            setup.stream.fail(PublisherUnavailable("lost"))
            with pytest.raises(PublisherUnavailable):
                await task
        await setup.receiver.close()
        assert setup.ended() == ["rolled back"]
        assert setup.rows == ["1"]

    run(work())
