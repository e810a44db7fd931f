"""From scripted frames to events, status updates and the spool. Time is simulated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from itertools import pairwise

import pytest

from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import ProtocolError, PublisherError, PublisherUnavailable, SpoolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    Insert,
    LogicalMessage,
    Prepare,
    StreamAbort,
    StreamCommit,
    TupleData,
)
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, Transaction
from tests.unit.apply.memory_publisher import keepalive, xlog
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import ScriptedStream, chunk, stream_commit, transaction
from tests.unit.apply.virtual_time import run

SMALL = 64 * 1024
"""The least logical_decoding_work_mem: half of it for open transactions, half for those that wait."""


def simulated(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def runs() -> None:
        async def work() -> None:
            await test()

        run(work())

    return runs


class Session:
    """A running receiver."""

    def __init__(self, settings: Settings) -> None:
        self.stream = ScriptedStream()
        self.tracker = FlushTracker(Lsn(50))
        self.spool = MemorySpool()
        self.receiver = Receiver(self.stream, self.tracker, self.spool, settings)

    async def event(self) -> Event:
        """The next one, kept in memory."""
        async with asyncio.timeout(1000):
            while (found := self.receiver.peek()) is None:
                await self.receiver.wait(100)
        self.held = self.receiver.pop()[1]
        return found

    async def xid(self) -> int:
        found = await self.event()
        assert isinstance(found, Transaction)
        return found.xid


@contextlib.asynccontextmanager
async def session(*, status_interval: float = 10.0, timeout: float = 60.0, memory: int = 64 * 1024**2) -> AsyncIterator[Session]:
    found = Session(Settings(wal_receiver_status_interval=status_interval, wal_receiver_timeout=timeout, logical_decoding_work_mem=memory))
    await found.receiver.start()
    try:
        yield found
    finally:
        await found.receiver.close()


# --- numbers

FAR = 1 << 32
MAX = 0xFFFF_FFFF_FFFF_FFFF


@simulated
async def test_publisher_is_asked_for_wal_end_only_if_an_lsn_is_implausible() -> None:
    async with session() as s:
        s.stream.known_wal_end = Lsn(1000)
        s.stream.give([keepalive(900)])
        s.stream.give([keepalive(2000)])
        await asyncio.sleep(1)
        assert s.tracker.received == 2000
        assert s.stream.asked == [0]
        s.stream.known_wal_end = Lsn(FAR + 1000)
        s.stream.give([keepalive(FAR)])
        await asyncio.sleep(1)
        assert s.tracker.received == FAR
        assert len(s.stream.asked) == 2


@pytest.mark.parametrize("lsn", [FAR, MAX])
@pytest.mark.parametrize("frames", ["keepalive", "commit", "header", "streamed", "prepared", "row"])
def test_lsn_beyond_the_wal_end(lsn: int, frames: str) -> None:
    begin, commit = Begin(Lsn(lsn - 8), 0, 7), Commit(0, Lsn(lsn - 8), Lsn(lsn), 0)
    prepare = (Lsn(lsn - 8), Lsn(lsn), 0, 7, "gid")
    given: dict[str, list[bytes]] = {
        "keepalive": [keepalive(lsn)],
        "commit": [xlog(begin, 80), xlog(commit, 100)],
        "header": [xlog(Begin(Lsn(90), 0, 7), 80), xlog(Commit(0, Lsn(90), Lsn(100), 0), lsn)],
        "streamed": [*chunk(7, first=True, rows=1, size=1), xlog(StreamCommit(7, 0, Lsn(lsn - 8), Lsn(lsn), 0), 100)],
        "prepared": [xlog(BeginPrepare(*prepare), 80), xlog(Prepare(0, *prepare), 100)],
        "row": [xlog(Begin(Lsn(90), 0, 7), 80), xlog(Insert(1, TupleData(b"n", [None])), lsn)],
    }

    async def work() -> None:
        async with session() as s:
            s.stream.known_wal_end = Lsn(1000)
            s.stream.give(given[frames])
            if frames == "header":
                assert await s.xid() == 7, "it is whole, and its end is plausible"
            with pytest.raises(ProtocolError, match="but its WAL ends at 0/3E8"):
                await s.event()
            assert s.tracker.received <= 1000

    run(work())


@pytest.mark.parametrize("error", [PublisherUnavailable("no free session"), PublisherError("the password has expired")])
def test_publisher_that_cannot_be_asked(error: PublisherError) -> None:
    """A live stream continues; a jump of the clock does not count."""

    async def work() -> None:
        async with session() as s:
            s.stream.known_wal_end = error
            for lsn in range(10**8, 10**9, 10**8):
                s.stream.give([keepalive(lsn)])
            s.stream.give(transaction(10**7))
            assert await s.xid() == 10**7
            s.stream.give([keepalive(s.tracker.received + FAR)])
            with pytest.raises(type(error), match=str(error)):
                await s.event()
            assert s.tracker.received < FAR

    run(work())


@simulated
async def test_commit_below_a_keepalive() -> None:
    async with session() as s:
        s.stream.give(transaction(1))
        s.stream.give([keepalive(500)])
        s.stream.give(transaction(5))
        s.stream.give([keepalive(10_000)])
        s.stream.give(transaction(6))
        assert [await s.xid(), await s.xid()] == [1, 5]
        with pytest.raises(ProtocolError, match="ends at 0/260, after it had sent everything up to 0/2710"):
            await s.event()


# --- events


@simulated
async def test_events_in_order_with_their_memory() -> None:
    async with session() as s:
        s.stream.give([*transaction(1), *transaction(2, rows=3, size=1000)])
        s.stream.give([xlog(LogicalMessage(False, Lsn(250), "prefix", b"x" * 500))])
        assert await s.xid() == 1
        small = s.held
        assert await s.xid() == 2
        assert 3000 + small < s.held < 3000 + 2 * small + 500
        message = await s.event()
        assert isinstance(message, LogicalMessage)
        assert s.held > 500
        assert s.receiver.peek() is None


@simulated
async def test_arrivals_are_those_of_the_next_event_and_are_forgotten() -> None:
    async with session() as s:
        for xid in range(1, 6):
            s.stream.give([*transaction(xid * 2), *transaction(xid * 2 + 1)])
            await asyncio.sleep(1)
        moments = []
        for _ in range(10):
            assert s.receiver.arrival is not None
            moments.append(s.receiver.arrival.read)
            await s.event()
        assert moments == pytest.approx([0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
        assert s.receiver.arrival is None
        # a reader that never asks keeps only what waits
        for xid in range(20, 40):
            s.stream.give(transaction(xid))
            await s.event()
        assert len(s.receiver._arrivals) <= 1
        assert s.receiver.times.phases["receive"] == pytest.approx(5, abs=0.1)


@simulated
async def test_wait_ends_with_its_timeout_and_when_woken() -> None:
    loop = asyncio.get_running_loop()
    async with session() as s:
        started = loop.time()
        await s.receiver.wait(3)
        assert loop.time() - started == pytest.approx(3)
        loop.call_later(1, s.receiver.wake)
        await s.receiver.wait(100)
        assert loop.time() - started == pytest.approx(4)
        loop.call_later(1, s.stream.give, [keepalive(60)])
        await s.receiver.wait(100)
        assert loop.time() - started == pytest.approx(5)


@pytest.mark.parametrize("kind", ["lost", "garbage", "spool"])
def test_error_is_raised_after_earlier_events(kind: str) -> None:
    async def work() -> None:
        async with session(memory=SMALL) as s:
            s.stream.give([*transaction(1), *transaction(2)])
            expected: type[Exception]
            if kind == "lost":
                expected = PublisherUnavailable
                s.stream.fail(PublisherUnavailable("connection to the publisher was lost"))
            elif kind == "garbage":
                expected = ProtocolError
                s.stream.give([*transaction(3), b"?"])
            else:
                expected = SpoolError

                async def full(*_: object) -> None:
                    raise SpoolError("no space")

                s.spool.append = full  # type: ignore[assignment,method-assign]
                s.stream.give(chunk(9, first=True, rows=1, size=SMALL))
            await asyncio.sleep(1)
            found = [await s.xid() for _ in range(3 if kind == "garbage" else 2)]
            assert found == [1, 2, 3][: len(found)]
            for _ in range(2):
                with pytest.raises(expected):
                    await s.event()

    run(work())


# --- feedback


@simulated
async def test_reports_when_asked_and_when_the_status_changes() -> None:
    async with session(status_interval=10, timeout=0) as s:
        await asyncio.sleep(0.5)
        before = len(s.stream.sent)
        s.stream.give([keepalive(50)])
        await asyncio.sleep(0.1)
        assert len(s.stream.sent) == before, "nothing new, and no request"
        s.stream.give([keepalive(50, reply_requested=True)])
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        assert len(s.stream.sent) == before + 1
        assert [s.receiver.reply_requested for _ in range(2)] == [True, False]
        s.stream.give([keepalive(70)])
        await asyncio.sleep(0.001)
        assert len(s.stream.sent) == before + 2
        assert (s.stream.last.write, s.stream.last.flush, s.stream.last.apply) == (70, 50, 70)
        s.tracker.flush(Lsn(70))
        s.receiver.report()
        await asyncio.sleep(0.001)
        assert s.stream.last.flush == 70
        before = len(s.stream.sent)
        s.receiver.report()
        await asyncio.sleep(0.001)
        assert len(s.stream.sent) == before, "report() is about changes"
        await s.receiver.report_now()
        assert len(s.stream.sent) == before + 1


@pytest.mark.parametrize("interval", [0.5, 2.0, 10.0])
def test_reports_at_the_interval(interval: float) -> None:
    async def work() -> None:
        async with session(status_interval=interval, timeout=0) as s:
            await asyncio.sleep(100 * interval)
            moments = [moment for moment, _ in s.stream.sent]
            assert 99 <= len(moments) <= 101
            gaps = [later - earlier for earlier, later in pairwise(moments)]
            assert gaps[1:] == pytest.approx([interval] * (len(gaps) - 1), abs=0.01)

    run(work())


@simulated
async def test_interval_zero_reports_only_when_asked() -> None:
    async with session(status_interval=0, timeout=0) as s:
        s.stream.give([keepalive(70)])
        await asyncio.sleep(1000)
        assert s.stream.sent == []
        s.stream.give([keepalive(80, reply_requested=True)])
        await asyncio.sleep(0.001)
        assert len(s.stream.sent) == 1


@simulated
async def test_flush_never_passes_what_is_pending() -> None:
    async with session(timeout=0) as s:
        s.stream.give([*transaction(1), keepalive(200, reply_requested=True)])
        assert await s.xid() == 1
        await asyncio.sleep(1)
        assert (s.stream.last.write, s.stream.last.flush, s.stream.last.apply) == (200, 50, 50)
        assert s.tracker.idle_lsn() is None
        s.stream.give([*transaction(3)])
        s.tracker.applied_to(Lsn(108))
        s.tracker.flush(Lsn(108))
        s.receiver.report()
        await asyncio.sleep(1)
        assert (s.stream.last.write, s.stream.last.flush, s.stream.last.apply) == (308, 108, 108)
        assert await s.xid() == 3
        s.tracker.flush(Lsn(308))
        s.stream.give([keepalive(400)])
        await asyncio.sleep(1)
        assert (s.stream.last.write, s.stream.last.flush, s.stream.last.apply) == (400, 308, 400)
        assert s.tracker.idle_lsn() == 400


# --- silence


@simulated
async def test_silence_asks_for_a_reply_at_half_and_times_out_at_full() -> None:
    async with session(timeout=20, status_interval=100) as s:
        await asyncio.sleep(9.9)
        assert not any(status.reply_requested for _, status in s.stream.sent)
        await asyncio.sleep(0.2)
        assert [moment for moment, status in s.stream.sent if status.reply_requested] == pytest.approx([10], abs=0.01)
        await asyncio.sleep(9)
        assert sum(status.reply_requested for _, status in s.stream.sent) == 1, "once is enough"
        with pytest.raises(PublisherUnavailable, match=r"^terminating logical replication worker due to timeout$"):
            await s.event()
        assert asyncio.get_running_loop().time() == pytest.approx(20, abs=0.1)


@simulated
async def test_reply_restarts_the_timeout() -> None:
    async with session(timeout=20, status_interval=100) as s:
        for expected in (10, 22, 34):
            await asyncio.sleep(expected + 1 - asyncio.get_running_loop().time())
            asked = [moment for moment, status in s.stream.sent if status.reply_requested]
            assert asked[-1] == pytest.approx(expected, abs=0.01)
            await asyncio.sleep(1)
            s.stream.give([keepalive(60)])
        await asyncio.sleep(1)
        assert s.stream.unread == 0


@simulated
async def test_no_timeout() -> None:
    async with session(timeout=0, status_interval=0) as s:
        await asyncio.sleep(10_000)
        s.stream.give(transaction(1))
        assert await s.xid() == 1
        assert s.stream.sent == []


# --- bounded memory


@simulated
async def test_reading_stops_at_half_of_the_budget_and_resumes() -> None:
    async with session(memory=SMALL, timeout=20) as s:
        for xid in range(1, 11):
            s.stream.give(transaction(xid, size=10_000))
        await asyncio.sleep(1)
        assert s.stream.reads == 4, "three are below 32 kB, the fourth is not"
        before = len(s.stream.sent)
        await asyncio.sleep(200)
        assert s.stream.reads == 4
        assert len(s.stream.sent) - before >= 190, "the server's requests cannot be seen: it hears of us all the same"
        assert not any(status.reply_requested for _, status in s.stream.sent), "we do not listen: that is not its silence"
        for expected in range(1, 11):
            assert await s.xid() == expected
            s.receiver.release(s.held)
        assert s.stream.reads == 10
        await asyncio.sleep(9)
        assert not any(status.reply_requested for _, status in s.stream.sent)


@simulated
async def test_memory_counts_until_it_is_released() -> None:
    async with session(memory=SMALL, timeout=0) as s:
        for xid in range(1, 6):
            s.stream.give(transaction(xid, size=20_000))
        assert await s.xid() == 1
        assert await s.xid() == 2
        held = s.held
        await asyncio.sleep(10)
        assert s.stream.reads == 2
        s.receiver.release(held)
        await asyncio.sleep(10)
        assert s.stream.reads == 3


@pytest.mark.parametrize("directly", [True, False])
def test_time_without_reading_does_not_count_as_silence(directly: bool) -> None:
    # between release() and the next read the whole pause must not look like the publisher's silence
    async def work(offset: float) -> None:
        loop = asyncio.get_running_loop()
        async with session(memory=SMALL, timeout=5) as s:
            s.stream.give(transaction(1, size=SMALL))
            assert await s.xid() == 1
            # released in the same turn of the loop in which the feedback's timer strikes, or in the next one
            if directly:
                loop.call_at(100 + offset, s.receiver.release, s.held)
            await asyncio.sleep(100 + offset - loop.time())
            if not directly:
                s.receiver.release(s.held)
            s.stream.give(transaction(2))
            assert await s.xid() == 2

    for step in range(9):
        run(work(step / 8))


@simulated
async def test_a_slow_spool_is_not_silence() -> None:
    async with session(memory=SMALL, timeout=5, status_interval=100) as s:
        append = s.spool.append

        async def slow(spool_id: int, records: list[bytes]) -> None:
            await asyncio.sleep(60)
            await append(spool_id, records)

        s.spool.append = slow  # type: ignore[assignment,method-assign]
        s.stream.give(chunk(9, first=True, rows=1, size=SMALL))
        s.stream.give(stream_commit(9))
        assert await s.xid() == 9


@simulated
async def test_spills_the_largest_open_transaction() -> None:
    async with session(memory=SMALL, timeout=0) as s:
        s.stream.give(chunk(9, first=True, rows=1, size=10_000))
        s.stream.give(chunk(8, first=True, rows=2, size=8_000))
        await asyncio.sleep(1)
        assert s.spool.appended == []
        s.stream.give(chunk(9, first=False, rows=1, size=9_000))
        await asyncio.sleep(1)
        assert [count for _, count in s.spool.appended] == [2]
        s.stream.give(stream_commit(8))
        s.stream.give(chunk(9, first=False, rows=1, size=100))
        s.stream.give(stream_commit(9))
        first = await s.event()
        assert isinstance(first, Transaction)
        assert (first.xid, first.spilled, first.count) == (8, 0, 2)
        second = await s.event()
        assert isinstance(second, Transaction)
        assert (second.xid, second.spilled, second.count) == (9, 2, 3)
        assert s.held < 11_000, "of what is in the spool, only the largest record counts: it is read back alone"
        sizes = [len(record) async for part in second.chunks() for record in part]
        assert [size // 1000 for size in sizes] == [10, 9, 0]
        await second.discard()
        assert s.spool.readers == []


@simulated
async def test_one_large_transaction_stays_within_the_budget() -> None:
    async with session(memory=SMALL, timeout=0) as s:
        s.stream.give(chunk(7, first=True, rows=10, size=1000))
        for _ in range(50):
            s.stream.give(chunk(7, first=False, rows=10, size=1000))
            await asyncio.sleep(0.1)
            assert s.receiver._reassembly.memory <= SMALL // 2
        s.stream.give(stream_commit(7))
        found = await s.event()
        assert isinstance(found, Transaction)
        assert found.count == 510
        assert sum([len(part) async for part in found.chunks()]) == 510


@simulated
async def test_orders_for_the_spool_are_carried_out() -> None:
    async with session(memory=SMALL, timeout=0) as s:
        s.stream.give(chunk(7, first=True, rows=5, size=10_000))
        s.stream.give(chunk(8, first=True, rows=5, size=10_000))
        await asyncio.sleep(1)
        assert len(s.spool.parts) == 2
        s.stream.give([xlog(StreamAbort(7, 7))])
        await asyncio.sleep(1)
        assert len(s.spool.parts) == 1


# --- the end


@simulated
async def test_close_frees_the_spool() -> None:
    async with session(memory=SMALL, timeout=0) as s:
        s.stream.give([*chunk(7, first=True, rows=1, size=10_000), *stream_commit(7)])
        s.stream.give([*chunk(8, first=True, rows=5, size=10_000)])
        s.stream.give([*stream_commit(8), *chunk(9, first=True, rows=5, size=10_000)])
        await asyncio.sleep(1)
        assert (len(s.spool.parts), len(s.spool.readers)) == (1, 1), "one is open, one waits; a third was small enough"
    assert s.spool.parts == {}
    assert s.spool.readers == []
    await s.receiver.close()


@simulated
async def test_close_after_an_error_is_quiet() -> None:
    async with session() as s:
        s.stream.fail(PublisherUnavailable("connection to the publisher was lost"))
        await asyncio.sleep(1)


@simulated
async def test_cancellation_during_close_is_not_swallowed() -> None:
    s = Session(Settings())
    await s.receiver.start()
    await asyncio.sleep(1)
    release = asyncio.Event()

    async def stubborn(_: bytes) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            await release.wait()

    s.stream.send = stubborn  # type: ignore[assignment,method-assign]
    s.stream.give([keepalive(60, reply_requested=True)])
    await asyncio.sleep(1)
    closing = asyncio.create_task(s.receiver.close())
    await asyncio.sleep(1)
    assert not closing.done()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert closing.cancelled()
    release.set()
    await s.receiver.close()
