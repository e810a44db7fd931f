"""Read a relay log: a stream of events for the receiver of the apply side.

The stream begins right after the target's position. The relations that were described before come first, in a transaction without
changes that ends at or before the position: the target skips it, and learns the relations. What the target has made durable comes back in
status updates, as to a publisher; they let segments be removed.

While the target keeps up, the events come from memory (:attr:`RelayLog.recent`), once they are on disk. Otherwise they are read from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from subscriber.errors import SpoolError
from subscriber.interfaces import ReceivedEvents
from subscriber.protocol.frames import StandbyStatusUpdate, decode_status_update
from subscriber.protocol.lsn import Lsn
from subscriber.recording.file import RecordedSession
from subscriber.recording.relay_events import transaction_of
from subscriber.recording.relay_groups import Group, StoredRecords, read_groups
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_segment import Descriptions, damaged
from subscriber.threads import run_in_thread
from subscriber.transaction.model import Event, Transaction, end_of

__all__ = ["RelayStream"]

_log = logging.getLogger(__name__)

_AT_ONCE: Final = 1024 * 1024


class RelayStream:
    """The events of a relay log after a position. Implements :class:`subscriber.interfaces.EventStream`.

    Args:
        log: open; it holds the position.
        position: everything up to there is in the target.
        acknowledged: is called with each status update of the apply side.

    Attributes:
        session: the session that the next group comes from.
        ended: whether the next group comes from another server. Everything before it was given out, and ``events`` waits.
    """

    def __init__(self, log: RelayLog, position: Lsn, acknowledged: Callable[[StandbyStatusUpdate], None]) -> None:
        self._log = log
        self._position = position
        self._acknowledged = acknowledged
        self._segment = next(segment for segment in reversed(log.segments) if segment.base <= position)
        self._offset = 0
        self._end = self._segment.base
        self._stopped = self._at_another_server = False
        self.session: RecordedSession = self._segment.session
        self.ended = False

    async def events(self) -> ReceivedEvents:
        """Return the next events, about a megabyte of those that are there."""
        while True:
            # before the look, so that no change is missed
            changed, failure = self._log.changed, self._log.failure
            if failure is not None and self._log.diverged:
                raise failure
            if not self.ended:
                found = self._take_recent() or await run_in_thread(partial(self._read, self._until()), self._stop)
                if found is not None:
                    return found
            if failure is not None:
                raise failure
            await changed.wait()

    async def send(self, message: bytes) -> None:
        """Take a status update: segments that the target does not need any more are removed, with the next one if that fails."""
        status = decode_status_update(message)
        self._acknowledged(status)
        try:
            await self._log.acknowledge(status.flush)
        except SpoolError as error:
            _log.warning("%s", error.one_line())

    def _stop(self) -> None:
        self._stopped = True

    def _take_recent(self) -> ReceivedEvents | None:
        """Take what is in memory, if it is next."""
        recent = self._log.recent
        if not self._offset or recent.first is None:
            return None
        if recent.first.segment is not self._segment:
            self._advance()
        groups = list[Group]()
        size = 0
        while size < _AT_ONCE and (first := recent.first) is not None:
            place = (first.segment.number, first.start)
            if place > (self._segment.number, self._offset):
                break
            group = recent.take()
            if place == (self._segment.number, self._offset):
                self._offset = group.stop
                groups.append(group)
                size += group.size
        return self._given(groups)

    def _given(self, groups: Sequence[Group]) -> ReceivedEvents | None:
        if not groups:
            return None
        self._end = groups[-1].end
        return ReceivedEvents([event for group in groups for event in group.events], self._end, groups[-1].moment)

    def _until(self) -> int | None:
        """Up to where the disk is read: the rest is in memory."""
        first = self._log.recent.first
        return first.start if first is not None and first.segment is self._segment else None

    # --- in a thread

    def _read(self, until: int | None) -> ReceivedEvents | None:
        if not self._offset and (known := self._seek()) is not None:
            return known
        found = list[Group]()
        size = 0
        while size < _AT_ONCE and self._advance() and (until is None or self._offset < until):
            for group in read_groups(self._segment, self._offset):
                self._offset, self._end = group.stop, group.end
                size += group.size
                found.append(group)
                if size >= _AT_ONCE or group.stop == until:
                    break
        # not before the receiver has what was read
        self.ended = self._at_another_server and not found
        return self._given(found)

    def _advance(self) -> bool:
        """Go to the next segment at the end of one. False: there is nothing to read."""
        following = next((each for each in self._log.segments if each.number > self._segment.number), None)
        if self._offset < self._segment.size:
            return True
        if following is None:
            return False
        if following.base != self._end:
            raise damaged(self._segment.path, f"it ends at {self._end}, and the next one begins at {following.base}")
        if (following.session.server_version, following.session.timeline) != (self.session.server_version, self.session.timeline):
            self._at_another_server = True
            return False
        # the relations at its beginning are known
        following.begin = following.begin or next(read_groups(following, 0)).stop
        self._segment, self._offset, self.session = following, following.begin, following.session
        return self._offset < following.size

    def _seek(self) -> ReceivedEvents | None:
        """Go to what comes after the position, which may be within a group. Return the relations before, and the rest of the group."""
        known = Descriptions()
        xid, moment = 0, None
        rest: Sequence[Event] = ()
        for group in read_groups(self._segment, 0):
            passed, end = group.events, group.end
            if end > self._position:
                count, end = _passed(group.events, self._end, self._position)
                if not count:
                    break
                passed, rest, moment = group.events[:count], group.events[count:], group.moment
            for transaction in filter(None, map(transaction_of, passed)):
                self._describe(known, transaction)
                xid = transaction.xid
            self._offset, self._end = group.stop, end
            if rest or self._stopped:
                break
        events = list[Event]()
        if records := [*known.all.values()]:
            # the target skips it, because it ends at or before its position
            events.append(Transaction(xid, self._end, self._end, 0, False, records, size=sum(map(len, records))))
        if rest:
            events += rest
            self._end = group.end
        return ReceivedEvents(events, self._end, moment) if events else None

    def _describe(self, known: Descriptions, transaction: Transaction) -> None:
        stored, start = transaction.spool, 0
        if isinstance(stored, StoredRecords):
            while start < stored.count and not self._stopped:
                records = stored.read(start)
                known.describe(records, streamed=transaction.prefixed)
                start += len(records)
        known.describe(transaction.records, streamed=transaction.prefixed)


def _passed(events: Sequence[Event], heard: Lsn, position: Lsn) -> tuple[int, Lsn]:
    """The number of events up to the position, and their end. A prepare that comes late has an old LSN, and belongs to what follows."""
    count = 0
    for number, event in enumerate(events, 1):
        end = end_of(event)
        if end > position:
            break
        if end > heard:
            count, heard = number, end
    return count, heard
