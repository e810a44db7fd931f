"""Apply a recording to a target, without a publisher.

The target stores the position as in a run, in the same transaction as the data. So a replay that was interrupted resumes where it stopped,
and a recording that was applied is not applied again. The tables must exist in the target. They are those that the recording describes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from subscriber.apply.hold import AppliedTransactions, Hold
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.skip import Skipping
from subscriber.apply.tables.table_state import TableStates
from subscriber.apply.worker import ApplyWorker
from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import ConfigurationError, DataLossError, MissingColumns, ProtocolError
from subscriber.interfaces import OpenedSink, Position, Spool, TableEntry, TableName, TableState, TwoPhaseSink, TwoPhaseState
from subscriber.protocol.capabilities import capabilities
from subscriber.protocol.decoder import Decoder
from subscriber.protocol.frames import XLogData, decode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, Relation, RollbackPrepared
from subscriber.recording.file import RECEIVED, RecordedSession, read_recording
from subscriber.recording.streams import ReplayedStream, sessions
from subscriber.subscription.targets import open_target
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction

__all__ = ["Replay"]


class Replay:
    """One recording and one target.

    Args:
        path: of the recording.
        target: URL or conninfo of the target.
        name: of the subscription in the target. It must not be one that a publisher feeds.
        speed: as a multiple of the recorded speed. None: as fast as possible.
        settings: of the process.

    Attributes:
        position: everything up to there is durable in the target.
        transactions: number of events that were applied.
        known: number of events that the target already had.
    """

    def __init__(self, path: Path, target: str, *, name: str, speed: float | None = None, settings: Settings | None = None) -> None:
        self._path = path
        self._name = name
        self._speed = speed
        self._settings = replace(settings or Settings(), wal_receiver_timeout=0)
        self._sink = open_target(target, SubscriptionOptions(), self._settings)
        self._tracker = FlushTracker(INVALID_LSN)
        self._stopped = asyncio.Event()
        self.position = INVALID_LSN
        self.transactions = 0
        self.known = 0

    def stop(self) -> None:
        """End the replay after the current batch."""
        self._stopped.set()

    async def run(self) -> None:
        """Apply the recording.

        Raises:
            ConfigurationError: the file cannot be read, is not a recording, or the target cannot take it.
            ProtocolError: a record is damaged, or the recording ends within it. Everything before it is applied.
            DataLossError: the recording is of another publisher than the target's position, or begins after it.
            SubscriberError: of the target.
        """
        tables, prepared = await asyncio.to_thread(self._described)
        opened = await self._sink.open(self._name, self._durable)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(opened.close)
            with self._open() as file:
                states = TableStates()
                for session, received in sessions(read_recording(file)):
                    position = await self._position(opened, session, tables)
                    states.load(await opened.tables(), position.lsn)
                    stream = ReplayedStream(received, self._speed)
                    await self._session(opened, states, session, stream, _Known(position.lsn, prepared))
                    if self._stopped.is_set():
                        break

    # --- before the first session

    def _described(self) -> tuple[Sequence[TableName], Mapping[int, Lsn]]:
        """The tables that the recording describes, and the ends of prepared transactions by xid.

        The recording may end within a record: everything before that is applied.
        """
        tables: dict[TableName, None] = {}
        ends: dict[int, Lsn] = {}
        with self._open() as file, contextlib.suppress(ProtocolError):
            for _, received in sessions(read_recording(file)):
                decoder = Decoder()
                for record in received:
                    if record.kind != RECEIVED:
                        continue
                    frame = decode_frame(record.content)
                    if not isinstance(frame, XLogData):
                        continue
                    match decoder.decode(frame.payload):
                        case Relation(namespace=namespace, name=name):
                            tables[TableName(namespace, name)] = None
                        case CommitPrepared(xid=xid, end_lsn=end) | RollbackPrepared(xid=xid, rollback_end_lsn=end):
                            ends[xid] = end
        return list(tables), ends

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except OSError as error:
            raise ConfigurationError(f'could not read "{self._path}": {error.strerror}', hint="give the path of a recording") from error

    async def _position(self, opened: OpenedSink, session: RecordedSession, tables: Sequence[TableName]) -> Position:
        """The target's position, or the first one. Also add the tables."""
        known = opened.state.position
        if self.position != INVALID_LSN:
            known = Position(session.slot_name, session.system_identifier, session.timeline, self.position)
        elif known is not None and (known.slot_name, known.system_identifier) != (session.slot_name, session.system_identifier):
            raise DataLossError(
                f'subscription "{self._name}" of the target is of replication slot "{known.slot_name}" of another recording or publisher',
                hint="use another --name for this recording",
            )
        if known is None:
            known = Position(session.slot_name, session.system_identifier, session.timeline, session.start_lsn)
            two_phase = TwoPhaseState.ENABLED if session.options.get("two_phase") == "on" else TwoPhaseState.DISABLED
            if two_phase is TwoPhaseState.ENABLED and not isinstance(opened, TwoPhaseSink):
                raise ConfigurationError(
                    "the recording has prepared transactions, which the target cannot store", hint="record without two_phase"
                )
            await opened.begin_slot(session.slot_name, (), two_phase)
            await opened.set_position(known)
        if session.start_lsn > known.lsn:
            raise DataLossError(
                f"the recording continues at {session.start_lsn}, but the target has everything up to {known.lsn} only",
                hint="replay the recording of what lies between, or use another --name with a new copy of the tables",
            )
        have = await opened.tables()
        missing = [table for table in tables if table not in have]
        refused = await opened.add_tables(missing, TableEntry(TableState.READY, known.lsn)) if missing else {}
        for error in refused.values():
            error.hint = "create the recording's tables in the target first"
            raise error
        self.position = known.lsn
        return known

    # --- a session

    async def _session(
        self, opened: OpenedSink, states: TableStates, session: RecordedSession, stream: ReplayedStream, known: _Known
    ) -> None:
        self._tracker = FlushTracker(known.position)
        two_phase = TwoPhaseState.ENABLED if session.options.get("two_phase") == "on" else TwoPhaseState.DISABLED
        key = f"replay of {session.system_identifier} to {self._name}"
        async with contextlib.AsyncExitStack() as stack:
            spool = await stack.enter_async_context(SpoolDirectory(self._settings.spool_directory, key))
            receiver = _ReplayReceiver(stream, self._tracker, spool, self._settings, known)
            await receiver.start()
            stack.push_async_callback(receiver.close)
            waker = asyncio.create_task(_wake(stream, self._stopped, receiver))
            stack.callback(waker.cancel)
            owner = _Owner(stream, receiver, self._stopped, empty_prepares=capabilities(session.server_version).empty_prepares)
            worker = ApplyWorker(receiver, opened, states, owner, two_phase=two_phase, skipping=Skipping(INVALID_LSN, self._name))
            await worker.run()
            await opened.advance(self._tracker.applied)
            self._durable(self._tracker.applied)
            self.transactions += receiver.popped - receiver.passed
            self.known += receiver.passed + receiver.left_out
        if stream.failure is not None:
            raise stream.failure
        if stream.unanswered is not None and not session.answered:
            error = ProtocolError(f"the recording does not tell which subtransactions of transaction {stream.unanswered} were rolled back")
            error.hint = "an older version made it; everything before this transaction is applied; record again, or with -o streaming=off"
            raise error

    def _durable(self, lsn: Lsn) -> None:
        self._tracker.flush(min(lsn, self._tracker.received))
        self.position = max(self.position, lsn)


