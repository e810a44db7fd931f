from __future__ import annotations

import pytest

from subscriber.errors import ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    LogicalMessage,
    Origin,
    Prepare,
    StreamAbort,
    StreamPrepare,
)
from subscriber.transaction.model import PreparedTransaction, Transaction
from subscriber.transaction.reassembly import RECORD_OVERHEAD, Reassembly, SpoolDiscard, SpoolTruncate
from tests.unit.transaction.traces import feed, final_lsn, label_of, labels, messages, record, show

TRACES = {
    "plain": ("B9 R:r I:a U:b D:c T:d C", "9(r a b c d)"),
    "plain, empty, as 14 sends it": ("B9 C", "9()"),
    "two in a row": ("B9 I:a C B10 I:b C", "9(a) 10(b)"),
    "streamed": ("S7! R7:r I7:a E S7 I7:b E c7", "7(r a b)"),
    "streamed, interleaved with another and with plain ones": (
        "S7! I7:a E B9 I:p C S8! I8:b E S7 I7:c E B10 I:q C c8 S7 I7:d E c7",
        "9(p) 10(q) 8(b) 7(a c d)",
    ),
    "commits in another order than starts": ("S7! I7:a E S8! I8:b E S9! I9:c E c9 c7 c8", "9(c) 7(a) 8(b)"),
    "streamed, all chunks empty": ("S7! E S7 E c7", "7()"),
    "abort of a subtransaction": ("S7! I7:a I8:b E S7 I8:c E A7,8 S7 I7:d E c7", "7(a d)"),
    "abort of a subtransaction that comes first": ("S7! I8:a E A7,8 S7 I7:b E c7", "7(b)"),
    "abort of the only subtransaction leaves an empty one": ("S7! I8:a E A7,8 c7", "7()"),
    "released subtransactions stay": ("S7! I8:a I7:b I9:c E A7,9 S7 I7:d E c7", "7(a b d)"),
    "abort of a parent takes its children": ("S7! I7:a I8:b I9:c I8:d E A7,9 A7,8 c7", "7(a)"),
    "child wrote before its parent": ("S7! I7:a I9:b I8:c E A7,9 A7,8 c7", "7(a)"),
    "inner abort, outer stays": ("S7! I8:a I9:b I10:c E A7,10 S7 I9:d I8:e E c7", "7(a b d e)"),
    "aborted, and the same savepoint used again": ("S7! I7:a I8:b E A7,8 S7 I9:c E A7,9 S7 I10:d E c7", "7(a d)"),
    "abort comes twice": ("S7! I7:a I8:b E A7,8 A7,8 S7 I7:c E c7", "7(a c)"),
    "abort of a subtransaction without records": ("S7! I7:a E A7,8 c7", "7(a)"),
    "abort of the whole": ("S7! I7:a I8:b E A7,8 A7,7 B9 I:c C", "9(c)"),
    "abort of the whole alone": ("S7! I7:a E A7,7 B9 I:c C", "9(c)"),
    "large aborted transaction of 14 to 17": ("S7! E S7 E A7,8 A7,9 A7,7 B9 I:a C", "9(a)"),
    "stray abort of 18.4, streaming off": ("A7,8 B9 R:r I:a C A9,10", "9(r a)"),
    "stray abort of 18.4 beside a stream": ("S7! I7:a E A5,6 S7 I7:b E A6,6 c7", "7(a b)"),
    "stray abort inside blocks": ("B9 A5,6 I:a C S7! A5,6 A7,12 I7:b E c7 b8 A5,6 P", "9(a) 7(b) p8()"),
    "xid used again, end missed": ("S7! I7:a E S7! I7:b E c7", "7(b)"),
    "xid used again after commit": ("S7! I7:a E c7 S7! I7:b I8:c E A7,8 c7", "7(a) 7(b)"),
    "prepared": ("b9 I:a P K9", "p9(a) K9"),
    "prepared, rolled back": ("b9 I:a P B10 I:b C r9", "p9(a) 10(b) r9"),
    "prepared, empty": ("b9 P", "p9()"),
    "prepared, empty, as 18.4 sends it": ("P9 B10 I:a C K9", "p9() 10(a) K9"),
    "the same, beside a stream, rolled back": ("S7! I7:a E P9 r9 c7", "p9() r9 7(a)"),
    "streamed, prepared": ("S7! I7:a I8:b E A7,8 p7 B9 I:c C K7", "p7(a) 9(c) K7"),
    "lone rollback prepared": ("r7", "r7"),
    "prepared before the stream began, streamed all the same": ("S7! I7:a E B9 I:b C S7 I7:c E K7 B10 I:d C", "9(b) K7 10(d)"),
    "the same, rolled back": ("S7! I7:a I8:b E S9! I9:c E r7 c9", "r7 9(c)"),
    "prepare sent late, with its commit": ("B20 I:a C b9 I:b P K9", "20(a) p9(b) K9"),
    "origin": ("B9 O I:a C b10 O I:b P S7! O I7:c E S7 I7:d E c7", "9(a) p10(b) 7(c d)"),
    "type before relation": ("B9 Y:y R:r I:a C S7! Y7:z R7:s I7:b E c7", "9(y r a) 7(z s b)"),
    "relation vanishes with its subtransaction and comes again": ("S7! R8:r I8:a E A7,8 S7 R9:s I9:b E c7", "7(s b)"),
    "relation before the subtransaction stays": ("S7! R7:r I7:a I8:b E A7,8 S7 R7:s I7:c E c7", "7(r a s c)"),
    "transactional messages": ("B9 M:x I:a M:y C S7! M7:z I7:b E c7", "9(x a y) 7(z b)"),
    "message of a subtransaction, behind its first row": ("S7! I7:a I8:b M7:x E A7,8 c7", "7(a)"),
    "message of a subtransaction, before its first row: the publisher does not tell": ("S7! I7:a M7:x I8:b E A7,8 c7", "7(a x)"),
    "messages outside transactions": ("m:x B9 I:a C m:y S7! I7:b E m:z c7", "m:x 9(a) m:y m:z 7(b)"),
    "top row and subtransaction row alternate": ("S7! I7:a I8:b I7:c I8:d E c7", "7(a b c d)"),
}


