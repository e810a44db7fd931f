"""Parallel apply: streamed transactions are applied while the publisher still sends them (``streaming = parallel``).

Purpose
    A large transaction comes in chunks while it runs, and lies in reassembly and spool until its commit. Applied only then, its
    commit waits for all of it. Here the records are given to a session of its own in the target as they come; at the commit there is
    little left to do but to commit.

Only ever the same rows
    Everything received stays where it is, as if this did not exist. An attempt may end at any moment and for any reason, with a rollback;
    the apply worker then applies the transaction from memory and spool, and reports what is wrong with it, if anything. So all that has
    to be shown is that an attempt that *commits* did what the other path would have done:

    * *Order.* What a chunk changes may depend on what was committed before it came. Hence its records are not touched before all
      events that came earlier are committed in the target (:meth:`UnfinishedTransaction.available`). What is committed later at the
      publisher cannot depend on rows that this transaction has locked there. It commits in its own place in the order, because the
      apply worker waits for it there.
    * *Which records.* It works along the sequence of records that reassembly keeps. An aborted subtransaction cuts that sequence at its
      first record, where there is a savepoint, so the session goes back to it; what the session had not yet done needs no undoing. A
      cut is seen before any record that came behind it is read.
    * *Which tables.* The gate's answer may depend on the final LSN. So attempts begin only while every table is ready, as natively, and
      end when one is not; and at the commit the gate is asked again, with the LSN. Nor are there any while a transaction is to be
      skipped, which is known at its end only.
    * *Position.* It moves in the very transaction that holds the changes.

Never a deadlock
    What one of our transactions at the target has locked, another may wait for: a unique index that the publisher does not have, a
    TRUNCATE, equal rows of a table without a key. The server sees a deadlock only where it can see all waits; but the attempt waits for
    its commit *record*, which is behind the worker's transaction in the stream. So while the worker's call takes longer than
    :data:`PATIENCE`, the sink is asked who holds it up, directly or through others, and attempts that do are rolled back. The same while
    the worker waits for an attempt's commit; and all of them are, where it waits for that of another subscription, whose worker may be
    waiting for one of ours. Where the server was faster and took the worker's transaction for the victim, all attempts
    are rolled back, and it is done again.

Bounded
    At most ``max_parallel_apply_workers_per_subscription`` attempts; the others wait in the spool, and may get their turn when a
    session is free. An attempt that is slower than the publisher reads what it has missed back from the spool, a block at a time.

Rejected
    Handing chunks from reassembly to the session: they would need a budget of their own, and a way to lose and to repeat them. Locks on
    what is about to be changed, to avoid deadlocks: their order would have to be the publisher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Self

from subscriber.abc import ParallelTransaction, Sink
from subscriber.apply.receiver import Receiver
from subscriber.apply.table_state import TableStates
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.protocol.lsn import INVALID_LSN
from subscriber.protocol.messages import Relation
from subscriber.transaction.model import PreparedTransaction, Transaction
from subscriber.transaction.unfinished import UnfinishedTransaction

__all__ = ["PATIENCE", "ParallelApply"]

_log = logging.getLogger(__name__)

PATIENCE: Final = 0.1
"""Seconds that a call to the sink may take before the sink is asked what holds it up, and between two such looks."""

_DEADLOCK: Final = "40P01"


class _Attempt:
    """One streamed transaction on its way. Its task ends when the stream does, or with the attempt."""

    def __init__(self, stream: UnfinishedTransaction, owner: ParallelApply) -> None:
        self.stream = stream
        self.changed = asyncio.Event()
        self.done = 0
        self.alive = True
        self.committing = False
        self.session: ParallelTransaction | None = None
        self._owner = owner
        self._decided: dict[tuple[str, str], tuple[Relation, bool]] = {}
        self._cancelled = False
        self.task = asyncio.create_task(self._run(), name=f"parallel apply of transaction {stream.xid}")

    async def _run(self) -> None:
        followed = False
        try:
            self.session = await self._owner.sink.open_parallel(self.stream.xid, self._gate)
            followed = await self._follow(self.session)
        except SubscriberError as error:
            self._log_end(error)
        finally:
            if not followed:
                await self.end()

    async def _follow(self, session: ParallelTransaction) -> bool:
        """Apply what may be applied, until the stream ends. False: it is not to be applied before its end."""
        stream, receiver = self.stream, self._owner.receiver
        while not stream.dropped:
            self.changed.clear()
            await self._cut(session)
            if stream.finished:
                return True
            stop = stream.available(self._owner.events)
            records = await receiver.read(stream, self.done, stop) if self.done < stop else ()
            if not records:
                await self.changed.wait()
            elif receiver.is_large(records):
                # one session at a time is to hold such a record: the apply session's, behind the end
                return False
            elif not await self._cut(session):
                await session.apply(records)
                self.done += len(records)
        return False

    async def _cut(self, session: ParallelTransaction) -> bool:
        """Undo what was cut off meanwhile; whether anything was cut."""
        kept = self.stream.take_cut()
        if kept is not None and kept < self.done:
            await session.cut(kept)
            self.done = kept
        return kept is not None

    def _gate(self, relation: Relation) -> bool:
        wanted = self._owner.tables.gate(relation, INVALID_LSN)
        self._decided[relation.namespace, relation.name] = relation, wanted
        return wanted

    async def commit(self, event: Transaction | PreparedTransaction) -> bool:
        """The end of the stream came, and everything before it is committed: commit or prepare. False if nothing of it stays.

        Raises:
            TargetUnavailable: it is open whether it took effect.
        """
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        await asyncio.wait({self.task})
        session = self.session
        if not self.alive or session is None:
            return False
        self.committing = True
        try:
            if not self.done or not await self._complete(session, transaction):
                return False
            done = await (session.prepare(event) if isinstance(event, PreparedTransaction) else session.commit(event))
        finally:
            await self.end()
        if done:
            _log.info(
                "streamed transaction %d was applied in parallel: %d of its %d records before its end",
                transaction.xid,
                self.done,
                transaction.count,
            )
        return done

    async def _complete(self, session: ParallelTransaction, transaction: Transaction) -> bool:
        """Apply what is left of it; whether it is then what it shall be."""
        try:
            async for records in transaction.chunks(self.done):
                await session.apply(records)
        except SubscriberError as error:
            self._log_end(error)
            return False
        gate = self._owner.tables.gate
        return all(gate(relation, transaction.final_lsn) is wanted for relation, wanted in self._decided.values())

    def _log_end(self, error: SubscriberError) -> None:
        _log.info("transaction %d is not applied in parallel: %s", self.stream.xid, error)

    async def end(self) -> None:
        """Nothing more is done here; what is not committed is rolled back. Idempotent; cancelled in it, it is to be called again."""
        self.alive = False
        if self.session is not None:
            await self.session.roll_back()
        self._owner.forget(self)

    async def abandon(self) -> None:
        """Roll it back, unless its commit is under way."""
        if self.committing:
            return
        if self.alive and not self._cancelled:
            # once, and not while it is rolled back already: nobody else would do the rest of that
            self._cancelled = True
            self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.exception()  # looked at, so that asyncio does not report it as lost
        if not self.committing:
            # its end may have come, and with it the commit, while we waited
            await self.end()


class ParallelApply:
    """The attempts of one stream. An async context manager, inside which the apply worker runs.

    Args:
        receiver: of the stream.
        sink: opened.
        tables: states of the subscription's tables.
        limit: how many attempts at once; 0: none ever.
        paused: asked before any begins, and whenever something happens; True ends them all.

    Attributes:
        events: how many of the stream's events are committed in the target.
    """

    def __init__(self, receiver: Receiver, sink: Sink, tables: TableStates, limit: int, paused: Callable[[], bool] = lambda: False) -> None:
        self.receiver = receiver
        self.sink = sink
        self.tables = tables
        self.events = 0
        self._limit = limit
        self._paused = paused
        self._attempts: dict[int, _Attempt] = {}
        self._tried: set[int] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._busy = asyncio.Event()
        self._waiting: ParallelTransaction | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._limit:
            self.receiver.watch(self._look)
            self._watch = asyncio.create_task(self._keep_free(), name="parallel apply")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._limit = 0
        self.receiver.watch(None)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self.abandon_all()
        if self._ending:
            await asyncio.wait(self._ending)

    # --- the worker's side

    def committed(self, events: int) -> None:
        """The first so many events of the stream are committed in the target."""
        self.events = events
        self._look()

    def serves(self, transaction: Transaction) -> bool:
        """Whether :meth:`commit` may succeed."""
        return transaction.spool_id in self._attempts

    async def commit(self, event: Transaction | PreparedTransaction) -> bool:
        """Commit what was applied of it already, and the rest. False: nothing of it stays, it has to be applied as any other.

        Raises:
            TargetUnavailable: it is open whether it took effect.
        """
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        attempt = self._attempts.get(transaction.spool_id)
        if attempt is None:
            return False
        with self._call(attempt.session):
            return await attempt.commit(event)

    async def guard(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call to the sink, and see that no attempt holds it up."""
        try:
            with self._call(None):
                await call()
        except TargetUnavailable as error:
            if error.sqlstate != _DEADLOCK or not self._attempts:
                raise
            await self.abandon_all()
            with self._call(None):
                await call()

    async def abandon_all(self) -> None:
        """Roll all attempts back whose commit is not under way."""
        for attempt in list(self._attempts.values()):
            await attempt.abandon()

    # --- attempts

    def _look(self) -> None:
        """Something was received, or committed."""
        if not self.tables.all_ready or self._paused():
            for attempt in self._attempts.values():
                self._abandon_soon(attempt)
            return
        self._tried.intersection_update([stream.spool_id for stream in self.receiver.streams])
        for stream in self.receiver.streams:
            if len(self._attempts) >= self._limit:
                break
            if stream.spool_id not in self._tried and stream.available(self.events):
                self._tried.add(stream.spool_id)
                self._attempts[stream.spool_id] = _Attempt(stream, self)
        for attempt in self._attempts.values():
            attempt.changed.set()

    def _abandon_soon(self, attempt: _Attempt) -> None:
        task = asyncio.create_task(attempt.abandon(), name="end of parallel apply")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def forget(self, attempt: _Attempt) -> None:
        """It ended."""
        if self._attempts.get(attempt.stream.spool_id) is attempt:
            del self._attempts[attempt.stream.spool_id]

    # --- never a deadlock

    @contextlib.contextmanager
    def _call(self, waiting: ParallelTransaction | None) -> Iterator[None]:
        self._calls += 1
        self._waiting = waiting
        self._busy.set()
        try:
            yield
        finally:
            self._busy.clear()

    async def _keep_free(self) -> None:
        while True:
            await self._busy.wait()
            call = self._calls
            await asyncio.sleep(PATIENCE)
            if self._busy.is_set() and call == self._calls and self._attempts:
                await self._free()

    async def _free(self) -> None:
        """Roll back the attempts that hold up the call under way."""
        attempts = [attempt for attempt in self._attempts.values() if not attempt.committing]
        others = [attempt.session for attempt in attempts if attempt.session is not None and attempt.session is not self._waiting]
        try:
            found = await self.sink.holding_up(self._waiting, others) if others else ()
        except TargetError:
            found = others  # it cannot be found out: none may stay
        for attempt in attempts:
            if attempt.alive and attempt.session in found:
                _log.info("parallel apply of transaction %d held up another one: it is applied at its end", attempt.stream.xid)
                await attempt.abandon()
