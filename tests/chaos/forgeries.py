"""Messages of a walsender that are wrong, each in a way that a subscriber can notice, or need not notice.

Faults that no subscriber can notice are left out: a value, a relation id or a known tag changed to another; a missing or duplicate row; a
WAL end that is wrong, but within the publisher's WAL.
"""

from __future__ import annotations

import random
from dataclasses import replace
from struct import pack

from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PAYLOAD, PrimaryKeepalive, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Message,
    Prepare,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
)
from tests.chaos.network import error_response
from tests.support.framing import HEADER
from tests.support.proxy import Fault, Make, Strike, Then
from tests.support.stream_state import StreamState, payload_tag

_GIGABYTE = 1 << 30
FORGED_XID = 4_294_967_290
"""Of transactions that there never were."""
_LAST = 2**64 - 1
_ROWS = frozenset(b"IUD")
_CONTROL = frozenset(b"BCbPSEcpAKrROYM")


def _copy_data(content: bytes) -> bytes:
    return b"d" + pack(">I", len(content) + 4) + content


def _is_frame(state: StreamState, message: bytes) -> bool:
    return state.streaming and message[:1] == b"d"


def _is_between(state: StreamState, message: bytes) -> bool:
    """Behind this message, or before it, no transaction is open; and it opens none."""
    return _is_frame(state, message) and state.lsn > 0 and state.block == 0 and payload_tag(message) not in b"BbS"


def _keepalive(lsn: int, rng: random.Random) -> bytes:
    return _copy_data(encode_frame(PrimaryKeepalive(Lsn(lsn), 0, rng.random() < 0.5)))


