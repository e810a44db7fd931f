"""The synchronization of a table: copy, catch-up, hand-over, and recovery after a crash."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from subscriber.errors import ApplyError, ProtocolError, TargetError
from subscriber.interfaces import CopyFormat, Position, TableEntry, TableSink, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.testing.compliance.assertions import demand, equal, refused
from subscriber.testing.compliance.feed import START, SYSTEM, Feed
from subscriber.testing.compliance.sample_messages import Table
from subscriber.testing.compliance.scenarios import Scenarios

__all__ = ["scenarios"]

scenarios = Scenarios("copying")

_TABLE = Table("t", "*id int4", "v")
_AT = Position("a_sync_slot", SYSTEM, 1, Lsn(START + 0x10))
_SECRET = "53CRET"


async def _lines(*rows: Sequence[object]) -> AsyncIterator[bytes]:
    """Rows in COPY's text format, one line per chunk."""
    for row in rows:
        yield "\t".join("\\N" if value is None else str(value) for value in row).encode() + b"\n"


async def _torn(data: bytes, size: int) -> AsyncIterator[bytes]:
    """The same bytes, split into chunks at any place."""
    for start in range(0, len(data), size):
        yield data[start : start + size]


async def _copying(feed: Feed, table: Table = _TABLE) -> TableSink:
    """Begin a table's synchronization, up to the copy."""
    await feed.begin(TableState.INIT, table)
    return await _again(feed, table)


async def _again(feed: Feed, table: Table = _TABLE) -> TableSink:
    sink = feed.opened.open_table(table.name)
    equal(await sink.begin(), TableEntry(TableState.INIT), "the state before a copy")
    await sink.start_copy()
    await sink.describe(table.published)
    return sink


async def _finish(feed: Feed, sink: TableSink) -> None:
    await sink.finish_copy(_AT)
    await feed.hand_over(sink, _AT.lsn)
    await sink.close()


async def _expect_before(feed: Feed, table: Table, *rows: Sequence[object]) -> None:
    """Check the rows of a table that the apply worker has not taken over yet."""
    await feed.expect(table, *(rows if feed.target.traits.copies_visible else ()))


def _names(table: Table) -> list[str]:
    return [column.name for column in table.sent]


@scenarios
async def synchronization_in_full(feed: Feed) -> None:
    """A table is copied, catches up from its snapshot, is synchronized, and becomes ready."""
    t = _TABLE
    sink = await _copying(feed)
    equal((await feed.opened.tables())[t.name], TableEntry(TableState.DATASYNC), "the state during the copy")
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a"), (2, None)))
    await sink.finish_copy(_AT)
    equal(await sink.begin(), TableEntry(TableState.FINISHEDCOPY), "the state after the copy")
    equal(await sink.position(), _AT, "the table's own position")
    demand(_AT.slot_name in await feed.opened.slot_names(), "the table's slot is not among the slots")
    await _expect_before(feed, t, (1, "a"), (2, None))

    feed.closed.add(t.name)
    concurrent = await feed.apply(t.relation, t.insert(99, "the gate is closed"))
    feed.closed.clear()
    caught_up = feed.transaction(t.relation, t.insert(3, "b"), t.update(1, "c"), t.delete(2, None))
    await sink.apply(feed.batch(caught_up))
    await sink.apply(feed.batch(caught_up))
    await _expect_before(feed, t, (1, "c"), (3, "b"))
    equal((await sink.position()).lsn, caught_up.end_lsn, "the table's own position after catching up")

    await sink.finish_sync(caught_up.end_lsn)
    await sink.close()
    entry = (await feed.opened.tables())[t.name]
    equal(entry, TableEntry(TableState.SYNCDONE, caught_up.end_lsn), "the state of a synchronized table")
    equal(await feed.position(), concurrent.end_lsn, "the subscription's position")
    demand(_AT.slot_name not in await feed.opened.slot_names(), "the slot of a synchronized table is still among the slots")
    await feed.opened.set_ready({t.name: caught_up.end_lsn})
    await feed.apply(t.relation, t.insert(4, "d"))
    await feed.expect(t, (1, "c"), (3, "b"), (4, "d"))


