"""A publisher in memory: a history of transactions, as the real bytes that a walsender would send of it.

Tables are ``public.t0``, ``public.t1``, …, of one column; every transaction inserts one row that bears its xid into each table it
touches. A commit record is 8 bytes long.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from subscriber.apply.tables.table_synchronization import CopyPart
from subscriber.interfaces import CopyFormat, Position, PublishedTable, TableName
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, decode_status_update, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import TEXT, Begin, Column, Commit, Insert, Message, Relation, TupleData

__all__ = ["Committed", "History", "MemorySource", "MemoryStream", "keepalive", "relation", "table", "transaction_frames", "xlog"]

Step = Callable[[str], Awaitable[None]]


def table(number: int) -> TableName:
    return TableName("public", f"t{number}")


def relation(number: int) -> Relation:
    return Relation(number + 1, "public", f"t{number}", "d", (Column("id", 23, -1, True),))


@dataclass(frozen=True)
class Committed:
    """A transaction of the history."""

    xid: int
    final_lsn: Lsn
    tables: tuple[int, ...]

    @property
    def end_lsn(self) -> Lsn:
        return Lsn(self.final_lsn + 8)


def xlog(message: Message, lsn: int = 0) -> bytes:
    return encode_frame(XLogData(Lsn(lsn), Lsn(lsn), 0, encode(message)))


def keepalive(lsn: int, *, reply_requested: bool = False) -> bytes:
    return encode_frame(PrimaryKeepalive(Lsn(lsn), 0, reply_requested))


def transaction_frames(committed: Committed, described: set[int]) -> list[bytes]:
    """What a walsender sends of it: LSN 0 where the message is not the last of its record."""
    frames = [xlog(Begin(committed.final_lsn, 0, committed.xid), committed.final_lsn - 8)]
    for number in committed.tables:
        if number not in described:
            described.add(number)
            frames.append(xlog(relation(number)))
        row = TupleData(bytes([TEXT]), [str(committed.xid).encode()])
        frames.append(xlog(Insert(number + 1, row), committed.final_lsn - 4))
    frames.append(xlog(Commit(0, committed.final_lsn, committed.end_lsn, 0), committed.end_lsn))
    return frames


class History:
    """What was committed, and how far the WAL goes.

    Attributes:
        transactions: in the order of their commits.
        end: of the WAL.
    """

    def __init__(self) -> None:
        self.transactions: list[Committed] = []
        self.end = Lsn(100)
        self._changed = asyncio.Condition()

    async def commit(self, tables: Sequence[int]) -> Committed:
        committed = Committed(len(self.transactions) + 1, Lsn(self.end + 24), tuple(tables))
        self.transactions.append(committed)
        await self.grow(32)
        return committed

    async def grow(self, size: int) -> None:
        """WAL that is of no interest to us."""
        self.end = Lsn(self.end + size)
        async with self._changed:
            self._changed.notify_all()

    async def beyond(self, lsn: Lsn) -> None:
        """Wait until the WAL goes further than this."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.end > lsn)

    def behind(self, lsn: Lsn) -> list[Committed]:
        """What START_REPLICATION there sends: transactions whose commit record starts at or after it."""
        return [committed for committed in self.transactions if committed.final_lsn >= lsn]

    def rows(self, number: int, before: Lsn | None = None) -> list[str]:
        """What a table holds, in a snapshot or at the end."""
        return [
            str(committed.xid)
            for committed in self.transactions
            if number in committed.tables and (before is None or committed.final_lsn < before)
        ]


class MemoryStream:
    """A :class:`subscriber.interfaces.ReplicationStream` of a history.

    Attributes:
        statuses: what was reported.
    """

    def __init__(self, history: History, lsn: Lsn, step: Step) -> None:
        self.statuses: list[StandbyStatusUpdate] = []
        self._history = history
        self._sent = lsn
        self._described: set[int] = set()
        self._step = step

    async def receive(self) -> Sequence[bytes]:
        await self._step("receive")
        await self._history.beyond(self._sent)
        waiting = self._history.behind(self._sent)
        if not waiting:
            self._sent = self._history.end
            return [keepalive(self._sent)]
        self._sent = waiting[0].end_lsn
        return transaction_frames(waiting[0], self._described)

    async def send(self, message: bytes) -> None:
        status = decode_status_update(message)
        assert status.write >= status.apply >= status.flush
        if self.statuses:
            assert status.flush >= self.statuses[-1].flush
        self.statuses.append(status)

    async def wal_end(self, least: Lsn) -> Lsn:
        return self._history.end

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        return ()

    async def close(self) -> None:
        return


class MemorySource:
    """A :class:`subscriber.apply.tables.table_synchronization.CopySource`.

    Attributes:
        slots: those that exist, with their confirmed positions.
    """

    def __init__(self, history: History, step: Step) -> None:
        self.slots: dict[str, Lsn] = {}
        self._history = history
        self._step = step

    async def describe(self, found: TableName) -> PublishedTable | None:
        await self._step("describe")
        return PublishedTable(
            name=found,
            relation_id=int(found.name.removeprefix("t")) + 1,
            kind="r",
            columns=("id",),
            key_columns=("id",),
            replica_identity="d",
            column_types=(23,),
        )

    @contextlib.asynccontextmanager
    async def snapshot(self, slot_name: str) -> AsyncIterator[MemorySnapshot]:
        await self._step("snapshot")
        self.slots[slot_name] = self._history.end
        yield MemorySnapshot(self._history, self._history.end, self._step)

    @contextlib.asynccontextmanager
    async def stream(self, position: Position) -> AsyncIterator[MemoryStream]:
        slot_name, lsn = position.slot_name, position.lsn
        await self._step("stream")
        if slot_name not in self.slots:
            raise AssertionError(f"{slot_name} does not exist any more")
        assert lsn >= self.slots[slot_name] > INVALID_LSN
        stream = MemoryStream(self._history, lsn, self._step)
        try:
            yield stream
        finally:
            if stream.statuses:
                self.slots[slot_name] = max(self.slots[slot_name], stream.statuses[-1].flush)

    async def drop_slot(self, slot_name: str) -> None:
        await self._step("drop_slot")
        self.slots.pop(slot_name, None)


class MemorySnapshot:
    """A :class:`subscriber.apply.tables.table_synchronization.SnapshotSource`."""

    def __init__(self, history: History, consistent_point: Lsn, step: Step) -> None:
        self.consistent_point = consistent_point
        self._history = history
        self._step = step

    async def parts(self, published: PublishedTable, copy_format: CopyFormat, rows: Callable[[int], None]) -> list[CopyPart]:
        number = int(published.name.name.removeprefix("t"))
        found = self._history.rows(number, self.consistent_point)
        return [partial(self._part, found)]

    async def reconcile(self, *_: object, **__: object) -> None:
        raise AssertionError("the sink keeps no rows of an interrupted copy")

    async def verify(self, published: PublishedTable) -> None:
        """The tables of a history are never rewritten."""

    @contextlib.asynccontextmanager
    async def _part(self, values: list[str]) -> AsyncIterator[AsyncIterator[bytes]]:
        yield self._lines(values)

    async def _lines(self, values: list[str]) -> AsyncIterator[bytes]:
        for value in values:
            await self._step("copy")
            yield value.encode()
