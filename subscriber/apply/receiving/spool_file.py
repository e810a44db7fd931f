"""The file of one spilled transaction. It blocks; :mod:`subscriber.apply.receiving.spool` calls it from threads.

A file is a sequence of blocks of about :data:`BLOCK_SIZE` bytes (more if a single record is larger). Each block has a header (number of
records, length of the rest, CRC32), the length of every record, and the records. A block that differs in any way from what was written
is a SpoolError; content is never interpreted.

The offset of each block is kept in memory, which takes some bytes per 256 kB. So the file can be cut at any record (at most one block is
rewritten), and a changed length is detected. The CRC starts from the number of the block's first record, so that a misplaced block is
detected as well. There is one CRC per block and not per record, because a row is then read in a fifth of the time (measured).

Rejected: pickle and similar formats (reading them can run code).
"""

from __future__ import annotations

import contextlib
import errno
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from operator import itemgetter
from pathlib import Path
from struct import Struct, pack, unpack_from
from typing import Final

from subscriber import crash_points
from subscriber.errors import SpoolError, connection_hint

__all__ = ["BLOCK_SIZE", "SpoolFile", "blocks", "spool_failure"]

BLOCK_SIZE: Final = 256 * 1024
"""A block is closed at so many bytes of records."""

_LARGE: Final = 4 * BLOCK_SIZE
"""A larger block holds a large record, which is written and read without another copy."""
_HEADER: Final = Struct(">III")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def spool_failure(action: str, path: Path, error: OSError, setting: str = "spool_directory") -> SpoolError:
    """Make the error with a hint for the user."""
    if error.errno in _FULL:
        hint = f"make room in {path.parent}, or set {setting} to a place that has more"
    else:
        hint = f"set {setting} to a directory that belongs to the user who runs this, and that no other user can write to"
    said = os.strerror(error.errno or 0)
    return SpoolError(f'could not {action} "{path}": {said}', hint=connection_hint(said, hint))


def _damaged(path: Path, what: str) -> SpoolError:
    return SpoolError(
        f'spool file "{path}" is damaged: {what}', hint="check the disk, and whether another program writes there; then start again"
    )


