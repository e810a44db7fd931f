"""For frames in pieces of any size: the same events, in the same order, and the same positions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from hypothesis import strategies as st

from subscriber.apply.receiving.receiver import Receiver
from subscriber.config import Settings
from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import XLogData, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Begin, Commit, Origin
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction
from tests.support.examples import property_test
from tests.unit.apply.memory_publisher import keepalive
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import ScriptedStream
from tests.unit.apply.virtual_time import run
from tests.unit.transaction.publisher_model import Publisher
from tests.unit.transaction.traces import record

Seen = list[tuple[object, ...]]


def told(event: Event) -> tuple[object, ...]:
    transaction = event.transaction if isinstance(event, PreparedTransaction) else event
    if not isinstance(transaction, Transaction):
        return (event,)
    return (type(event), *[getattr(transaction, name) for name in Transaction.__slots__ if name != "spool"])


def received(pieces: Sequence[Sequence[bytes]]) -> tuple[Seen, str | None, Lsn | None, float | None]:
    """Events, the error that ended it, the position received, and when the last message was sent."""

    async def work() -> tuple[Seen, str | None, Lsn | None, float | None]:
        stream, tracker = ScriptedStream(), FlushTracker(INVALID_LSN)
        receiver = Receiver(stream, tracker, MemorySpool(), Settings())
        await receiver.start()
        events: Seen = []
        error = None
        try:
            for piece in pieces:
                stream.give(piece)
                await asyncio.sleep(0.01)
            while receiver.peek() is not None:
                event, held = receiver.pop()
                events.append((held, *told(event)))
            try:
                await receiver.wait(0.01)
            except ProtocolError as failure:
                error = str(failure)
            # these are not compared for a piece with an error
            return events, error, *((tracker.received, receiver.sent_at) if error is None else (None, None))
        finally:
            await receiver.close()

    return run(work())


def cut(frames: list[bytes], rng: random.Random) -> list[list[bytes]]:
    pieces: list[list[bytes]] = [[]]
    for frame in frames:
        if rng.random() < 0.2:
            pieces.append([])
        pieces[-1].append(frame)
    return [piece for piece in pieces if piece]


def framed(messages: Sequence[bytes], rng: random.Random) -> list[bytes]:
    """As a walsender sends them: not every message has an LSN; a keepalive may come between any two."""
    frames = []
    for number, message in enumerate(messages):
        lsn = Lsn(0) if rng.random() < 0.3 else Lsn(1000 + number)
        frames.append(encode_frame(XLogData(lsn, lsn, number, message)))
        if rng.random() < 0.1:
            frames.append(keepalive(1000 + number))
    return frames


@property_test(40, 400, st.binary(min_size=40, max_size=200), st.integers(0, 2**32))
def test_pieces_of_any_history(history: bytes, seed: int) -> None:
    rng = random.Random(seed)
    frames = framed([payload for payload in Publisher(history).sent if payload is not None], rng)
    one_by_one = received([[frame] for frame in frames])
    assert received([frames]) == one_by_one
    assert received(cut(frames, rng)) == one_by_one


BEGIN = encode(Begin(Lsn(100), 7, 5))
ROWS = [encode(record("I", "a", None)), encode(record("U", "b", None))]
COMMIT = encode(Commit(0, Lsn(100), Lsn(108), 9))


@pytest.mark.parametrize(
    "messages",
    [
        [BEGIN, *ROWS, COMMIT],
        [BEGIN, COMMIT, BEGIN, COMMIT],
        [BEGIN, encode(Origin(Lsn(3), "elsewhere")), *ROWS, COMMIT],
        [BEGIN, *ROWS, BEGIN, COMMIT],
        [BEGIN, *ROWS, encode(Commit(0, Lsn(101), Lsn(108), 9))],
        [BEGIN, *ROWS, COMMIT, COMMIT],
        [BEGIN, *ROWS, COMMIT[:-1]],
        [BEGIN, *ROWS, COMMIT + b"x"],
        [BEGIN[:-1], *ROWS, COMMIT],
        [BEGIN + b"x", *ROWS],
        [BEGIN, *ROWS, b"?", COMMIT],
        [BEGIN, *ROWS, b"", COMMIT],
        [BEGIN],
        [*ROWS, COMMIT],
        [BEGIN, ROWS[0]],
    ],
)
def test_pieces_of_valid_and_invalid_messages(messages: list[bytes]) -> None:
    frames = [encode_frame(XLogData(Lsn(50), Lsn(50), 3, message)) for message in messages]
    for before in ([], [encode_frame(XLogData(Lsn(1), Lsn(1), 3, message)) for message in (BEGIN, *ROWS, COMMIT)]):
        one_by_one = received([[frame] for frame in (*before, *frames)])
        assert received([[*before, *frames]]) == one_by_one
        assert len(one_by_one[0]) >= (1 if before else 0)
