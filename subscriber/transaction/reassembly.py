"""Assemble messages to whole transactions: streams, aborted subtransactions, two-phase commit, and spilling.

Purpose
    A publisher sends small transactions whole (``B`` … ``C``, or ``b`` … ``P`` when prepared). It sends large ones in chunks
    (``S`` … ``E``) while they are still running; chunks interleave with everything else. This module assembles transactions and returns
    them in the order in which the publisher committed or prepared them, without the changes of aborted subtransactions. It does no IO:
    if a transaction is too large for memory, the caller takes its records (:meth:`Reassembly.spill`), and carries out the orders for
    them that :meth:`Reassembly.feed` returns.

States
    Between two calls at most one block is open (``BETWEEN``: none). Any number of streamed transactions exist beside it, each from its
    first ``S`` to its ``c``, ``p`` or ``A``. ``-`` is a ProtocolError::

                          BETWEEN          TRANSACTION   PREPARE       CHUNK
        B                 TRANSACTION      -             -             -
        C                 -                event         -             -
        b                 PREPARE          -             -             -
        P                 event, empty     -             event         -
        S                 CHUNK            -             -             -
        E                 -                -             -             BETWEEN
        c, p              event            -             -             -
        K, r              event, dropped   -             -             -
        A, unknown        nothing          nothing       nothing       nothing
        A, known          dropped          -             -             -
        O                 -                kept          kept          kept          right after B, b or S only
        I U D T R Y       -                record        record        record
        M transactional   -                record        record        record
        M other           event            event         event         event

    The event of ``C`` and of ``P`` closes the block. After a ProtocolError the object can only be :meth:`Reassembly.reset`.

Where messages can occur (from pgoutput.c and reorderbuffer.c; the facts on ``A`` and ``M`` were also tested on 16.14 and 18.4)
    * ``O`` is written together with the ``B``, ``b`` or first ``S`` before it, if the origin still has a name. It never has an xid.
    * ``A`` is written when the abort record is decoded, hence between blocks. PostgreSQL 18.4 also sends it for transactions that it
      never streamed, even with streaming off. So an ``A`` for an unknown transaction is not an error.
    * A transaction that was prepared before the stream began stays in the reorder buffer until its ``K`` or ``r``. If memory gets short,
      it is streamed from there as if it were still running (``ReorderBufferLargestStreamableTopTXN``; tested on 15 to 18). Its ``K`` or
      ``r`` ends such a stream, not a ``p`` or ``A``. The stream is not needed, because its changes were received before. (Those of a
      transaction prepared before two-phase was enabled were not, but it has its ``p`` before the ``K``.)
    * ``P`` without ``b``: PostgreSQL 18 sends it for a prepared transaction without changes (``SELECT … FOR UPDATE``; tested on 18.4),
      because ReorderBufferPrepare sends the PREPARE that ReorderBufferReplay left out. It gives a transaction without records. Once
      that is prepared in the target, its ``K`` or ``r`` is like any other, also after a restart. 15 to 17 send only the ``K`` or ``r``
      of such a transaction (tested on 15.18, 16.14 and 17.10).
    * A non-transactional ``M`` is written when its record is decoded, hence between blocks and without an xid. Its LSN may be past
      those of the next chunk. It is accepted inside a block too, where it would be harmless.
    * A transactional ``M`` in a chunk carries the *top* xid even if a subtransaction emitted it. It is removed with an aborted
      subtransaction if a row of that subtransaction precedes it. A message before the first row of its subtransaction survives the
      abort: the publisher does not send which subtransaction it belongs to.

Aborted subtransactions
    The reorder buffer sends a transaction's changes in WAL order, and subtransactions nest. Hence all records between the first record
    of a subtransaction and its abort belong to it or to its children. So it is exact to drop *everything from its first record on*.
    For this the position of every subxid's first record is kept, and a cut removes the subxids that start after it. An abort lists the
    children first and the parent last. The one that starts first cuts most; the others find nothing more. ``A`` with ``subxid == xid``
    ends the whole transaction.

    An abort may be missing (:mod:`subscriber.apply.receiving.rolled_back`). So a transaction names the subtransactions that are left in it.

    Relation and Type are records like the others, and are removed with the subtransaction in which they were sent. That is correct,
    because at *every* ``A``, also of a subtransaction, the publisher forgets which relations it described in this stream. It describes
    them again before their next row (cleanup_rel_sync_cache). After ``c`` it assumes that the subscriber knows the relations of the
    stream. So the consumer of a transaction must read its Relation records even if it skips the rows.

Examples (7 is the top transaction, 8 a subtransaction; ``S7!`` is a first segment)
    1. ``S7! I7 I8 E  B9 I C  S7 I8 E  A7,8  S7 R7 I7 E  c7``: transaction 9 with one row, then 7 with ``I7 R7 I7``. ``A7,8`` cut at
       record 1, through two chunks.
    2. The same with the first chunk spilled: ``A7,8`` gives ``SpoolTruncate(id, 1)`` and drops the records in memory. Transaction 7 has
       one spilled record, and ``R7 I7`` in memory.
    3. ``S7! E  S7 E  A7,8  A7,7``: a large aborted transaction as 14 to 17 send it. There is no output.
    4. ``S7! I7 E  p7 … K7``: a PreparedTransaction, later CommitPrepared. ``r7`` instead, or without any ``p7``, passes through as well.
    5. ``S7! I7 E  K7``: prepared before this stream. The chunks are dropped, CommitPrepared is returned.
    6. ``S7! I7 E  S7! I7 E  c7``: the end of the first 7 was missed. Its part is discarded; each part has its own spool id.

Memory
    ``memory`` is the size of the unfinished transactions: payload bytes and Python's overhead for each. The largest of them is spilled
    first, as on the publisher. No object is built per row. Only the tag of a row is read and, in a chunk, the xid.

Reading unfinished transactions
    ``streams`` are the streamed transactions that have not ended. Parallel apply reads them from there before they end. The records of a
    chunk may depend on transactions that were committed before it. Hence each chunk notes how many events had been returned by then.

Rejected
    One list of records per subtransaction, merged at commit: the merge needs the order across the lists, and it costs time in the common
    case without aborts. Returning chunks as events of their own: they would wait in memory, or in a second spool, until they are applied.
    Spilling here: this package does no IO.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import count
from typing import Final, assert_never

from subscriber import _cython as cython
from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
from subscriber.protocol.frames import PAYLOAD, payloads
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Tag,
    Truncate,
    Type,
    Update,
)
from subscriber.transaction.model import Event, PreparedTransaction, Transaction
from subscriber.transaction.unfinished import RECORD_OVERHEAD, SpoolDiscard, SpoolTruncate, UnfinishedTransaction

__all__ = ["RECORD_OVERHEAD", "ROW_TAGS", "Output", "Reassembly", "SpoolDiscard", "SpoolTruncate"]

Output = Event | SpoolTruncate | SpoolDiscard
"""The results of :meth:`Reassembly.feed`: events for the sink and orders for the spool, to be carried out in order."""

_W: Final = ord("w")
_BEGIN_SIZE: Final = 46
_COMMIT_SIZE: Final = 51
"""The sizes of an XLogData with a BEGIN and with a COMMIT."""
_B: Final = int(Tag.BEGIN)
_C: Final = int(Tag.COMMIT)
_new: Final = int.__new__
_ORDERS: Final = (SpoolTruncate, SpoolDiscard)
_NOTHING: Final[tuple[Output, ...]] = ()
ROW_TAGS: Final = frozenset(map(int, (Tag.INSERT, Tag.UPDATE, Tag.DELETE, Tag.TRUNCATE, Tag.RELATION, Tag.TYPE)))
"""Tags of messages that are always records of the open transaction."""


class _Block(Enum):
    """The open block. The value is the message that closes it."""

    BETWEEN = ""
    TRANSACTION = "COMMIT"
    PREPARE = "PREPARE"
    CHUNK = "STREAM STOP"


_ANYWHERE: Final = frozenset(_Block)
_BETWEEN: Final = frozenset({_Block.BETWEEN})
_LEGAL: Final[dict[type, frozenset[_Block]]] = {
    **dict.fromkeys((Begin, BeginPrepare, StreamStart, StreamCommit, StreamPrepare, CommitPrepared, RollbackPrepared), _BETWEEN),
    Commit: frozenset({_Block.TRANSACTION}),
    Prepare: frozenset({_Block.PREPARE, _Block.BETWEEN}),
    StreamStop: frozenset({_Block.CHUNK}),
    Origin: _ANYWHERE - _BETWEEN,
}
"""The state table of the module's docstring, for control messages. For the other messages the block alone does not decide."""

