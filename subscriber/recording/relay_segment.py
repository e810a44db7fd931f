"""The segments of a relay log: their files, and what their messages describe."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO, ClassVar, Final

from subscriber.errors import DataLossError, ProtocolError, SpoolError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Tag
from subscriber.recording.file import MAGIC, SESSION, RecordedSession, RecordingRecord, read_records
from subscriber.recording.file import read_heads as file_heads

__all__ = [
    "SUFFIX",
    "Descriptions",
    "Segment",
    "create_file",
    "damaged",
    "first_xid",
    "read_head",
    "read_heads",
    "read_segment",
    "sync_directory",
    "sync_file",
    "write_file",
]

SUFFIX: Final = ".relay"
_DESCRIPTIONS: Final = frozenset({int(Tag.RELATION), int(Tag.TYPE)})
_STREAM_START, _STREAM_STOP = int(Tag.STREAM_START), int(Tag.STREAM_STOP)
_NOTED: Final = _DESCRIPTIONS | {_STREAM_START, _STREAM_STOP}


@dataclass(slots=True)
class Segment:
    """One file.

    Attributes:
        first: offset of the first record.
        number: names the file.
        path: of the file.
        session: what it begins with; ``start_lsn``: everything up to there is in earlier segments.
        size: bytes that are durable.
        begin: where its first group of its own begins; 0: it was not read yet.
    """

    first: ClassVar[int] = len(MAGIC)

    number: int
    path: Path
    session: RecordedSession
    size: int = 0
    begin: int = 0

    @property
    def base(self) -> Lsn:
        """Everything up to there is in earlier segments."""
        return self.session.start_lsn


def damaged(path: Path, what: str) -> DataLossError:
    """The error for a segment that cannot be read."""
    return DataLossError(
        f'segment "{path}" of the relay log is damaged: {what}',
        hint="restore the file if you can; else changes are lost: start over with a new copy",
    )


class _Durable:
    """The durable part of a segment, for reading."""

    def __init__(self, file: BinaryIO, left: int) -> None:
        self._file = file
        self._left = left

    def read(self, size: int, /) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


def read_segment(segment: Segment, offset: int) -> Iterator[RecordingRecord]:
    """Read the durable records of a segment from an offset on; 0: from the first one.

    Raises:
        DataLossError: one is damaged, or the file is missing.
        SpoolError: the file cannot be read.
    """
    offset = offset or segment.first
    with _reading(segment) as file:
        file.seek(offset)
        yield from read_records(_Durable(file, segment.size - offset), offset)


def read_heads(segment: Segment, offset: int) -> Iterator[tuple[bytes, int, int, int]]:
    """Read the heads of the durable records of a segment from an offset on, see :func:`subscriber.recording.file.read_heads`.

    Raises:
        DataLossError, SpoolError: see :func:`read_segment`.
    """
    with _reading(segment) as file:
        yield from file_heads(file, offset or segment.first, segment.size)


@contextlib.contextmanager
def _reading(segment: Segment) -> Iterator[BinaryIO]:
    try:
        with segment.path.open("rb") as file:
            yield file
    except FileNotFoundError:
        raise damaged(segment.path, "the file is missing") from None
    except ProtocolError as error:
        raise damaged(segment.path, str(error)) from None
    except OSError as error:
        raise SpoolError(
            f'could not read "{segment.path}": {os.strerror(error.errno or 0)}', hint="check the disk and the permissions"
        ) from error


def read_head(path: Path) -> tuple[RecordedSession, int]:
    """Read the session that a segment begins with, and the size of its file.

    Raises:
        DataLossError: it does not begin with one.
    """
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ValueError
            record = next(read_records(file, len(MAGIC)))
            if record.kind != SESSION:
                raise ValueError
            return RecordedSession.from_json(record.content), os.fstat(file.fileno()).st_size
    except (ValueError, ProtocolError, StopIteration):
        raise damaged(path, "it does not begin with a session") from None


def create_file(path: Path, content: bytes) -> int:
    """Create a file that is either complete or not there. Return its descriptor."""
    unfinished = path.with_suffix(".new")
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        write_file(descriptor, content, 0)
        os.fdatasync(descriptor)
        unfinished.rename(path)
        sync_directory(path.parent)
    except OSError:
        os.close(descriptor)
        for name in (unfinished, path):
            name.unlink(missing_ok=True)
        raise
    return descriptor


class Descriptions:
    """The relations and types that messages describe, in the form that they have outside of streamed blocks.

    Attributes:
        all: the last one of each, by tag and oid, in the order in which they came.
    """

    def __init__(self) -> None:
        self.all: dict[bytes, bytes] = {}
        self._streamed = False

    def read(self, payloads: Sequence[bytes]) -> None:
        """Take the messages that follow those before."""
        if _NOTED.isdisjoint(map(itemgetter(0), payloads)):
            return
        for payload in payloads:
            tag = payload[0]
            if tag in _NOTED:
                if tag in _DESCRIPTIONS:
                    self._note(payload[:1] + payload[5:] if self._streamed else payload)
                else:
                    self._streamed = tag == _STREAM_START

    def describe(self, records: Sequence[bytes], *, streamed: bool) -> None:
        """Take the records of a transaction."""
        if not _DESCRIPTIONS.isdisjoint(map(itemgetter(0), records)):
            for record in records:
                if record[0] in _DESCRIPTIONS:
                    self._note(record[:1] + record[5:] if streamed else record)

    def update(self, later: Descriptions) -> None:
        """Take those of messages that follow."""
        for payload in later.all.values():
            self._note(payload)

    def _note(self, payload: bytes) -> None:
        self.all.pop(payload[:5], None)
        self.all[payload[:5]] = payload


def first_xid(payloads: Sequence[bytes]) -> int:
    """The id of the first transaction; 0 if the messages begin with something else."""
    first = payloads[0] if payloads else b""
    if first[:1] == b"B":
        return int.from_bytes(first[17:21])
    if first[:1] == b"b":
        return int.from_bytes(first[25:29])
    return int.from_bytes(first[1:5]) if first[:1] == b"S" else 0


def sync_directory(path: Path) -> None:
    """A new file survives a crash of the machine once its directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(descriptor: int, data: bytes, offset: int) -> int:
    """Write everything. Return the offset after it."""
    view = memoryview(data)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view = view[count:]
        offset += count
    return offset


def sync_file(descriptor: int, path: Path) -> None:
    """Wait until a file is on disk under its name."""
    os.fdatasync(descriptor)
    # a file without a name can be written as well
    if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
        raise FileNotFoundError
