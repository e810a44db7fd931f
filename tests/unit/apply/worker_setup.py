"""An apply worker between a scripted stream and a target in memory. Time is simulated."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection

from subscriber.apply.hold import AppliedTransactions, Hold
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.skip import Skipping
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.worker import ApplyWorker
from subscriber.config import Settings
from subscriber.errors import MissingColumns
from subscriber.interfaces import Position, TableEntry, TableState, TwoPhaseState
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import BeginPrepare, Insert, Message, Prepare, TupleData
from subscriber.rate_limit import RateLimit
from subscriber.transaction.feedback import FlushTracker
from tests.unit.apply.crashable_target import CrashableSink, State, TargetServer
from tests.unit.apply.memory_publisher import relation, table, xlog
from tests.unit.apply.memory_spool import MemorySpool
from tests.unit.apply.scripted_stream import ScriptedStream

READY = TableEntry(TableState.READY)
COPIED = TableEntry(TableState.FINISHEDCOPY)
QUIET = Settings(wal_receiver_timeout=0)


class WorkerSetup:
    """One worker and all around it."""

    def __init__(
        self,
        *,
        settings: Settings,
        entry: TableEntry,
        lazy: bool,
        two_phase: TwoPhaseState,
        keeps: bool,
        skip_lsn: Lsn,
        empty_prepares: bool,
    ) -> None:
        entries = {table(0): entry}
        self.server = TargetServer(State(position=Position("slot", "system", 1, Lsn(50)), entries=dict(entries)))
        self.sink = CrashableSink(self.server, lazy=lazy, keeps=keeps)
        self.stream = ScriptedStream()
        self.tracker = FlushTracker(Lsn(50))
        self.states = TableStates()
        self.states.load(entries, Lsn(50))
        self.receiver = Receiver(self.stream, self.tracker, MemorySpool(), settings)
        self.stopped = False
        self.empty_prepares = empty_prepares
        self.goal: Lsn | None = None
        self.progress = 0
        self.rolled_back: set[int] = set()
        self.applied = AppliedTransactions()
        self.hold: Hold | None = None
        self.rate = RateLimit()
        self.worker = ApplyWorker(
            self.receiver, self.sink, self.states, self, two_phase=two_phase, skipping=Skipping(skip_lsn, "sub"), rate=self.rate
        )

    async def was_rolled_back(self, xid: int) -> bool:
        return xid in self.rolled_back

    async def learn_columns(self) -> None: ...

    async def add_columns(self, missing: MissingColumns) -> bool:
        return False

    async def is_dropped(self, relation_id: int, xids: Collection[int]) -> bool:
        return False

    def finished(self) -> bool:
        return self.stopped

    def is_awaited(self, lsn: Lsn) -> bool:
        return self.goal is not None and lsn >= self.goal

    def progressed(self) -> None:
        self.progress += 1

    def stop(self) -> None:
        """As RunState.wake() does it."""
        self.stopped = True
        self.receiver.wake()
        self.states.changed.notify()

    @property
    def rows(self) -> list[str]:
        return [value.strip() for value in self.server.visible.rows.get(table(0), [])]

    @property
    def held(self) -> int:
        return self.receiver._held


@contextlib.asynccontextmanager
async def running_worker(
    *,
    settings: Settings | None = None,
    entry: TableEntry = READY,
    lazy: bool = False,
    two_phase: TwoPhaseState = TwoPhaseState.DISABLED,
    keeps: bool = False,
    skip_lsn: Lsn = INVALID_LSN,
    empty_prepares: bool = True,
) -> AsyncIterator[tuple[WorkerSetup, asyncio.Task[None]]]:
    found = WorkerSetup(
        settings=settings or QUIET,
        entry=entry,
        lazy=lazy,
        two_phase=two_phase,
        keeps=keeps,
        skip_lsn=skip_lsn,
        empty_prepares=empty_prepares,
    )
    await found.sink.open("sub", found.tracker.flush)
    await found.receiver.start()
    task = asyncio.create_task(found.worker.run())
    try:
        yield found, task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await found.receiver.close()


def prepared(xid: int) -> list[bytes]:
    final, end = Lsn(100 * xid), Lsn(100 * xid + 8)
    row = TupleData(b"t", [str(xid).encode()])
    messages: list[Message] = [
        BeginPrepare(final, end, 0, xid, f"gid{xid}"),
        relation(0),
        Insert(1, row),
        Prepare(0, final, end, 0, xid, f"gid{xid}"),
    ]
    return [xlog(message, end if index == 3 else 0) for index, message in enumerate(messages)]
