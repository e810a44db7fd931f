"""What is written to a relay log is read again, after any position, from disk and from memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from subscriber.apply.skip import Skipping
from subscriber.errors import DataLossError, ProtocolError
from subscriber.protocol.encoder import encode
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    BeginPrepare,
    Commit,
    Message,
    Prepare,
    StreamCommit,
    StreamStart,
    StreamStop,
)
from subscriber.recording.file import END, MESSAGES, encode_record, messages_content, read_recording
from subscriber.recording.relay_groups import Group, StoredRecords
from subscriber.recording.relay_stream import RelayStream
from subscriber.sinks.memory.opened_memory_sink import OpenedMemorySink
from subscriber.transaction.model import Transaction, end_of
from tests.unit.relay_log.written import (
    START,
    History,
    described,
    direct,
    frame,
    group,
    made,
    read,
    relation,
    row,
    segments,
    session,
    write,
)


@pytest.mark.parametrize("seed", range(6))
async def test_is_read_after_any_position(seed: int, tmp_path: Path) -> None:
    history = History(seed)
    log = await made(tmp_path, 100 * 1024**2 if seed % 2 else 8 * 80_000)
    log.limit = 2**40
    await write(log, history.frames, history.end)
    events = await direct(history.frames, history.end)
    expected = [await described(event) for event in events]
    assert seed % 2 or len(log.segments) > 2
    cut, heard = 0, START
    for number, event in enumerate(events):
        if number % 7 == 0 or number == len(events) - 1:
            assert await read(log, heard) == expected[cut:]
        if end_of(event) > heard:
            # not a prepare that comes late: the position does not count it, and it comes again with its end
            cut, heard = number + 1, end_of(event)
    assert await read(log, log.end) == []
    last = max(map(end_of, events))
    assert log.last_change == last
    await log.close()
    # and by another process
    log = await made(tmp_path)
    assert (log.end, log.last_change) == (history.end, last)
    assert await read(log, START, memory=2**26) == expected
    # segments that the target does not need are removed, and what remains still describes its relations
    await log.acknowledge(events[-3].end_lsn if isinstance(events[-3], Transaction) else heard)
    assert await read(log, log.known) is not None
    await log.close()
    for path in segments(tmp_path):
        with path.open("rb") as file:
            assert all(record.kind in b"S<" for record in read_recording(file))
        assert path.stat().st_mode & 0o777 == 0o600


async def test_what_the_publisher_rolled_back_is_not_stored(tmp_path: Path) -> None:
    """It is asked while it still knows: when the target applies, it may have forgotten, or be down."""
    log = await made(tmp_path)
    lsn, end = Lsn(2000), Lsn(2008)
    rows: list[Message] = [relation(1, "t", 50), row(1, b"kept", 50), row(1, b"gone", 51), row(1, b"kept, too", 52)]
    frames = frame(StreamStart(50, True), *rows, StreamStop(), StreamCommit(50, 0, lsn, end, 1))
    await write(log, frames, end, rolled_back=[51])
    (found,) = await read(log, START)
    assert found == (
        "Transaction",
        repr(Transaction(50, lsn, end, 1, True, [b""] * 3)),
        None,
        True,
        [encode(rows[0]), encode(rows[1]), encode(rows[3])],
    )
    await log.close()


async def test_relations_at_the_beginning_are_not_skipped_for_another_transaction() -> None:
    """The bug was that a skip LSN was cleared, or found, by the transaction that only describes relations."""
    skipping = Skipping(START, "s")
    event = Transaction(9, START, START, 0, False, [encode(relation(1, "t"))])
    sink = OpenedMemorySink.__new__(OpenedMemorySink)
    assert not await skipping.skips(event, sink)
    await skipping.passed(event, sink)
    assert skipping.waits


async def test_rotation_of_empty_segments(tmp_path: Path) -> None:
    """The reader stays where it is while segments after it come and go."""
    log = await made(tmp_path)
    await log.append(group(1100), 0, Lsn(1108))
    stream = RelayStream(log, START, lambda _: None)
    await stream.events()
    log.limit = 0
    for _ in range(3):
        await log.acknowledge(Lsn(1108))
    assert [segment.number for segment in log.segments] == [2]
    for timeline in (2, 1):
        await log.follow(session(timeline=timeline))
        await log.acknowledge(Lsn(1108))
    assert [segment.number for segment in log.segments] == [4]
    log.limit = 2**20
    await log.append(group(1200), 0, Lsn(1208))
    assert len((await stream.events()).events) == 1
    await log.close()


@pytest.mark.parametrize("large", [False, True])
async def test_late_prepare_without_its_end(large: bool, tmp_path: Path) -> None:
    """It would be stored with something that does not belong to it."""
    log = await made(tmp_path)
    rows: list[Message] = [relation(1, "t"), *(row(1, b"x" * 40_000) for _ in range(40 if large else 1))]
    prepare = frame(BeginPrepare(Lsn(500), Lsn(508), 1, 9, "g"), *rows, Prepare(0, Lsn(500), Lsn(508), 1, 9, "g"))
    other = frame(Begin(Lsn(2000), 1, 10), row(1, b"v"), Commit(0, Lsn(2000), Lsn(2008), 1))
    with pytest.raises(ProtocolError, match="COMMIT PREPARED"):
        await write(log, [*prepare, *other], Lsn(2008))
    assert log.end == START
    await log.close()


async def test_what_the_publisher_has_lost_is_not_applied(tmp_path: Path) -> None:
    log = await made(tmp_path)
    await log.append(group(1100), 0, Lsn(1108))
    stream = RelayStream(log, START, lambda _: None)
    log.failure, log.diverged = DataLossError("another server was promoted"), True
    with pytest.raises(DataLossError, match="promoted"):
        await stream.events()
    await log.close()


@pytest.mark.parametrize("seed", range(4))
async def test_apply_is_faster_and_slower_than_the_publisher(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is next comes from memory if it is there, and else from disk, in the same order."""
    history = History(seed)
    events = [await described(event) for event in await direct(history.frames, history.end)]
    log = await made(tmp_path, 8 * 20_000)
    log.limit, log.recent.limit = 2**40, 500_000 if seed % 2 else 20_000
    taken, take = list[Group](), log.recent.take

    def counted() -> Group:
        taken.append(take())
        return taken[-1]

    monkeypatch.setattr(log.recent, "take", counted)
    found, _ = await asyncio.gather(read(log, START, end=history.end), write(log, history.frames, history.end))
    assert found == events
    assert taken
    assert sum(len(group.events) for group in taken) < len(events)
    assert len(log.segments) > 1
    # the memory is bounded, and what is in it is not lost for another reader, which begins at another position
    assert 0 <= log.recent.size <= log.recent.limit
    assert await read(log, START) == events
    await log.close()