@pytest.mark.parametrize(("trace", "expected"), TRACES.values(), ids=TRACES.keys())
def test_trace(trace: str, expected: str) -> None:
    assert show(feed(Reassembly(), trace)) == expected


@pytest.mark.parametrize(("trace", "expected"), TRACES.values(), ids=TRACES.keys())
def test_trace_spilled_after_every_message(trace: str, expected: str) -> None:
    """With any behaviour of the spool, the result is the same transactions."""
    reassembly = Reassembly()
    spool: dict[int, list[bytes]] = {}
    shown = []
    for message in messages(trace):
        for output in reassembly.feed(encode(message)):
            if isinstance(output, SpoolDiscard):
                del spool[output.spool_id]
            elif isinstance(output, Transaction | PreparedTransaction):
                transaction = output if isinstance(output, Transaction) else output.transaction
                spilled = spool.pop(transaction.spool_id, [])
                assert len(spilled) == transaction.spilled
                transaction.records = spilled + transaction.records
                shown.append(show([output]))
            elif isinstance(output, SpoolTruncate):
                assert 0 < output.count < len(spool[output.spool_id])
                del spool[output.spool_id][output.count :]
            else:
                shown.append(show([output]))
        while (spill := reassembly.spill()) is not None:
            spool.setdefault(spill[0], []).extend(spill[1])
        assert reassembly.memory == 0
    assert " ".join(shown) == expected
    assert spool == {}