_OPENER: Final[dict[type, str]] = {Commit: "BEGIN", StreamStop: "STREAM START"}


@cython.cfunc
def _number(frame: bytes, start: cython.Py_ssize_t, length: cython.Py_ssize_t) -> cython.ulonglong:
    """An unsigned number in a frame."""
    if not cython.compiled:
        return int.from_bytes(frame[start : start + length])
    text: cython.p_uchar = frame
    found: cython.ulonglong = 0
    for place in range(start, start + length):
        found = found << 8 | text[place]
    return found


@cython.cfunc
def _signed(number: cython.ulonglong) -> cython.longlong:
    return number if cython.compiled or number < 1 << 63 else number - (1 << 64)


class Reassembly:
    """Assembles one connection's messages to transactions. See the module's docstring.

    Make one call at a time, in the order of the messages. Carry out orders for the spool before the next :meth:`spill`.
    """

    def __init__(self) -> None:
        self._block = _Block.BETWEEN
        self._current: UnfinishedTransaction | None = None
        self._streams: dict[int, UnfinishedTransaction] = {}
        self._memory = 0
        self._events = 0
        self._spool_ids = count(1)

    @property
    def streams(self) -> Collection[UnfinishedTransaction]:
        """Transactions whose end was not received: the open one that is not streamed, then the streamed ones, oldest first."""
        return self._unfinished()

    @property
    def open(self) -> UnfinishedTransaction | None:
        """The open transaction that is not streamed."""
        return None if self._current is None or self._current.streamed else self._current

    @property
    def memory(self) -> int:
        """Bytes held by unfinished transactions: payloads, and :data:`RECORD_OVERHEAD` for each."""
        return self._memory

    def feed(self, payload: bytes) -> Sequence[Output]:
        """Take the next message (the payload of an XLogData frame). Return what it completes, most often nothing.

        Raises:
            ProtocolError: it is not a message, or not allowed in the current state.
        """
        current = self._current
        if current is not None and payload and payload[0] in ROW_TAGS:
            self._memory += current.append(payload)
            return _NOTHING
        outputs = self._control(payload)
        for output in outputs:
            if not isinstance(output, _ORDERS):
                self._events += 1
        return outputs

    def feed_rows(self, payloads: Sequence[bytes]) -> None:
        """Feed messages that all have one of :data:`ROW_TAGS`. A block must be open.

        Raises:
            ProtocolError
        """
        current = self._current
        assert current is not None  # a block is open
        self._memory += current.extend(payloads)

    def feed_frames(self, frames: list[bytes], start: int) -> tuple[list[tuple[Transaction, Lsn]], int]:
        """Feed the frames from ``start`` on, up to the first one that is neither a row nor part of a whole transaction.

        Most transactions are small and arrive whole: BEGIN, rows, COMMIT. No message is built for these. Of a large frame only the header
        stays in ``frames``.

        Returns:
            The whole transactions, each with the LSN of its last frame; and the place of the first frame that was not fed.

        Raises:
            ProtocolError: a row is damaged. This cannot happen after a whole transaction.
        """
        found: list[tuple[Transaction, Lsn]] = []
        place: cython.Py_ssize_t = start
        count: cython.Py_ssize_t = len(frames)
        size: cython.Py_ssize_t
        last: cython.ulonglong
        end_lsn: cython.ulonglong
        begin_tag: cython.Py_ssize_t = _B
        commit_tag: cython.Py_ssize_t = _C
        frame_tag: cython.Py_ssize_t = _W
        begin_size: cython.Py_ssize_t = _BEGIN_SIZE
        commit_size: cython.Py_ssize_t = _COMMIT_SIZE
        payload: cython.Py_ssize_t = PAYLOAD
        begin: bytes
        end: bytes
        row: bytes
        if self._current is not None:
            rows = payloads(frames, place, ROW_TAGS)
            if rows:
                self.feed_rows(rows)
                place += len(rows)
            return found, place
        while place < count:
            begin = frames[place]
            if len(begin) != begin_size or begin[payload] != begin_tag or begin[0] != frame_tag:
                break
            rows = payloads(frames, place + 1, ROW_TAGS)
            place += 1 + len(rows)
            end = frames[place] if place < count else b""
            whole = len(end) == commit_size and end[payload] == commit_tag and end[0] == frame_tag
            # the commit LSN is the same
            if whole and _number(begin, 26, 8) == _number(end, 27, 8):
                place += 1
                self._events += 1
                size = 0
                for row in rows:
                    size += len(row)
                # these LSNs are in range, because they were read from 64 unsigned bits
                end_lsn = _number(end, 35, 8)
                end_of_it = _new(Lsn, end_lsn)
                last = max(_number(end, 1, 8), _number(end, 9, 8))
                transaction = Transaction(
                    _number(begin, 42, 4),
                    _new(Lsn, _number(begin, 26, 8)),
                    end_of_it,
                    _signed(_number(end, 43, 8)),
                    False,
                    rows,
                    None,
                    0,
                    size,
                    0,
                    next(self._spool_ids),
                )
                found.append((transaction, end_of_it if last == end_lsn else _new(Lsn, last)))
                continue
            self.feed(begin[PAYLOAD:])
            if rows:
                self.feed_rows(rows)
            break
        return found, place

    def spill(self) -> tuple[int, list[bytes]] | None:
        """Return records in memory of the largest open transaction, with the spool id to append them to.

        These are the records that parallel apply has applied, if there are any, else all. They count as spilled from now on. None if no
        open transaction has records in memory.
        """
        largest = max(self._unfinished(), key=lambda transaction: transaction.memory, default=None)
        if largest is None or not largest.memory:
            return None
        self._memory -= largest.memory
        records = largest.spill()
        self._memory += largest.memory
        return largest.spool_id, records

    def reset(self) -> list[SpoolDiscard]:
        """Drop everything after the connection ended. Return what to discard in the spool. The publisher will send it again."""
        orders = [order for transaction in self._unfinished() for order in transaction.discard()]
        self._block = _Block.BETWEEN
        self._current = None
        self._streams.clear()
        self._memory = 0
        return orders

    def _unfinished(self) -> list[UnfinishedTransaction]:
        return [*self._streams.values()] if self.open is None else [self.open, *self._streams.values()]

    # --- everything except rows inside a block

    def _control(self, payload: bytes) -> Sequence[Output]:
        message = decode(payload, in_stream=self._block is _Block.CHUNK)
        if self._block not in _LEGAL.get(type(message), _ANYWHERE):
            raise self._out_of_order(message, payload)
        match message:
            case Begin():
                self._open(UnfinishedTransaction(message, next(self._spool_ids)), _Block.TRANSACTION)
            case BeginPrepare():
                self._open(UnfinishedTransaction(message, next(self._spool_ids)), _Block.PREPARE)
            case StreamStart():
                return self._stream_start(message)
            case StreamStop():
                self._close()
            case Origin():
                self._origin(message)
            case Commit():
                return self._commit(message)
            case Prepare():
                return self._prepare(message)
            case StreamCommit():
                return self._stream_commit(message)
            case StreamPrepare():
                return self._stream_prepare(message)
            case StreamAbort():
                return self._stream_abort(message, payload)
            case CommitPrepared() | RollbackPrepared():
                return (*self._drop_stream(message.xid), message)
            case LogicalMessage():
                return self._logical_message(message, payload)
            case Relation() | Type() | Insert() | Update() | Delete() | Truncate():
                raise self._out_of_order(message, payload)  # feed() handles these inside a block
            case _:
                assert_never(message)
        return _NOTHING

    def _out_of_order(self, message: Message, payload: bytes) -> ProtocolError:
        """Report the error in the words of PostgreSQL's apply worker where it has any."""
        name = Tag(payload[0]).name.replace("_", " ")
        current = self._current
        if isinstance(message, Origin):
            text = "ORIGIN message sent out of order"
        elif current is not None:
            text = f"{name} message without {self._block.value}: transaction {current.xid} is open"
        elif type(message) in _OPENER:
            text = f"{name} message without {_OPENER[type(message)]}"
        else:
            text = f"{name} message outside a transaction"
        return ProtocolError(text, tag=chr(payload[0]))

    def _open(self, transaction: UnfinishedTransaction, block: _Block) -> None:
        transaction.origin_at = transaction.count
        transaction.begin_chunk(self._events)
        self._current = transaction
        self._block = block

    def _close(self) -> None:
        self._current = None
        self._block = _Block.BETWEEN

    def _end_current(self) -> UnfinishedTransaction:
        """End the open transaction that is not streamed, and return it."""
        current = self._current
        assert current is not None  # by the state table, its block was open
        self._memory -= current.memory
        self._close()
        return current

    def _end_stream(self, xid: int, name: str, tag: str) -> UnfinishedTransaction:
        stream = self._streams.pop(xid, None)
        if stream is None:
            raise ProtocolError(f"{name} message without STREAM START: transaction {xid} is not known", tag=tag)
        self._memory -= stream.memory
        return stream

    def _origin(self, message: Origin) -> None:
        current = self._current
        assert current is not None  # by the state table, Origin occurs in a block
        if current.count != current.origin_at:
            raise ProtocolError("ORIGIN message sent out of order", tag="O")
        current.origin_at = None
        current.origin = message

    def _logical_message(self, message: LogicalMessage, payload: bytes) -> Sequence[Output]:
        if not message.transactional:
            return (message,)
        current = self._current
        if current is None:
            raise self._out_of_order(message, payload)
        self._memory += current.append(payload)
        return _NOTHING

    def _commit(self, message: Commit) -> Sequence[Output]:
        current = self._end_current()
        assert isinstance(current.opening, Begin)  # by the state table
        _check_commit(message, current.opening)
        return (current.finish(message.commit_lsn, message.end_lsn, message.commit_time),)

    def _prepare(self, message: Prepare) -> Sequence[Output]:
        if self._current is None:
            return self._empty_prepare(message)
        current = self._end_current()
        opening = current.opening
        assert isinstance(opening, BeginPrepare)  # by the state table
        if message.prepare_lsn != opening.prepare_lsn:
            text = f"incorrect prepare LSN {message.prepare_lsn} in prepare message (expected {opening.prepare_lsn})"
            raise ProtocolError(text, tag="P")
        if (message.xid, message.gid) != (opening.xid, opening.gid):
            text = f'incorrect transaction {message.xid} "{message.gid}" in prepare message (expected {opening.xid} "{opening.gid}")'
            raise ProtocolError(text, tag="P")
        return (PreparedTransaction(current.finish(message.prepare_lsn, message.end_lsn, message.prepare_time), message.gid),)

    def _empty_prepare(self, message: Prepare) -> Sequence[Output]:
        if message.xid in self._streams:
            raise ProtocolError(f"PREPARE message without BEGIN PREPARE: transaction {message.xid} is streamed", tag="P")
        opening = BeginPrepare(message.prepare_lsn, message.end_lsn, message.prepare_time, message.xid, message.gid)
        empty = UnfinishedTransaction(opening, next(self._spool_ids))
        return (PreparedTransaction(empty.finish(message.prepare_lsn, message.end_lsn, message.prepare_time), message.gid),)

    def _stream_start(self, message: StreamStart) -> Sequence[Output]:
        stream = self._streams.get(message.xid)
        orders: Sequence[Output] = _NOTHING
        if message.first_segment:
            orders = self._drop_stream(message.xid)
            stream = self._streams[message.xid] = UnfinishedTransaction(message, next(self._spool_ids))
        elif stream is None:
            text = f"STREAM START message for a later chunk of transaction {message.xid}, whose first one was not received"
            raise ProtocolError(text, tag="S")
        self._open(stream, _Block.CHUNK)
        return orders

    def _stream_commit(self, message: StreamCommit) -> Sequence[Output]:
        stream = self._end_stream(message.xid, "STREAM COMMIT", "c")
        return (stream.finish(message.commit_lsn, message.end_lsn, message.commit_time),)

    def _stream_prepare(self, message: StreamPrepare) -> Sequence[Output]:
        stream = self._end_stream(message.xid, "STREAM PREPARE", "p")
        return (PreparedTransaction(stream.finish(message.prepare_lsn, message.end_lsn, message.prepare_time), message.gid),)

    def _drop_stream(self, xid: int) -> tuple[SpoolDiscard, ...]:
        """Drop the streamed transaction, if there is one. It is not needed any more."""
        stream = self._streams.pop(xid, None)
        if stream is None:
            return ()
        self._memory -= stream.memory
        return stream.discard()

    def _stream_abort(self, message: StreamAbort, payload: bytes) -> Sequence[Output]:
        stream = self._streams.get(message.xid)
        whole = message.subxid == message.xid
        if stream is None or (not whole and not stream.knows(message.subxid)):
            return _NOTHING
        if self._block is not _Block.BETWEEN:
            raise self._out_of_order(message, payload)
        if whole:
            return self._drop_stream(message.xid)
        self._memory -= stream.memory
        orders = stream.cut(message.subxid)
        self._memory += stream.memory
        return orders


def _check_commit(commit: Commit, begin: Begin) -> None:
    if commit.commit_lsn != begin.final_lsn:
        raise ProtocolError(f"incorrect commit LSN {commit.commit_lsn} in commit message (expected {begin.final_lsn})", tag="C")
