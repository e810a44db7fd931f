"""Random histories of a publisher: sessions with nested savepoints that change rows, streamed in chunks that interleave.

The model has what matters for applying streamed transactions before their end: row locks, held until the end of the transaction
or of the rolled back subtransaction that took them, and the order in which a walsender sends chunks, aborts and commits. It knows the rows
that are left by undoing what is rolled back, and nothing of how that is found from the messages.

Tables: ``t (id, v)`` with a key, ``log (label)`` without, which would show a row that came twice. A label begins with the number of its
session and a dash; ``committed_before`` says how many labels of others were committed when it was sent: the applier has to see
as many.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    Message,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Update,
)
from tests.support.sink_postgres import Remote, row, truncate
from tests.unit.apply.memory_publisher import xlog

SESSIONS = 5
KEYS = 16
T = Remote("t", "*id", "v", relation_id=1)
LOG = Remote("log", "label", relation_id=2)
_REMOTES = {1: T.relation, 2: LOG.relation}

_OPERATIONS = {
    "write": 40,
    "savepoint": 8,
    "release": 3,
    "rollback_to": 7,
    "stream": 14,
    "commit": 6,
    "rollback": 2,
    "prepare": 2,
    "log": 10,
}

Make = Callable[[int | None], Message]
"""A message, with the xid that it has in a stream."""


@dataclass
class _Level:
    """A (sub)transaction that is open."""

    rows: dict[int, str | None]
    logged: int
    locks: set[int]
    xids: list[int] = field(default_factory=list)
    """Its own, first, and those of what was released into it."""


class _Session:
    def __init__(self, rows: dict[int, str | None]) -> None:
        self.rows = rows
        """What it changed: None for a row that is gone."""
        self.log: list[str] = []
        self.locks: set[int] = set()
        self.levels = [_Level(dict(rows), 0, set())]
        self.unsent: list[tuple[int, int, Make]] = []
        """xid, relation, message."""
        self.streamed: set[int] = set()
        self.begun = False
        self.described: set[int] = set()
        self.gid = ""
        self.prepare_end = 0
        self.number = 0


class History:
    """Makes frames; ``rows`` and ``log`` are what is committed so far.

    Attributes:
        committed_before: see the module's text.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.rows: dict[int, str] = {}
        self.log: list[str] = []
        self.committed_before: dict[str, int] = {}
        self.lsn = 0x2000
        self._xids = iter(range(1000, 10**9))
        self._sessions = [_Session({}) for _ in range(SESSIONS)]
        self._prepared: list[_Session] = []
        self._count = 0

    def frames(self, steps: int) -> Iterator[list[bytes]]:
        """What each of so many steps sends, then what ends everything."""
        for _ in range(steps):
            yield self._step(self.rng.randrange(SESSIONS), self.rng.choices(list(_OPERATIONS), list(_OPERATIONS.values()))[0])
        for number in range(SESSIONS):
            yield self._step(number, "commit")
        while self._prepared:
            yield self._finish_prepared()

    def _next(self) -> Lsn:
        self.lsn += 0x20
        return Lsn(self.lsn)

    def _step(self, number: int, operation: str) -> list[bytes]:
        session, rng = self._sessions[number], self.rng
        match operation:
            case "write":
                for _ in range(rng.randint(1, 12)):
                    self._write(session)
            case "log":
                self._count += 1
                session.number = session.number or self._count
                label = f"{session.number}-{self._count}"
                session.log.append(label)
                self._send(session, 2, lambda xid: self._logged(label, xid))
            case "savepoint":
                session.levels.append(_Level(dict(session.rows), len(session.log), set(session.locks)))
            case "release" if len(session.levels) > 1:
                gone = session.levels.pop()
                session.levels[-1].xids += gone.xids
            case "rollback_to" if len(session.levels) > 1:
                return self._roll_back(session, rng.randrange(1, len(session.levels)))
            case "stream":
                return self._chunk(session)
            case "commit":
                return self._commit(number)
            case "rollback":
                sent = self._abort(session, [xid for level in session.levels for xid in level.xids])
                self._sessions[number] = _Session({})
                return sent
            case "prepare" if session.begun and session.unsent and len(self._prepared) < 3:
                return self._prepare(number)
            case "prepare" if self._prepared:
                return self._finish_prepared()
        return []

    def _logged(self, label: str, xid: int | None) -> Insert:
        """It is sent now."""
        self.committed_before[label] = len(self.log)
        return Insert(2, row(label), xid)

    def _visible(self, session: _Session, key: int) -> str | None:
        return session.rows[key] if key in session.rows else self.rows.get(key)

    def _is_free(self, session: _Session, key: int) -> bool:
        return all(key not in other.locks for other in (*self._sessions, *self._prepared) if other is not session)

    def _send(self, session: _Session, relation: int, make: Make) -> None:
        for level in session.levels:
            if not level.xids:
                level.xids.append(next(self._xids))
        session.unsent.append((session.levels[-1].xids[0], relation, make))

    def _write(self, session: _Session) -> None:
        rng = self.rng
        key, other = rng.randrange(KEYS), rng.randrange(KEYS)
        if rng.random() < 0.01 and all(self._is_free(session, every) for every in range(KEYS)):
            session.locks |= set(range(KEYS))
            session.rows.update(dict.fromkeys(range(KEYS)))
            self._send(session, 1, lambda xid: Truncate(truncate(T).options, (1,), xid))
            return
        if not self._is_free(session, key) or not self._is_free(session, other):
            return
        session.locks |= {key, other}
        self._count += 1
        value = f"{self._count}-" + "x" * rng.choice((0, 10, 1500))
        if self._visible(session, key) is None:
            session.rows[key] = value
            self._send(session, 1, lambda xid: Insert(1, row(key, value), xid))
        elif rng.random() < 0.2:
            session.rows[key] = None
            self._send(session, 1, lambda xid: Delete(1, row(key, None), None, xid))
        elif self._visible(session, other) is None and rng.random() < 0.3:
            session.rows[key], session.rows[other] = None, value
            self._send(session, 1, lambda xid: Update(1, row(key, None), None, row(other, value), xid))
        else:
            session.rows[key] = value
            self._send(session, 1, lambda xid: Update(1, None, None, row(key, value), xid))

    def _chunk(self, session: _Session) -> list[bytes]:
        if not session.levels[0].xids or (not session.unsent and self.rng.random() < 0.8):
            return []
        messages: list[Message] = [StreamStart(session.levels[0].xids[0], not session.begun)]
        for xid, relation, make in session.unsent:
            if relation not in session.described:
                session.described.add(relation)
                messages.append(_described(relation, xid))
            messages.append(make(xid))
            session.streamed.add(xid)
        session.begun = True
        session.unsent = []
        return [xlog(message) for message in (*messages, StreamStop())]

    def _abort(self, session: _Session, xids: list[int]) -> list[bytes]:
        """Children first, the parent last."""
        if not session.begun:
            return []
        session.described.clear()
        return [xlog(StreamAbort(session.levels[0].xids[0], xid), self._next()) for xid in reversed(xids)]

    def _roll_back(self, session: _Session, depth: int) -> list[bytes]:
        gone = [xid for level in session.levels[depth:] for xid in level.xids]
        first = session.levels[depth]
        session.rows = first.rows
        session.locks = first.locks
        del session.log[first.logged :]
        session.unsent = [change for change in session.unsent if change[0] not in gone]
        del session.levels[depth:]
        # ROLLBACK TO keeps the savepoint
        session.levels.append(_Level(dict(session.rows), len(session.log), set(session.locks)))
        return self._abort(session, gone)

    def _commit(self, number: int) -> list[bytes]:
        session = self._sessions[number]
        self._sessions[number] = _Session({})
        if not session.levels[0].xids:
            return []
        xid = session.levels[0].xids[0]
        if session.begun:
            sent = self._chunk(session)
            lsn = self._next()
            sent.append(xlog(StreamCommit(xid, 0, lsn, Lsn(lsn + 8), 0), lsn + 8))
        else:
            lsn = self._next()
            messages: list[Message] = [Begin(lsn, 0, xid), T.relation, LOG.relation]
            messages += [make(None) for _, _, make in session.unsent]
            sent = [xlog(message) for message in messages]
            sent.append(xlog(Commit(0, lsn, Lsn(lsn + 8), 0), lsn + 8))
        self._apply(session)
        return sent

    def _apply(self, session: _Session) -> None:
        for key, value in session.rows.items():
            if value is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = value
        self.log += session.log

    def _prepare(self, number: int) -> list[bytes]:
        session = self._sessions[number]
        self._sessions[number] = _Session({})
        sent = self._chunk(session)
        lsn, xid = self._next(), session.levels[0].xids[0]
        session.gid, session.prepare_end = f"gid{xid}", lsn + 8
        self._prepared.append(session)
        return [*sent, xlog(StreamPrepare(0, lsn, Lsn(lsn + 8), 0, xid, session.gid), lsn + 8)]

    def _finish_prepared(self) -> list[bytes]:
        session = self._prepared.pop(self.rng.randrange(len(self._prepared)))
        lsn, xid = self._next(), session.levels[0].xids[0]
        if self.rng.random() < 0.3:
            end = Lsn(lsn + 8)
            return [xlog(RollbackPrepared(0, Lsn(session.prepare_end), end, 0, 0, xid, session.gid), lsn + 8)]
        self._apply(session)
        return [xlog(CommitPrepared(0, lsn, Lsn(lsn + 8), 0, xid, session.gid), lsn + 8)]


def _described(relation: int, xid: int) -> Relation:
    found = _REMOTES[relation]
    return Relation(found.relation_id, found.namespace, found.name, found.replica_identity, found.columns, xid)