REFUSED = {
    "nested begin": ("B9 B10", "BEGIN message without COMMIT: transaction 9 is open in message 'B'"),
    "begin prepare in a transaction": ("B9 b10", "BEGIN PREPARE message without COMMIT: transaction 9 is open in message 'b'"),
    "begin in a prepared one": ("b9 B10", "BEGIN message without PREPARE: transaction 9 is open in message 'B'"),
    "begin in a chunk": ("S7! B9", "BEGIN message without STREAM STOP: transaction 7 is open in message 'B'"),
    "commit alone": ("C", "COMMIT message without BEGIN in message 'C'"),
    "commit twice": ("B9 C C", "COMMIT message without BEGIN in message 'C'"),
    "commit of a prepared one": ("b9 C", "COMMIT message without PREPARE: transaction 9 is open in message 'C'"),
    "commit in a chunk": ("S7! C", "COMMIT message without STREAM STOP: transaction 7 is open in message 'C'"),
    "prepare alone of a streamed one": ("S7! I7:a E P7", "PREPARE message without BEGIN PREPARE: transaction 7 is streamed in message 'P'"),
    "prepare alone in a chunk": ("S7! I7:a P9", "PREPARE message without STREAM STOP: transaction 7 is open in message 'P'"),
    "prepare of a plain one": ("B9 P", "PREPARE message without COMMIT: transaction 9 is open in message 'P'"),
    "stream start twice": ("S7! S7", "STREAM START message without STREAM STOP: transaction 7 is open in message 'S'"),
    "stream start in a transaction": ("B9 S7!", "STREAM START message without COMMIT: transaction 9 is open in message 'S'"),
    "stream stop alone": ("E", "STREAM STOP message without STREAM START in message 'E'"),
    "stream stop twice": ("S7! E E", "STREAM STOP message without STREAM START in message 'E'"),
    "stream stop in a transaction": ("B9 E", "STREAM STOP message without COMMIT: transaction 9 is open in message 'E'"),
    "later chunk of an unknown one": (
        "S7",
        "STREAM START message for a later chunk of transaction 7, whose first one was not received in message 'S'",
    ),
    "later chunk of an aborted one": (
        "S7! E A7,7 S7",
        "STREAM START message for a later chunk of transaction 7, whose first one was not received in message 'S'",
    ),
    "stream commit in a chunk": ("S7! c7", "STREAM COMMIT message without STREAM STOP: transaction 7 is open in message 'c'"),
    "stream commit of an unknown one": ("c7", "STREAM COMMIT message without STREAM START: transaction 7 is not known in message 'c'"),
    "stream commit twice": ("S7! E c7 c7", "STREAM COMMIT message without STREAM START: transaction 7 is not known in message 'c'"),
    "stream prepare in a chunk": ("S7! p7", "STREAM PREPARE message without STREAM STOP: transaction 7 is open in message 'p'"),
    "stream prepare of an unknown one": ("p7", "STREAM PREPARE message without STREAM START: transaction 7 is not known in message 'p'"),
    "abort in its own chunk": ("S7! I8 A7,8", "STREAM ABORT message without STREAM STOP: transaction 7 is open in message 'A'"),
    "abort of a known one in another's block": (
        "S7! E B9 A7,7",
        "STREAM ABORT message without COMMIT: transaction 9 is open in message 'A'",
    ),
    "commit prepared in a transaction": ("B9 K5", "COMMIT PREPARED message without COMMIT: transaction 9 is open in message 'K'"),
    "rollback prepared in a chunk": ("S7! r5", "ROLLBACK PREPARED message without STREAM STOP: transaction 7 is open in message 'r'"),
    "row alone": ("I", "INSERT message outside a transaction in message 'I'"),
    "row between chunks": ("S7! E U", "UPDATE message outside a transaction in message 'U'"),
    "relation alone": ("R", "RELATION message outside a transaction in message 'R'"),
    "transactional message alone": ("M", "MESSAGE message outside a transaction in message 'M'"),
    "row with xid 0": ("S7! I0", "invalid transaction ID in streamed replication transaction in message 'I' at offset 1"),
    "origin alone": ("O", "ORIGIN message sent out of order in message 'O'"),
    "origin after a row": ("B9 I O", "ORIGIN message sent out of order in message 'O'"),
    "origin twice": ("B9 O O", "ORIGIN message sent out of order in message 'O'"),
    "row between two origins": ("B9 O I O", "ORIGIN message sent out of order in message 'O'"),
    "origin after a row of the chunk": ("S7! I7 E S7 I7 O", "ORIGIN message sent out of order in message 'O'"),
    "origin between chunks": ("S7! E O", "ORIGIN message sent out of order in message 'O'"),
}


