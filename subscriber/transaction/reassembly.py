"""Messages to whole transactions: streams, aborted subtransactions, two-phase commit, and what shall be spilled.

Purpose
    A publisher sends small transactions whole (``B`` … ``C``, or ``b`` … ``P`` when prepared) and large ones, while they are still
    running, in chunks (``S`` … ``E``) that interleave with everything else. This module puts them together and hands them on when the
    publisher committed or prepared them, in that order, with the changes of aborted subtransactions left out. It does no IO: where a
    transaction is too large for memory, the caller takes its records (:meth:`Reassembly.spill`), and carries out the orders on them
    that :meth:`Reassembly.feed` returns.

States
    Between two calls exactly one block is open, or none (``BETWEEN``). Streamed transactions live beside it from their first ``S`` to
    their ``c``, ``p`` or ``A``, any number of them. ``-`` is a ProtocolError::

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
        O                 -                kept          kept          kept          right behind B, b or S only
        I U D T R Y       -                record        record        record
        M transactional   -                record        record        record
        M other           event            event         event         event

    The event of ``C`` and of ``P`` closes the block. After a ProtocolError the object is of no more use except for
    :meth:`Reassembly.reset`.

Where messages can stand (read in pgoutput.c and reorderbuffer.c; what is said of ``A`` and ``M`` was also run on 16.14 and 18.4)
    * ``O`` is written together with the ``B``, ``b`` or first ``S`` before it, if the origin still has a name. It never has an xid.
    * ``A`` is written when the abort record is decoded, hence between blocks. PostgreSQL 18.4 also sends it for transactions that it
      never streamed, with streaming off too: an ``A`` that names nothing we hold is no error anywhere.
    * A transaction that was prepared before the stream began lies in the reorder buffer until its ``K`` or ``r``, and is streamed from
      there if memory gets short, as if it were still running (``ReorderBufferLargestStreamableTopTXN``; run on 15 to 18). No ``p`` or ``A``
      ends such a stream: the ``K`` or ``r`` does. Nothing of it is needed: it was received before. (What was prepared before the slot's
      two-phase start was not, but has its ``p`` before the ``K``.)
    * ``P`` without ``b`` is what PostgreSQL 18 writes of a prepared transaction that changed nothing (``SELECT … FOR UPDATE``; run on
      18.4): ReorderBufferPrepare sends the PREPARE that ReorderBufferReplay left out with the rest. It gives a transaction without records.
      Once that is prepared in the target, its ``K`` or ``r`` is as any other, after a restart too. 15 to 17 write nothing of it but the
      ``K`` or ``r`` (run on 15.18, 16.14 and 17.10).
    * A non-transactional ``M`` is written when its record is decoded, hence between blocks and without an xid; its LSN may be past
      those of the chunk behind it. Inside a block it would do no harm, so it is let through.
    * A transactional ``M`` in a chunk carries the *top* xid even where a subtransaction emitted it. It vanishes with an aborted
      subtransaction if a row of that one came before it; a message before the first row of its subtransaction survives the abort:
      the publisher does not tell whose it is.

Aborted subtransactions
    The reorder buffer sends a transaction's changes in WAL order, and subtransactions nest. Hence between the first record of a
    subtransaction and its abort there is nothing but its own records and those of its children, and dropping *everything from its first
    record on* is exact. That is why the place of every subxid's first record is kept, and why a cut forgets the subxids that start
    behind it. An abort names the children first and the parent last; whichever starts first cuts most, the others find nothing more.
    ``A`` with ``subxid == xid`` ends the whole transaction.

    Relation and Type are records like the others, and vanish with the subtransaction in which they were sent. That is right because
    the publisher forgets at *every* ``A``, a subtransaction's too, which relations it described in this stream, and describes them again
    before their next row (cleanup_rel_sync_cache). At ``c`` it takes the relations of the stream for known to us: whoever consumes the
    transaction reads its Relation records, even where it skips the rows.

Worked traces (7 is the top transaction, 8 a subtransaction; ``S7!`` is a first segment)
    1. ``S7! I7 I8 E  B9 I C  S7 I8 E  A7,8  S7 R7 I7 E  c7``: transaction 9 with one row, then 7 with ``I7 R7 I7``. ``A7,8`` cut at
       record 1, through two chunks.
    2. The same with the first chunk spilled: ``A7,8`` gives ``SpoolTruncate(id, 1)`` and drops what is in memory. Transaction 7 comes
       with one spilled record and ``R7 I7`` in memory.
    3. ``S7! E  S7 E  A7,8  A7,7``: a large aborted transaction as 14 to 17 send it. Nothing comes out.
    4. ``S7! I7 E  p7 … K7``: a PreparedTransaction, later CommitPrepared. ``r7`` instead, or without any ``p7``, passes through as well.
    5. ``S7! I7 E  K7``: prepared long ago. The stream is dropped, CommitPrepared comes.
    6. ``S7! I7 E  S7! I7 E  c7``: the end of the first 7 was missed. Its part is discarded; a spool id of its own keeps the two apart.

Memory
    ``memory`` is what the unfinished transactions hold: payload bytes and what Python adds to each. The largest of them is spilled
    first, as the publisher does on its side. No object is made of a row, and nothing in it is looked at but the tag and, in a chunk,
    the xid.

Looking in
    ``streams`` are the streamed transactions that have not ended. Whoever applies one of them before its end reads it from there. Its
    records may depend on what was committed before their chunk came, hence each chunk notes how many events had been handed on by then.

Rejected
    One list of records a subtransaction, merged at commit: it needs the order across them, and a merge for the common case that nothing
    aborts. Handing chunks on as events of their own: they would wait in memory, or in a second spool, for whoever applies them.
    Spilling from here: this room does no IO.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import count
from typing import Final, assert_never

from subscriber.errors import ProtocolError
from subscriber.protocol.decoder import decode
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
"""What :meth:`Reassembly.feed` returns: events for the sink and orders for the spool, to be carried out in their order."""

_ORDERS: Final = (SpoolTruncate, SpoolDiscard)
_NOTHING: Final[tuple[Output, ...]] = ()
ROW_TAGS: Final = frozenset(map(int, (Tag.INSERT, Tag.UPDATE, Tag.DELETE, Tag.TRUNCATE, Tag.RELATION, Tag.TYPE)))
"""Of messages that only ever are records of the transaction that is open."""


class _Block(Enum):
    """What is open; the value is the message that closes it."""

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
"""The state table of the module's text, for control messages; the others depend on more than the block."""

