"""The stream into an open lake: collect transactions, land them, and report them as durable.

Transactions are collected until ``batch_delay`` or ``batch_size`` is reached, and landed together (``writer.py``). The position is the end
of the last manifest, or the one in ``position.json`` if that is further.

After an error of one transaction, the transactions before it are still there. After any other error, the collected transactions are lost.
Then the position in memory is wrong, and every call is refused until the lake is opened again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Final

from subscriber import crash_points
from subscriber.batch_times import committing
from subscriber.errors import (
    ApplyError,
    ConfigurationError,
    DataLossError,
    ProtocolError,
    RelationError,
    SubscriberError,
    TargetError,
    TargetUnavailable,
)
from subscriber.interfaces import ApplyStatistics, Batch, Position, RelationGate
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import CommitPrepared, RollbackPrepared
from subscriber.sinks.prepared_errors import lost_prepared, never_prepared
from subscriber.sinks.spark.catalog.lake import LANDING, Lake
from subscriber.sinks.spark.catalog.snapshots import NOT_PUBLISHED, Snapshots
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.landing.manifest import BatchTransactions, first_manifest
from subscriber.sinks.spark.landing.prepared_transactions import PreparedTransactions
from subscriber.sinks.spark.landing.writer import LandingWriter, count, encode
from subscriber.sinks.spark.schema_gaps import SchemaGaps
from subscriber.threads import run_in_thread
from subscriber.transaction.model import PreparedTransaction

__all__ = ["LandingStream"]

_REFUSALS: Final = (ApplyError, RelationError, ProtocolError, ConfigurationError, DataLossError)
"""Errors that belong to one transaction."""
_LOOK_SECONDS: Final = 0.2
"""Interval of reading the applier's position, with ``confirm=applied``."""