def _keepalive_ahead(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """Beyond the publisher's WAL."""
    if not _is_frame(state, message) or not state.lsn:
        return None
    ahead = rng.choice((_GIGABYTE, 1 << 40, 1 << 56))
    return Strike(message + _keepalive(state.lsn + ahead, rng))


def _keepalive_last(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    return Strike(message + _keepalive(_LAST, rng)) if _is_frame(state, message) else None


def _keepalive_behind(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    return Strike(message + _keepalive(rng.choice((0, state.lsn // 2)), rng)) if _is_frame(state, message) else None


def _xlog_data(lsn: int, payload: bytes) -> bytes:
    return _copy_data(pack(">cQQq", b"w", lsn, lsn, 0) + payload)


def _stray_abort(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """Of a transaction that was never streamed, as PostgreSQL 18 sends it."""
    if not _is_between(state, message):
        return None
    return Strike(message + _xlog_data(state.lsn, encode(StreamAbort(FORGED_XID, FORGED_XID - rng.randrange(2)))))


def _stray_prepare(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """PREPARE without BEGIN PREPARE, as publishers send it for an empty transaction; perhaps with its end."""
    if not _is_between(state, message):
        return None
    lsn, gid = Lsn(state.lsn), "chaos"
    data = _xlog_data(lsn, encode(Prepare(0, lsn, lsn, 0, FORGED_XID, gid)))
    if rng.random() < 0.3:
        data += _xlog_data(lsn, encode(CommitPrepared(0, lsn, lsn, 0, FORGED_XID, gid)))
    return Strike(message + data)


def _twice(state: StreamState, message: bytes, _: random.Random) -> Strike | None:
    """A message that holds no row. (Not ``K`` or ``r``: they may stand alone.)"""
    if not _is_frame(state, message) or (payload_tag(message) and payload_tag(message) not in _CONTROL - frozenset(b"KrMA")):
        return None
    return Strike(message * 2)


def _transaction_twice(state: StreamState, message: bytes, _: random.Random) -> Strike | None:
    """All of a small transaction, once more."""
    begins = bool(state.transaction) and payload_tag(state.transaction[0]) == ord("B")
    if not _is_frame(state, message) or payload_tag(message) != ord("C") or not begins or len(state.transaction) > 30:
        return None
    return Strike(message + b"".join(state.transaction) + message)


def _unknown_tag(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    if not _is_frame(state, message):
        return None
    place = HEADER if rng.random() < 0.3 or not payload_tag(message) else HEADER + PAYLOAD
    return Strike(message[:place] + bytes([rng.choice(b"\x00\x7f\xffzX1")]) + message[place + 1 :])


def _cut_content(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """A message that ends early, in a frame whose length says so."""
    if not _is_frame(state, message) or payload_tag(message) == ord("M"):
        return None
    content = message[HEADER:]
    return Strike(_copy_data(content[: rng.randrange(len(content))]))


def _trailing(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    if not _is_frame(state, message):
        return None
    return Strike(_copy_data(message[HEADER:] + rng.randbytes(rng.randint(1, 30))))


def _tuple_place(state: StreamState, message: bytes) -> int | None:
    """Offset of a tuple's number of columns."""
    if not _is_frame(state, message) or payload_tag(message) not in _ROWS:
        return None
    return HEADER + PAYLOAD + 1 + (4 if state.block == ord("S") else 0) + 4 + 1


def _tuple_count(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    place = _tuple_place(state, message)
    if place is None:
        return None
    count = int.from_bytes(message[place : place + 2], "big")
    wrong = rng.choice((count + 1, max(count - 1, 0), 0x7FFF, 0xFFFF))
    return None if wrong == count else Strike(message[:place] + wrong.to_bytes(2, "big") + message[place + 2 :])


def _value_length(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """The first value says that it is longer than the message, or of negative length."""
    place = _tuple_place(state, message)
    if place is None or message[place + 2 : place + 3] not in (b"t", b"b"):
        return None
    wrong = rng.choice((0x7FFFFFFF, 0xFFFFFFFF, 0x00FFFFFF))
    return Strike(message[: place + 3] + wrong.to_bytes(4, "big") + message[place + 7 :])


def _kind_of_value(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    place = _tuple_place(state, message)
    if place is None or len(message) <= place + 2:
        return None
    return Strike(message[: place + 2] + bytes([rng.choice(b"\x00\xffxN")]) + message[place + 3 :])


def _wrong_lsn(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """In a message that begins or ends a transaction."""
    if not _is_frame(state, message) or payload_tag(message) not in b"BCbPcpKr" or not payload_tag(message):
        return None
    wrong = rng.choice((Lsn(0), Lsn(1), Lsn(_LAST), Lsn(state.lsn + _GIGABYTE)))
    changed = _with_lsn(decode(message[HEADER + PAYLOAD :]), wrong, rng.random() < 0.5)
    return None if changed is None else Strike(_copy_data(message[HEADER : HEADER + PAYLOAD] + encode(changed)))


def _with_lsn(message: Message, wrong: Lsn, end: bool) -> Message | None:
    match message:
        case Begin():
            return replace(message, final_lsn=wrong)
        case Commit() | StreamCommit() | CommitPrepared():
            return replace(message, end_lsn=wrong) if end else replace(message, commit_lsn=wrong)
        case BeginPrepare() | Prepare() | StreamPrepare():
            return replace(message, end_lsn=wrong) if end else replace(message, prepare_lsn=wrong)
        case RollbackPrepared():
            return replace(message, rollback_end_lsn=wrong)
    return None


def _frame_lsn(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """In the frame's header."""
    if not _is_frame(state, message) or not payload_tag(message):
        return None
    wrong = rng.choice((_LAST, state.lsn + _GIGABYTE, state.lsn + (1 << 40)))
    return Strike(message[: HEADER + 1] + pack(">QQ", wrong, wrong) + message[HEADER + 17 :])


def _error(state: StreamState, _: bytes, rng: random.Random) -> Strike | None:
    """Where a walsender ends with an error."""
    if not state.streaming:
        return None
    code = rng.choice(("57P01", "XX000", "58P01", "53200", "55000", "57014", "42704", "XX001"))
    return Strike(error_response(rng.choice(("FATAL", "ERROR")), code), then=rng.choice((Then.CLOSE, Then.RESET)))


def _ended(state: StreamState, message: bytes, rng: random.Random) -> Strike | None:
    """The end of the COPY, as when a server shuts down, at any place of the stream."""
    if not state.streaming:
        return None
    done = b"c\0\0\0\4"
    complete = b"C\0\0\0\x0fCOPY 0\0\0\0\0\0"[:12]
    return Strike(message + rng.choice((done, done + b"C\0\0\0\x0bCOPY 0\0", complete)), then=rng.choice((Then.GO_ON, Then.CLOSE)))


def _notice(state: StreamState, message: bytes, _: random.Random) -> Strike | None:
    """What a server may say at any time."""
    if not state.streaming:
        return None
    status = b"application_name\0\x1b[2Jx\0"
    return Strike(message + b"N" + error_response("WARNING", "01000")[1:] + b"S" + pack(">I", len(status) + 4) + status)


_ALL: dict[str, tuple[float, Make]] = {
    "keepalive far ahead": (2, _keepalive_ahead),
    "keepalive FFFFFFFF/FFFFFFFF": (2, _keepalive_last),
    "keepalive behind": (1, _keepalive_behind),
    "stray STREAM ABORT": (1, _stray_abort),
    "PREPARE without BEGIN PREPARE": (1, _stray_prepare),
    "message twice": (2, _twice),
    "transaction twice": (2, _transaction_twice),
    "unknown tag": (2, _unknown_tag),
    "message cut short": (2, _cut_content),
    "trailing bytes": (1, _trailing),
    "wrong number of columns": (2, _tuple_count),
    "wrong length of a value": (1, _value_length),
    "wrong kind of a value": (1, _kind_of_value),
    "wrong LSN in a message": (3, _wrong_lsn),
    "wrong LSN in a frame": (2, _frame_lsn),
    "error in the stream": (2, _error),
    "end of the COPY": (1, _ended),
    "notices with control characters": (1, _notice),
}
NAMES = tuple(_ALL)


def forgery(name: str, rng: random.Random) -> Fault:
    """This one, at one of the next messages that it fits."""
    return Fault(name, _ALL[name][1], skip=rng.choice((0, 0, rng.randrange(5), rng.randrange(100))))


def draw(rng: random.Random) -> Fault:
    """One of them."""
    return forgery(rng.choices(NAMES, [weight for weight, _ in _ALL.values()])[0], rng)