_OPENER: Final[dict[type, str]] = {Commit: "BEGIN", StreamStop: "STREAM START"}


class Reassembly:
    """Puts one connection's messages together to transactions. See the module's text.

    Calls are made one at a time, in the order of the messages. Orders for the spool are carried out before the next :meth:`spill`.
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
        """Streamed transactions whose end was not received, the oldest first. To look at."""
        return self._streams.values()

    @property
    def memory(self) -> int:
        """Bytes held by transactions whose end was not received: payloads, and :data:`RECORD_OVERHEAD` for each."""
        return self._memory

    def feed(self, payload: bytes) -> Sequence[Output]:
        """Take the next message, as the payload of an XLogData frame; return what it completes, most often nothing.

        Raises:
            ProtocolError: it is no message, or stands where it must not.
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

    @property
    def in_transaction(self) -> bool:
        """Whether a row may come next: a block is open."""
        return self._current is not None

    def feed_rows(self, payloads: Sequence[bytes]) -> None:
        """Take messages that all have one of :data:`ROW_TAGS`, as :meth:`feed` takes each of them. Only where one may come.

        Raises:
            ProtocolError
        """
        current = self._current
        assert current is not None  # in_transaction
        self._memory += current.extend(payloads)

    def feed_whole(self, begin: bytes, payloads: list[bytes], commit: bytes) -> Transaction:
        """Take a BEGIN, messages that all have one of :data:`ROW_TAGS`, and a COMMIT, as :meth:`feed` takes each of them.

        Most transactions are small, and come at once: a third of what they cost is spared. Only while none is open
        (:attr:`in_transaction`).

        Raises:
            ProtocolError
        """
        opening, closing = decode(begin), decode(commit)
        assert isinstance(opening, Begin)  # the tags
        assert isinstance(closing, Commit)
        _check_commit(closing, opening)
        self._events += 1
        return Transaction(
            xid=opening.xid,
            final_lsn=closing.commit_lsn,
            end_lsn=closing.end_lsn,
            commit_time=closing.commit_time,
            prefixed=False,
            records=payloads,
            size=sum(map(len, payloads)),
            spool_id=next(self._spool_ids),
        )

    def spill(self) -> tuple[int, list[bytes]] | None:
        """Hand over the records in memory of the transaction that holds most: the spool id to append them to, and the records.

        They count as spilled from now on. None if no open transaction has records in memory.
        """
        largest = max(self._unfinished(), key=lambda transaction: transaction.memory, default=None)
        if largest is None or not largest.memory:
            return None
        self._memory -= largest.memory
        return largest.spool_id, largest.spill()

    def reset(self) -> list[SpoolDiscard]:
        """The connection ended: forget everything, and return what has to be discarded. The publisher will send it again."""
        orders = [order for transaction in self._unfinished() for order in transaction.discard()]
        self._block = _Block.BETWEEN
        self._current = None
        self._streams.clear()
        self._memory = 0
        return orders

    def _unfinished(self) -> list[UnfinishedTransaction]:
        found = list(self._streams.values())
        if self._current is not None and not self._current.streamed:
            found.append(self._current)
        return found

    # --- everything that is not a row in its place

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
                raise self._out_of_order(message, payload)  # inside a block feed() takes them
            case _:
                assert_never(message)
        return _NOTHING

    def _out_of_order(self, message: Message, payload: bytes) -> ProtocolError:
        """Say what is wrong in the words of native's apply worker, as far as it has any."""
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
        self._current = transaction
        self._block = block

    def _close(self) -> None:
        self._current = None
        self._block = _Block.BETWEEN

    def _end_current(self) -> UnfinishedTransaction:
        """End the transaction that is not streamed, and return it."""
        current = self._current
        assert current is not None  # the state table: its block was open
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
        assert current is not None  # the state table: Origin stands in a block
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
        assert isinstance(current.opening, Begin)  # the state table
        _check_commit(message, current.opening)
        return (current.finish(message.commit_lsn, message.end_lsn, message.commit_time),)

    def _prepare(self, message: Prepare) -> Sequence[Output]:
        if self._current is None:
            return self._empty_prepare(message)
        current = self._end_current()
        opening = current.opening
        assert isinstance(opening, BeginPrepare)  # the state table
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
        stream.begin_chunk(self._events)
        self._open(stream, _Block.CHUNK)
        return orders

    def _stream_commit(self, message: StreamCommit) -> Sequence[Output]:
        stream = self._end_stream(message.xid, "STREAM COMMIT", "c")
        return (stream.finish(message.commit_lsn, message.end_lsn, message.commit_time),)

    def _stream_prepare(self, message: StreamPrepare) -> Sequence[Output]:
        stream = self._end_stream(message.xid, "STREAM PREPARE", "p")
        return (PreparedTransaction(stream.finish(message.prepare_lsn, message.end_lsn, message.prepare_time), message.gid),)

    def _drop_stream(self, xid: int) -> tuple[SpoolDiscard, ...]:
        """Nothing of it is needed any more, if there is one."""
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
