"""The messages of pgoutput, protocol 1 to 4. Each has one class under PostgreSQL's own name.

Source: PostgreSQL manual, Logical Replication Message Formats. Times are integers, microseconds since the PostgreSQL epoch, because a
server may send times that a datetime cannot hold (:func:`subscriber.protocol.lsn.datetime_from_postgres` converts them). ``xid`` is
None outside a streamed block and the (sub)transaction's id inside one. Names are text; bytes that are not UTF-8 are kept with
``surrogateescape``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Final, Literal

from subscriber.protocol.lsn import Lsn

__all__ = [
    "BINARY",
    "NULL",
    "TEXT",
    "UNCHANGED",
    "Begin",
    "BeginPrepare",
    "Column",
    "Commit",
    "CommitPrepared",
    "Delete",
    "Insert",
    "LogicalMessage",
    "Message",
    "Origin",
    "Prepare",
    "Relation",
    "ReplicaIdentity",
    "RollbackPrepared",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Tag",
    "Truncate",
    "TruncateOption",
    "TupleData",
    "Type",
    "Update",
]


class Tag(IntEnum):
    """First byte of every message."""

    BEGIN = ord("B")
    COMMIT = ord("C")
    ORIGIN = ord("O")
    RELATION = ord("R")
    TYPE = ord("Y")
    INSERT = ord("I")
    UPDATE = ord("U")
    DELETE = ord("D")
    TRUNCATE = ord("T")
    MESSAGE = ord("M")
    STREAM_START = ord("S")
    STREAM_STOP = ord("E")
    STREAM_COMMIT = ord("c")
    STREAM_ABORT = ord("A")
    BEGIN_PREPARE = ord("b")
    PREPARE = ord("P")
    COMMIT_PREPARED = ord("K")
    ROLLBACK_PREPARED = ord("r")
    STREAM_PREPARE = ord("p")


NULL: Final = ord("n")
UNCHANGED: Final = ord("u")
TEXT: Final = ord("t")
BINARY: Final = ord("b")

ReplicaIdentity = Literal["d", "n", "f", "i"]
"""``pg_class.relreplident``: default, nothing, full, index."""


class TupleData:
    """One row as received: a kind byte and raw bytes for each column, in the order of the Relation's columns.

    Attributes:
        kinds: one byte per column: ``n`` null, ``u`` unchanged TOAST (not sent), ``t`` text, ``b`` binary.
        values: one entry per column: the raw bytes, or None for ``n`` and ``u``.

    A plain class with slots, because one is built per row.
    """

    __slots__ = ("kinds", "values")

    def __init__(self, kinds: bytes, values: list[bytes | None]) -> None:
        self.kinds = kinds
        self.values = values

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TupleData):
            return NotImplemented
        return self.kinds == other.kinds and self.values == other.values

    def __hash__(self) -> int:
        return hash((self.kinds, tuple(self.values)))

    def __repr__(self) -> str:
        # without the values: a repr ends up in logs and tracebacks
        return f"TupleData(kinds={self.kinds!r})"


@dataclass(frozen=True, slots=True)
class Begin:
    """``B``: a committed transaction starts. ``final_lsn`` is the LSN of its commit record."""

    final_lsn: Lsn
    commit_time: int
    xid: int


@dataclass(frozen=True, slots=True)
class Commit:
    """``C``. ``end_lsn`` is the position to acknowledge, from which a restart resumes."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """``O``: the transaction was itself replicated to the publisher from ``name``."""

    commit_lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a Relation. ``key`` says whether it is part of the replica identity."""

    name: str
    type_oid: int
    type_modifier: int
    key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """``R``: describes the rows of ``relation_id`` from here on. ``namespace`` is never empty (pg_catalog is empty on the wire)."""

    relation_id: int
    namespace: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Type:
    """``Y``: the name of a type that is not built in."""

    type_oid: int
    namespace: str
    name: str
    xid: int | None = None


class Insert:
    """``I``. It has plain slots because there is one per row."""

    __slots__ = ("new", "relation_id", "xid")
    __match_args__ = ("relation_id", "new")

    def __init__(self, relation_id: int, new: TupleData, xid: int | None = None) -> None:
        self.relation_id = relation_id
        self.new = new
        self.xid = xid

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Insert):
            return NotImplemented
        return (self.relation_id, self.new, self.xid) == (other.relation_id, other.new, other.xid)

    def __hash__(self) -> int:
        return hash((self.relation_id, self.new, self.xid))

    def __repr__(self) -> str:
        return f"Insert(relation_id={self.relation_id}, new={self.new!r}, xid={self.xid})"


class Update:
    """``U``. ``key`` is the old replica identity (``K``), ``old`` is the whole old row (``O``). At most one of them is set.

    In ``key``, columns outside the replica identity are placeholders of kind ``n``, not NULLs.
    """

    __slots__ = ("key", "new", "old", "relation_id", "xid")
    __match_args__ = ("relation_id", "key", "old", "new")

    def __init__(self, relation_id: int, key: TupleData | None, old: TupleData | None, new: TupleData, xid: int | None = None) -> None:
        self.relation_id = relation_id
        self.key = key
        self.old = old
        self.new = new
        self.xid = xid

    def _fields(self) -> tuple[object, ...]:
        return (self.relation_id, self.key, self.old, self.new, self.xid)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Update):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Update(relation_id={self.relation_id}, key={self.key!r}, old={self.old!r}, new={self.new!r}, xid={self.xid})"


class Delete:
    """``D``. Exactly one of ``key`` (``K``) and ``old`` (``O``) is set."""

    __slots__ = ("key", "old", "relation_id", "xid")
    __match_args__ = ("relation_id", "key", "old")

    def __init__(self, relation_id: int, key: TupleData | None, old: TupleData | None, xid: int | None = None) -> None:
        self.relation_id = relation_id
        self.key = key
        self.old = old
        self.xid = xid

    def _fields(self) -> tuple[object, ...]:
        return (self.relation_id, self.key, self.old, self.xid)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Delete):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())

    def __repr__(self) -> str:
        return f"Delete(relation_id={self.relation_id}, key={self.key!r}, old={self.old!r}, xid={self.xid})"


class TruncateOption(IntFlag):
    """Option bits of Truncate."""

    CASCADE = 1
    RESTART_IDENTITY = 2


@dataclass(frozen=True, slots=True)
class Truncate:
    """``T``: the relations were truncated together."""

    options: TruncateOption
    relation_ids: tuple[int, ...]
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """``M``: written by ``pg_logical_emit_message``. A non-transactional message is sent outside any transaction."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    """``S``: a block of changes of an in-progress transaction follows, up to StreamStop."""

    xid: int
    first_segment: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    """``E``."""


@dataclass(frozen=True, slots=True)
class StreamCommit:
    """``c``: the streamed transaction ``xid`` committed."""

    xid: int
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """``A``: the streamed transaction (``subxid == xid``) or one subtransaction of it aborted.

    ``abort_lsn`` and ``abort_time`` are sent if and only if ``streaming 'parallel'`` was requested.
    """

    xid: int
    subxid: int
    abort_lsn: Lsn | None = None
    abort_time: int | None = None


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    """``b``: a transaction that was prepared for two-phase commit starts."""

    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    """``P``."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    """``K``."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """``r``. There may be no Prepare before it: the transaction may have been prepared before two-phase was enabled for the slot."""

    flags: int
    prepare_end_lsn: Lsn
    rollback_end_lsn: Lsn
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    """``p``: the streamed transaction ``xid`` was prepared."""

    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: int
    gid: str


Message = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | CommitPrepared
    | RollbackPrepared
    | StreamPrepare
)
