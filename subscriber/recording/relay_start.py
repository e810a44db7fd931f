"""What a start finds in the directory of a relay log."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from subscriber.errors import ConfigurationError, ProtocolError
from subscriber.protocol.lsn import INVALID_LSN, Lsn
from subscriber.recording.file import END, MESSAGES, end_lsn, messages, read_records
from subscriber.recording.relay_segment import SUFFIX, Descriptions, Segment, damaged, first_xid, read_head

__all__ = ["Found", "find_segments", "segment_numbers"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Found:
    """A relay log.

    Attributes:
        segments: oldest first. A torn end does not count.
        end: everything up to there is in them.
        unsure: where the last group begins. It may not be on disk, if a process was killed, or its sync failed.
        relations: that are known at the end.
        xid: of some transaction before the end.
        last_change: the last group that has messages ends there.
    """

    segments: list[Segment] = field(default_factory=list)
    end: Lsn = INVALID_LSN
    unsure: int = 0
    relations: Descriptions = field(default_factory=Descriptions)
    xid: int = 0
    last_change: Lsn = INVALID_LSN


def segment_numbers(directory: Path) -> list[int]:
    """The numbers of the segments in a directory."""
    return sorted(int(path.stem) for path in directory.glob(f"*{SUFFIX}") if path.stem.isdecimal())


def find_segments(directory: Path, key: str, stopped: Callable[[], bool]) -> Found:
    """Look at a directory, and remove what crashes have left there. It blocks.

    Args:
        directory: of the relay log.
        key: names the subscription.
        stopped: whether the caller does not want the result any more.

    Raises:
        ConfigurationError: it is of another subscription.
        DataLossError: it is damaged.
        OSError: it cannot be read.
    """
    for path in directory.glob("*.new"):
        # a crash ended its creation
        path.unlink()
    segments = [_head(directory / f"{number:012d}{SUFFIX}", number, key) for number in segment_numbers(directory)]
    if not segments:
        return Found()
    found = _scan(segments, stopped)
    if found.end == segments[-1].base and len(segments) > 1:
        # it is left over if its creation failed after it got its name: then the one before it has groups after its base
        before = _scan(segments[:-1], stopped)
        if before.end > segments[-1].base:
            segments[-1].path.unlink()
            found = before
    last = found.segments[-1]
    if found.end == INVALID_LSN:
        raise damaged(last.path, "it has no group")
    torn = last.path.stat().st_size - last.size
    if torn:
        # they are cut off when receiving begins: only then is it known that the publisher has not forgotten them
        _log.warning('the relay log ends at %s: the last %d bytes of "%s" are not complete', found.end, torn, last.path)
    return found


def _scan(segments: list[Segment], stopped: Callable[[], bool]) -> Found:
    """Find the end of the last segment."""
    found = Found(segments)
    last, group, empty = segments[-1], Descriptions(), True
    size = last.first
    with last.path.open("rb") as file, contextlib.suppress(ProtocolError):
        file.seek(last.first)
        for record in read_records(file, last.first):
            if record.kind == MESSAGES:
                payloads = messages(record)
                group.read(payloads)
                empty = False
                found.xid = first_xid(payloads) or found.xid
            elif record.kind == END:
                found.relations.update(group)
                group = Descriptions()
                last.begin = last.begin or record.end
                found.end, found.unsure, size = end_lsn(record), size, record.end
                if not empty or not found.last_change:
                    # the first one ends where the segment begins
                    found.last_change = found.end
                empty = True
            if stopped():
                break
    last.size = size
    return found


def _head(path: Path, number: int, key: str) -> Segment:
    session, size = read_head(path)
    if session.relay_of != key:
        raise ConfigurationError(
            f'the relay log "{path.parent}" is of another subscription: {session.relay_of or "none"}',
            hint="set another relay_log, or remove that directory if its subscription does not exist any more",
        )
    return Segment(number, path, session, size)