@scenarios
async def escapes(feed: Feed) -> None:
    """COPY's text format: escapes, NULLs and empty strings, in chunks that end at any place."""
    t = _TABLE
    values = ["tab\there", "new\nline", "back\\slash", "", None, "\\N", "\r\b\f\v", "ä€😀", "'\"%:", "x" * 3000]
    escaped = {"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r", "\b": "\\b", "\f": "\\f", "\v": "\\v"}
    data = "".join(
        f"{number}\t" + ("\\N" if value is None else "".join(escaped.get(letter, letter) for letter in value)) + "\n"
        for number, value in enumerate(values)
    ).encode()
    sink = await _copying(feed)
    await sink.copy(_names(t), CopyFormat.TEXT, _torn(data, 7))
    await _finish(feed, sink)
    await feed.expect(t, *enumerate(values))


@scenarios.needing("binary")
async def binary(feed: Feed) -> None:
    """COPY's binary format, in chunks that end at any place."""
    t = _TABLE
    rows: list[tuple[int, bytes | None]] = [(1, "ä€".encode()), (2, None), (-3, b"")]
    data = bytearray(b"PGCOPY\n\xff\r\n\0" + bytes(8))
    for key, value in rows:
        data += (2).to_bytes(2, "big") + (4).to_bytes(4, "big") + key.to_bytes(4, "big", signed=True)
        data += b"\xff\xff\xff\xff" if value is None else len(value).to_bytes(4, "big") + value
    data += b"\xff\xff"
    sink = await _copying(feed)
    await sink.copy(_names(t), CopyFormat.BINARY, _torn(bytes(data), 5))
    await _finish(feed, sink)
    await feed.expect(t, (1, "ä€"), (2, None), (-3, ""))


@scenarios
async def columns_in_any_order(feed: Feed) -> None:
    """The named columns are copied in the given order."""
    t = Table("t", "*id int4", "v", "n int4")
    sink = await _copying(feed, t)
    await sink.copy(["v", "n", "id"], CopyFormat.TEXT, _lines(("a", 10, 1), (None, None, 2)))
    await _finish(feed, sink)
    await feed.expect(t, (1, "a", 10), (2, None, None))


@scenarios.needing("given_tables")
async def columns_of_the_target(feed: Feed) -> None:
    """Columns that only the target has get their defaults."""
    t = Table("t", "+extra int4=7", "*id int4", "v")
    sink = await _copying(feed, t)
    await sink.copy(["v", "id"], CopyFormat.TEXT, _lines(("a", 1), (None, 2)))
    await _finish(feed, sink)
    await feed.expect(t, (7, 1, "a"), (7, 2, None))


@scenarios
async def in_pieces(feed: Feed) -> None:
    """Several copies one after another, and many rows."""
    t = _TABLE
    sink = await _copying(feed)
    for piece in range(3):
        await sink.copy(_names(t), CopyFormat.TEXT, _lines(*((piece * 2000 + number, f"row {number}") for number in range(2000))))
    await sink.copy(_names(t), CopyFormat.TEXT, _lines())
    await _finish(feed, sink)
    await feed.expect(t, *((piece * 2000 + number, f"row {number}") for piece in range(3) for number in range(2000)))


@scenarios
async def side_by_side(feed: Feed) -> None:
    """Several copies of one table at the same time."""
    t = _TABLE
    sink = await _copying(feed)

    async def rows(piece: int) -> AsyncIterator[bytes]:
        for number in range(20):
            yield f"{piece * 100 + number}\tx\n".encode()
            await asyncio.sleep(0)

    await asyncio.gather(*(sink.copy(_names(t), CopyFormat.TEXT, rows(piece)) for piece in range(4)))
    await _finish(feed, sink)
    await feed.expect(t, *((piece * 100 + number, "x") for piece in range(4) for number in range(20)))


@scenarios.needing("shared_tables")
async def unfinished(feed: Feed) -> None:
    """An unfinished copy is undone and starts again. Rows that existed before stay."""
    t = _TABLE
    await feed.target.create_table(t)
    await feed.target.insert(t, [("1000", "was there before")])
    await feed.describe(t)
    await feed.opened.add_tables([t.name], TableEntry(TableState.INIT))
    sink = await _again(feed)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a"), (2, "a")))
    await sink.close()
    await feed.reopen()
    sink = await _again(feed)
    await feed.expect(t, (1000, "was there before"))
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "b")))
    await _finish(feed, sink)
    await feed.expect(t, (1, "b"), (1000, "was there before"))


@scenarios
async def unfinished_into_empty(feed: Feed) -> None:
    """The same, into a table that was empty."""
    t = _TABLE
    sink = await _copying(feed)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a"), (2, "a")))
    await sink.close()
    sink = await _again(feed)
    await feed.expect(t)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((2, "b")))
    await _finish(feed, sink)
    await feed.expect(t, (2, "b"))


