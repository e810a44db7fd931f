"""How long apply takes: per batch, never per row."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Sequence
from typing import Final

from subscriber.batch_times import AppliedBatch, Applying, Arrival, watcher
from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.transaction.model import Event, PreparedTransaction, Transaction

__all__ = ["BUCKETS", "PHASES", "ApplyTimes"]

BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds in seconds. There is one more bucket, for what took longer."""
PHASES: Final = ("receive", "decode", "wait", "limit", "apply", "commit")
_WAITING: Final = 65_536
"""So many batches may wait for their durability. Later ones are not measured."""
_EPOCH: Final = POSTGRES_EPOCH.timestamp()


class ApplyTimes:
    """Times of one subscription since it was created.

    Attributes:
        counts: for each of BUCKETS and one more, how many batches took so long from the commit of their first transaction on the publisher
            to its durability in the target. Both clocks should agree.
        total: the sum of these times.
        phases: seconds in each phase (:mod:`subscriber.batch_times`). The receiver has ``receive`` and ``decode``; the apply worker
            ``wait`` (it had nothing to apply), ``limit`` (``max_apply_rate`` held it up), ``apply`` and ``commit``.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._committing = 0.0
        self._pending: deque[tuple[Lsn, int]] = deque()

    def taken(self, event: Event) -> None:
        """Note the first event of a batch that is about to be applied."""
        if len(self._pending) >= _WAITING:
            return
        match event:
            case Transaction():
                self._pending.append((event.end_lsn, event.commit_time))
            case PreparedTransaction():
                self._pending.append((event.transaction.end_lsn, event.transaction.commit_time))

    def durable(self, lsn: Lsn) -> None:
        """Note that everything up to this LSN is durable in the target."""
        pending = self._pending
        if not pending or pending[0][0] > lsn:
            return
        now = time.time() - _EPOCH
        while pending and pending[0][0] <= lsn:
            seconds = max(now - pending.popleft()[1] / 1e6, 0.0)
            self.counts[bisect_left(BUCKETS, seconds)] += 1
            self.total += seconds
            if (heard := watcher.get()) is not None:
                heard.durable(seconds)

    async def timed(self, transactions: Sequence[Transaction], arrival: Arrival | None, work: Awaitable[None]) -> None:
        """Await a call of the sink that applies transactions, and note how long it takes."""
        clock, applying = asyncio.get_running_loop().time, Applying()
        taken = clock()
        with applying.current():
            await work
        done = clock()
        self._committing = 0.0 if applying.committing is None else done - applying.committing
        if (heard := watcher.get()) is not None:
            first = transactions[0]
            heard.applied(
                AppliedBatch(
                    end_lsn=transactions[-1].end_lsn,
                    xid=first.xid,
                    commit_time=first.commit_time / 1e6 + _EPOCH,
                    transactions=len(transactions),
                    messages=sum(each.count for each in transactions),
                    size=sum(each.size for each in transactions),
                    arrival=arrival,
                    taken=taken,
                    committing=applying.committing,
                    done=done,
                )
            )

    def applied(self, seconds: float) -> None:
        """Note that an event was applied in so many seconds, with what :meth:`timed` has measured of it."""
        committing, self._committing = self._committing, 0.0
        self.phases["apply"] += seconds - committing
        self.phases["commit"] += committing

    def restart(self) -> None:
        """Forget the batches that are not durable: a new stream brings them again."""
        self._pending.clear()
