"""Streamed transactions in the blocks in which they come, in the notation of ``traces``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.messages import StreamAbort, StreamCommit, StreamPrepare, StreamStart
from subscriber.transaction.blocks import BlockReassembly
from subscriber.transaction.model import StreamedPart
from subscriber.transaction.reassembly import Output
from tests.unit.transaction.traces import feed, final_lsn, labels, show


def parts(outputs: Sequence[Output]) -> str:
    """As ``show``, with the parts of streamed transactions."""
    found = []
    for output in outputs:
        if not isinstance(output, StreamedPart):
            found.append(show([output]))
            continue
        match output.message:
            case StreamStart(first_segment=first):
                found.append(f"S{output.xid}{'!' if first else ''}({labels(output.records, prefixed=True)})")
            case StreamAbort(subxid=subxid):
                found.append(f"A{output.xid},{subxid}")
            case StreamCommit():
                found.append(f"c{output.xid}")
                assert (output.final_lsn, output.end_lsn) == (final_lsn(output.xid), final_lsn(output.xid) + 8)
            case StreamPrepare():
                found.append(f"p{output.xid}")
    return " ".join(found)


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ("S7! R7:r I7:a E S7 I7:b E c7", "S7!(r a) S7(b) c7"),
        ("S7! I7:a E B9 I:p C S8! I8:b E S7 E c8 S7 I7:c E c7", "S7!(a) 9(p) S8!(b) S7() c8 S7(c) c7"),
        ("S7! I7:a I8:b E A7,8 S7 I7:c E A7,7 B9 C", "S7!(a b) A7,8 S7(c) A7,7 9()"),
        ("S7! I7:a E p7 K7 S8! I8:a E p8 r8", "S7!(a) p7 K7 S8!(a) p8 r8"),
        ("S7! I7:a E m:x c7", "S7!(a) m:x c7"),
        ("S7! I7:a E S7! I7:b E c7", "S7!(a) S7!(b) c7"),
        ("S7! I7:a E K7 B10 I:d C", "S7!(a) K7 10(d)"),
        ("B9 A5,6 I:a C S7! A5,6 A7,12 I7:b E c7 A5,5", "9(a) S7!(b) c7"),
    ],
)
def test_streamed_transactions_come_in_blocks(trace: str, expected: str) -> None:
    reassembly = BlockReassembly()
    assert parts(feed(reassembly, trace)) == expected
    assert reassembly.memory == 0
    assert not reassembly.reset()


def test_origin_and_spilled_records_of_a_block() -> None:
    reassembly = BlockReassembly()
    assert not feed(reassembly, "S7! O:up I7:a I7:b")
    spilled = reassembly.spill()
    assert spilled is not None
    (block,) = feed(reassembly, "I7:c E")
    assert isinstance(block, StreamedPart)
    assert block.origin is not None
    assert (block.origin.name, block.spool_id, block.spilled, labels(block.records, prefixed=True)) == ("up", spilled[0], 2, "c")
    (second,) = feed(reassembly, "S7 I7:d E")
    assert isinstance(second, StreamedPart)
    assert second.spool_id != block.spool_id
    assert second.origin is None
    feed(reassembly, "S7 I7:e")
    assert reassembly.spill() is not None
    assert len(reassembly.reset()) == 1


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("S7 I7:a E", "whose first one was not received"),
        ("S7! E c7 S7 E", "whose first one was not received"),
        ("S7! E A7,7 c7", "transaction 7 is not known"),
        ("p7", "transaction 7 is not known"),
        ("S7! I7:a I8:b A7,8", "STREAM ABORT message without STREAM STOP"),
        ("E", "STREAM STOP message without STREAM START"),
    ],
)
def test_parts_out_of_order(trace: str, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        feed(BlockReassembly(), trace)
