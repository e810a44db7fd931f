"""A model of a publisher: sessions with nested savepoints, a reorder buffer that streams, and what pgoutput makes of it.

It knows the surviving rows by asking each row's chain of subtransactions whether one of them was rolled back: nothing of how reassembly
finds them. A history is made of bytes, each of them one step of one session, so that hypothesis can make and shrink them fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from subscriber.protocol.encoder import encode
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
    StreamStart,
    StreamStop,
)
from tests.unit.transaction.traces import record

SESSIONS = 4
_XIDS = 60
"""So few that they are soon used again."""

_STEPS = {
    "release": 4,  # first, as it mostly does nothing: that is what hypothesis shrinks to
    "write": 17,
    "savepoint": 6,
    "rollback_to": 6,
    "stream": 8,
    "spill": 5,
    "commit": 3,
    "prepare": 2,
    "rollback": 2,
    "finish_prepared": 2,
    "stream_prepared": 1,
    "truncate": 1,
    "transactional_message": 2,
    "message": 1,
    "empty_chunk": 2,
    "stray_abort": 1,
    "invalidate": 1,
}
_STEP_OF_BYTE = [step for step, weight in _STEPS.items() for _ in range(weight)]
assert len(_STEP_OF_BYTE) == 256 // SESSIONS


@dataclass(eq=False)
class Sub:
    """A (sub)transaction; its xid is given out with its first write, after its parents'."""

    parent: Sub | None
    xid: int = 0
    rolled_back: bool = False
    streamed: bool = False
    released: list[Sub] = field(default_factory=list)

    def survives(self) -> bool:
        return not self.rolled_back and (self.parent is None or self.parent.survives())

    def tree(self) -> Iterator[Sub]:
        """Itself and what was released into it."""
        yield self
        for sub in self.released:
            yield from sub.tree()


@dataclass(eq=False)
class Change:
    sub: Sub
    tag: str
    label: str


@dataclass(eq=False)
class Session:
    """One session's current transaction."""

    top: Sub = field(default_factory=lambda: Sub(None))
    open: list[Sub] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    buffered: list[Change] = field(default_factory=list)
    streamed: bool = False
    described: bool = False

    @property
    def current(self) -> Sub:
        return self.open[-1] if self.open else self.top

    def subs(self) -> Iterator[Sub]:
        yield from self.top.tree()
        for sub in self.open:
            yield from sub.tree()


@dataclass(frozen=True)
class Expected:
    """What reassembly has to hand on: kind, xid and the labels of the rows."""

    kind: str
    xid: int
    rows: tuple[str, ...] = ()


