"""For any bytes: a message or a ProtocolError, quickly and without much memory.

Hypothesis draws a seed a batch and each batch makes many cases of it: drawing every case itself would take minutes for this many.
The cases are the same at each run; ``SUBSCRIBER_FUZZ=random`` draws others, and a failure tells the bytes.
"""

from __future__ import annotations

import os
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, decode_frame, decode_status_update, encode_frame
from subscriber.protocol.messages import Relation, Tag, Type
from tests.support.examples import few_and_many
from tests.unit.protocol.literal_messages import INSIDE, OUTSIDE
from tests.unit.protocol.strategies import inside_streams, outside_streams

BATCHES = 20
MANY_BATCHES = 300
ROUNDS_A_BATCH = 250
SLOWEST_SECONDS = 2.0

Frame = XLogData | PrimaryKeepalive | StandbyStatusUpdate

VALID = [bytes.fromhex(wire) for _, wire in OUTSIDE + INSIDE]
FRAMES = [b"w" + bytes(24) + VALID[0], b"k" + bytes(17), b"r" + bytes(33)]
# numbers that lengths and counts are likely to be mistreated at
EDGES = [
    bytes.fromhex(text) for text in ("00", "7f", "80", "ff", "0000", "7fff", "8000", "ffff", "00000000", "7fffffff", "80000000", "ffffffff")
]

fuzzed = settings(
    derandomize=os.environ.get("SUBSCRIBER_FUZZ") != "random",
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
seeds = st.integers(0, 2**64 - 1)


def random_bytes(rng: random.Random, valid: list[bytes]) -> bytes:
    """No message at all, but mostly one that begins with the tag of one."""
    body = rng.randbytes(rng.choice((0, 1, 4, 8, 9, 16, 24, 25, 33, 60, 300)))
    return body if rng.random() < 0.1 else rng.choice(valid)[:1] + body


def mutated(rng: random.Random, valid: list[bytes]) -> bytes:
    """A valid message with one to four changes."""
    data = bytearray(rng.choice(valid))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + rng.randint(1, 4)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 4:
                edge = rng.choice(EDGES)
                data[at : at + len(edge)] = edge
            case _:
                other = rng.choice(valid)
                data[at:] = other[rng.randrange(len(other)) :]
    return bytes(data)


def checked(error: ProtocolError, data: bytes) -> None:
    assert error.offset is not None, data.hex()
    assert 0 <= error.offset <= len(data), data.hex()
    assert (error.tag is None) == (not data), data.hex()


def check_message(payload: bytes, in_stream: bool) -> bool:
    """Decode; what is taken for a message must be those very bytes. Was it?"""
    try:
        message = decode(payload, in_stream=in_stream)
    except ProtocolError as error:
        checked(error, payload)
        return False
    again = encode(message)
    if isinstance(message, Relation | Type) and message.namespace == "pg_catalog" and len(again) < len(payload):
        payload = payload.replace(b"pg_catalog\0", b"\0", 1)  # the one thing that may be spelled in two ways
    assert again == payload, payload.hex()
    return True


def check_frame(data: bytes) -> bool:
    """Decode as a frame of the walsender, and as one of the standby. Was it one?"""
    readers: tuple[Callable[[bytes], Frame], ...] = (decode_frame, decode_status_update)
    for reader in readers:
        try:
            frame = reader(data)
        except ProtocolError as error:
            checked(error, data)
        else:
            assert encode_frame(frame) == data, data.hex()
            return True
    return False


def run(cases: Callable[[random.Random], Iterable[bool]], batches: int) -> tuple[int, int]:
    """Run batches, and return how many cases there were and how many of them were messages."""
    done = messages = 0
    slowest = 0.0

    @settings(fuzzed, max_examples=batches)
    @given(seeds)
    def batch(seed: int) -> None:
        nonlocal done, messages, slowest
        rng = random.Random(seed)
        for _ in range(ROUNDS_A_BATCH):
            start = time.process_time()
            for decoded in cases(rng):
                done += 1
                messages += decoded
            slowest = max(slowest, time.process_time() - start)

    batch()
    assert slowest < SLOWEST_SECONDS
    return done, messages


@few_and_many(BATCHES, MANY_BATCHES)
def test_payloads(examples: int) -> None:
    def cases(rng: random.Random) -> Iterable[bool]:
        for make in (random_bytes, mutated):
            payload = make(rng, VALID)
            yield check_message(payload, in_stream=False)
            yield check_message(payload, in_stream=True)

    done, messages = run(cases, examples)
    assert done >= examples * ROUNDS_A_BATCH
    # mutations reach far behind the first check: some are messages still, most are not
    assert done * 0.01 < messages < done * 0.5


@few_and_many(BATCHES, MANY_BATCHES)
def test_frames(examples: int) -> None:
    def cases(rng: random.Random) -> Iterable[bool]:
        for make in (random_bytes, mutated):
            yield check_frame(make(rng, FRAMES))

    done, frames = run(cases, examples)
    assert done >= examples * ROUNDS_A_BATCH
    assert done * 0.01 < frames < done * 0.9


@settings(fuzzed, max_examples=200)
@given(st.binary(max_size=80), st.booleans())
def test_bytes_that_hypothesis_makes(payload: bytes, in_stream: bool) -> None:
    check_message(payload, in_stream)
    check_frame(payload)


@settings(fuzzed, max_examples=400)
@given(st.data(), st.booleans(), seeds)
def test_mutations_of_messages_that_hypothesis_makes(data: st.DataObject, in_stream: bool, seed: int) -> None:
    payload = encode(data.draw(inside_streams if in_stream else outside_streams))
    rng = random.Random(seed)
    for _ in range(20):
        check_message(mutated(rng, [payload]), in_stream)


def test_memory_stays_within_a_small_multiple_of_the_input() -> None:
    rng = random.Random(18)
    tracemalloc.start()
    try:
        for tag in Tag:
            for edge in EDGES:
                for size in (0, 8, 40, 2000):
                    payload = bytes([tag]) + rng.randbytes(rng.randrange(12)) + edge * 2 + b"n" * size
                    tracemalloc.reset_peak()
                    before, _ = tracemalloc.get_traced_memory()
                    check_message(payload, in_stream=False)
                    check_message(payload, in_stream=True)
                    _, peak = tracemalloc.get_traced_memory()
                    assert peak - before < 20_000 + 100 * len(payload), payload.hex()
    finally:
        tracemalloc.stop()
