"""How long apply takes: per batch, never per row."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from typing import Final

from subscriber.protocol.lsn import POSTGRES_EPOCH, Lsn
from subscriber.transaction.model import Event, PreparedTransaction, Transaction

__all__ = ["BUCKETS", "ApplyTimes"]

BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
"""Upper bounds in seconds. There is one more bucket, for what took longer."""
_WAITING: Final = 65_536
"""So many batches may wait for their durability. Later ones are not measured."""
_EPOCH: Final = POSTGRES_EPOCH.timestamp()


class ApplyTimes:
    """Times of one subscription since it was created.

    Attributes:
        counts: for each of BUCKETS and one more, how many batches took so long from the commit of their first transaction on the publisher
            to its durability in the target. Both clocks should agree.
        total: the sum of these times.
        waiting: seconds in which the apply worker had nothing to apply.
        applying: seconds in which it applied changes, commits included.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0
        self.waiting = self.applying = 0.0
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

    def restart(self) -> None:
        """Forget the batches that are not durable: a new stream brings them again."""
        self._pending.clear()
