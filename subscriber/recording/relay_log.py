"""The relay log: the publisher's transactions on local disk, so that its WAL need not wait for the target.

Layout
    ``<relay_log>/<hash of the subscription>/<number>.relay``. Each segment is a recording (:mod:`subscriber.recording.file`): the session
    that it comes from, the relations that are known where it begins, then groups. A group is one or more records of messages, and the LSN
    up to which everything is complete. It holds small transactions, or one large one, or nothing: then the publisher sent nothing for the
    subscription up to that LSN. Only whole transactions are stored, in the publisher's order, without what was rolled back.
    :mod:`subscriber.recording.relay_writer` makes them from the stream, and :mod:`subscriber.recording.relay_stream` reads them.

Durable
    A group counts, and can be read, once it is on disk. Only then does :attr:`RelayLog.end` move, and only that is acknowledged to the
    publisher. So what is torn by a crash was not acknowledged, and the publisher sends it again.

Removed
    A segment is removed when the target has everything in it. The last one stays.

Rejected: the stream as it arrives. A segment could then depend on all earlier ones, because the changes of a streamed transaction come in
pieces, and its savepoints must be judged by the publisher while that still knows about them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from subscriber import crash_points
from subscriber.apply.receiving.spool import private_directory
from subscriber.errors import ConfigurationError, DataLossError, SpoolError, SubscriberError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.protocol.messages import Begin, Commit
from subscriber.recording.file import END, MAGIC, MESSAGES, SESSION, RecordedSession, encode_record, messages_content
from subscriber.recording.relay_directory import directory_name
from subscriber.recording.relay_groups import Group, RecentGroups
from subscriber.recording.relay_segment import (
    SUFFIX,
    Descriptions,
    Segment,
    create_file,
    damaged,
    first_xid,
    sync_directory,
    sync_file,
    write_file,
)
from subscriber.recording.relay_start import find_segments, segment_numbers
from subscriber.threads import run_in_thread
from subscriber.transaction.model import Event

__all__ = ["RelayLog"]

_log = logging.getLogger(__name__)

_LOCK: Final = "lock"
_WRONG: Final = "wrong"
_LARGEST: Final = 64 * 1024**2
_AT_ONCE: Final = 1024**2
_HINT: Final = "make room there, or set relay_log to a directory that belongs to the user who runs this"


class RelayLog:
    """The relay log of one subscription. One process at a time.

    Args:
        directory: the setting ``relay_log``.
        size: the setting ``relay_log_size``.
        key: names the subscription among all that may use the same directory.

    Attributes:
        directory: that of this subscription.
        recent: what need not be read from disk.
        segments: oldest first; none: there is no relay log yet.
        end: everything up to there is durable here.
        last_change: the last transaction or other event up to there ends here or before.
        known: the target has everything up to there.
        damage: why what is there cannot be used; then there are no segments.
        failure: why nothing more is written; it is raised to the reader after the last group.
        diverged: whether the failure is that groups which are not read yet must not be: the publisher does not have their changes any more.
        changed: set when one of these changed, and then replaced.
    """

    def __init__(self, directory: str, size: int, key: str) -> None:
        self._base = Path(os.path.realpath(directory))
        self.directory = self._base / directory_name(key)
        self.limit = size
        self._key = key
        self._segment_size = min(size // 8, _LARGEST)
        self._lock: int | None = None
        self._descriptor: int | None = None
        self._written = self._unsure = 0
        self._relations, self._group = Descriptions(), Descriptions()
        self._xid = 0
        self._turn = asyncio.Lock()
        self._starved = self._stopped = False
        self.recent = RecentGroups()
        self.segments: list[Segment] = []
        self.end = self.known = self.last_change = INVALID_LSN
        self.damage: DataLossError | None = None
        self.failure: SubscriberError | None = None
        self.diverged = False
        self.changed = asyncio.Event()

    def notify(self) -> None:
        """Wake those who wait for a change."""
        event, self.changed = self.changed, asyncio.Event()
        event.set()

    @property
    def size(self) -> int:
        """Bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    @property
    def full(self) -> bool:
        """Whether receiving must wait until a segment is removed."""
        return self.size >= self.limit

    @property
    def session(self) -> RecordedSession:
        """The session of the last segment."""
        return self.segments[-1].session

    # --- open

    async def open(self) -> None:
        """Open the relay log that is there. A torn end is not read. Before :attr:`end` is acknowledged, :meth:`rewind` must be called.

        Raises:
            ConfigurationError: another process uses it, or it is of another subscription.
            DataLossError: the publisher sent a wrong LSN.
            SpoolError: the directory cannot be read or written, or is not private to this user.
        """
        await run_in_thread(self._open, self._stop)

    async def close(self) -> None:
        """Close the files, and unlock the directory. Idempotent."""
        await run_in_thread(self._close)

    def _close(self) -> None:
        for descriptor in (self._descriptor, self._lock):
            if descriptor is not None:
                os.close(descriptor)
        self._descriptor = self._lock = None

    def _stop(self) -> None:
        self._stopped = True

    def _open(self) -> None:
        for path in (self._base, self.directory):
            private_directory(path, "relay log", "relay_log")
        with self._failing("lock"):
            self._lock = os.open(self.directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigurationError(
                f'another process uses the relay log "{self.directory}"', hint="stop it, or set another relay_log for this one"
            ) from None
        with self._failing("read"), contextlib.suppress(FileNotFoundError):
            raise DataLossError((self.directory / _WRONG).read_text(), hint="start over with a new copy; drop removes this relay log")
        with self._failing("read"):
            try:
                found = find_segments(self.directory, self._key, lambda: self._stopped)
            except DataLossError as error:
                # it does not matter if the slot still has everything after the target's position
                self.damage = error
            else:
                self.segments, self.end, self._relations, self._xid = found.segments, found.end, found.relations, found.xid
                self.last_change = found.last_change
                if self.segments:
                    self._unsure, self._written = found.unsure, self.segments[-1].size
                    self._descriptor = os.open(self.segments[-1].path, os.O_WRONLY | os.O_CLOEXEC)
            for path in (self._base, self.directory):
                sync_directory(path)
            with contextlib.suppress(PermissionError):
                sync_directory(self._base.parent)

    def _path(self, number: int) -> Path:
        return self.directory / f"{number:012d}{SUFFIX}"

    # --- compare with the target

    def holds(self, lsn: Lsn) -> bool:
        """Whether everything after this LSN, up to :attr:`end`, is here.

        Raises:
            DataLossError: a segment after it is missing, or the relay log cannot be used.
        """
        if self.damage is not None:
            raise self.damage
        if not self.segments or not self.segments[0].base <= lsn <= self.end:
            return False
        needed = [one for one, following in pairwise(self.segments) if following.base > lsn] + self.segments[-1:]
        for before, after in pairwise(needed):
            if after.number != before.number + 1:
                raise damaged(self._path(before.number + 1), "the file is missing")
        return True

    async def begin(self, session: RecordedSession) -> None:
        """Begin an empty relay log at ``session.start_lsn``. What is there is removed.

        Raises:
            SpoolError: the directory cannot be written.
        """

        def work() -> None:
            numbers = segment_numbers(self.directory)
            for number in reversed(numbers):
                self._path(number).unlink(missing_ok=True)
            self.segments, self.damage = [], None
            self._relations = Descriptions()
            self.end = self.last_change = session.start_lsn
            self.recent.clear()
            self._add(max(numbers, default=0) + 1, replace(session, relay_of=self._key))

        with self._failing("write"):
            await run_in_thread(work)
        self.notify()

    async def condemn(self, error: SubscriberError) -> None:
        """Note that the publisher sent a wrong LSN, which may be stored here and in the target. Every later start fails."""
        try:
            await run_in_thread(lambda: os.close(create_file(self.directory / _WRONG, str(error).encode())))
        except OSError as failure:
            _log.error('could not note in the relay log "%s" that it must not be used any more: %s', self.directory, failure.strerror)

    # --- write

    async def follow(self, session: RecordedSession) -> None:
        """Note the session that the next groups come from, with a new segment if the server is another one.

        Raises:
            SpoolError: it cannot be written.
        """
        known = self.session
        if (known.server_version, known.timeline) != (session.server_version, session.timeline):
            async with self._turn:
                with self._failing("write"):
                    await run_in_thread(lambda: self._rotate(session))
            self.notify()

    async def append(
        self, payloads: Sequence[bytes], moment: int, end: Lsn | None = None, events: Sequence[Event] | None = None, held: int = 0
    ) -> None:
        """Write a record of messages. With ``end``, the group is complete: return when it is durable.

        A group has a single record, or one large transaction: a record with the messages before its changes, some with changes only, and
        one with the messages after them.

        Args:
            payloads: the messages; none: nothing was sent up to ``end``.
            moment: when the publisher sent them.
            end: everything up to there is complete then. None: the transaction continues.
            events: of the complete group, if it may stay in memory for the reader.
            held: bytes that they take.

        Raises:
            SpoolError: it cannot be written. What was written of the group is cut off.
        """

        def work() -> tuple[Segment, int]:
            last = self.segments[-1]
            if self._written == last.size >= self._segment_size:
                last = self._rotate(last.session)
            start = last.size
            records = [encode_record(MESSAGES, moment, messages_content(payloads))] if payloads else []
            self._group.read(payloads)
            if end is not None:
                records.append(encode_record(END, moment, end.to_bytes(8)))
            assert self._descriptor is not None
            self._written = write_file(self._descriptor, b"".join(records), self._written)
            crash_points.reached("relay.written")
            if end is not None:
                sync_file(self._descriptor, last.path)
                crash_points.reached("relay.synced")
                last.size, self.end = self._written, end
                self.last_change = end if payloads else self.last_change
                self._relations.update(self._group)
                self._group = Descriptions()
                self._xid = first_xid(payloads) or self._xid
            return last, start

        async with self._turn:
            self._starved = True
            try:
                with self._failing("write"):
                    last, start = await run_in_thread(work)
                self._starved = False
                if end is not None and events is not None:
                    self.recent.add(Group(last, start, last.size, end, moment, events, held))
            except SubscriberError:
                # after a failed sync it can be read, although it is not on disk
                with contextlib.suppress(OSError):
                    await run_in_thread(self._cut)
                raise
            finally:
                # it may be complete although this was cancelled
                self.notify()

    async def rewind(self) -> None:
        """Cut off what was written since the last complete group, and ensure that everything before it is durable.

        Raises:
            SpoolError: it cannot be done.
        """

        def work() -> None:
            self._cut()
            last = self.segments[-1]
            assert self._descriptor is not None
            if self._unsure < last.size:
                # to sync it is not enough: if an earlier sync failed, its pages count as written
                with last.path.open("rb") as file:
                    file.seek(self._unsure)
                    while self._unsure < last.size and (data := file.read(min(_AT_ONCE, last.size - self._unsure))):
                        self._unsure = write_file(self._descriptor, data, self._unsure)
                sync_file(self._descriptor, last.path)

        async with self._turn:
            with self._failing("write"):
                await run_in_thread(work)

    def _cut(self) -> None:
        self._written, self._group = self.segments[-1].size, Descriptions()
        assert self._descriptor is not None
        os.ftruncate(self._descriptor, self._written)

    async def acknowledge(self, lsn: Lsn) -> None:
        """Note that the target has everything up to an LSN. Segments that are not needed any more are removed.

        Raises:
            SpoolError: they cannot be removed.
        """
        self.known = max(self.known, lsn)
        async with self._turn:
            # the last segment can be larger than the limit, if a transaction is, or than the disk
            last = self.segments[-1]
            stuck = (self.full or self._starved) and self.known >= self.end > last.base and self._written == last.size
            if not self._unneeded() and not stuck:
                return

            def work() -> None:
                # first, because a new segment may need their room
                self._remove()
                if stuck:
                    self._rotate(last.session)
                    self._starved = False
                    self._remove()

            with self._failing("remove a segment of"):
                await run_in_thread(work)
        self.notify()

    def _remove(self) -> None:
        unneeded = self._unneeded()
        for segment in unneeded:
            segment.path.unlink(missing_ok=True)
            crash_points.reached("relay.removed")
        self.segments = [segment for segment in self.segments if segment not in unneeded]

    def _unneeded(self) -> Sequence[Segment]:
        return [one for one, following in pairwise(self.segments) if following.base <= self.known]

    def _rotate(self, session: RecordedSession) -> Segment:
        assert self._written == self.segments[-1].size
        return self._add(self.segments[-1].number + 1, replace(session, start_lsn=self.end, relay_of=self._key))

    def _add(self, number: int, session: RecordedSession) -> Segment:
        path = self._path(number)
        base = self.end
        begin, commit = Begin(base, 0, self._xid), Commit(0, base, base, 0)
        known = messages_content([encode(begin), *self._relations.all.values(), encode(commit)])
        head = [encode_record(SESSION, 0, session.to_json()), *([encode_record(MESSAGES, 0, known)] if self._relations.all else [])]
        content = b"".join([MAGIC, *head, encode_record(END, 0, base.to_bytes(8))])
        segment, descriptor = Segment(number, path, session, len(content), len(content)), create_file(path, content)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._written, self._unsure = descriptor, segment.size, segment.size
        self.segments.append(segment)
        crash_points.reached("relay.segment")
        return segment

    @contextlib.contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise DataLossError(
                f'the relay log "{self.directory}" was removed or replaced while it was in use',
                hint="start again: the start says whether changes are missing, and what to do",
            ) from error
        except OSError as error:
            raise SpoolError(f'could not {action} the relay log "{self.directory}": {os.strerror(error.errno or 0)}', hint=_HINT) from error
