"""The apply worker: takes whole transactions and gives them to the sink, in the publisher's order.

One loop, one sink call at a time. What the sink reports as durable goes to the FlushTracker, and from there to the publisher.
When nothing is pending, the position follows what was received (keepalives included): it is first stored in the target, then
acknowledged, so that our durable position is never behind the slot's confirmed_flush_lsn and comparing the two at start is exact.

A sink may report durability later than it applies. If that report stays away while there is nothing else to do, the sink is told to make
the position durable: either it can, or it says what is wrong, and the stream starts anew. Waiting would hold back the publisher's WAL.

With nothing to do, the sink is asked twice in ``wal_retrieve_retry_interval`` whether its sessions are alive, so that a target that was
restarted is not found out only by the next change.

A prepared transaction that the publisher has rolled back before it decodes it may come without some of its changes: the first ones, from 18
on (``ReorderBufferCheckAndTruncateAbortedTXN``), the last ones before. What is left may be refused by the target, an INSERT of a row whose
DELETE is missing for example, and no other attempt would help. So the publisher is asked, and if it was rolled back, it is passed over:
nothing is prepared. Should its COMMIT PREPARED come all the same, that is an error of the sink, and not the end of its rows unnoticed.

Before 18, a publisher sends nothing of a prepared transaction that changed nothing but its COMMIT PREPARED or ROLLBACK PREPARED. So from
such a publisher, the COMMIT PREPARED of a transaction whose PREPARE never came is passed over. The sink tells it from one that was prepared
and is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from subscriber.abc import Batch, ManyTablesSink, Sink, TableEntry, TableState, TwoPhaseState, WatchedSink
from subscriber.apply.batch import collect
from subscriber.apply.parallel import ParallelApply
from subscriber.apply.receiver import Receiver
from subscriber.apply.skipping import Skipping
from subscriber.apply.table_state import TableStates
from subscriber.config import Settings
from subscriber.errors import ApplyError, NeverPrepared, RelationError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, RollbackPrepared
from subscriber.transaction.feedback import FlushTracker
from subscriber.transaction.model import Event, PreparedTransaction, Transaction

__all__ = ["ApplyWorker"]

_log = logging.getLogger(__name__)

_TICK = 1.0
"""Seconds between looks at table states and at the idle position when nothing happens."""


class ApplyWorker:
    """Applies one stream until told to stop.

    Args:
        receiver: of the stream; started.
        sink: opened.
        tracker: of the stream, shared with the receiver and with the sink's ``on_durable``.
        tables: states of the subscription's tables.
        settings: batches.
        two_phase: the state the stream was started with; PENDING lets the worker end once all tables are ready.
        skipping: the transaction to be skipped, if any.
        rolled_back: whether the publisher rolled a transaction back, by its xid; False if that cannot be found out.
        empty_prepares: whether the publisher sends the PREPARE of every transaction; then a COMMIT PREPARED without it is an error.
        finished: asked after every step; True ends the worker.
        awaited: whether somebody waits for this LSN: then the idle position is stored at once instead of once a second.
        progressed: called after every step.
        parallel: applies streamed transactions before their end; entered.
    """

    def __init__(
        self,
        *,
        receiver: Receiver,
        sink: Sink,
        tracker: FlushTracker,
        tables: TableStates,
        settings: Settings,
        two_phase: TwoPhaseState,
        skipping: Skipping,
        rolled_back: Callable[[int], Awaitable[bool]],
        empty_prepares: bool,
        finished: Callable[[], bool],
        awaited: Callable[[Lsn], bool],
        progressed: Callable[[], None],
        parallel: ParallelApply | None = None,
    ) -> None:
        self._receiver = receiver
        self._sink = sink
        self._tracker = tracker
        self._tables = tables
        self._settings = settings
        self._two_phase = two_phase
        self._skipping = skipping
        self._rolled_back = rolled_back
        self._empty_prepares = empty_prepares
        self._finished = finished
        self._awaited = awaited
        self._progressed = progressed
        self._parallel = parallel or ParallelApply(receiver, sink, tables, 0)
        self._advanced_at = 0.0
        self._pinged_at = asyncio.get_running_loop().time()
        self._unsettled: tuple[Lsn, float] | None = None

    async def run(self) -> None:
        """Apply until ``finished()``, or until the stream has to be started anew to enable two_phase.

        Raises:
            SubscriberError: of the stream or the sink. What was applied before stays; the position tells how far.
        """
        while not self._finished() and not self._enable_two_phase():
            event = self._receiver.peek()
            if event is None:
                await self._idle()
                await self._receiver.wait(_TICK)
            elif isinstance(event, Transaction | PreparedTransaction) and await self._commit_parallel(event):
                pass
            elif isinstance(event, Transaction) and not self._skipping.waits:
                await self._apply_batch()
            else:
                await self._apply_single(event)
            self._parallel.committed(self._receiver.popped)
            await self._ready_tables()
            self._tables.tell_unknown(self._sink.statistics.skipped_tables)
            self._progressed()
        await self._receiver.report_now()

    def _enable_two_phase(self) -> bool:
        return self._two_phase is TwoPhaseState.PENDING and bool(self._tables.entries()) and self._tables.all_ready

    async def _commit_parallel(self, event: Transaction | PreparedTransaction) -> bool:
        """End the next event if it was applied while it was streamed; False: it is still the next, and nothing of it is applied."""
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        if not self._parallel.serves(transaction) or not await self._tables.hand(transaction.end_lsn, self._finished, [transaction]):
            return False
        if not await self._parallel.commit(event):
            return False
        self._receiver.release(self._receiver.pop()[1])
        self._tracker.applied_to(transaction.end_lsn)
        self._receiver.report()
        return True

    async def _apply_batch(self) -> None:
        batch, held = await collect(self._receiver, self._settings, self._tables.gate, self._parallel.serves)
        try:
            if not await self._tables.hand(batch.end_lsn, self._finished, batch.transactions):
                return
            await self._parallel.guard(lambda: self._sink.apply(batch))
        finally:
            self._receiver.release(held)
        self._tracker.applied_to(batch.end_lsn)
        self._receiver.report()

    async def _apply_single(self, event: Event) -> None:
        held = self._receiver.pop()[1]
        end_lsn: Lsn | None = None
        try:
            match event:
                case Transaction():
                    end_lsn = event.end_lsn
                    if not await self._tables.hand(end_lsn, self._finished, [event]):
                        return
                    if not await self._skipping.skips(event, self._sink):
                        await self._sink.apply(Batch((event,), self._tables.gate))
                        await self._skipping.passed(event, self._sink)
                case PreparedTransaction():
                    end_lsn = event.transaction.end_lsn
                    if not await self._tables.hand(end_lsn, self._finished, [event.transaction]):
                        return
                    if not await self._skipping.skips(event, self._sink):
                        await self._prepare(event)
                        await self._skipping.passed(event, self._sink)
                case CommitPrepared():
                    end_lsn = event.end_lsn
                    if not await self._skipping.skips(event, self._sink):
                        await self._commit_prepared(event)
                        await self._skipping.passed(event, self._sink)
                case RollbackPrepared():
                    end_lsn = event.rollback_end_lsn
                    await self._sink.rollback_prepared(event)
                case LogicalMessage():
                    pass  # nothing to apply: messages are not asked for
        finally:
            self._receiver.release(held)
        if end_lsn is not None:
            self._tracker.applied_to(end_lsn)
            self._receiver.report()

    async def _prepare(self, prepared: PreparedTransaction) -> None:
        try:
            await self._parallel.guard(lambda: self._sink.prepare(prepared, self._tables.gate))
        except (ApplyError, RelationError) as error:
            xid = prepared.transaction.xid
            if not self._sink.capabilities.prepares_in_target or not await self._rolled_back(xid):
                raise
            _log.warning(
                "prepared transaction %d is passed over: the publisher has rolled it back, and the target refuses it: %s", xid, error
            )
            # not as a prepared one: then its COMMIT PREPARED, which must not come, would be no error
            await self._sink.skip(prepared.transaction)

    async def _commit_prepared(self, message: CommitPrepared) -> None:
        try:
            await self._sink.commit_prepared(message)
        except NeverPrepared:
            if self._empty_prepares:
                raise
            _log.warning(
                "COMMIT PREPARED of transaction %d is passed over: its PREPARE never came, and before 18 a publisher sends none of a"
                " transaction that changed nothing",
                message.xid,
            )
            await self._sink.advance(message.end_lsn)
            self._tracker.flush(message.end_lsn)

    async def _idle(self) -> None:
        await self._ping()
        await self._settle()
        lsn = self._tracker.idle_lsn()
        if lsn is None:
            return
        now = asyncio.get_running_loop().time()
        if self._receiver.reply_requested or now - self._advanced_at >= _TICK or self._awaited(lsn):
            self._advanced_at = now
            await self._sink.advance(lsn)
            self._tracker.flush(lsn)
            self._receiver.report()

    async def _ping(self) -> None:
        now = asyncio.get_running_loop().time()
        if isinstance(self._sink, WatchedSink) and now - self._pinged_at >= self._settings.wal_retrieve_retry_interval / 2:
            self._pinged_at = now
            await self._sink.ping()

    async def _settle(self) -> None:
        flushed, applied = self._tracker.flushed, self._tracker.applied
        if self._tracker.idle or applied <= flushed:
            self._unsettled = None
            return
        now = asyncio.get_running_loop().time()
        if self._unsettled is None or self._unsettled[0] != flushed:
            self._unsettled = flushed, now
        elif now - self._unsettled[1] >= _TICK:
            self._unsettled = None
            await self._sink.advance(applied)
            self._tracker.flush(applied)
            self._receiver.report()

    async def _ready_tables(self) -> None:
        passed = self._tables.passed(self._tracker.flushed)
        if passed and isinstance(self._sink, ManyTablesSink):
            await self._sink.set_all_ready(passed)
        else:
            for table, lsn in passed.items():
                await self._sink.set_ready(table, lsn)
        self._tables.update({table: TableEntry(TableState.READY, lsn) for table, lsn in passed.items()})
        for table in passed:
            _log.info('table "%s" is ready', table)
