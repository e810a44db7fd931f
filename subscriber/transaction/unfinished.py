"""A transaction whose end was not received yet: its records, and which of them are spilled or cut off.

The records form one sequence. The first ones may have been spilled. For each subtransaction of a streamed transaction the index of its
first record is kept, with the number of bytes before it. So an abort cuts the sequence and the byte counts in one step.

Parallel apply reads a transaction while it is still being received, at its own pace. It asks which records are available
(:meth:`UnfinishedTransaction.available`), and then whether records were cut off (:meth:`UnfinishedTransaction.take_cut`). It notes how many
it has applied (:attr:`UnfinishedTransaction.applied`): these are spilled first, because they are only needed if the attempt fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Begin, BeginPrepare, Origin, StreamStart
from subscriber.transaction.model import Transaction

__all__ = ["RECORD_OVERHEAD", "SpoolDiscard", "SpoolTruncate", "UnfinishedTransaction"]

RECORD_OVERHEAD: Final = 56
"""Bytes that Python adds to a record: the header of the bytes object, its rounding, its slot in a list."""
_UNKNOWN_XID: Final = b"longer than any"


@dataclass(frozen=True, slots=True)
class SpoolTruncate:
    """Order: keep only the first ``count`` (at least one) records that were spilled under ``spool_id``."""

    spool_id: int
    count: int


@dataclass(frozen=True, slots=True)
class SpoolDiscard:
    """Order: delete the records that were spilled under ``spool_id``."""

    spool_id: int


class UnfinishedTransaction:
    """Filled by :class:`subscriber.transaction.reassembly.Reassembly`.

    Attributes:
        opening: its Begin, BeginPrepare or first StreamStart.
        spool_id: under which its records are spilled. It is never reused.
        streamed: whether every record has an xid.
        origin: where the publisher replicated it from, or None.
        origin_at: the number of records at which an Origin is allowed, which is right after the message that opens a block; else None.
        size: payload bytes of all records.
        largest: payload bytes of the largest record that was ever spilled.
        applied: number of first records that parallel apply has applied; None: no attempt runs.
        finished: its end was received, and a :class:`Transaction` has its records.
        dropped: it was abandoned: aborted, or the connection ended.
    """

    __slots__ = (
        "_barriers",
        "_cut_to",
        "_firsts",
        "_last_xid",
        "_records",
        "_spilled",
        "_spilled_size",
        "applied",
        "dropped",
        "finished",
        "largest",
        "opening",
        "origin",
        "origin_at",
        "size",
        "spool_id",
        "streamed",
    )

    def __init__(self, opening: Begin | BeginPrepare | StreamStart, spool_id: int) -> None:
        self.opening = opening
        self.spool_id = spool_id
        self.streamed = isinstance(opening, StreamStart)
        self.origin: Origin | None = None
        self.origin_at: int | None = 0
        self.size = 0
        self.largest = 0
        self.applied: int | None = None
        self.finished = False
        self.dropped = False
        # for chunks: number of their first record, and of the events before them; only where the latter grew and is not reached yet
        self._barriers: deque[tuple[int, int]] = deque()
        self._cut_to: int | None = None
        self._records: list[bytes] = []
        self._spilled = 0
        self._spilled_size = 0
        # for each xid, in the order of their first records: number and bytes of the records before its first one
        self._firsts: dict[int, tuple[int, int]] = {}
        # the four bytes of the last record's xid: while they stay the same, no lookup is needed
        self._last_xid = _UNKNOWN_XID

    @property
    def xid(self) -> int:
        """The (top) transaction id."""
        return self.opening.xid

    @property
    def count(self) -> int:
        """Number of records, including spilled ones."""
        return self._spilled + len(self._records)

    @property
    def spilled(self) -> int:
        """Number of spilled records. They are the first ones."""
        return self._spilled

    @property
    def memory(self) -> int:
        """Bytes in memory: payloads, and :data:`RECORD_OVERHEAD` for each."""
        return self.size - self._spilled_size + RECORD_OVERHEAD * len(self._records)

    def append(self, payload: bytes) -> int:
        """Add a record; return the memory that it takes.

        Raises:
            ProtocolError: the transaction is streamed, and the record has no xid.
        """
        if self.streamed and payload[1:5] != self._last_xid:
            self._note_xid(payload)
        size = len(payload)
        self._records.append(payload)
        self.size += size
        return size + RECORD_OVERHEAD

    def extend(self, payloads: Sequence[bytes]) -> int:
        """Add records; return the memory that they take.

        Raises:
            ProtocolError: as :meth:`append`.
        """
        if self.streamed or len(payloads) == 1:
            return sum([self.append(payload) for payload in payloads])
        size = sum(map(len, payloads))
        self._records += payloads
        self.size += size
        return size + RECORD_OVERHEAD * len(payloads)

    def _note_xid(self, payload: bytes) -> None:
        """Note where a (sub)transaction starts, if the record is its first one."""
        prefix = payload[1:5]
        xid = int.from_bytes(prefix)
        if len(prefix) < 4 or xid == 0:
            raise ProtocolError("invalid transaction ID in streamed replication transaction", offset=1, tag=chr(payload[0]))
        self._firsts.setdefault(xid, (self.count, self.size))
        self._last_xid = prefix

    def knows(self, subxid: int) -> bool:
        """Whether this subtransaction has a record."""
        return subxid in self._firsts

    def cut(self, subxid: int) -> tuple[SpoolTruncate | SpoolDiscard, ...]:
        """Drop everything from the first record of ``subxid``, which must be known. Return the orders for the spool."""
        kept, self.size = self._firsts[subxid]
        while self._firsts.popitem()[0] != subxid:
            pass  # remove subtransactions that start after the cut
        while self._barriers and self._barriers[-1][0] >= kept:
            self._barriers.pop()
        self._cut_to = kept if self._cut_to is None else min(kept, self._cut_to)
        if self.applied is not None:
            self.applied = min(kept, self.applied)
        self._last_xid = _UNKNOWN_XID
        if kept >= self._spilled:
            del self._records[kept - self._spilled :]
            return ()
        self._records = []
        self._spilled = kept
        self._spilled_size = self.size
        return (SpoolTruncate(self.spool_id, kept) if kept else SpoolDiscard(self.spool_id),)

    def spill(self) -> list[bytes]:
        """Return records in memory and release them: the applied ones if there are any, else all. They count as spilled from now on."""
        applied = (self.applied or 0) - self._spilled
        stop = applied if applied > 0 else len(self._records)
        records = self._records[:stop]
        del self._records[:stop]
        self.largest = max(self.largest, max(map(len, records), default=0))
        self._spilled += len(records)
        self._spilled_size += sum(map(len, records))
        return records

    def discard(self) -> tuple[SpoolDiscard, ...]:
        """Abandon the transaction. Return the orders for the spool."""
        self.dropped = True
        return (SpoolDiscard(self.spool_id),) if self._spilled else ()

    # --- for parallel apply

    def begin_chunk(self, events: int) -> None:
        """Note that the next records may depend on the first ``events`` events."""
        if self._barriers and self._barriers[-1][0] == self.count:
            self._barriers.pop()
        if not self._barriers or self._barriers[-1][1] != events:
            self._barriers.append((self.count, events))

    def available(self, events: int) -> int:
        """Return how many of the first records depend only on the first ``events`` events. ``events`` must never decrease."""
        while self._barriers and self._barriers[0][1] <= events:
            self._barriers.popleft()
        return self._barriers[0][0] if self._barriers else self.count

    def take_cut(self) -> int | None:
        """Return how many records the deepest cut since the last call left; None if there was none."""
        cut, self._cut_to = self._cut_to, None
        return cut

    def held(self, start: int, stop: int) -> list[bytes]:
        """Return the records from number ``start`` to before ``stop``; none if they begin among the spilled ones."""
        return self._records[start - self._spilled : stop - self._spilled] if start >= self._spilled else []

    def finish(self, final_lsn: Lsn, end_lsn: Lsn, commit_time: int) -> Transaction:
        """End the transaction; return it."""
        self.finished = True
        return Transaction(
            xid=self.xid,
            final_lsn=final_lsn,
            end_lsn=end_lsn,
            commit_time=commit_time,
            prefixed=self.streamed,
            records=self._records,
            origin=self.origin,
            spilled=self._spilled,
            size=self.size,
            largest=self.largest,
            spool_id=self.spool_id,
            subxids=tuple(xid for xid in self._firsts if xid != self.xid),
        )
