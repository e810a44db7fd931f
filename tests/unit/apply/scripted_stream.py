"""A replication stream that gives what a test puts into it, and keeps what was sent."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from subscriber.apply.hold import AppliedTransactions
from subscriber.errors import MissingColumns, SubscriberError
from subscriber.protocol.frames import StandbyStatusUpdate, decode_status_update
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    TEXT,
    Begin,
    Commit,
    Insert,
    Message,
    StreamCommit,
    StreamStart,
    StreamStop,
    TupleData,
)
from tests.unit.apply.memory_publisher import relation, xlog

__all__ = ["EndlessRun", "ScriptedStream", "chunk", "stream_commit", "transaction"]


class EndlessRun:
    """A :class:`subscriber.apply.worker.ApplyOwner` that does not end its worker."""

    empty_prepares = True
    hold = None

    def __init__(self) -> None:
        self.applied = AppliedTransactions()

    def finished(self) -> bool:
        return False

    def progressed(self) -> None:
        pass

    def is_awaited(self, _: Lsn) -> bool:
        return False

    async def was_rolled_back(self, _: int) -> bool:
        return False

    async def learn_columns(self) -> None: ...

    async def add_columns(self, _: MissingColumns) -> bool:
        return False

    async def is_dropped(self, _: int, __: Collection[int]) -> bool:
        return False


class ScriptedStream:
    """A :class:`subscriber.interfaces.ReplicationStream`.

    Attributes:
        sent: when and what was reported.
        reads: how often something was read.
        known_wal_end: where the publisher's WAL ends; an error if it cannot be asked.
        asked: with what least end it was asked for.
        rolled_back_xids: the subtransactions that the publisher rolled back; an error if it does not say.
        judged: the streamed transactions that it was asked about, each with its subtransactions.
    """

    def __init__(self) -> None:
        self.sent: list[tuple[float, StandbyStatusUpdate]] = []
        self.reads = 0
        self.known_wal_end: Lsn | SubscriberError = Lsn(1 << 40)
        self.asked: list[Lsn] = []
        self.rolled_back_xids: Collection[int] | SubscriberError = ()
        self.judged: list[tuple[int, set[int]]] = []
        self._waiting: deque[list[bytes] | SubscriberError] = deque()
        self._changed = asyncio.Event()

    def give(self, frames: Iterable[bytes]) -> None:
        """One piece that receive() returns."""
        self._waiting.append(list(frames))
        self._changed.set()

    def fail(self, error: SubscriberError) -> None:
        """Behind what was given before."""
        self._waiting.append(error)
        self._changed.set()

    @property
    def unread(self) -> int:
        return len(self._waiting)

    @property
    def last(self) -> StandbyStatusUpdate:
        return self.sent[-1][1]

    async def receive(self) -> Sequence[bytes]:
        while not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        self.reads += 1
        found = self._waiting.popleft()
        if isinstance(found, SubscriberError):
            raise found
        return found

    async def send(self, message: bytes) -> None:
        self.sent.append((asyncio.get_running_loop().time(), decode_status_update(message)))

    async def wal_end(self, least: Lsn) -> Lsn:
        self.asked.append(least)
        if isinstance(self.known_wal_end, SubscriberError):
            raise self.known_wal_end
        return self.known_wal_end

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        self.judged.append((xid, set(subxids)))
        if isinstance(self.rolled_back_xids, SubscriberError):
            raise self.rolled_back_xids
        return [subxid for subxid in subxids if subxid in self.rolled_back_xids]

    async def close(self) -> None:
        return


def _row(xid: int, size: int) -> TupleData:
    return TupleData(bytes([TEXT]), [str(xid).rjust(size).encode()])


def transaction(xid: int, *, rows: int = 1, size: int = 1) -> list[bytes]:
    """A small one into table 0: its commit record is at 100 * xid, and 8 long."""
    final, end = Lsn(100 * xid), Lsn(100 * xid + 8)
    inserts = [xlog(Insert(1, _row(xid, size)), final - 10) for _ in range(rows)]
    return [xlog(Begin(final, 0, xid), final - 20), xlog(relation(0)), *inserts, xlog(Commit(0, final, end, 0), end)]


def chunk(xid: int, *, first: bool, rows: int, size: int) -> list[bytes]:
    """A part of a streamed one."""
    messages: list[Message] = [StreamStart(xid, first)]
    messages += [Insert(1, _row(xid, size), xid) for _ in range(rows)]
    return [xlog(message) for message in [*messages, StreamStop()]]


def stream_commit(xid: int) -> list[bytes]:
    final, end = Lsn(100 * xid), Lsn(100 * xid + 8)
    return [xlog(StreamCommit(xid, 0, final, end, 0), end)]