@scenarios
async def finished_is_never_undone(feed: Feed) -> None:
    """A finished copy is never repeated. The next process resumes from the table's own position."""
    t = _TABLE
    sink = await _copying(feed)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a")))
    await sink.finish_copy(_AT)
    caught_up = feed.transaction(t.relation, t.insert(2, "b"))
    await sink.apply(feed.batch(caught_up))
    await sink.close()
    await feed.reopen()
    sink = feed.opened.open_table(t.name)
    equal(await sink.begin(), TableEntry(TableState.FINISHEDCOPY), "the state after the copy")
    with refused(TargetError, "a second copy"):
        await sink.start_copy()
    equal(await sink.begin(), TableEntry(TableState.FINISHEDCOPY), "the state after a refused copy")
    equal((await sink.position()).lsn, caught_up.end_lsn, "the table's own position")
    last = feed.transaction(t.insert(3, "c"))
    await sink.apply(feed.batch(caught_up, last))
    await feed.hand_over(sink, last.end_lsn)
    await sink.close()
    await feed.expect(t, (1, "a"), (2, "b"), (3, "c"))


@scenarios
async def changes_of_others(feed: Feed) -> None:
    """Transactions without a change of the table move its own position too, so that they are acknowledged to the table's slot."""
    t, other = _TABLE, Table("other", "*id int4", "v")
    await feed.create(other)
    sink = await _copying(feed)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a")))
    await sink.finish_copy(_AT)
    feed.closed.add(other.name)
    none, theirs = (), (other.relation, other.insert(7, "theirs"))
    changes = [(t.relation, change) for change in (t.insert(2, "b"), t.insert(3, "c"), t.delete(1, None))]
    for first, second in (none, changes[0]), (changes[1], theirs), (changes[2], none):
        await sink.apply(feed.batch(feed.transaction(*first)))
        last = feed.transaction(*second)
        await sink.apply(feed.batch(last))
        await sink.close()
        await feed.reopen()
        sink = feed.opened.open_table(t.name)
        equal(await sink.begin(), TableEntry(TableState.FINISHEDCOPY), "the state after the copy")
        equal((await sink.position()).lsn, last.end_lsn, "the table's own position")
    await feed.hand_over(sink, (await sink.position()).lsn)
    await sink.close()
    await feed.expect(t, (2, "b"), (3, "c"))
    await feed.expect(other)


@scenarios.needing("constraints")
async def refused_rows(feed: Feed) -> None:
    """The target rejects rows: the error names the table and shows no value, and after ``begin`` none of them are left."""
    t = _TABLE
    sink = await _copying(feed)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a")))
    for rows in ([(2, "b"), (2, _SECRET)], [(3, "b"), (_SECRET, "c")]):
        with refused(ApplyError, "rows that the target refuses") as caught:
            await sink.copy(_names(t), CopyFormat.TEXT, _lines(*rows))
        text = caught.error.one_line()
        demand("public.t" in text and _SECRET not in text, f"the error is not as it should be: {text}")
    equal(await sink.begin(), TableEntry(TableState.INIT), "the state after refused rows")
    await feed.expect(t)
    await sink.close()


@scenarios
async def broken_source(feed: Feed) -> None:
    """An error of the source of rows is passed through, and the copy can start again."""
    t = _TABLE

    async def broken() -> AsyncIterator[bytes]:
        yield b"1\tx\n"
        raise ProtocolError("the publisher's end")

    sink = await _copying(feed)
    with refused(ProtocolError, "rows whose source breaks") as caught:
        await sink.copy(_names(t), CopyFormat.TEXT, broken())
    equal(str(caught.error), "the publisher's end", "the error")
    equal(await sink.begin(), TableEntry(TableState.INIT), "the state after it")
    await feed.expect(t)
    await sink.start_copy()
    await sink.describe(t.published)
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a")))
    await _finish(feed, sink)
    await feed.expect(t, (1, "a"))


@scenarios
async def copy_during_the_stream(feed: Feed) -> None:
    """A table is copied while changes of another one are applied. Closing and reopening the sink does not end the copy."""
    t, u = _TABLE, Table("u", "*id int4", relation_id=2)
    await feed.create(u)
    sink = await _copying(feed)
    await feed.apply(u.relation, u.insert(1))
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((1, "a")))
    await feed.apply(u.insert(2))
    await feed.opened.close()
    await feed.open()
    await sink.copy(_names(t), CopyFormat.TEXT, _lines((2, "b")))
    await _finish(feed, sink)
    await feed.expect(t, (1, "a"), (2, "b"))
    await feed.expect(u, (1,), (2,))