@pytest.mark.parametrize(("trace", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_messages_out_of_order_are_rejected(trace: str, expected: str) -> None:
    *before, last = messages(trace)
    reassembly = Reassembly()
    for message in before:
        reassembly.feed(encode(message))
    with pytest.raises(ProtocolError) as caught:
        reassembly.feed(encode(last))
    assert str(caught.value) == expected
    assert caught.value.tag == expected.split("in message '")[1][0]


def test_every_tag_in_every_block() -> None:
    """No combination gives anything but outputs or a ProtocolError."""
    openings = ["", "B9", "b9", "S7!", "S7! E"]
    rows = [f"{tag}{xid}" for tag in "IUDTRYM" for xid in ("", "8")]
    words = ["B9", "C", "b9", "P", "K9", "r9", "O", "S7!", "S7", "E", "c7", "p7", "A7,7", "A7,8", "m", *rows]
    taken = set()
    for opening in openings:
        for word in words:
            reassembly = Reassembly()
            feed(reassembly, opening)
            payload = encode(
                next(messages(word)) if word not in {"C", "P"} else list(messages(f"{'B' if word == 'C' else 'b'}9 {word}"))[1]
            )
            try:
                reassembly.feed(payload)
            except ProtocolError:
                continue
            taken.add((opening, word[0]))
    assert {word for opening, word in taken if opening == ""} == set("BbPSKrAm")
    assert {word for opening, word in taken if opening == "S7! E"} == set("BbPSKrAmcp")
    assert {word for opening, word in taken if opening == "B9"} == set("COIUDTRYMAm")
    assert {word for opening, word in taken if opening == "b9"} == set("POIUDTRYMAm")
    assert {word for opening, word in taken if opening == "S7!"} == set("EOIUDTRYMAm")


@pytest.mark.parametrize("opening", ["", "B9", "S7!"])
@pytest.mark.parametrize(
    ("payload", "error"), [(b"", "empty message at offset 0"), (b"?", "unknown message type in message '?' at offset 0")]
)
def test_invalid_messages(opening: str, payload: bytes, error: str) -> None:
    reassembly = Reassembly()
    feed(reassembly, opening)
    with pytest.raises(ProtocolError) as caught:
        reassembly.feed(payload)
    assert str(caught.value) == error


@pytest.mark.parametrize("trace", ["S7!", "S7! I7 I8", "S7! I7 I8 E A7,8 S7"])
@pytest.mark.parametrize("length", range(1, 5))
@pytest.mark.parametrize("filler", [b"\0", b"-", b"\7"])
def test_row_of_a_chunk_too_short_for_its_xid(trace: str, length: int, filler: bytes) -> None:
    reassembly = Reassembly()
    feed(reassembly, trace)
    with pytest.raises(ProtocolError, match="invalid transaction ID"):
        reassembly.feed((b"I" + 3 * filler)[:length])


def test_incorrect_commit_lsn() -> None:
    reassembly = Reassembly()
    reassembly.feed(encode(Begin(Lsn(0x1_0000_0010), 0, 9)))
    with pytest.raises(ProtocolError) as caught:
        reassembly.feed(encode(Commit(0, Lsn(0x1_0000_0011), Lsn(0x1_0000_0020), 0)))
    assert str(caught.value) == "incorrect commit LSN 1/11 in commit message (expected 1/10) in message 'C'"


@pytest.mark.parametrize(
    ("prepare", "error"),
    [
        (Prepare(0, Lsn(0x11), Lsn(0x20), 0, 9, "g"), "incorrect prepare LSN 0/11 in prepare message (expected 0/10)"),
        (Prepare(0, Lsn(0x10), Lsn(0x20), 0, 8, "g"), 'incorrect transaction 8 "g" in prepare message (expected 9 "g")'),
        (Prepare(0, Lsn(0x10), Lsn(0x20), 0, 9, "h"), 'incorrect transaction 9 "h" in prepare message (expected 9 "g")'),
    ],
)
def test_prepare_that_does_not_match(prepare: Prepare, error: str) -> None:
    reassembly = Reassembly()
    reassembly.feed(encode(BeginPrepare(Lsn(0x10), Lsn(0x20), 0, 9, "g")))
    with pytest.raises(ProtocolError) as caught:
        reassembly.feed(encode(prepare))
    assert str(caught.value) == f"{error} in message 'P'"


def test_attributes_of_a_plain_transaction() -> None:
    [transaction] = feed(Reassembly(), "B9 O:here I:a I:b C")
    assert isinstance(transaction, Transaction)
    assert (transaction.xid, transaction.final_lsn, transaction.end_lsn) == (9, Lsn(0x900), Lsn(0x908))
    assert transaction.commit_time == 1009
    assert transaction.origin == Origin(Lsn(5), "here")
    assert not transaction.prefixed
    assert (transaction.spilled, transaction.count) == (0, 2)
    assert transaction.records == [encode(record("I", "a", None)), encode(record("I", "b", None))]
    assert transaction.size == sum(map(len, transaction.records))


def test_attributes_of_a_streamed_transaction() -> None:
    [transaction] = feed(Reassembly(), "S7! O:there I7:a I8:b E A7,8 S7 I7:c E c7")
    assert isinstance(transaction, Transaction)
    assert (transaction.xid, transaction.final_lsn, transaction.end_lsn) == (7, Lsn(0x700), Lsn(0x708))
    assert transaction.commit_time == 1007
    assert transaction.origin == Origin(Lsn(5), "there")
    assert transaction.prefixed
    assert transaction.records == [encode(record("I", "a", 7)), encode(record("I", "c", 7))]
    assert transaction.size == sum(map(len, transaction.records))


@pytest.mark.parametrize("trace", ["b9 I:a P", "S9! I9:a E p9"])
def test_attributes_of_a_prepared_transaction(trace: str) -> None:
    [prepared] = feed(Reassembly(), trace)
    assert isinstance(prepared, PreparedTransaction)
    transaction = prepared.transaction
    assert prepared.gid == "the gid"
    assert (transaction.xid, transaction.final_lsn, transaction.end_lsn) == (9, final_lsn(9), Lsn(final_lsn(9) + 8))
    assert transaction.commit_time == 1009
    assert transaction.prefixed == trace.startswith("S")
    assert transaction.origin is None


def test_origin_belongs_to_one_transaction() -> None:
    first, second = feed(Reassembly(), "B9 O C B10 C")
    assert isinstance(first, Transaction)
    assert isinstance(second, Transaction)
    assert first.origin is not None
    assert second.origin is None


def test_stream_abort_of_streaming_parallel_has_lsn_and_time() -> None:
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a I8:b E")
    assert reassembly.feed(encode(StreamAbort(7, 8, Lsn(1), 2))) == ()
    assert reassembly.feed(encode(StreamAbort(5, 6, Lsn(1), 2))) == ()
    assert show(feed(reassembly, "c7")) == "7(a)"


def test_message_in_a_chunk_that_is_not_transactional_is_an_event() -> None:
    """PostgreSQL writes none there; what would come is not lost, and is no part of the transaction."""
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a")
    message = LogicalMessage(False, Lsn(1), "prefix", b"x", 7)
    assert list(reassembly.feed(encode(message))) == [message]
    assert show(feed(reassembly, "E c7")) == "7(a)"


def test_stream_prepare_may_be_empty_of_rows() -> None:
    reassembly = Reassembly()
    feed(reassembly, "S7! E")
    [prepared] = reassembly.feed(encode(StreamPrepare(0, Lsn(1), Lsn(2), 3, 7, "g")))
    assert isinstance(prepared, PreparedTransaction)
    assert prepared.transaction.records == []


# --- memory and spilling


def held(*records: tuple[str, str, int | None]) -> int:
    return sum(len(encode(record(*each))) + RECORD_OVERHEAD for each in records)


def test_memory_counts_unfinished_transactions() -> None:
    reassembly = Reassembly()
    assert reassembly.memory == 0
    feed(reassembly, "S7! I7:a I8:bb M7:m E")
    assert reassembly.memory == held(("I", "a", 7), ("I", "bb", 8), ("M", "m", 7))
    feed(reassembly, "S6! I6:ccc E")
    feed(reassembly, "B9 I:dddd")
    streams = held(("I", "a", 7), ("I", "bb", 8), ("M", "m", 7), ("I", "ccc", 6))
    assert reassembly.memory == streams + held(("I", "dddd", None))
    feed(reassembly, "A5,5")
    reassembly.feed(encode(Commit(0, final_lsn(9), Lsn(0x908), 0)))
    assert reassembly.memory == streams
    feed(reassembly, "A7,8")
    assert reassembly.memory == held(("I", "a", 7), ("I", "ccc", 6))
    feed(reassembly, "A7,7")
    assert reassembly.memory == held(("I", "ccc", 6))
    feed(reassembly, "S6! I6:x E")
    assert reassembly.memory == held(("I", "x", 6))
    feed(reassembly, "p6")
    assert reassembly.memory == 0


def test_spill_takes_the_largest() -> None:
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a E S8! I8:b I8:c I8:d E S6! I6:e I6:f E")
    taken = []
    while (spill := reassembly.spill()) is not None:
        taken.append(labels(spill[1], prefixed=True))
    assert taken == ["b c d", "e f", "a"]
    assert reassembly.memory == 0


@pytest.mark.parametrize("opening", ["B9", "b9"])
def test_spill_of_a_transaction_that_is_being_received(opening: str) -> None:
    reassembly = Reassembly()
    feed(reassembly, f"{opening} I:a I:b")
    spill = reassembly.spill()
    assert spill is not None
    assert labels(spill[1], prefixed=False) == "a b"
    assert reassembly.memory == 0
    feed(reassembly, "I:c")
    [_, end] = messages("B9 C" if opening == "B9" else "b9 P")
    [event] = reassembly.feed(encode(end))
    transaction = event.transaction if isinstance(event, PreparedTransaction) else event
    assert isinstance(transaction, Transaction)
    assert (transaction.spilled, transaction.count) == (2, 3)
    assert transaction.spool_id == spill[0]
    assert transaction.size == len(encode(record("I", "a", None))) * 3


def test_spill_during_a_chunk_keeps_the_open_stream_once() -> None:
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a")
    assert reassembly.spill() is not None
    assert reassembly.spill() is None
    assert show(feed(reassembly, "I7:b E c7")) == "7(b)"


def test_nothing_to_spill() -> None:
    reassembly = Reassembly()
    assert reassembly.spill() is None
    feed(reassembly, "S7! E B9")
    assert reassembly.spill() is None


CUTS = {
    "in memory": ("S7! I7:a E", "S7 I7:b I8:c E A7,8", "", "b", 1),
    "in the spool": ("S7! I7:a I8:b I8:c E", "S7 I8:d E A7,8", "truncate(1,1)", "", 1),
    "at the end of the spool": ("S7! I7:a E", "S7 I8:b I9:c E A7,8", "", "", 1),
    "everything": ("S7! I8:a E", "S7 I8:b E A7,8", "discard(1)", "", 0),
    "a later one in memory, then an earlier one in the spool": (
        "S7! I7:a I8:b E",
        "S7 I8:c I9:d E A7,9 A7,8",
        "truncate(1,1)",
        "",
        1,
    ),
    "and goes on": ("S7! I7:a I8:b E", "S7 I8:c E A7,8 S7 I7:d E", "truncate(1,1)", "d", 1),
}


@pytest.mark.parametrize(("before", "after", "orders", "left", "spilled"), CUTS.values(), ids=CUTS.keys())
def test_cut(before: str, after: str, orders: str, left: str, spilled: int) -> None:
    reassembly = Reassembly()
    feed(reassembly, before)
    assert reassembly.spill() is not None
    assert show(feed(reassembly, after)) == orders
    assert reassembly.memory == len(left.split()) * held(("I", "a", 7))
    [transaction] = feed(reassembly, "c7")
    assert isinstance(transaction, Transaction)
    assert labels(transaction.records, prefixed=True) == left
    assert transaction.spilled == spilled
    assert transaction.size == transaction.count * len(encode(record("I", "a", 7)))


def test_cut_forgets_later_subtransactions() -> None:
    """The bug would be a second truncation, at a place that was overwritten in the meantime."""
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a I8:b I9:c E A7,8 S7 I7:d I7:e I7:f E")
    assert show(feed(reassembly, "A7,9 c7")) == "7(a d e f)"


def test_same_subtransaction_may_start_again_after_a_cut() -> None:
    """The xid of the last record before a cut is not taken for seen after it."""
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a I8:b I9:c E A7,9 S7 I8:d E A7,8 S7 I8:x E")
    assert show(feed(reassembly, "A7,8 c7")) == "7(a)"


@pytest.mark.parametrize(("trace", "orders"), [("A7,7", "discard(1)"), ("S7!", "discard(1)")])
def test_abandoned_transactions_are_discarded(trace: str, orders: str) -> None:
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a E")
    reassembly.spill()
    assert show(feed(reassembly, trace)) == orders
    assert reassembly.memory == 0


def test_spool_ids_are_never_used_again() -> None:
    reassembly = Reassembly()
    seen = []
    for opening in ("S7! I7:a", "E S7! I7:b", "E c7 S7! I7:c", "E B9 I:d"):
        feed(reassembly, opening)
        spill = reassembly.spill()
        assert spill is not None
        seen.append(spill[0])
    assert len(set(seen)) == 4


def test_reset_discards_all_transactions() -> None:
    reassembly = Reassembly()
    feed(reassembly, "S7! I7:a I8:x E S6! I6:b E S5! I5:c E B9 I:dddd")
    ids = [spill[0] for spill in (reassembly.spill(), reassembly.spill()) if spill is not None]
    assert sorted(order.spool_id for order in reassembly.reset()) == sorted(ids)
    assert reassembly.memory == 0
    assert reassembly.spill() is None
    assert reassembly.reset() == []
    assert show(feed(reassembly, "A7,8 B9 I:e C S7! I7:f E c7")) == "9(e) 7(f)"
    with pytest.raises(ProtocolError):
        feed(reassembly, "c6")


@pytest.mark.parametrize("trace", ["B9 I:a", "b9 I:a", "S7! I7:a", "S7! I7:a E"])
def test_reset_discards_a_part_once(trace: str) -> None:
    reassembly = Reassembly()
    feed(reassembly, trace)
    spill = reassembly.spill()
    assert spill is not None
    assert reassembly.reset() == [SpoolDiscard(spill[0])]
    assert show(feed(reassembly, "B9 I:a C")) == "9(a)"


def test_reset_after_an_error() -> None:
    reassembly = Reassembly()
    with pytest.raises(ProtocolError):
        feed(reassembly, "S7! I7:a B9")
    assert reassembly.reset() == []
    assert show(feed(reassembly, "B9 I:b C")) == "9(b)"


def test_payloads_are_kept_unchanged() -> None:
    """No copy is made of a row, and nothing after its xid is read."""
    reassembly = Reassembly()
    feed(reassembly, "S7!")
    payload = b"I\0\0\0\7whatever"
    assert list(reassembly.feed(payload)) == []
    reassembly.feed(b"E")
    [transaction] = feed(reassembly, "c7")
    assert isinstance(transaction, Transaction)
    assert transaction.records[0] is payload


def test_labels_read_back() -> None:
    """The notation itself."""
    for tag in "IUDTRYM":
        for xid in (None, 7):
            assert label_of(encode(record(tag, "x", xid)), prefixed=xid is not None) == "x"
