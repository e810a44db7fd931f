"""Streamed changes that the publisher rolled back without sending their abort, between a scripted stream and a target in memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import SubscriberError, UndecidedTransaction
from subscriber.protocol.decoder import decode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    TEXT,
    Column,
    Insert,
    LogicalMessage,
    Message,
    Relation,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TruncateOption,
    TupleData,
)
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import PreparedTransaction, StreamedPart, Transaction
from tests.unit.apply.memory_publisher import relation, xlog
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import ScriptedStream, stream_commit, transaction
from tests.unit.apply.test_parallel import running_worker
from tests.unit.apply.virtual_time import run

SMALL, LARGE = 64 * 1024, 64 * 1024**2
UNDECIDED = UndecidedTransaction("no session")


def row(xid: int, text: str) -> Insert:
    return Insert(1, TupleData(bytes([TEXT]), [text.encode()]), xid)


def block(*messages: Message, first: bool = False) -> list[bytes]:
    """A block of transaction 9."""
    return [xlog(message) for message in (StreamStart(9, first), *messages, StreamStop())]


def described(xid: int) -> Relation:
    return replace(relation(0), xid=xid)


# 10 is rolled back, and what follows relies on its description of the table; 11 and 12 are not
HISTORY = [
    *block(described(10), row(10, "gone"), Truncate(TruncateOption(0), (1,), 10), row(11, "kept"), first=True),
    *block(row(10, "gone too"), row(9, "kept too")),
    *block(row(12, "last")),
]
KEPT = ["kept", "kept too", "last"]
PREPARE = [xlog(StreamPrepare(0, Lsn(900), Lsn(908), 0, 9, "gid"), 908)]


async def received(
    frames: list[bytes], aborted: set[int] | SubscriberError, *, memory: int = LARGE, blocks: bool = False
) -> tuple[ScriptedStream, MemorySpool, list[Transaction], SubscriberError | None]:
    """All transactions that the frames give, the error that ends them, and what was asked."""
    stream, spool = ScriptedStream(), MemorySpool()
    stream.rolled_back_xids = aborted
    settings = Settings(wal_receiver_timeout=0, logical_decoding_work_mem=memory)
    receiver = Receiver(stream, FlushTracker(Lsn(50)), spool, settings, blocks=blocks)
    await receiver.start()
    for frame in frames:
        stream.give([frame])
    stream.give(transaction(100))
    found: list[Transaction] = []
    failure = None
    try:
        while not found or found[-1].xid != 100:
            await receiver.wait(10)
            while receiver.peek() is not None:
                event, held = receiver.pop()
                found.append(event.transaction if isinstance(event, PreparedTransaction) else event)  # type: ignore[arg-type]
                receiver.release(held)
    except SubscriberError as error:
        failure = error
    lost = receiver.take_left_out()
    assert lost == sum(each.left_out for each in found)
    return stream, spool, found, failure


async def texts(transaction: Transaction) -> list[str]:
    messages = [decode(record, in_stream=True) async for chunk in transaction.chunks() for record in chunk]
    assert len(messages) == transaction.count
    assert [each for each in messages if isinstance(each, Relation)] == [described(10)]
    return [(each.new.values[0] or b"").decode().strip() for each in messages if isinstance(each, Insert)]


@pytest.mark.parametrize("end", ["commit", "prepare"])
@pytest.mark.parametrize("spilled", [False, True])
def test_only_its_own_changes_are_left_out(end: str, spilled: bool) -> None:
    async def work() -> None:
        large = block(row(10, "gone" + "x" * 40_000)) if spilled else []
        frames = [*HISTORY, *large, *large, *(stream_commit(9) if end == "commit" else PREPARE)]
        stream, spool, (found, _), _ = await received(frames, {10}, memory=SMALL if spilled else LARGE)
        assert await texts(found) == KEPT
        assert found.left_out == 3 + (2 if spilled else 0)
        assert found.size == sum([len(record) async for chunk in found.chunks() for record in chunk])
        assert bool(found.spilled) == spilled
        assert stream.judged == [(9, {10, 11, 12})]
        await found.discard()
        assert (spool.parts, spool.readers) == ({}, [])

    run(work())


def test_nothing_of_the_spool_is_left() -> None:
    async def work() -> None:
        frames = [*block(row(10, "x" * 40_000), first=True), *block(row(10, "x" * 40_000)), *stream_commit(9)]
        _, spool, (found, _), _ = await received(frames, {10}, memory=SMALL)
        assert (found.count, found.size, found.spilled, found.spool, found.left_out) == (0, 0, 0, None, 2)
        assert (spool.parts, spool.readers) == ({}, [])

    run(work())


def test_is_asked_only_about_subtransactions_that_have_changes_and_were_not_aborted() -> None:
    async def work() -> None:
        frames = [*block(described(9), row(9, "top"), first=True), *block(row(13, "aborted")), xlog(StreamAbort(9, 13))]
        stream, *_ = await received([*frames, *stream_commit(9)], UNDECIDED)
        assert stream.judged == []

    run(work())


def test_description_that_was_rolled_back_counts_only_until_the_next_one() -> None:
    async def work() -> None:
        altered = replace(described(10), columns=(*described(10).columns, Column("w", 23, -1, False)))
        of_another = replace(relation(1), xid=10)
        frames = [
            *block(described(9), row(9, "first"), altered, row(10, "gone"), of_another, first=True),
            *block(described(9), row(9, "last")),
        ]
        _, _, (found, _), _ = await received([*frames, *stream_commit(9)], {10})
        messages = [decode(record, in_stream=True) for record in found.records]
        assert messages == [described(9), row(9, "first"), described(9), row(9, "last"), of_another]
        assert found.size == sum(map(len, found.records))

    run(work())


@pytest.mark.parametrize("blocks", [False, True])
def test_uncertain_answer_ends_the_stream_before_the_transaction(blocks: bool) -> None:
    async def work() -> None:
        _, _, found, failure = await received([*transaction(1), *HISTORY, *stream_commit(9)], UNDECIDED, blocks=blocks)
        assert isinstance(failure, UndecidedTransaction)
        assert found[0].xid == 1
        assert not any(each.end_lsn for each in found[1:])

    run(work())


def test_logical_message_may_be_of_the_subtransaction() -> None:
    async def work() -> None:
        message = LogicalMessage(True, Lsn(5), "prefix", b"", 9)
        frames = [*HISTORY, *block(message), *stream_commit(9)]
        *_, found, failure = await received(frames, {10})
        assert found == []
        assert "a logical message may be" in str(failure)
        *_, found, failure = await received(frames, set())
        assert (len(found), failure) == (2, None)

    run(work())


def test_blocks_that_were_given_are_taken_back() -> None:
    async def work() -> None:
        other = [xlog(message) for message in (StreamStart(20, True), described(20), row(20, "of another"), StreamStop())]
        for aborted in ({10}, UNDECIDED):
            *_, found, failure = await received([*HISTORY, *other, *stream_commit(9)], aborted, blocks=True)
            assert isinstance(failure, UndecidedTransaction)
            parts = [each.message for each in found if isinstance(each, StreamedPart)]
            assert parts[-2:] == [StreamAbort(9, 9), StreamAbort(20, 20)]
            assert not any(isinstance(each, StreamCommit) for each in parts)
        stream, _, found, failure = await received([*HISTORY, xlog(StreamAbort(9, 12)), *other, *stream_commit(9)], set(), blocks=True)
        assert (stream.judged, failure) == ([(9, {10, 11})], None)
        assert isinstance(found[-2], StreamedPart)
        assert isinstance(found[-2].message, StreamCommit)

    run(work())


def test_parallel_apply_rolls_back_what_it_has_applied() -> None:
    async def work() -> None:
        async with running_worker() as setup:
            setup.stream.rolled_back_xids = {10}
            setup.stream.give(HISTORY)
            await asyncio.sleep(0.01)
            assert setup.sink.parallel[0].calls == [7]
            setup.stream.give([*stream_commit(9), *transaction(10)])
            await asyncio.sleep(0.01)
            assert setup.rows == ["1", *KEPT, "10"]
            assert setup.ended() == ["rolled back"]
            assert setup.sink.statistics.rolled_back_changes == 3
            assert setup.tracker.flushed == 1008

    run(work())
