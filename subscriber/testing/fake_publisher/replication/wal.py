"""The write-ahead log of the fake publisher, as far as logical decoding reads it.

Each record has the LSN of its first byte and of the byte after it, as on a server. A record of a transaction names the (sub)transaction
that wrote it, and its top transaction.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import TruncateOption
from subscriber.testing.fake_publisher.tables import RowValues, TableShape

__all__ = [
    "Abort",
    "Commit",
    "CommitPrepared",
    "DeleteRow",
    "EmittedMessage",
    "InsertRow",
    "Origin",
    "Prepare",
    "Record",
    "RollbackPrepared",
    "RowChange",
    "TruncateTables",
    "UpdateRow",
    "Wal",
    "WalContent",
]

_HEADER: Final = 24
_ALIGNMENT: Final = 8


@dataclass(frozen=True, slots=True)
class Origin:
    """The replication origin of a transaction, and its position there."""

    name: str
    lsn: Lsn
    time: int


@dataclass(frozen=True, slots=True)
class InsertRow:
    """A new row."""

    shape: TableShape
    new: RowValues


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """A changed row.

    Attributes:
        shape: of the table.
        old: the old row as the replica identity gives it: all of it, its key (``old_is_key``), or None.
        old_is_key: see above.
        new: the new row.
        unchanged: the columns whose TOASTed values did not change.
    """

    shape: TableShape
    old: RowValues | None
    old_is_key: bool
    new: RowValues
    unchanged: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeleteRow:
    """A deleted row; ``old`` as in :class:`UpdateRow`."""

    shape: TableShape
    old: RowValues | None
    old_is_key: bool


@dataclass(frozen=True, slots=True)
class TruncateTables:
    """A TRUNCATE."""

    shapes: tuple[TableShape, ...]
    options: TruncateOption


@dataclass(frozen=True, slots=True)
class EmittedMessage:
    """``pg_logical_emit_message``."""

    transactional: bool
    prefix: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Commit:
    """COMMIT of the top transaction, with the subtransactions that did not abort."""

    subxids: tuple[int, ...]
    time: int


@dataclass(frozen=True, slots=True)
class Abort:
    """ROLLBACK of a (sub)transaction, with its subtransactions."""

    subxids: tuple[int, ...]
    time: int


@dataclass(frozen=True, slots=True)
class Prepare:
    """PREPARE TRANSACTION."""

    gid: str
    subxids: tuple[int, ...]
    time: int


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """COMMIT PREPARED."""

    gid: str
    subxids: tuple[int, ...]
    time: int


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """ROLLBACK PREPARED."""

    gid: str
    subxids: tuple[int, ...]
    time: int


RowChange = InsertRow | UpdateRow | DeleteRow
WalContent = RowChange | TruncateTables | EmittedMessage | Commit | Abort | Prepare | CommitPrepared | RollbackPrepared


@dataclass(frozen=True, slots=True)
class Record:
    """One record.

    Attributes:
        start, end: its first byte, and the byte after it.
        xid: the (sub)transaction, or 0.
        top_xid: the top transaction, or 0.
        size: of the change in the memory of the reorder buffer.
        origin: of the transaction, or None.
        content: what happened.
    """

    start: Lsn
    end: Lsn
    xid: int
    top_xid: int
    size: int
    origin: Origin | None
    content: WalContent


class Wal:
    """All records, and the end of the log.

    Args:
        start: the LSN of the first record.

    Attributes:
        end: where the next record starts.
        start: where the first record starts.
    """

    def __init__(self, start: Lsn) -> None:
        self.end = start
        self.start = start
        self._records: list[Record] = []
        self._grown = asyncio.Event()

    def append(self, content: WalContent, *, xid: int = 0, top_xid: int = 0, origin: Origin | None = None) -> Record:
        """Write a record."""
        size = _size(content)
        end = Lsn(self.end + (_HEADER + size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT)
        record = Record(self.end, end, xid, top_xid, size, origin, content)
        self._records.append(record)
        self.end = end
        self.wake()
        return record

    def advance(self, size: int) -> None:
        """Write WAL that concerns no published table."""
        self.end = Lsn(self.end + size)
        self.wake()

    def wake(self) -> None:
        """Wake everyone who waits for :meth:`grown`."""
        self._grown.set()
        self._grown = asyncio.Event()

    @property
    def grown(self) -> asyncio.Event:
        """An event that is set when the log grows, or :meth:`wake` is called."""
        return self._grown

    def place(self, lsn: Lsn) -> int:
        """The number of the first record that starts at ``lsn`` or later."""
        return bisect_left(self._records, lsn, key=lambda record: record.start)

    def since(self, lsn: Lsn) -> Sequence[Record]:
        """The records that start at ``lsn`` or later."""
        return self._records[self.place(lsn) :]

    def __getitem__(self, place: int) -> Record:
        return self._records[place]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records)


def _size(content: WalContent) -> int:
    match content:
        case InsertRow():
            return _row_size(content.new)
        case UpdateRow():
            return _row_size(content.new) + _row_size(content.old)
        case DeleteRow():
            return _row_size(content.old)
        case EmittedMessage():
            return len(content.prefix) + len(content.content) + 32
        case Prepare() | CommitPrepared() | RollbackPrepared():
            return 64 + len(content.gid) + 4 * len(content.subxids)
        case Commit() | Abort():
            return 16 + 4 * len(content.subxids)
        case TruncateTables():
            return 16 + 4 * len(content.shapes)


def _row_size(row: Sequence[bytes | None] | None) -> int:
    # as SizeofHeapTupleHeader and the struct of a change, about
    return 0 if row is None else 80 + sum(4 + len(value) for value in row if value is not None)
