"""``max_apply_rate`` while a table catches up: what counts, and what a pause notices."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from subscriber.apply.progress import Quiet
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.tables.table_synchronization import SyncRun, TableSynchronization
from subscriber.config import Settings
from subscriber.errors import PublisherUnavailable
from subscriber.interfaces import CopyFormat, Position, TableEntry, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import TEXT, Begin, Commit, Insert, StreamStart, StreamStop, TupleData
from subscriber.rate_limit import RateLimit
from tests.unit.apply.crashable_target import CrashableTableSink, State, TargetServer, never_fails
from tests.unit.apply.memory_publisher import History, MemorySource, relation, table, xlog
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import ScriptedStream, stream_commit
from tests.unit.apply.virtual_time import run

OWN, OTHER = 0, 1
ROW = 100
"""Bytes of the message of each row of the table."""
START = Position("slot", "system", 1, Lsn(50))


def row(number: int, xid: int, size: int, *, streamed: bool = False) -> Insert:
    """An Insert whose message has so many bytes."""
    length = size - (17 if streamed else 13)
    return Insert(number + 1, TupleData(bytes([TEXT]), [str(xid).rjust(length).encode()]), xid if streamed else None)


def committed(xid: int, *rows: tuple[int, int], described: bool = True) -> list[bytes]:
    """A transaction, with the number of the table and the size of each row."""
    final, end = Lsn(100 * xid), Lsn(100 * xid + 8)
    changes = []
    for number, size in rows:
        changes += [xlog(relation(number))] if described else []
        changes.append(xlog(row(number, xid, size), final - 10))
    return [xlog(Begin(final, 0, xid), final - 20), *changes, xlog(Commit(0, final, end, 0), end)]


def streamed(xid: int, number: int, size: int) -> list[bytes]:
    """The first part of a transaction that is streamed."""
    described = replace(relation(number), xid=xid)
    return [xlog(each) for each in (StreamStart(xid, True), described, row(number, xid, size, streamed=True), StreamStop())]


class OneStream(MemorySource):
    """A publisher whose stream a test writes."""

    def __init__(self, stream: ScriptedStream) -> None:
        super().__init__(History(), never_fails)
        self._stream = stream

    @contextlib.asynccontextmanager
    async def stream(self, _: Position) -> AsyncIterator[ScriptedStream]:  # type: ignore[override]
        yield self._stream


class CatchUp:
    """A table that is copied, and follows its stream."""

    def __init__(self, rate: RateLimit) -> None:
        entry = TableEntry(TableState.FINISHEDCOPY)
        self.server = TargetServer(State(entries={table(OWN): entry}, table_positions={table(OWN): START}, rows={table(OWN): []}))
        self.stream = ScriptedStream()
        states = TableStates()
        states.load({table(OWN): entry}, Lsn(1_000_000))
        run = SyncRun(
            oid=1,
            target_identifier="target",
            position=START,
            source=OneStream(self.stream),
            states=states,
            settings=Settings(logical_decoding_work_mem=64 * 1024),
            copy_format=CopyFormat.TEXT,
            progress=Quiet(),
            reconciled={},
            apply_rate=rate,
        )
        sink = CrashableTableSink(self.server, table(OWN), never_fails)
        self.spool = MemorySpool()
        self.task = asyncio.create_task(TableSynchronization(run, table(OWN), sink, self.spool).run())

    @property
    def rows(self) -> list[int]:
        return [int(value) for value in self.server.visible.rows[table(OWN)]]


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_only_changes_of_the_table_count() -> None:
    # the bug was that those of all tables did, although they are not applied
    async def work() -> None:
        rate = RateLimit(float(ROW))
        found = CatchUp(rate)
        for xid in range(1, 20):
            found.stream.give(committed(xid, (OTHER, 1000)))
        found.stream.give(committed(20, (OTHER, 1000), (OWN, ROW)))
        found.stream.give(streamed(21, OTHER, 40_000))  # it is spilled
        found.stream.give(streamed(22, OWN, ROW))
        found.stream.give([*stream_commit(21), *stream_commit(22)])
        found.stream.give([*committed(23, (OWN, ROW)), *committed(24, (OTHER, 1000)), *committed(25, (OWN, ROW))])
        await asyncio.sleep(0.5)
        assert found.rows == [20]
        assert found.spool.appended
        for expected in ([20, 22], [20, 22, 23], [20, 22, 23, 25]):
            assert rate.holds
            await asyncio.sleep(1)
            assert found.rows == expected
        await ended(found.task)

    run(work())


def test_table_that_was_described_before_the_limit_counts() -> None:
    async def work() -> None:
        rate = RateLimit()
        found = CatchUp(rate)
        found.stream.give(committed(1, (OWN, ROW)))
        await asyncio.sleep(0.1)
        rate.limit = float(ROW)
        found.stream.give([each for xid in (2, 3) for each in committed(xid, (OWN, ROW), described=False)])
        await asyncio.sleep(0.5)
        assert found.rows == [1, 2]
        await asyncio.sleep(1)
        assert found.rows == [1, 2, 3]
        await ended(found.task)

    run(work())


@pytest.mark.parametrize("waits", [False, True])
def test_lost_stream_is_noticed_in_a_pause(waits: bool) -> None:
    async def work() -> None:
        found = CatchUp(RateLimit(0.001))
        found.stream.give(committed(1, (OWN, ROW)))
        await asyncio.sleep(0.1)
        if waits:
            found.stream.give(committed(2, (OWN, ROW)))
            await asyncio.sleep(0.1)
        found.stream.fail(PublisherUnavailable("lost"))
        await asyncio.sleep(2)
        assert found.rows == [1]
        with pytest.raises(PublisherUnavailable, match="lost"):
            found.task.result()

    run(work())
