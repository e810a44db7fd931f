"""The apply worker: takes whole transactions and passes them to the sink, in the publisher's order.

It is one loop with one sink call at a time. The FlushTracker gets the positions that the sink reports as durable, and passes them to the
publisher. While nothing is pending, the position follows what was received, including keepalives. It is first stored in the target and
then acknowledged. So the target's durable position is never behind the slot's confirmed_flush_lsn, and comparing them at start is exact.

A sink may report durability later than it applies. If that report is missing while there is nothing else to do, the sink is told to make
the position durable. If it cannot, it reports an error, and the stream is restarted. Waiting would retain the publisher's WAL.

While there is nothing to do, the sink is asked twice per ``wal_retrieve_retry_interval`` whether its sessions are alive. So a restart of
the target is noticed before the next change.

If the publisher rolls back a prepared transaction before it decodes it, some of its changes may be missing in the stream: the first ones
from 18 on (``ReorderBufferCheckAndTruncateAbortedTXN``), the last ones before. The target may reject the rest, for example an INSERT of a
row whose DELETE is missing, and a retry would not help. So the publisher is asked. If the transaction was rolled back, it is skipped:
nothing is prepared. If its COMMIT PREPARED came nevertheless, the sink would raise an error, so that no rows can be lost unnoticed.

Before 18, a publisher sends only COMMIT PREPARED or ROLLBACK PREPARED of a prepared transaction without changes. So with such a publisher,
a COMMIT PREPARED whose PREPARE never came is skipped. The sink distinguishes it from a transaction that was prepared and lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

from subscriber import crash_points
from subscriber.apply.batch import collect
from subscriber.apply.hold import AppliedTransactions, Hold
from subscriber.apply.parallel import ParallelApply
from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.skip import Skipping
from subscriber.apply.tables.parking import Parking
from subscriber.apply.tables.table_state import TableStates
from subscriber.errors import ApplyError, MissingColumns, NeverPrepared, RelationError, TargetError
from subscriber.interfaces import Batch, DescribedSink, OpenedSink, PingedSink, TableEntry, TableState, TwoPhaseSink, TwoPhaseState
from subscriber.log_fields import error_fields, extra_fields
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared, LogicalMessage, RollbackPrepared
from subscriber.rate_limit import RateLimit
from subscriber.transaction.model import Event, PreparedTransaction, Transaction
from subscriber.transaction.relations import changed_relations

__all__ = ["ApplyOwner", "ApplyWorker"]

_log = logging.getLogger(__name__)

_TICK = 1.0
"""Seconds between checks of table states and of the idle position when nothing happens."""
_FIRST_PAUSE = 0.05
"""While the idle position moves on, the pauses between its commits grow from this to ``_TICK``."""


class ApplyOwner(Protocol):
    """The run that a stream belongs to."""

    @property
    def empty_prepares(self) -> bool:
        """Whether the publisher sends the PREPARE of every transaction. Then a COMMIT PREPARED without it is an error."""
        ...

    def finished(self) -> bool:
        """Called after every step; True ends the worker."""
        ...

    def progressed(self) -> None:
        """Called after every step."""
        ...

    def is_awaited(self, lsn: Lsn) -> bool:
        """Whether another task waits for this LSN. Then the idle position is stored at once, not once a second."""
        ...

    @property
    def applied(self) -> AppliedTransactions:
        """The transactions that this run has applied last."""
        ...

    @property
    def hold(self) -> Hold | None:
        """Where apply is to be held for another task, if one wants that."""
        ...

    async def was_rolled_back(self, xid: int) -> bool:
        """Whether the publisher rolled a transaction back; False if this is not known."""
        ...

    async def learn_columns(self) -> None:
        """Learn the columns of tables that are ready, for those whose changes come from now on."""
        ...

    async def add_columns(self, missing: MissingColumns) -> bool:
        """Add columns that a table of the target lacks. False: they are not to be added."""
        ...

    async def is_dropped(self, relation_id: int, xids: Collection[int]) -> bool:
        """Whether the publisher dropped a table, which at least one of these transactions has changed; False if this is not certain."""
        ...


class ApplyWorker:
    """Applies one stream until told to stop.

    Args:
        receiver: of the stream; started.
        sink: opened.
        tables: states of the subscription's tables.
        owner: the run that the stream belongs to.
        two_phase: the state the stream was started with. With PENDING the worker ends once all tables are ready.
        skipping: the transaction to skip, if any.
        parallel: applies streamed transactions before their end; entered.
        parking: parks tables.
        rate: limits what is applied. Transactions are applied whole, and the pause follows. What only ends one that was applied before
            does not wait: it would keep locks in the target.
    """

    def __init__(
        self,
        receiver: Receiver,
        sink: OpenedSink,
        tables: TableStates,
        owner: ApplyOwner,
        *,
        two_phase: TwoPhaseState,
        skipping: Skipping,
        parallel: ParallelApply | None = None,
        parking: Parking | None = None,
        rate: RateLimit | None = None,
    ) -> None:
        self._receiver = receiver
        self._sink = sink
        self._rate = rate or RateLimit()
        self._tracker = receiver.tracker
        self._tables = tables
        self._settings = receiver.settings
        self._owner = owner
        self._two_phase = two_phase
        self._skipping = skipping
        self._parallel = parallel or ParallelApply(receiver, None, tables, 0)
        self._parking = parking or Parking(tables)
        self._advance_due = 0.0
        self._advance_pause = _FIRST_PAUSE
        # asked for once: the answer takes as long as a small step
        self._pinged = sink if isinstance(sink, PingedSink) else None
        self._pinged_at = asyncio.get_running_loop().time()
        self._unsettled: tuple[Lsn, float] | None = None
        self._added = set[MissingColumns]()

    async def run(self) -> None:
        """Apply until the owner is finished, or until the stream must be restarted to enable two_phase.

        Raises:
            SubscriberError: of the stream or the sink. Earlier transactions stay applied, up to the stored position.
        """
        await self._owner.learn_columns()
        clock, times = asyncio.get_running_loop().time, self._owner.applied.times
        while not self._owner.finished() and not self._enable_two_phase():
            if self._owner.hold is not None and not await self._owner.hold.passes(self._receiver, self._owner.applied):
                continue
            if self._tables.any_parked:
                await self._parking.change(self._sink, self._tracker.applied)
            pause = self._rate.pause
            event = self._receiver.peek()
            if pause and event is not None and self._is_applied(event):
                pause = 0.0
            if pause:
                if event is not None:
                    self._rate.hold(pause)
                event = None
            self._sink.statistics.rolled_back_changes += self._receiver.take_left_out()
            began = clock()
            if pause:
                await self._receiver.rest(min(pause, await self._idle()))
                times.phases["limit"] += clock() - began
            elif event is None:
                await self._receiver.wait(await self._idle())
                times.phases["wait"] += clock() - began
                if self._receiver.peek() is not None and self._tables.all_ready:
                    # first the event: the rest of a step is for tables that become ready, and can wait
                    continue
            elif isinstance(event, Transaction | PreparedTransaction) and await self._commit_parallel(event):
                pass
            elif isinstance(event, Transaction) and not self._skipping.waits:
                await self._apply_batch()
            else:
                await self._apply_single(event)
            if event is not None:
                times.applied(clock() - began)
            self._parallel.committed(self._receiver.popped)
            await self._ready_tables()
            await self._add_tables()
            self._tables.tell_unknown(self._sink.statistics.skipped_tables)
            self._owner.progressed()
        await self._receiver.report_now()

    def _enable_two_phase(self) -> bool:
        return self._two_phase is TwoPhaseState.PENDING and self._tables.may_prepare

    def _is_applied(self, event: Event) -> bool:
        """Whether an event only ends what has been applied before. Until then its locks are held in the target: it does not wait."""
        match event:
            case CommitPrepared() | RollbackPrepared():
                return True
            case Transaction() | PreparedTransaction():
                return self._parallel.serves(event.transaction if isinstance(event, PreparedTransaction) else event)
        return False

    async def _commit_parallel(self, event: Transaction | PreparedTransaction) -> bool:
        """Commit the next event if it was applied while it was streamed. False: it is still the next one, and was rolled back."""
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        if not self._parallel.serves(transaction) or not await self._tables.hand(transaction.end_lsn, self._owner.finished, [transaction]):
            return False
        self._owner.applied.add([event])
        if not await self._parallel.commit(event):
            return False
        self._rate.owe(transaction.size)
        self._receiver.release(self._receiver.pop()[1])
        self._tracker.applied_to(transaction.end_lsn)
        self._receiver.report()
        return True

    def _take(self, events: Sequence[Event]) -> None:
        """Note events that are about to be applied."""
        self._owner.applied.add(events)
        transactions = [each.transaction if isinstance(each, PreparedTransaction) else each for each in events]
        self._rate.owe(sum(each.size for each in transactions if isinstance(each, Transaction)))

    async def _apply_batch(self) -> None:
        arrival = self._receiver.arrival
        batch, held = await collect(self._receiver, self._settings, self._tables.gate, self._alone, self._rate.at_once)
        try:
            if not await self._tables.hand(batch.end_lsn, self._owner.finished, batch.transactions):
                return
            self._take(batch.transactions)
            crash_points.reached("apply.taken")
            await self._owner.applied.times.timed(
                batch.transactions, arrival, self._call(batch.transactions, lambda: self._sink.apply(batch))
            )
            crash_points.reached("apply.applied")
        finally:
            self._receiver.release(held)
        self._tracker.applied_to(batch.end_lsn)
        self._receiver.report()

    async def _call(
        self, transactions: Sequence[Transaction], call: Callable[[], Awaitable[None]], *, committed: Collection[int] = ()
    ) -> None:
        """Make a call to the sink. Repeat it without a table that was dropped or is to be added, and after missing columns were added.

        Args:
            transactions: the transactions that the call applies.
            call: the call.
            committed: the prepared transactions that the call commits.
        """
        while True:
            try:
                return await self._parallel.guard(call)
            except RelationError as error:
                if (columns := error.missing_columns) is not None and columns not in self._added:
                    await self._parallel.abandon_all()  # their locks would be waited for
                    try:
                        added = await self._owner.add_columns(columns)
                    except TargetError as refused:
                        refused.of_table, refused.finish_lsn = error.of_table, error.finish_lsn
                        raise
                    if added:
                        self._added.add(columns)
                        continue
                missing = error.missing
                if missing is None or missing in self._tables.dropped:
                    raise
                if self._tables.awaits(*missing):
                    self._tables.note_dropped(*missing)
                    _log.info('table "%s" does not exist in the target yet: its changes are left out until it is copied', missing[1])
                    continue
                relations = [(transaction.xid, changed_relations(transaction)) for transaction in transactions]
                xids = {xid for xid, changed in relations if changed is None or missing[0] in changed}.union(committed)
                if not await self._owner.is_dropped(missing[0], xids):
                    raise
                self._tables.note_dropped(*missing)
                _log.warning("changes of a table that the publisher has dropped since are left out: %s", error)

    def _alone(self) -> Callable[[Transaction], bool] | None:
        hold, serves = self._owner.hold, self._parallel.serves
        if hold is None:
            return serves if self._parallel.serves_any else None
        return lambda transaction: serves(transaction) or hold.alone(transaction)

    async def _apply_single(self, event: Event) -> None:
        arrival = self._receiver.arrival
        held = self._receiver.pop()[1]
        self._take([event])
        end_lsn: Lsn | None = None
        try:
            match event:
                case Transaction():
                    end_lsn = event.end_lsn
                    if not await self._tables.hand(end_lsn, self._owner.finished, [event]):
                        return
                    if not await self._skipping.skips(event, self._sink):
                        call = self._call([event], lambda: self._sink.apply(Batch((event,), self._tables.gate)))
                        await self._owner.applied.times.timed([event], arrival, call)
                        await self._skipping.passed(event, self._sink)
                case PreparedTransaction():
                    end_lsn = event.transaction.end_lsn
                    if not await self._tables.hand(end_lsn, self._owner.finished, [event.transaction]):
                        return
                    if not await self._skipping.skips(event, self._sink):
                        crash_points.reached("prepare.taken")
                        await self._prepare(event)
                        crash_points.reached("prepare.prepared")
                        await self._skipping.passed(event, self._sink)
                case CommitPrepared():
                    end_lsn = event.end_lsn
                    if not await self._skipping.skips(event, self._sink):
                        crash_points.reached("prepare.commit_taken")
                        await self._commit_prepared(event)
                        crash_points.reached("prepare.committed")
                        await self._skipping.passed(event, self._sink)
                case RollbackPrepared():
                    end_lsn = event.rollback_end_lsn
                    crash_points.reached("prepare.rollback_taken")
                    await self._two_phase_sink.rollback_prepared(event)
                    crash_points.reached("prepare.rolled_back")
                case LogicalMessage():
                    pass  # nothing to apply: messages are not requested
        finally:
            self._receiver.release(held)
        if end_lsn is not None:
            self._tracker.applied_to(end_lsn)
            self._receiver.report()

    @property
    def _two_phase_sink(self) -> TwoPhaseSink:
        # no other sink runs with two_phase, so the publisher sends it no prepared transactions
        assert isinstance(self._sink, TwoPhaseSink)
        return self._sink

    async def _prepare(self, prepared: PreparedTransaction) -> None:
        try:
            await self._call([prepared.transaction], lambda: self._two_phase_sink.prepare(prepared, self._tables.gate))
        except (ApplyError, RelationError) as error:
            xid = prepared.transaction.xid
            if not self._two_phase_sink.prepares_in_target or not await self._owner.was_rolled_back(xid):
                raise
            _log.warning(
                "prepared transaction %d is skipped: the publisher has rolled it back, and the target rejects it: %s",
                xid,
                error,
                extra=error_fields(error, xid=xid),
            )
            # not as a prepared one: then its COMMIT PREPARED, which must not come, would not raise an error
            await self._sink.skip(prepared.transaction)

    async def _commit_prepared(self, message: CommitPrepared) -> None:
        try:
            sink, gate = self._two_phase_sink, self._tables.gate
            await self._call([], lambda: sink.commit_prepared(message, gate), committed=[message.xid])
        except NeverPrepared:
            if self._owner.empty_prepares:
                raise
            _log.warning(
                "COMMIT PREPARED of transaction %d is skipped: its PREPARE never came, because before 18 a publisher sends none of a"
                " transaction without changes",
                message.xid,
                extra=extra_fields(xid=message.xid),
            )
            await self._sink.advance(message.end_lsn)
            self._tracker.flush(message.end_lsn)

    async def _idle(self) -> float:
        """Do what is due while no event waits. Return the seconds until it must be called again."""
        await self._ping()
        await self._settle()
        lsn = self._tracker.idle_lsn()
        if lsn is None:
            return _TICK
        now = asyncio.get_running_loop().time()
        if self._receiver.reply_requested or now >= self._advance_due or self._owner.is_awaited(lsn):
            rested = now - self._advance_due >= _TICK
            self._advance_pause = _FIRST_PAUSE if rested else min(self._advance_pause * 2, _TICK)
            self._advance_due = now + self._advance_pause
            await self._sink.advance(lsn)
            crash_points.reached("apply.advanced")
            self._tracker.flush(lsn)
            self._receiver.report()
            return _TICK
        return self._advance_due - now

    async def _ping(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._pinged is not None and now - self._pinged_at >= self._settings.wal_retrieve_retry_interval / 2:
            self._pinged_at = now
            await self._pinged.ping()

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

    async def _add_tables(self) -> None:
        while self._tables.additions:
            addition = self._tables.additions[0]
            if isinstance(self._sink, DescribedSink):
                await self._sink.describe_tables(addition.tables)
            failed = await self._sink.add_tables([table.name for table in addition.tables], addition.entry)
            # after an error of the sink, the next attempt repeats this
            self._tables.additions.popleft()
            self._tables.added(addition, failed)

    async def _ready_tables(self) -> None:
        passed = self._tables.passed(self._tracker.flushed)
        if passed:
            await self._sink.set_ready(passed)
            crash_points.reached("copy.ready")
        self._tables.update({table: TableEntry(TableState.READY, lsn) for table, lsn in passed.items()})
        for table in passed:
            _log.info('table "%s" is ready', table)
        if passed:
            await self._owner.learn_columns()