async def test_large_transaction_is_read_once(tmp_path: Path) -> None:
    """The bug was that it was read in a single call, and again to be applied."""
    log = await made(tmp_path)
    rows: list[Message] = [row(1, b"%d" % number + b"x" * 100_000) for number in range(60)]
    await write(log, frame(Begin(Lsn(2000), 1, 9), relation(1, "t"), *rows, Commit(0, Lsn(2000), Lsn(2008), 1)), Lsn(2008))
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"30xxx", b"30xxy"))
    stream = RelayStream(log, START, lambda _: None)
    (event,) = (await stream.events()).events
    assert isinstance(event, Transaction)
    assert isinstance(event.spool, StoredRecords)
    assert (event.count, event.spilled, event.records) == (61, 61, [])
    with pytest.raises(DataLossError, match="checksum"):
        [record async for chunk in event.chunks() for record in chunk]
    path.write_bytes(whole)
    expected = list(map(encode, [relation(1, "t"), *rows]))
    for start in (0, 1, 35, 60):
        assert [record async for chunk in event.chunks(start) for record in chunk] == expected[start:]
    # a start after it learns its relation
    begin, _, *rest = group(2100)
    await log.append([begin, *rest], 0, Lsn(2108))
    assert len(await read(log, Lsn(2008))) == 1
    await log.close()


@pytest.mark.parametrize(
    "stored",
    [
        [[]],
        [[b""]],
        [[b"C"]],
        [group(1100)[:1], [b"K"]],
        [group(1100)[:3], group(1100)[3:]],
        [group(1100)[1:]],
        [group(1100)[:1]],
    ],
)
async def test_what_no_relay_log_has_is_an_error(stored: Sequence[Sequence[bytes]], tmp_path: Path) -> None:
    """Its checksums are correct, but it has no whole transactions."""
    log = await made(tmp_path)
    records = [encode_record(MESSAGES, 0, messages_content(payloads)) for payloads in stored]
    with segments(tmp_path)[0].open("ab") as file:
        file.write(b"".join([*records, encode_record(END, 0, Lsn(1108).to_bytes(8))]))
    log.segments[0].size = segments(tmp_path)[0].stat().st_size
    with pytest.raises(DataLossError, match=r"is damaged: (a transaction is not complete|it has something else)"):
        await RelayStream(log, START, lambda _: None).events()
    await log.close()