class Publisher:
    """Plays a history.

    Attributes:
        sent: payloads, and None where the subscriber must spill.
        expected: events in the order of ``sent``.
    """

    def __init__(self, history: bytes) -> None:
        self.sent: list[bytes | None] = []
        self.expected: list[Expected] = []
        self._sessions = [Session() for _ in range(SESSIONS)]
        self._prepared: list[int] = []
        self._streamed_again: set[int] = set()
        self._described = False
        self._last_xid = 0
        self._lsn = 0x1000
        self._labels = 0
        for byte in history:
            getattr(self, f"_{_STEP_OF_BYTE[byte // SESSIONS]}")(byte % SESSIONS)
        for number, session in enumerate(self._sessions):
            if session.changes:
                self._commit(number)

    def _send(self, message: Message) -> None:
        self.sent.append(encode(message))

    def _next_lsn(self) -> Lsn:
        self._lsn += 0x10
        return Lsn(self._lsn)

    def _assign(self, sub: Sub) -> int:
        if not sub.xid:
            if sub.parent is not None:
                self._assign(sub.parent)
            used = {each.xid for session in self._sessions for each in session.subs()} | set(self._prepared)
            while True:
                self._last_xid = self._last_xid % _XIDS + 1
                if self._last_xid not in used:
                    break
            sub.xid = self._last_xid
        return sub.xid

    # --- steps of a session

    def _change(self, session: Session, tag: str) -> None:
        self._labels += 1
        self._assign(session.current)
        change = Change(session.current, tag, str(self._labels))
        session.changes.append(change)
        session.buffered.append(change)

    def _write(self, number: int) -> None:
        self._change(self._sessions[number], "IUD"[self._labels % 3])

    def _truncate(self, number: int) -> None:
        self._change(self._sessions[number], "T")

    def _transactional_message(self, number: int) -> None:
        # in a subtransaction its fate is not the publisher's to tell: see the design note of reassembly
        if not self._sessions[number].open:
            self._change(self._sessions[number], "M")

    def _savepoint(self, number: int) -> None:
        session = self._sessions[number]
        if sum(len(each.open) for each in self._sessions) < 12:
            session.open.append(Sub(session.current))

    def _release(self, number: int) -> None:
        session = self._sessions[number]
        if session.open:
            sub = session.open.pop()
            session.current.released.append(sub)

    def _roll_back(self, session: Session, sub: Sub) -> None:
        """An abort record: children first, then the subtransaction itself."""
        sub.rolled_back = True
        session.buffered = [change for change in session.buffered if change.sub.survives()]
        children = sorted((each for each in sub.tree() if each is not sub), key=lambda each: each.xid)
        for each in (*children, sub):
            if each.streamed:
                self._send(StreamAbort(session.top.xid, each.xid))
                session.described = False

    def _rollback_to(self, number: int) -> None:
        session = self._sessions[number]
        if session.open:
            level = self._labels % len(session.open)
            while len(session.open) > level:
                self._roll_back(session, session.open.pop())
            session.open.append(Sub(session.current))

    def _rollback(self, number: int) -> None:
        session = self._sessions[number]
        while session.open:
            self._roll_back(session, session.open.pop())
        if session.streamed:
            self._roll_back(session, session.top)
        self._sessions[number] = Session()

    def _commit(self, number: int) -> None:
        session = self._finish(number)
        lsn, end = self._next_lsn(), self._next_lsn()
        if session.streamed:
            self._chunk(session)
            self._send(StreamCommit(session.top.xid, 0, lsn, end, 0))
            self._described = self._described or session.described
        else:
            self._send(Begin(lsn, 0, session.top.xid))
            self._changes(session)
            self._send(Commit(0, lsn, end, 0))
        self._expect("commit", session)

    def _prepare(self, number: int) -> None:
        session = self._finish(number)
        lsn, end = self._next_lsn(), self._next_lsn()
        xid = session.top.xid
        if session.streamed:
            self._chunk(session)
            self._send(StreamPrepare(0, lsn, end, 0, xid, f"gid{xid}"))
        else:
            self._send(BeginPrepare(lsn, end, 0, xid, f"gid{xid}"))
            self._changes(session)
            self._send(Prepare(0, lsn, end, 0, xid, f"gid{xid}"))
        self._expect("prepare", session)
        self._prepared.append(xid)

    def _finish(self, number: int) -> Session:
        session = self._sessions[number]
        self._assign(session.top)
        while session.open:
            self._release(number)
        self._sessions[number] = Session()
        return session

    def _expect(self, kind: str, session: Session) -> None:
        rows = tuple(change.label for change in session.changes if change.sub.survives())
        self.expected.append(Expected(kind, session.top.xid, rows))

    def _finish_prepared(self, number: int) -> None:
        if self._prepared:
            xid = self._prepared.pop(0)
            self._streamed_again.discard(xid)
            lsn, end = self._next_lsn(), self._next_lsn()
            if number % 2:
                self._send(CommitPrepared(0, lsn, end, 0, xid, f"gid{xid}"))
                self.expected.append(Expected("commit prepared", xid))
            else:
                self._send(RollbackPrepared(0, lsn, end, 0, 0, xid, f"gid{xid}"))
                self.expected.append(Expected("rollback prepared", xid))

    # --- steps of the walsender

    def _changes(self, session: Session) -> None:
        for change in session.buffered:
            xid = (session.top.xid if change.tag == "M" else change.sub.xid) if session.streamed else None
            described = session.described if session.streamed else self._described
            if change.tag != "M" and not described:
                self._send(record("R", "r", xid))
                if session.streamed:
                    session.described = True
                else:
                    self._described = True
            self._send(record(change.tag, change.label, xid))
            change.sub.streamed = session.streamed
        session.buffered = []

    def _chunk(self, session: Session) -> None:
        self._send(StreamStart(self._assign(session.top), first_segment=not session.streamed))
        session.streamed = session.top.streamed = True
        self._changes(session)
        self._send(StreamStop())

    def _stream_prepared(self, number: int) -> None:
        """As if the stream had begun after its PREPARE: its K or r ends it."""
        if self._prepared:
            xid = self._prepared[number % len(self._prepared)]
            self._send(StreamStart(xid, first_segment=xid not in self._streamed_again))
            self._streamed_again.add(xid)
            self._send(record("R", "r", xid))
            self._send(record("I", "again", xid))
            self._send(StreamStop())

    def _stream(self, number: int) -> None:
        if self._sessions[number].buffered:
            self._chunk(self._sessions[number])

    def _empty_chunk(self, number: int) -> None:
        session = self._sessions[number]
        buffered, session.buffered = session.buffered, []
        self._chunk(session)
        session.buffered = buffered

    def _stray_abort(self, number: int) -> None:
        """As 18.4: of a transaction that was never streamed."""
        session = self._sessions[number]
        if not session.streamed and session.top.xid:
            for sub in session.subs():
                if sub.xid:
                    self._send(StreamAbort(session.top.xid, sub.xid, Lsn(1), 0))

    def _message(self, number: int) -> None:
        self._labels += 1
        self._send(record("m", str(self._labels), None))
        self.expected.append(Expected("message", 0, (str(self._labels),)))

    def _invalidate(self, number: int) -> None:
        self._described = False
        for session in self._sessions:
            session.described = False

    def _spill(self, number: int) -> None:
        self.sent.append(None)
