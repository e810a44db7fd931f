"""Faults of a network, and of servers in the middle of an answer: they fit any connection."""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.framing import HEADER
from tests.support.proxy import Direction, Fault, Strike, Then
from tests.support.stream_state import StreamState

_SHORT = (0.05, 1.5)
_LONG = (5.0, 14.0)
"""Longer than wal_receiver_timeout and wal_sender_timeout of a round."""
_ENDS = (Then.CLOSE, Then.RESET, Then.ORPHAN)
_CODES = ("57P01", "57P02", "XX000", "53200", "53100", "40001", "58030", "55006")


def _cut(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    """At a random byte: a message that comes in part."""
    return Strike(message[: rng.randrange(len(message) + 1)], then=rng.choice(_ENDS))


def _delay(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    return Strike(message, pause=rng.uniform(*_SHORT))


def _stall(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    """Silence for longer than the timeouts; then the connection continues, or not."""
    return Strike(message, pause=rng.uniform(*_LONG), then=rng.choice((Then.GO_ON, *_ENDS)))


def _garbage(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    """Bytes that are no message: their tag is none of the protocol's.

    Their length is not negative: over some of those, asyncpg 0.32 loops for ever in C. The event loop stands still then, and only a
    watchdog, such as systemd's, ends the program.
    """
    header = bytes([rng.choice(b"\x00\x01\xff!~q"), rng.randrange(128)])
    return Strike(header + rng.randbytes(rng.randint(7, 199)), then=rng.choice((Then.GO_ON, Then.CLOSE)))


def _length(_: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """A length that is too small or too large. The connection is damaged from here on; it ends by the next calm."""
    if len(message) < 3 * HEADER:
        return None
    length = rng.choice((0, 3, 2**31 - 1, 2**32 - 1, 2**20))
    return Strike(message[:1] + length.to_bytes(4, "big") + message[HEADER:])


def _postgres_error(_: StreamState, __: bytes, rng: random.Random) -> Strike:
    """The server ends in the middle of what it was doing; whether a COMMIT was done is not known."""
    return Strike(error_response(rng.choice(("FATAL", "ERROR", "PANIC")), rng.choice(_CODES)), then=rng.choice((Then.CLOSE, Then.RESET)))


def error_response(severity: str, code: str) -> bytes:
    """As PostgreSQL's servers send it, with control characters in the text."""
    text = "a fault that chaos made \x1b[31m\x07 \u202eon purpose"
    fields = "".join(f"{kind}{value}\0" for kind, value in (("S", severity), ("V", severity), ("C", code), ("M", text))) + "\0"
    data = fields.encode()
    return b"E" + (len(data) + 4).to_bytes(4, "big") + data


def _mariadb_sequence(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    """Packet sequence number wrong."""
    return Strike(message[:3] + bytes([(message[3] + rng.randint(1, 200)) % 256]) + message[4:])


def _mariadb_error(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    code, state = rng.choice(((1053, "08S01"), (1927, "70100"), (1213, "40001"), (1021, "HY000"), (1290, "HY000")))
    data = b"\xff" + code.to_bytes(2, "little") + f"#{state}a fault that chaos made".encode()
    return Strike(len(data).to_bytes(3, "little") + message[3:4] + data, then=rng.choice((Then.CLOSE, Then.RESET)))


def _mariadb_length(_: StreamState, message: bytes, rng: random.Random) -> Strike:
    return Strike(rng.choice((0, 2**16, 2**24 - 2)).to_bytes(3, "little") + message[3:])


_Make = Callable[[StreamState, bytes, random.Random], Strike | None]
_ANY: dict[str, tuple[float, Direction, _Make]] = {
    "cut an answer": (4, Direction.TO_CLIENT, _cut),
    "cut a request": (3, Direction.TO_SERVER, _cut),
    "delay an answer": (2, Direction.TO_CLIENT, _delay),
    "delay a request": (2, Direction.TO_SERVER, _delay),
    "stall": (1, Direction.TO_CLIENT, _stall),
}
POSTGRES: dict[str, tuple[float, Direction, _Make]] = {
    **_ANY,
    "garbage": (1, Direction.TO_CLIENT, _garbage),
    "wrong length": (1, Direction.TO_CLIENT, _length),
    "error of the server": (2, Direction.TO_CLIENT, _postgres_error),
}
MARIADB: dict[str, tuple[float, Direction, _Make]] = {
    **_ANY,
    "wrong sequence number": (1, Direction.TO_CLIENT, _mariadb_sequence),
    "wrong length": (1, Direction.TO_CLIENT, _mariadb_length),
    "error of the server": (2, Direction.TO_CLIENT, _mariadb_error),
}
"""Weight, direction, and what is done, by name."""


def fault(faults: dict[str, tuple[float, Direction, _Make]], name: str, rng: random.Random) -> Fault:
    """This one, at one of the next messages: a session may have a few, a stream has thousands, and is asked for little."""
    _, direction, make = faults[name]
    many = 200 if direction is Direction.TO_CLIENT else 10
    return Fault(name, make, direction, skip=rng.choice((0, 0, rng.randrange(10), rng.randrange(many))))


def draw(faults: dict[str, tuple[float, Direction, _Make]], rng: random.Random) -> Fault:
    """One of them."""
    return fault(faults, rng.choices(list(faults), [weight for weight, _, _ in faults.values()])[0], rng)
