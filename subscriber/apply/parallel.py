"""Parallel apply: apply large transactions while the publisher still sends them.

Purpose
    A large transaction stays in reassembly and spool until its commit. If it is applied only then, receiving and applying take the sum of
    their times. Here the records are applied as they arrive, in a separate session with the target. At the commit little is left to do.
    There are two kinds of these transactions:

    * those that are streamed in chunks while they run on the publisher (with ``streaming = parallel``);
    * those that the publisher sends between BEGIN and COMMIT (or PREPARE), after they have ended there. An attempt begins when
      :data:`LARGE` bytes were received.

Why the result is the same
    All received records stay where they are, as without parallel apply. An attempt may end at any time and for any reason, with a
    rollback. The apply worker then applies the transaction from memory and spool, and reports its error, if there is one. So it is
    sufficient to show that an attempt that *commits* gives the same result:

    * *Order.* The changes of a chunk, or of a block from BEGIN to COMMIT, may depend on transactions that were committed before it arrived.
      Hence its records are not applied before all earlier events are committed in the target (:meth:`UnfinishedTransaction.available`).
      A transaction that commits later on the publisher cannot depend on rows that a streamed one has locked there. The attempt commits in
      its place in the order, because the apply worker waits for it there.
    * *Which records.* It follows the sequence of records in reassembly. An aborted subtransaction cuts that sequence at its first record.
      There the session has a savepoint, and rolls back to it. Records that it has not applied yet need no undo. It detects a cut before
      it reads any record that was received after it. If the publisher did not send an abort, that is known only at the end
      (:mod:`subscriber.apply.receiving.rolled_back`): then the attempt is rolled back.
    * *Which relations.* A streamed transaction describes its relations itself. Another one also uses those of earlier transactions. All of
      these are committed when the attempt begins, and no other event comes before its own end.
    * *Which tables.* The gate's answer may depend on the final LSN, which a stream does not tell. So attempts begin only while every table
      is ready, as in PostgreSQL, and end if one is not. At the commit the gate is asked again, with the LSN. There are no attempts while a
      transaction is to be skipped, because only its end tells which one it is.
    * *Position.* It is stored in the same transaction as the changes.

No deadlocks
    Transactions of the subscription may wait for each other in the target: at a unique index that the publisher does not have, at
    TRUNCATE, or at equal rows of a table without a key. The server detects a deadlock only if it sees all waits. But an attempt waits for
    its commit *record*, which comes after the worker's transaction in the stream. So if the worker's call takes longer than
    :data:`PATIENCE`, the sink is asked which attempts hold it up, directly or through others, and these are rolled back. The same applies
    while the worker waits for the commit of an attempt, and while a transaction that is not streamed is applied, because it is next
    in the order. If the worker waits for a session of another subscription, whose worker may wait
    for an attempt of this one, all attempts are rolled back. If the server chooses the worker's transaction as the deadlock victim, all
    attempts are rolled back and the transaction is repeated.

Limits
    There are at most ``max_parallel_apply_workers_per_subscription`` attempts for streamed transactions. Others wait in the spool, and may
    be attempted when a session becomes free. One more attempt is possible for the transaction that is not streamed. An attempt that is
    slower than the publisher reads missed records from the spool, one block at a time. If its transaction is not streamed, the receiver
    waits for it before it spills, because nothing else can arrive.

Rejected
    Passing chunks from reassembly to the session: they would need a memory budget of their own, and a way to drop and repeat them. Locking
    rows before they are changed, to avoid deadlocks: the order of locks would have to be the publisher's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Self

from subscriber.apply.receiving.receiver import Receiver
from subscriber.apply.tables.table_state import TableStates
from subscriber.errors import SubscriberError, TargetError, TargetUnavailable
from subscriber.interfaces import ParallelSink, ParallelTransaction
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Begin, BeginPrepare, Relation, StreamStart
from subscriber.transaction.model import PreparedTransaction, Transaction
from subscriber.transaction.unfinished import UnfinishedTransaction

__all__ = ["LARGE", "PATIENCE", "ParallelApply"]

_log = logging.getLogger(__name__)

PATIENCE: Final = 0.1
"""Seconds that a call to the sink may take before the sink is asked what holds it up, and the interval of further checks."""

LARGE: Final = 1024**2
"""Bytes that must have been received of a transaction that is not streamed before it is applied. Most transactions are smaller."""

_DEADLOCK: Final = "40P01"


class _Attempt:
    """One unfinished transaction (here: the stream) being applied. Its task ends with the stream, or with the attempt."""

    def __init__(self, stream: UnfinishedTransaction, owner: ParallelApply) -> None:
        self.stream = stream
        self.changed = asyncio.Event()
        self.done = 0
        self.alive = True
        self.committing = False
        self.session: ParallelTransaction | None = None
        self._owner = owner
        self._decided: dict[tuple[str, str], tuple[Relation, bool | None]] = {}
        self._cancelled = False
        owner.receiver.note_applied(stream, 0)
        self.task = asyncio.create_task(self._run(), name=f"parallel apply of transaction {stream.xid}")

    async def _run(self) -> None:
        followed = False
        try:
            assert self._owner.sink is not None
            self.session = await self._owner.sink.open_parallel(self.stream.xid, self._gate, streamed=self.stream.streamed)
            followed = await self._follow(self.session)
        except SubscriberError as error:
            self._log_end(error)
        finally:
            if not followed:
                await self.end()

    async def _follow(self, session: ParallelTransaction) -> bool:
        """Apply available records until the stream ends. False: the transaction must not be applied before its end."""
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
                # only one session at a time may hold such a record: the apply session, after the transaction's end
                return False
            elif not await self._cut(session):
                with contextlib.nullcontext() if stream.streamed else self._owner.call(session):
                    await session.apply(records, more=self.done + len(records) < stop)
                self.done += len(records)
                receiver.note_applied(stream, self.done)
                await asyncio.sleep(0)  # records that are already here must not starve the other tasks
        return False

    async def _cut(self, session: ParallelTransaction) -> bool:
        """Undo records that were cut off meanwhile. Return whether any were."""
        kept = self.stream.take_cut()
        if kept is not None and kept < self.done:
            await session.cut(kept)
            self.done = kept
            self._owner.receiver.note_applied(self.stream, kept)
        return kept is not None

    def _gate(self, relation: Relation) -> bool | None:
        wanted = self._owner.tables.gate(relation, self._final_lsn)
        self._decided[relation.namespace, relation.name] = relation, wanted
        return wanted

    @property
    def _final_lsn(self) -> Lsn:
        match self.stream.opening:
            case Begin(final_lsn=lsn) | BeginPrepare(prepare_lsn=lsn):
                return lsn
            case StreamStart():
                return INVALID_LSN

    async def commit(self, event: Transaction | PreparedTransaction) -> bool:
        """Commit or prepare, after the stream has ended and everything before it is committed. False if it was rolled back.

        Raises:
            TargetUnavailable: the commit may have taken effect.
        """
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        if self.session is None or transaction.rewritten:
            # nothing is applied yet, and to connect may take long; or changes are applied that were rolled back
            await self.abandon()
            return False
        await asyncio.wait({self.task})
        session = self.session
        if not self.alive:
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
                "transaction %d was applied in parallel: %d of its %d records before its end",
                transaction.xid,
                self.done,
                transaction.count,
            )
        return done

    async def _complete(self, session: ParallelTransaction, transaction: Transaction) -> bool:
        """Apply the remaining records. Return whether the result is complete and valid."""
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
        """Stop, and roll back what is not committed. Idempotent. If it is cancelled, call it again."""
        self.alive = False
        self._owner.receiver.note_applied(self.stream, None)
        if self.session is not None:
            await self.session.roll_back()
        self._owner.forget(self)

    async def abandon(self) -> None:
        """Roll back, unless the commit has begun."""
        if self.committing:
            return
        if self.alive and not self._cancelled:
            # only once, and not during a rollback: a cancelled rollback would stay incomplete
            self._cancelled = True
            self.task.cancel()
        await asyncio.wait({self.task})
        if not self.task.cancelled():
            self.task.exception()  # retrieved, so that asyncio does not log it
        if not self.committing:
            # the end of the stream, and with it the commit, may have arrived during the wait
            await self.end()


class ParallelApply:
    """The attempts of one stream. Use it as an async context manager around the apply worker.

    Args:
        receiver: of the stream.
        sink: opened; None: without attempts.
        tables: states of the subscription's tables.
        limit: maximum number of streamed transactions at once; 0: none.
        whole: whether transactions that are not streamed are applied as well.
        paused: called before each attempt and after each event; True ends all attempts.

    Attributes:
        events: how many of the stream's events are committed in the target.
    """

    def __init__(
        self,
        receiver: Receiver,
        sink: ParallelSink | None,
        tables: TableStates,
        limit: int,
        *,
        whole: bool = False,
        paused: Callable[[], bool] = lambda: False,
    ) -> None:
        self.receiver = receiver
        self.sink = sink
        self.tables = tables
        self.events = 0
        self._limit = limit if sink is not None else 0
        self._whole = whole and sink is not None
        self._paused = paused
        self._attempts: dict[int, _Attempt] = {}
        self._tried: set[int] = set()
        self._ending: dict[_Attempt, asyncio.Task[None]] = {}
        self._calls = 0
        self._running = 0
        self._busy = asyncio.Event()
        self._waiting: ParallelTransaction | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._limit or self._whole:
            self.receiver.watch(self._look)
            self._watch = asyncio.create_task(self._keep_free(), name="parallel apply")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._limit, self._whole = 0, False
        self.receiver.watch(None)
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self.abandon_all()
        if self._ending:
            await asyncio.wait(self._ending.values())

    # --- for the apply worker

    def committed(self, events: int) -> None:
        """Note that the first so many events of the stream are committed in the target."""
        self.events = events
        self._look()

    @property
    def serves_any(self) -> bool:
        """Whether an attempt exists."""
        return bool(self._attempts)

    def serves(self, transaction: Transaction) -> bool:
        """Whether an attempt exists, so that :meth:`commit` may succeed."""
        return transaction.spool_id in self._attempts

    async def commit(self, event: Transaction | PreparedTransaction) -> bool:
        """Commit the attempt, with the remaining records. False: it was rolled back, and must be applied like other transactions.

        Raises:
            TargetUnavailable: the commit may have taken effect.
        """
        transaction = event.transaction if isinstance(event, PreparedTransaction) else event
        attempt = self._attempts.get(transaction.spool_id)
        if attempt is None:
            return False
        with self.call(attempt.session):
            return await attempt.commit(event)

    async def guard(self, call: Callable[[], Awaitable[None]]) -> None:
        """Make a call to the sink, and roll back attempts that hold it up."""
        try:
            with self.call(None):
                await call()
        except TargetUnavailable as error:
            if error.sqlstate != _DEADLOCK or not self._attempts:
                raise
            await self.abandon_all()
            with self.call(None):
                await call()

    async def abandon_all(self) -> None:
        """Roll back all attempts whose commit has not begun."""
        # together: each waits for the server
        await asyncio.gather(*[attempt.abandon() for attempt in self._attempts.values()])

    # --- attempts

    def _look(self) -> None:
        """Start and end attempts, after something was received or committed."""
        if not self.tables.all_ready or self._paused():
            for attempt in self._attempts.values():
                self._abandon_soon(attempt)
            return
        streams = self.receiver.streams
        self._tried.intersection_update([stream.spool_id for stream in streams])
        for stream in streams:
            if stream.spool_id not in self._tried and self._may_begin(stream) and stream.available(self.events):
                self._tried.add(stream.spool_id)
                self._attempts[stream.spool_id] = _Attempt(stream, self)
        for attempt in self._attempts.values():
            attempt.changed.set()

    def _may_begin(self, stream: UnfinishedTransaction) -> bool:
        if stream.streamed:
            return sum(attempt.stream.streamed for attempt in self._attempts.values()) < self._limit
        return self._whole and stream.size >= LARGE

    def _abandon_soon(self, attempt: _Attempt) -> None:
        # one task: this is called for each piece that is received, and a rollback may take long
        if attempt not in self._ending:
            task = self._ending[attempt] = asyncio.create_task(attempt.abandon(), name="end of parallel apply")
            task.add_done_callback(lambda _: self._ending.pop(attempt, None))

    def forget(self, attempt: _Attempt) -> None:
        """Remove an attempt that has ended."""
        if self._attempts.get(attempt.stream.spool_id) is attempt:
            del self._attempts[attempt.stream.spool_id]

    # --- avoid deadlocks

    @contextlib.contextmanager
    def call(self, waiting: ParallelTransaction | None) -> Iterator[None]:
        """Watch a call of the sink: of the session ``waiting``, or of the apply session. Calls of one session may overlap."""
        self._calls += 1
        self._running += 1
        self._waiting = waiting
        self._busy.set()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._busy.clear()

    async def _keep_free(self) -> None:
        while True:
            await self._busy.wait()
            call = self._calls
            await asyncio.sleep(PATIENCE)
            if self._busy.is_set() and call == self._calls and self._attempts:
                await self._free()

    async def _free(self) -> None:
        """Roll back the attempts that hold up the current call."""
        attempts = [attempt for attempt in self._attempts.values() if not attempt.committing]
        others = [attempt.session for attempt in attempts if attempt.session is not None and attempt.session is not self._waiting]
        try:
            found = await self.sink.holding_up(self._waiting, others) if others and self.sink is not None else ()
        except TargetError:
            found = others  # the cause is unknown: roll back all
        for attempt in attempts:
            if attempt.alive and attempt.session in found:
                _log.info("parallel apply of transaction %d blocked another transaction: it will be applied at its end", attempt.stream.xid)
                await attempt.abandon()