@dataclass(frozen=True, slots=True)
class _Known:
    """What the target had before a session: everything up to the position. ``prepared``: ends of prepared transactions by xid."""

    position: Lsn
    prepared: Mapping[int, Lsn]


class _ReplayReceiver(Receiver):
    """Leaves out the parts of prepared transactions that the target has.

    A publisher never sends them again, but a recording may be replayed again. A known PREPARE becomes a transaction that the target skips,
    because its position is past it: the relations in it still count.

    Attributes:
        passed: number of events taken that the target has.
        left_out: number of events that are not given to it.
    """

    def __init__(self, stream: ReplayedStream, tracker: FlushTracker, spool: Spool, settings: Settings, known: _Known) -> None:
        super().__init__(stream, tracker, spool, settings)
        self._known = known
        self._last = INVALID_LSN
        self.passed = 0
        self.left_out = 0

    def peek(self) -> Event | None:
        while self._queue:
            event, held = self._queue[0]
            match event:
                case PreparedTransaction(transaction) if self._has(transaction):
                    self._queue[0] = transaction, held
                case CommitPrepared(end_lsn=end) | RollbackPrepared(rollback_end_lsn=end) if end <= self._known.position:
                    self._queue.popleft()
                    self.left_out += 1
                    self.release(held)
                    continue
            break
        return super().peek()

    def pop(self) -> tuple[Event, int]:
        event, held = super().pop()
        if isinstance(event, Transaction):
            self._note([event])
        return event, held

    def pop_batch(self, rows: int, size: int, alone: Callable[[Transaction], bool] | None) -> tuple[list[Transaction], int]:
        found, held = super().pop_batch(rows, size, alone)
        self._note(found)
        return found, held

    def _note(self, transactions: Sequence[Transaction]) -> None:
        for transaction in transactions:
            self._last = max(self._last, transaction.end_lsn)
            self.passed += transaction.end_lsn <= self._known.position

    def _has(self, transaction: Transaction) -> bool:
        """Whether the target has this PREPARE. One that comes late, right before its end, has an LSN that was passed before."""
        if transaction.end_lsn > self._known.position:
            return False
        end = self._known.prepared.get(transaction.xid)
        return transaction.end_lsn > self._last or (end is not None and end <= self._known.position)


async def _wake(stream: ReplayedStream, stopped: asyncio.Event, receiver: Receiver) -> None:
    waiting = [asyncio.create_task(stream.ended.wait()), asyncio.create_task(stopped.wait())]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        receiver.wake()
    finally:
        for task in waiting:
            task.cancel()


class _Owner:
    """Ends the apply worker at the end of a session. See :class:`subscriber.apply.worker.ApplyOwner`."""

    def __init__(self, stream: ReplayedStream, receiver: Receiver, stopped: asyncio.Event, *, empty_prepares: bool) -> None:
        self._stream = stream
        self._receiver = receiver
        self._stopped = stopped
        self.empty_prepares = empty_prepares
        self.applied = AppliedTransactions()
        self.hold: Hold | None = None

    def finished(self) -> bool:
        return self._stopped.is_set() or (self._stream.ended.is_set() and self._receiver.peek() is None)

    def progressed(self) -> None:
        """Do nothing: a replay has no watcher."""

    def is_awaited(self, lsn: Lsn) -> bool:
        """No task waits for an LSN of a replay."""
        return False

    async def was_rolled_back(self, xid: int) -> bool:
        """There is no publisher to ask."""
        return False

    async def learn_columns(self) -> None:
        """Not: there is no publisher."""

    async def add_columns(self, missing: MissingColumns) -> bool:
        """Not: there is no publisher."""
        return False

    async def is_dropped(self, relation_id: int, xids: Collection[int]) -> bool:
        """There is no publisher to ask."""
        return False
