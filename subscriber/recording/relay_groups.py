"""The groups of a relay log: what the publisher sent between two LSNs up to which everything is complete.

The changes of a large transaction are several records, between one with the messages before them and one with those after them. They stay
on disk until they are applied: to read the group, only the heads of these records are read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Tag
from subscriber.recording.file import END, MESSAGES, end_lsn, messages
from subscriber.recording.relay_events import decode_events, transaction_of
from subscriber.recording.relay_segment import Segment, damaged, read_heads, read_segment
from subscriber.threads import run_in_thread
from subscriber.transaction.model import Event

__all__ = ["Group", "RecentGroups", "StoredRecords", "read_groups"]

_ENDS: Final = bytes((Tag.COMMIT, Tag.STREAM_COMMIT, Tag.PREPARE, Tag.STREAM_PREPARE, Tag.COMMIT_PREPARED, Tag.ROLLBACK_PREPARED))


@dataclass(frozen=True, slots=True)
class Group:
    """A complete group.

    Attributes:
        segment: where it is stored.
        start: its offset there.
        stop: the offset after it.
        end: everything up to there is complete.
        moment: when the publisher sent it.
        events: in the publisher's order; none: nothing was sent for the subscription.
        size: bytes that the events take in memory.
    """

    segment: Segment
    start: int
    stop: int
    end: Lsn
    moment: int
    events: Sequence[Event]
    size: int


class RecentGroups:
    """Groups that are in memory, and on disk too, oldest first. There may be others before, between and after them.

    Attributes:
        limit: bytes that their events may take.
        size: bytes that they take.
    """

    def __init__(self) -> None:
        self._groups: deque[Group] = deque()
        self.limit = self.size = 0

    @property
    def first(self) -> Group | None:
        """The oldest one."""
        return self._groups[0] if self._groups else None

    def add(self, group: Group) -> None:
        """Add one, if there is room for it."""
        if self.size + group.size <= self.limit:
            self._groups.append(group)
            self.size += group.size

    def take(self) -> Group:
        """Remove the oldest one."""
        group = self._groups.popleft()
        self.size -= group.size
        return group

    def clear(self) -> None:
        """Remove all."""
        self._groups.clear()
        self.size = 0


def read_groups(segment: Segment, offset: int) -> Iterator[Group]:
    """Read the groups of a segment from an offset on; 0: from the first one, which has the relations that are known before. It blocks.

    Raises:
        DataLossError: one is damaged, or the file is missing.
        SpoolError: the file cannot be read.
    """
    offset = offset or segment.first
    start, payloads, size = offset, list[bytes](), 0
    part: StoredRecords | None = None
    while offset < segment.size:
        for record in read_segment(segment, offset):
            offset = record.end
            if record.kind == MESSAGES:
                payloads += messages(record)
                size += len(record.content)
                if part is None and not _ends(payloads):
                    part, offset = _skip(segment, offset)
                    break
            elif record.kind == END:
                yield Group(segment, start, offset, end_lsn(record), record.moment, _events(segment, payloads, part), size)
                start, payloads, size, part = offset, [], 0, None


def _ends(payloads: Sequence[bytes]) -> bool:
    return bool(payloads) and bool(payloads[-1]) and payloads[-1][0] in _ENDS


def _events(segment: Segment, payloads: list[bytes], part: StoredRecords | None) -> Sequence[Event]:
    try:
        events = decode_events(payloads)
    except (ProtocolError, IndexError) as error:
        raise damaged(segment.path, "it has something else than whole transactions") from error
    if part is not None:
        transaction = transaction_of(events[0]) if events else None
        if transaction is None or transaction.records:
            raise damaged(segment.path, "a transaction is not complete")
        transaction.spilled, transaction.size, transaction.largest = part.count, part.size, part.largest
        transaction.spool = part
    return events


def _skip(segment: Segment, offset: int) -> tuple[StoredRecords, int]:
    """Pass the changes of a large transaction. Return them, and the offset of what follows."""
    part = StoredRecords(segment)
    last: tuple[int, int, int] | None = None
    for kind, place, stop, count in read_heads(segment, offset):
        if kind == END:
            break
        if last is not None:
            part.add(*last)
        last = place, stop, count
    if last is None:
        raise damaged(segment.path, "a transaction is not complete")
    return part, last[0]


class StoredRecords:
    """The changes of a large transaction. Implements :class:`subscriber.transaction.model.SpooledRecords`.

    Attributes:
        count: how many there are.
        size: their bytes, with what is stored beside them.
        largest: bytes that are read at once.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        # for each stored record: the number of its first change, and its offset
        self._index: list[tuple[int, int]] = []
        self.count = self.size = self.largest = 0

    def add(self, offset: int, stop: int, count: int) -> None:
        """Add a stored record with some changes."""
        self._index.append((self.count, offset))
        self.count += count
        self.size += stop - offset
        self.largest = max(self.largest, stop - offset)

    def read(self, start: int) -> Sequence[bytes]:
        """Read some from number ``start``. It blocks.

        Raises:
            DataLossError, SpoolError: they cannot be read.
        """
        first, offset = self._index[bisect_right(self._index, start, key=itemgetter(0)) - 1]
        record = next(read_segment(self._segment, offset), None)
        found = [] if record is None else messages(record)[start - first :]
        if not found:
            raise damaged(self._segment.path, "a transaction is not complete")
        return found

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        """Read from number ``start``."""
        while start < self.count:
            records = await run_in_thread(partial(self.read, start))
            start += len(records)
            yield records
            del records

    async def discard(self) -> None:
        """Nothing: segments are removed as a whole."""
