"""Read a relay log: a replication stream for the receiver of the apply side, and its spool.

The stream begins right after the target's position. The relations that were described before come first, in a transaction without
changes that ends at or before the position: the target skips it, and learns the relations. What the target has made durable comes back in
status updates, as to a publisher; they let segments be removed.

The transactions of a relay log are whole, one after another. So those that are too large for memory are not stored again: the spool notes
where they are, and reads them there.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from operator import itemgetter
from typing import Final

from subscriber.errors import SpoolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.encoder import encode
from subscriber.protocol.frames import PrimaryKeepalive, StandbyStatusUpdate, XLogData, decode_status_update, encode_frame
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Begin, Commit, CommitPrepared, Prepare, RollbackPrepared, StreamCommit, StreamPrepare, Tag
from subscriber.recording.file import END, MESSAGES, RecordedSession, RecordingRecord, end_lsn, messages
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_segment import Descriptions, Segment, damaged, first_xid, read_segment
from subscriber.threads import run_in_thread
from subscriber.transaction.reassembly import ROW_TAGS

__all__ = ["RelaySpool", "RelayStream", "is_applied"]

_log = logging.getLogger(__name__)

_ANY_LSN: Final = Lsn(2**63)
_AT_ONCE: Final = 1024 * 1024
_RECORDS: Final = ROW_TAGS | {int(Tag.MESSAGE)}
_ENDS: Final = frozenset(
    map(int, (Tag.COMMIT, Tag.STREAM_COMMIT, Tag.PREPARE, Tag.STREAM_PREPARE, Tag.COMMIT_PREPARED, Tag.ROLLBACK_PREPARED))
)


class RelayStream:
    """The transactions of a relay log after a position. Implements :class:`subscriber.interfaces.ReplicationStream`.

    Args:
        log: open; it holds the position.
        position: everything up to there is in the target.
        acknowledged: is called with each status update of the apply side.

    Attributes:
        session: the session that the current group comes from.
        ended: whether the next group comes from another server. Everything before it was given out, and ``receive`` waits.
        group: segment and offset at which the group begins that is being read.
    """

    def __init__(self, log: RelayLog, position: Lsn, acknowledged: Callable[[StandbyStatusUpdate], None]) -> None:
        self._log = log
        self._position = position
        self._acknowledged = acknowledged
        self._segment = next(segment for segment in reversed(log.segments) if segment.base <= position)
        self._offset = 0
        self._end = self._segment.base
        self._ready: list[bytes] = []
        self.session: RecordedSession = self._segment.session
        self.ended = False
        self.group = self._segment, 0

    async def receive(self) -> Sequence[bytes]:
        """Return the next messages, about a megabyte of those that are there."""
        while True:
            # before the look, so that no change is missed
            changed, failure = self._log.changed, self._log.failure
            if failure is not None and self._log.diverged:
                raise failure
            if not self._ready and not self.ended:
                await run_in_thread(self._read)
            if self._ready:
                frames, self._ready = self._ready, []
                return frames
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

    async def wal_end(self, least: Lsn) -> Lsn:
        """Every LSN of a relay log was checked when it was received."""
        return _ANY_LSN

    async def rolled_back(self, xid: int, subxids: Collection[int]) -> Collection[int]:
        """What the publisher rolled back is not in a relay log."""
        return ()

    async def close(self) -> None:
        """Nothing is open."""

    # --- in a thread

    def _read(self) -> None:
        if not self._offset:
            self._seek()
        size = 0
        while size < _AT_ONCE and self._advance():
            for record in read_segment(self._segment, self._offset):
                self._offset = record.end
                size += len(record.content)
                self._take(record)
                if size >= _AT_ONCE:
                    break

    def _take(self, record: RecordingRecord) -> None:
        if record.kind == MESSAGES:
            self._ready += _frames(messages(record), record.moment)
        elif record.kind == END:
            self._end = end_lsn(record)
            self.group = self._segment, record.end
            self._ready.append(encode_frame(PrimaryKeepalive(self._end, record.moment, reply_requested=False)))

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
            # not before the receiver has processed what was read
            self.ended = not self._ready
            return False
        # the relations at its beginning are known
        offset = next(record.end for record in read_segment(following, 0) if record.kind == END)
        self._segment, self._offset, self.session, self.group = following, offset, following.session, (following, offset)
        return offset < following.size

    def _seek(self) -> None:
        """Go to what comes after the position: within a group, if that has more than one transaction. Begin with the relations before."""
        segment = self._segment
        known, group = Descriptions(), Descriptions()
        xid = count = 0
        payloads: list[bytes] = []
        rest: list[bytes] = []
        for record in read_segment(segment, 0):
            if record.kind == MESSAGES:
                payloads = messages(record)
                count += 1
                group.read(payloads)
            elif record.kind == END:
                end = end_lsn(record)
                if end <= self._position:
                    known.update(group)
                    xid = first_xid(payloads) or xid
                    self._end, self._offset, self.group = end, record.end, (segment, record.end)
                elif count == 1 and (cut := self._cut(payloads)):
                    group = Descriptions()
                    group.read(payloads[:cut])
                    known.update(group)
                    rest = _frames(payloads[cut:], record.moment)
                    rest.append(encode_frame(PrimaryKeepalive(end, record.moment, reply_requested=False)))
                    base, self._end, self._offset, self.group = self._end, end, record.end, (segment, record.end)
                    self._ready = [*_known(known, base, xid or first_xid(payloads)), *rest]
                    return
                if end > self._position:
                    break
                group, count, payloads = Descriptions(), 0, []
        self._ready = _known(known, self._end, xid)

    def _cut(self, payloads: Sequence[bytes]) -> int:
        """The number of messages up to the position. A prepare that comes late has an old LSN, and belongs to what follows."""
        cut, heard = 0, self._end
        streamed = False
        for index, payload in enumerate(payloads):
            tag = payload[0]
            if tag in {Tag.STREAM_START, Tag.STREAM_STOP}:
                streamed = tag == Tag.STREAM_START
            elif tag in _ENDS and not streamed:
                end = _end(payload)
                if end > self._position:
                    break
                if end > heard:
                    cut, heard = index + 1, end
        self._end = heard
        return cut


def is_applied(log: RelayLog, position: Lsn) -> bool:
    """Whether the relay log has no transaction after a position that it holds. It blocks.

    Raises:
        DataLossError, SpoolError: it cannot be read.
    """
    first = next(segment for segment in reversed(log.segments) if segment.base <= position)
    for segment in log.segments[log.segments.index(first) :]:
        # a segment begins with relations
        changes, begun = False, False
        for record in read_segment(segment, 0):
            if record.kind == MESSAGES:
                changes = begun
            elif record.kind == END:
                if changes and end_lsn(record) > position:
                    return False
                changes, begun = False, True
    return True


def _end(payload: bytes) -> Lsn:
    match decode(payload):
        case RollbackPrepared(rollback_end_lsn=end):
            return end
        case (
            Commit(end_lsn=end)
            | StreamCommit(end_lsn=end)
            | Prepare(end_lsn=end)
            | StreamPrepare(end_lsn=end)
            | CommitPrepared(end_lsn=end)
        ):
            return end
    raise AssertionError("one of the tags that end something")


def _frames(payloads: Sequence[bytes], moment: int) -> list[bytes]:
    head = encode_frame(XLogData(INVALID_LSN, INVALID_LSN, moment, b""))
    return [head + payload for payload in payloads]


def _known(known: Descriptions, base: Lsn, xid: int) -> list[bytes]:
    """A transaction that describes relations, and that the target skips, because it ends at or before its position."""
    if not known.all:
        return []
    return _frames([encode(Begin(base, 0, xid)), *known.all.values(), encode(Commit(0, base, base, 0))], 0)


class RelaySpool:
    """The spool of a relay log's stream: records stay where they are. Implements :class:`subscriber.interfaces.Spool`.

    Args:
        stream: what it gives is not changed on its way to the receiver.
    """

    def __init__(self, stream: RelayStream) -> None:
        self._stream = stream
        self._parts: dict[int, _Part] = {}

    async def append(self, spool_id: int, records: Sequence[bytes]) -> None:
        """Note how many records there are. They are those of the open group, because only one transaction at a time is open."""
        part = self._parts.setdefault(spool_id, _Part(*self._stream.group))
        part.count += len(records)

    async def truncate(self, spool_id: int, count: int) -> None:
        """Never called: a relay log has no rolled back subtransactions."""
        raise AssertionError("a relay log has no rolled back subtransactions")

    async def discard(self, spool_id: int) -> None:
        """Forget where they are."""
        self._parts.pop(spool_id, None)

    async def read(self, spool_id: int, start: int) -> Sequence[bytes]:
        """Read some of those that were appended."""
        part = self._parts[spool_id]
        return await run_in_thread(partial(part.read, start)) if start < part.count else ()

    def reader(self, spool_id: int) -> _Part:
        """Return those that were appended."""
        return self._parts.pop(spool_id)


class _Part:
    """The first ``count`` records of a transaction. Implements :class:`subscriber.transaction.model.SpooledRecords`."""

    def __init__(self, segment: Segment, offset: int) -> None:
        self._segment = segment
        # for each record of messages that was read: the number of its first record of the transaction, and its offset
        self._index = [(0, offset)]
        self.count = 0

    def read(self, start: int) -> Sequence[bytes]:
        first, offset = self._index[bisect_right(self._index, start, key=itemgetter(0)) - 1]
        for record in read_segment(self._segment, offset):
            found = [payload for payload in messages(record) if payload[0] in _RECORDS] if record.kind == MESSAGES else []
            following = first + len(found)
            if following > self._index[-1][0]:
                self._index.append((following, record.end))
            if start < following:
                return found[start - first : self.count - first]
            first = following
        raise damaged(self._segment.path, "a transaction is not complete")

    async def chunks(self, start: int = 0) -> AsyncIterator[Sequence[bytes]]:
        while start < self.count:
            records = await run_in_thread(partial(self.read, start))
            start += len(records)
            yield records
            del records

    async def discard(self) -> None:
        """Nothing: segments are removed as a whole."""