def blocks(records: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    start = size = 0
    for index, record in enumerate(records):
        size += len(record)
        if size >= BLOCK_SIZE:
            yield records[start : index + 1]
            start, size = index + 1, 0
    if start < len(records):
        yield records[start:]


def _encode(first: int, records: Sequence[bytes]) -> list[bytes]:
    """Encode a block, in pieces."""
    pieces = [pack(f">{len(records)}I", *map(len, records)), *records]
    length = sum(map(len, pieces))
    if length <= _LARGE:
        pieces = [b"".join(pieces)]
    return [_HEADER.pack(len(records), length, _checksum(first, len(records), length, pieces)), *pieces]


def _checksum(first: int, number: int, length: int, pieces: Iterable[bytes | memoryview]) -> int:
    checksum = zlib.crc32(pack(">QII", first, number, length))
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return checksum


def _write(descriptor: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written


def _read(descriptor: int, length: int, offset: int) -> bytes:
    """Read so many bytes; fewer only at the end of the file."""
    pieces = []
    while length and (piece := os.pread(descriptor, length, offset)):
        pieces.append(piece)
        length -= len(piece)
        offset += len(piece)
    return b"".join(pieces)


class SpoolFile:
    """One transaction's file. It blocks. One call at a time.

    Attributes:
        path: of the file.
        count: number of records.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self._made = False
        self._end = 0
        # for each block, the number of its first record and its offset
        self._index: list[tuple[int, int]] = []

    @property
    def blocks(self) -> int:
        return len(self._index)

    @contextlib.contextmanager
    def _opened(self, action: str, flags: int = 0) -> Iterator[int]:
        try:
            descriptor = os.open(self.path, _OPEN | flags, 0o600)
            try:
                yield descriptor
            finally:
                os.close(descriptor)
        except OSError as error:
            raise spool_failure(action, self.path, error) from error

    def append(self, records: Sequence[bytes]) -> None:
        """Append one block. If this fails, the file is unchanged.

        Raises:
            SpoolError: disk full, no permission.
        """
        with self._opened("write spool file", 0 if self._made else os.O_CREAT | os.O_EXCL) as descriptor:
            self._made = True
            try:
                self._append(descriptor, records)
            except OSError:
                os.ftruncate(descriptor, self._end)
                raise

    def _append(self, descriptor: int, records: Sequence[bytes]) -> None:
        end = self._end
        for piece in _encode(self.count, records):
            _write(descriptor, piece, end)
            end += len(piece)
        crash_points.reached("spool.written")
        self._index.append((self.count, self._end))
        self._end = end
        self.count += len(records)

    def truncate(self, kept: int) -> None:
        """Keep only the first records.

        Raises:
            SpoolError: the file cannot be read, or is damaged.
        """
        if kept >= self.count:
            return
        with self._opened("truncate spool file") as descriptor:
            while self._index and self._index[-1][0] >= kept:
                self.count, self._end = self._index.pop()
            rest: Sequence[bytes] = ()
            if self.count > kept:
                rest = self._read_block(descriptor, len(self._index) - 1)
                self.count, self._end = self._index.pop()
                rest = rest[: kept - self.count]
            os.ftruncate(descriptor, self._end)
            crash_points.reached("spool.truncated")
            if rest:
                self._append(descriptor, rest)

    def read(self, block: int) -> list[bytes]:
        """The records of one block.

        Raises:
            SpoolError: the file cannot be read, or is damaged.
        """
        with self._opened("read spool file") as descriptor:
            size = os.fstat(descriptor).st_size
            if size != self._end:
                raise _damaged(self.path, f"it has {size} bytes where {self._end} were written")
            records = self._read_block(descriptor, block)
            crash_points.reached("spool.read")
            return records

    def read_from(self, start: int) -> list[bytes]:
        """Read records from number ``start`` up to the end of a block. Empty after the last one.

        Raises:
            SpoolError: the file cannot be read, or is damaged.
        """
        if start >= self.count:
            return []
        block = bisect_right(self._index, start, key=itemgetter(0)) - 1
        return self.read(block)[start - self._index[block][0] :]

    def _read_block(self, descriptor: int, block: int) -> list[bytes]:
        first, offset = self._index[block]
        next_first, end = self._index[block + 1] if block + 1 < len(self._index) else (self.count, self._end)
        count, size = next_first - first, end - offset - _HEADER.size
        # for a large block, first read the lengths, and then each record
        ahead = _HEADER.size + (size if size <= _LARGE else 4 * count)
        data = _read(descriptor, ahead, offset)
        if len(data) < ahead:
            raise _damaged(self.path, f"it ends at byte {offset + len(data)}")
        number, length, checksum = _HEADER.unpack_from(data)
        body = memoryview(data)[_HEADER.size :]
        damaged = _damaged(self.path, f"wrong checksum in the block at byte {offset}")
        if number != count or length != size:
            raise damaged
        lengths = unpack_from(f">{number}I", body)
        if size > _LARGE:
            if sum(lengths) != size - len(body):
                raise damaged
            starts = accumulate(lengths, initial=offset + ahead)
            records = [_read(descriptor, stop - start, start) for start, stop in pairwise(starts)]
            if checksum != _checksum(first, number, length, (body, *records)):
                raise damaged
            return records
        if checksum != _checksum(first, number, length, (body,)):
            raise damaged
        starts = accumulate(lengths, initial=_HEADER.size + 4 * number)
        return [data[start:stop] for start, stop in pairwise(starts)]

    def unlink(self) -> None:
        """Remove the file. Idempotent."""
        try:
            self.path.unlink(missing_ok=True)
            crash_points.reached("spool.removed")
        except OSError as error:
            raise spool_failure("remove spool file", self.path, error) from error
