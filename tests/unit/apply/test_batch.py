"""What becomes one batch."""

from __future__ import annotations

import asyncio

import pytest

from subscriber.apply.batch import collect
from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable
from subscriber.interfaces import Batch
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, Relation
from subscriber.transaction.feedback import FlushTracker
from tests.unit.apply.memory_publisher import xlog
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import ScriptedStream, transaction
from tests.unit.apply.virtual_time import run


def gate(_: Relation, __: Lsn) -> bool:
    return True


def xids(batch: Batch) -> list[int]:
    return [found.xid for found in batch.transactions]


class Feed:
    """A receiver that reads what a test gives."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.stream = ScriptedStream()
        self.receiver = Receiver(self.stream, FlushTracker(Lsn(50)), MemorySpool(), settings)

    async def __aenter__(self) -> Feed:
        await self.receiver.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.receiver.close()

    async def collect(self) -> list[int]:
        batch, held = await collect(self.receiver, self.settings, gate)
        self.receiver.release(held)
        assert batch.end_lsn == batch.transactions[-1].end_lsn
        assert batch.gate is gate
        return xids(batch)


# a transaction has a Relation in addition to its rows
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(), [[1, 2, 3, 4, 5]]),
        (Settings(batch_rows=1), [[1], [2], [3], [4], [5]]),
        (Settings(batch_rows=4), [[1], [2], [3], [4], [5]]),
        (Settings(batch_rows=5), [[1, 2], [3, 4], [5]]),
        (Settings(batch_rows=9), [[1, 2, 3], [4, 5]]),
        (Settings(batch_size=3000), [[1], [2], [3], [4], [5]]),
        (Settings(batch_size=4000), [[1, 2], [3, 4], [5]]),
    ],
)
def test_bounded_in_rows_and_bytes_and_never_within_a_transaction(settings: Settings, expected: list[list[int]]) -> None:
    async def work() -> None:
        async with Feed(settings) as feed:
            feed.stream.give([frame for xid in range(1, 6) for frame in transaction(xid, rows=3, size=1000)])
            await asyncio.sleep(1)
            assert [await feed.collect() for _ in expected] == expected
            assert feed.receiver.peek() is None
            assert feed.receiver._held == 0

    run(work())


def test_other_events_end_a_batch() -> None:
    async def work() -> None:
        async with Feed(Settings(batch_delay=5)) as feed:
            prepared = xlog(CommitPrepared(0, Lsn(300), Lsn(308), 0, 7, "gid"))
            feed.stream.give([*transaction(1), *transaction(2), prepared, *transaction(4)])
            await asyncio.sleep(1)
            assert await feed.collect() == [1, 2]
            assert asyncio.get_running_loop().time() == 1, "nothing to wait for"
            assert isinstance(feed.receiver.pop()[0], CommitPrepared)
            assert await feed.collect() == [4]

    run(work())


def test_delay_adds_later_transactions_to_the_batch() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with Feed(Settings(batch_delay=2)) as feed:
            feed.stream.give(transaction(1))
            await asyncio.sleep(1)
            loop.call_later(1.5, feed.stream.give, transaction(2))
            loop.call_later(1.9, feed.stream.give, transaction(3))
            loop.call_later(2.1, feed.stream.give, transaction(4))
            assert await feed.collect() == [1, 2, 3]
            assert loop.time() == pytest.approx(3)
            await asyncio.sleep(1)
            assert await feed.collect() == [4]

    run(work())


def test_delay_ends_with_a_full_batch() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        async with Feed(Settings(batch_delay=100, batch_rows=4)) as feed:
            feed.stream.give(transaction(1))
            loop.call_later(3, feed.stream.give, transaction(2))
            await asyncio.sleep(1)
            assert await feed.collect() == [1, 2]
            assert loop.time() == pytest.approx(3)

    run(work())


def test_without_delay_the_batch_ends_at_once() -> None:
    async def work() -> None:
        async with Feed(Settings()) as feed:
            feed.stream.give(transaction(1))
            await asyncio.sleep(1)
            assert await feed.collect() == [1]
            assert asyncio.get_running_loop().time() == 1

    run(work())


def test_error_during_the_delay_does_not_lose_earlier_transactions() -> None:
    # the bug was that the transactions taken already were dropped, and came again: after an error of the protocol, never
    async def work() -> None:
        async with Feed(Settings(batch_delay=100)) as feed:
            feed.stream.give(transaction(1))
            asyncio.get_running_loop().call_later(3, feed.stream.fail, PublisherUnavailable("lost"))
            await asyncio.sleep(1)
            assert await feed.collect() == [1]
            assert feed.receiver._held == 0
            with pytest.raises(PublisherUnavailable):
                await feed.receiver.wait(1)

    run(work())
