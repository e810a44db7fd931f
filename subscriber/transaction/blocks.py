"""Assemble transactions, but give streamed ones in the blocks in which they come, for a reader that wants them before their end.

What is not streamed is assembled as always. Of a streamed transaction each block is an event once STREAM STOP was received, and so are its
aborts and its end. Nothing is taken back: the reader sees the records of aborted subtransactions, and then the abort.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from subscriber.errors import ProtocolError
from subscriber.protocol.lsn import INVALID_LSN
from subscriber.protocol.messages import StreamAbort, StreamCommit, StreamPrepare, StreamStart, Tag
from subscriber.transaction.model import StreamedPart
from subscriber.transaction.reassembly import Output, Reassembly
from subscriber.transaction.unfinished import SpoolDiscard

__all__ = ["BlockReassembly"]

_NOTHING: Final[tuple[Output, ...]] = ()


class BlockReassembly(Reassembly):
    """See the module's docstring. The methods are those of the base class."""

    def __init__(self) -> None:
        super().__init__()
        # the streamed transactions, each with its subtransactions that were not aborted
        self._begun: dict[int, set[int]] = {}

    def take_back(self, xid: int) -> Sequence[StreamedPart]:
        """Forget this streamed transaction and all that have not ended. Return an abort of each, for the reader."""
        aborts = [_without_records(each, StreamAbort(each, each)) for each in (xid, *self._begun)]
        self._begun.clear()
        return aborts

    def feed(self, payload: bytes) -> Sequence[Output]:
        """Take the next message. The end of a block gives the block."""
        block = self._current
        outputs = super().feed(payload)
        if payload[:1] != bytes([Tag.STREAM_STOP]) or block is None:
            return outputs
        assert isinstance(block.opening, StreamStart)  # otherwise STREAM STOP is an error
        del self._streams[block.xid]
        self._memory -= block.memory
        whole = block.finish(INVALID_LSN, INVALID_LSN, 0)
        self._begun[block.xid].update(whole.subxids)
        return (
            StreamedPart(
                xid=whole.xid,
                final_lsn=whole.final_lsn,
                end_lsn=whole.end_lsn,
                commit_time=0,
                prefixed=True,
                records=whole.records,
                origin=whole.origin,
                spilled=whole.spilled,
                size=whole.size,
                largest=whole.largest,
                spool_id=whole.spool_id,
                message=block.opening,
            ),
        )

    def _stream_start(self, message: StreamStart) -> Sequence[Output]:
        subxids = set() if message.first_segment else self._begun.get(message.xid)
        if subxids is None:
            text = f"STREAM START message for a later chunk of transaction {message.xid}, whose first one was not received"
            raise ProtocolError(text, tag="S")
        # each block is a transaction of its own for the base class
        super()._stream_start(StreamStart(message.xid, True))
        self._begun[message.xid] = subxids
        assert self._current is not None  # it was just opened
        self._current.opening = message
        return _NOTHING

    def _stream_commit(self, message: StreamCommit) -> Sequence[Output]:
        return (_without_records(message.xid, message, self._end(message.xid, "STREAM COMMIT", "c")),)

    def _stream_prepare(self, message: StreamPrepare) -> Sequence[Output]:
        return (_without_records(message.xid, message, self._end(message.xid, "STREAM PREPARE", "p")),)

    def _stream_abort(self, message: StreamAbort, payload: bytes) -> Sequence[Output]:
        if message.xid not in self._begun:
            # PostgreSQL 18.4 sends such a message even without streaming
            return _NOTHING
        if self._current is not None:
            # a stray one, or an error
            return super()._stream_abort(message, payload)
        if message.subxid == message.xid:
            del self._begun[message.xid]
        else:
            self._begun[message.xid].discard(message.subxid)
        return (_without_records(message.xid, message),)

    def _drop_stream(self, xid: int) -> tuple[SpoolDiscard, ...]:
        # at COMMIT PREPARED, ROLLBACK PREPARED or another first block: the parts were given
        self._begun.pop(xid, None)
        return ()

    def _end(self, xid: int, name: str, tag: str) -> Collection[int]:
        """End a stream. Return its subtransactions."""
        subxids = self._begun.pop(xid, None)
        if subxids is None:
            raise ProtocolError(f"{name} message without STREAM START: transaction {xid} is not known", tag=tag)
        return tuple(subxids)


def _without_records(xid: int, message: StreamAbort | StreamCommit | StreamPrepare, subxids: Collection[int] = ()) -> StreamedPart:
    match message:
        case StreamCommit():
            final_lsn, end_lsn, time = message.commit_lsn, message.end_lsn, message.commit_time
        case StreamPrepare():
            final_lsn, end_lsn, time = message.prepare_lsn, message.end_lsn, message.prepare_time
        case _:
            final_lsn, end_lsn, time = INVALID_LSN, INVALID_LSN, 0
    return StreamedPart(
        xid=xid,
        final_lsn=final_lsn,
        end_lsn=end_lsn,
        commit_time=time,
        prefixed=True,
        records=[],
        subxids=subxids,
        message=message,
    )
