"""Hold apply at one LSN, so that another task can take a snapshot of the target there.

The snapshot of the publisher is an ordinary one (``pg_export_snapshot``). It exists at once, while the snapshot of a new replication slot
waits for the end of every transaction that is writing, which may take hours. An ordinary snapshot has no LSN. But it says for each
transaction id whether it sees the transaction (:class:`subscriber.transaction.visibility.XidSnapshot`), and pgoutput sends that id. So the
apply worker finds the LSN:

1. It applies nothing while the snapshot is taken (:meth:`Hold.take`). With the snapshot comes ``wal_end``, the end of the publisher's WAL
   just after it. Every transaction that the snapshot sees was committed before ``wal_end``.
2. It applies the transactions that the snapshot sees, up to the first one that it does not see, or until everything up to ``wal_end`` was
   received.
3. It waits until everything up to ``wal_end`` was received, and looks at the waiting transactions. If the snapshot sees one of them, the
   publisher made commits visible in another order than it wrote them. Between the flush of WAL and the removal of a transaction from the
   list of running ones, that takes microseconds, or the time of a synchronous standby. Then it takes another snapshot. It does the same if
   the snapshot does not see a transaction that was already applied.
4. Now the target has exactly what the snapshot sees. The other task works (``act``), and apply continues.

Transactions already applied are remembered by id (:class:`AppliedTransactions`): a hundred thousand, so only a commit that waits for a
synchronous standby during so many later ones could be missed.

Apply is held in steps 1, 3 and 4. Steps 1 and 3 take at most ``limit`` seconds, and ``act`` limits itself. If that is exceeded, the hold
fails and apply continues.

Rejected: the snapshot of a temporary slot. Its LSN is exact, but it is known only after the slot's creation, so apply would have to be held
all that time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol, TypeVar

from subscriber.apply.apply_times import ApplyTimes
from subscriber.apply.receiving.receiver import Receiver
from subscriber.errors import PublisherUnavailable, SubscriberError, TargetUnavailable
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import CommitPrepared
from subscriber.transaction.model import Event, Transaction
from subscriber.transaction.visibility import XidSnapshot

__all__ = ["AppliedTransactions", "Hold", "PublisherSnapshot"]

T = TypeVar("T")

_WITH_XID: Final = (Transaction, CommitPrepared)
_REMEMBERED: Final = 100_000
_ATTEMPTS: Final = 200
_POLL: Final = 0.02


class PublisherSnapshot(Protocol):
    """A snapshot of the publisher that other sessions can import."""

    @property
    def xids(self) -> XidSnapshot:
        """What it sees."""
        ...

    @property
    def wal_end(self) -> Lsn:
        """All that it sees was committed before."""
        ...


class AppliedTransactions:
    """The ids of the transactions that were applied last.

    Attributes:
        times: how long apply takes.
    """

    def __init__(self) -> None:
        self._xids: deque[int] = deque(maxlen=_REMEMBERED)
        self.times = ApplyTimes()

    def add(self, events: Sequence[Event]) -> None:
        """Note that these events were applied, or are about to be."""
        if events:
            self.times.taken(events[0])
        self._xids.extend([event.xid for event in events if isinstance(event, _WITH_XID)])

    def all_seen(self, xids: XidSnapshot) -> bool:
        """Whether a snapshot sees all of them."""
        sees = xids.sees
        return all(sees(xid) for xid in self._xids)


class Hold:
    """One hold. The apply worker calls :meth:`passes` before each event; the task that wants the hold awaits :attr:`ended`.

    Args:
        take: takes a snapshot of the publisher; the one before is not needed any more.
        act: called with the LSN once the target has exactly what the snapshot sees. Apply waits until it returns, which must be soon. It
            raises SubscriberError if it fails.
        limit: seconds that apply may be held before ``act``.

    Attributes:
        ended: set when apply has continued for good.
        error: why ``act`` was not called, or failed; None: it was called.
        seconds: how long apply was held.
    """

    def __init__(
        self, take: Callable[[], Awaitable[PublisherSnapshot]], act: Callable[[PublisherSnapshot, Lsn], Awaitable[None]], limit: float
    ) -> None:
        self._take = take
        self._act = act
        self._limit = limit
        self._snapshot: PublisherSnapshot | None = None
        self._attempts = 0
        self._since: float | None = None
        self.ended = asyncio.Event()
        self.error: SubscriberError | None = None
        self.seconds = 0.0

    def alone(self, event: Event) -> bool:
        """Whether the event must not follow others in a batch, because it may have to wait."""
        return self._snapshot is not None and not self._sees(event)

    def _sees(self, event: Event) -> bool:
        if self._snapshot is None or not isinstance(event, Transaction | CommitPrepared):
            # a PREPARE changes nothing that other sessions see
            return True
        return self._snapshot.xids.sees(event.xid)

    async def passes(self, receiver: Receiver, applied: AppliedTransactions) -> bool:
        """Whether the apply worker may take the next event, if there is one; False: call again."""
        now = asyncio.get_running_loop().time
        if self.ended.is_set():
            return True
        if self._since is None:
            self._since = now()
        try:
            return await self._passes(receiver, applied)
        except TimeoutError:
            self._fail(
                PublisherUnavailable(
                    f"the snapshots were not ready within {self._limit:g} s", hint="try again when the servers are less busy"
                )
            )
        except SubscriberError as error:
            self._fail(error)
        return True

    async def _passes(self, receiver: Receiver, applied: AppliedTransactions) -> bool:
        if self._snapshot is None:
            await self._open(applied)
            return False
        event = receiver.peek()
        wal_end = self._snapshot.wal_end
        if event is not None and self._sees(event):
            self._count()
            return True
        if event is None and receiver.tracker.received < wal_end:
            # nothing is held up
            self._count()
            await receiver.wait(_POLL)
            return False
        if not await receiver.wait_received(wal_end, self._remaining()):
            raise TimeoutError
        if any(self._sees(waiting) for waiting in receiver.waiting() if isinstance(waiting, Transaction | CommitPrepared)):
            self._snapshot = None
            return False
        snapshot = self._snapshot
        # not cancelled: what it has told others must be true
        await self._act(snapshot, receiver.tracker.applied)
        self._end()
        return True

    async def _open(self, applied: AppliedTransactions) -> None:
        self._attempts += 1
        if self._attempts > _ATTEMPTS:
            raise PublisherUnavailable(
                "commits on the publisher become visible in another order than they are written to WAL",
                hint="try again when fewer transactions wait for synchronous standbys",
            )
        snapshot = await self._within_limit(self._take())
        if applied.all_seen(snapshot.xids):
            self._snapshot = snapshot

    def _remaining(self) -> float:
        assert self._since is not None
        return max(self._since + self._limit - asyncio.get_running_loop().time(), 0.0)

    async def _within_limit(self, work: Awaitable[T]) -> T:
        async with asyncio.timeout(self._remaining()):
            return await work

    def _count(self) -> None:
        """Add the time since apply was held."""
        if self._since is not None:
            self.seconds += asyncio.get_running_loop().time() - self._since
            self._since = None

    def _end(self) -> None:
        self._count()
        self.ended.set()

    def _fail(self, error: SubscriberError) -> None:
        self.error = error
        self._end()

    def abandon(self, reason: str) -> None:
        """Let apply continue, because the caller no longer needs the hold. Idempotent."""
        if not self.ended.is_set():
            self._fail(TargetUnavailable(reason, hint="try again"))