class LandingStream:
    """The stream, from one opening of the lake to its close. Only the stream's own timers may run during a call.

    After :attr:`failure`, every call is refused.
    """

    def __init__(
        self,
        lake: Lake,
        lander: LandingWriter,
        location: Location,
        *,
        gaps: SchemaGaps,
        statistics: ApplyStatistics,
        on_durable: Callable[[Lsn], None],
    ) -> None:
        self.lander = lander
        self.failure: SubscriberError | None = None
        self._lake = lake
        self._location = location
        self.gaps = gaps
        self._statistics = statistics
        self._on_durable = on_durable
        self._files = PreparedTransactions(lake.storage)
        self._snapshots = Snapshots(lake.storage)
        self._over: dict[tuple[int, str], Lsn] = {}
        self._reported = INVALID_LSN
        self._waiting: tuple[Lsn, Lsn] | None = None
        self._calls = asyncio.Lock()
        self._tasks = [asyncio.create_task(self._land_in_time())]
        if location.confirm == "applied":
            self._tasks.append(asyncio.create_task(self._watch_applied()))

    async def close(self) -> None:
        """Land what was collected, unless the stream has failed."""
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.failure is not None:
            self.lander.forget()
        elif self.lander.gathered is not None:
            async with self._calls:
                await self._land()
        for bug in ended:
            if isinstance(bug, Exception):
                raise bug

    def _report(self, lsn: Lsn) -> None:
        """Report an LSN as durable. Reported LSNs never decrease."""
        self._reported = max(self._reported, lsn)
        self._on_durable(self._reported)

    # --- landing

    async def land(self) -> None:
        """Land now what was collected."""
        async with self._calls, self._failing():
            await self._land()

    async def apply(self, batch: Batch) -> None:
        """Collect a batch. It is landed now if there is enough data, else soon."""
        async with self._calls, self._failing():
            await self.lander.take(batch)
            full = self.lander.size >= self._location.batch_size or not self._location.batch_delay
            if full or self.lander.gathered is None:
                await self._land()

    async def advance(self, lsn: Lsn, look: Callable[[], None]) -> None:
        """Land what was collected, and store the position. With ``confirm=applied``, return after it is applied.

        ``look`` is called repeatedly while this waits for the applier. It may raise.
        """
        async with self._calls, self._failing():
            await self._land()
            await self._store_position(lsn)
        if self._location.confirm == "applied":
            while await self.applied() < lsn:
                look()
                await asyncio.sleep(_LOOK_SECONDS)
        self._report(lsn)

    async def set_position(self, position: Position) -> None:
        """Store the first position, or one on another timeline."""
        async with self._calls, self._failing():
            await self._land()
            if self._location.confirm == "applied" and self._lake.position is not None:
                # the LSN is the applier's and behind what is landed, so only the timeline is new
                position = replace(position, lsn=max(position.lsn, self.lander.position))
            await run_in_thread(lambda: self._lake.set_position(position))
            self.lander.position = max(self.lander.position, position.lsn)

    async def _land(self) -> None:
        """Make durable what was collected, even without rows, and report it."""
        before = self.lander.zone.last
        committing()
        await self.lander.land()
        position = self.lander.position
        if position > max(before, self.lander.zone.last):
            await self._store_position(position)
        self.lander.count()
        self._report_landed()

    async def _store_position(self, lsn: Lsn, received: frozenset[str] | None = None) -> None:
        """Move the position to an LSN, and store which prepared transactions were received, if either differs from what is stored."""
        lake, stored = self._lake, self._lake.position
        received = lake.received if received is None else received
        if stored is None or (lsn <= max(stored.lsn, self.lander.zone.last) and received == lake.received):
            return
        moved = replace(stored, lsn=max(lsn, stored.lsn))
        await run_in_thread(lambda: lake.set_position(moved, received))
        crash_points.reached("landing.position_stored")
        self.lander.position = max(self.lander.position, moved.lsn)

    def _report_landed(self) -> None:
        if self._location.confirm == "landed" and self._lake.position is not None:
            self._report(self.lander.position)

    @contextlib.asynccontextmanager
    async def _failing(self) -> AsyncIterator[None]:
        """After an error that does not belong to one transaction, refuse further calls. What was collected is lost, and is sent again."""
        if self.failure is not None:
            # raise it in a call that waited for the lock while the stream failed
            raise self.failure
        try:
            yield
        except SubscriberError as error:
            if isinstance(error, _REFUSALS) and not self.lander.lost:
                raise  # of one transaction, which left nothing behind
            # only after an error of the target do the callers open the sink again
            self.failure = error if isinstance(error, TargetError) else TargetUnavailable("the publisher sends the batch again")
            self.lander.forget()
            raise
        except BaseException:
            # after any other error, collected transactions may be lost, and the position in memory is beyond them
            self.failure = TargetUnavailable("a batch was not landed completely")
            self.lander.forget()
            raise

    async def _land_in_time(self) -> None:
        """Land what has waited for ``batch_delay``. The next call raises its error."""
        loop = asyncio.get_running_loop()
        delay = self._location.batch_delay
        while self.failure is None:
            gathered = self.lander.gathered
            pause = max(delay, _LOOK_SECONDS) if gathered is None else gathered + delay - loop.time()
            if pause > 0:
                await asyncio.sleep(pause)
                continue
            with contextlib.suppress(SubscriberError):
                await self.land()

    # --- what the applier has published

    async def applied(self) -> Lsn:
        """The LSN up to which everything that was landed is applied. Table copies do not count."""
        lake = self._lake
        landed = max(self.lander.zone.last, lake.position_lsn)

        def look() -> Lsn:
            snapshot = self._snapshots.newest()
            done = (snapshot or NOT_PUBLISHED).lsn
            # until a new snapshot is published, the oldest waiting manifest stays the same. This avoids reading a long backlog
            if self._waiting is None or self._waiting[0] != done:
                try:
                    first = first_manifest(lake.storage, LANDING, done)
                except DataLossError:
                    # a newer snapshot may have been published since, and its manifests removed
                    if self._snapshots.newest() == snapshot:
                        raise
                    return look()
                if first is None:
                    return landed
                self._waiting = (done, first.begin)
            return self._waiting[1]

        return await run_in_thread(look)

    async def _watch_applied(self) -> None:
        while self.failure is None:
            try:
                applied = await self.applied()
                async with self._calls:
                    for xid, gid in [known for known, ended in self._over.items() if ended <= applied]:
                        await self._forget(xid, gid)
            except SubscriberError as error:
                self.failure = error
                return
            # repeated each time: what was applied before it arrived in this stream counts only after it has arrived
            if self._lake.position is not None:
                self._report(min(applied, self.lander.position))
            await asyncio.sleep(_LOOK_SECONDS)

    # --- two-phase

    async def prepare(self, prepared: PreparedTransaction, gate: RelationGate) -> None:
        """Store the transaction's rows apart. On return they are durable, and the position is after the transaction."""
        transaction, gid = prepared.transaction, prepared.gid
        async with self._calls, self._failing():
            await self._land()
            if await run_in_thread(lambda: self._files.is_there(transaction.xid, gid)):
                await self.lander.described.learn(transaction)
            else:
                batch = await run_in_thread(lambda: self._files.begin(transaction.xid, gid))
                try:
                    encoder = self.lander.encoder(batch, gate)
                    await encode(encoder, transaction)
                except BaseException:
                    batch.discard()
                    raise
                await run_in_thread(lambda: self._files.prepare(batch, transaction, gid))
                count(self._statistics, {**encoder.counts, "transactions": 1})
            await transaction.discard()
            await self._store_position(transaction.end_lsn, self._lake.received | {self._files.directory(transaction.xid, gid)})
            self._report_landed()

    async def commit_prepared(self, message: CommitPrepared) -> None:
        """Land the rows of a prepared transaction, as of its commit.

        Raises:
            DataLossError: it was received, and is lost. NeverPrepared: it was never received.
        """
        async with self._calls, self._failing():
            await self._land()
            position, zone = self.lander.position, self.lander.zone
            if message.end_lsn > position:
                landed = await run_in_thread(lambda: self._files.commit(message, zone.directory))
                if landed is None:
                    was_received = self._files.directory(message.xid, message.gid) in self._lake.received
                    raise lost_prepared(message) if was_received else never_prepared(message)
                if landed:
                    crash_points.reached("landing.commit_written")
                    time = message.commit_time
                    counted = BatchTransactions(transactions=1, commit_time=time, first_commit_time=time)
                    await run_in_thread(lambda: zone.add(landed, position, message.end_lsn, counted))
                    self.lander.position = message.end_lsn
                else:
                    await self._store_position(message.end_lsn)
            await self._end(message.xid, message.gid, message.end_lsn)
            self._report_landed()

    async def rollback_prepared(self, message: RollbackPrepared) -> None:
        """Remove a prepared transaction."""
        async with self._calls, self._failing():
            await self._land()
            await self._end(message.xid, message.gid, message.rollback_end_lsn)
            await self._store_position(message.rollback_end_lsn)
            self._report_landed()

    async def _end(self, xid: int, gid: str, lsn: Lsn) -> None:
        if self._location.confirm == "landed":
            await self._forget(xid, gid)
        elif await run_in_thread(lambda: self._files.end(xid, gid, lsn)):
            self._over[xid, gid] = lsn

    async def _forget(self, xid: int, gid: str) -> None:
        await run_in_thread(lambda: self._files.forget(xid, gid, self._lake.forget_received))
        self._over.pop((xid, gid), None)
