"""What a start makes of a relay log: whatever was torn, damaged or taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from subscriber.errors import DataLossError, SpoolError
from subscriber.protocol.frames import PrimaryKeepalive, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    Commit,
)
from subscriber.recording import relay_segment
from subscriber.recording.relay_log import RelayLog
from tests.unit.relay_log.written import (
    KEY,
    START,
    History,
    failing,
    frame,
    group,
    made,
    read,
    relation,
    row,
    segments,
    session,
    several,
    write,
)


async def test_continues_after_a_torn_end(tmp_path: Path) -> None:
    """Wherever a crash ends the file, whole groups remain, and what the publisher sends again follows them."""
    first, second = History(1), History(2)
    log = await made(tmp_path)
    await write(log, first.frames[:40], Lsn(START + 1))
    before, end = segments(tmp_path)[-1].read_bytes(), log.end
    await write(
        log,
        [
            encode_frame(PrimaryKeepalive(Lsn(end + 100), 1, False)),
            *frame(Begin(Lsn(end + 200), 1, 9), relation(1, "t"), row(1, b"v"), Commit(0, Lsn(end + 200), Lsn(end + 208), 1)),
        ],
        Lsn(end + 208),
    )
    await log.close()
    path = segments(tmp_path)[-1]
    whole = path.read_bytes()
    for size in range(len(before), len(whole)):
        path.write_bytes(whole[:size])
        log = await made(tmp_path)
        assert end <= log.end < end + 208
        await log.rewind()
        assert path.stat().st_size == log.segments[-1].size <= size
        await log.close()
    # garbage after the end
    path.write_bytes(whole + b"\0" * 100)
    log = await made(tmp_path)
    assert log.end == end + 208
    assert second.frames
    await log.close()
    # a segment whose creation was interrupted
    (path.parent / f"{2:012d}.new").write_bytes(whole[:30])
    log = await made(tmp_path)
    assert (log.end, len(log.segments)) == (end + 208, 1)
    await log.close()
    # its beginning is written at once, so it was not a crash
    path.write_bytes(b"\0" * 100)
    log = RelayLog(str(tmp_path / "relay"), 2**20, KEY)
    await log.open()
    with pytest.raises(DataLossError, match="it does not begin with a session"):
        log.holds(START)
    # the slot may have everything
    await log.begin(session())
    assert log.holds(START)
    assert len(segments(tmp_path)) == 1
    await log.close()


async def test_missing_and_damaged_segments_are_named(tmp_path: Path) -> None:
    log = await several(tmp_path)
    middle, position = log.segments[1], log.segments[-1].base
    await log.close()
    data = bytearray(middle.path.read_bytes())
    data[len(data) // 2] ^= 1
    middle.path.write_bytes(data)
    log = await made(tmp_path)
    # what the target has is not read
    assert log.holds(position)
    await read(log, position)
    assert log.holds(START)
    with pytest.raises(DataLossError, match=f'segment "{middle.path}" of the relay log is damaged: .* checksum') as met:
        await read(log, START)
    assert "restore the file" in (met.value.hint or "")
    await log.close()
    middle.path.unlink()
    log = await made(tmp_path)
    assert log.holds(position)
    with pytest.raises(DataLossError, match=f'segment "{middle.path}" .* the file is missing'):
        log.holds(START)
    assert not log.holds(Lsn(START - 1))
    assert not log.holds(Lsn(log.end + 1))
    await log.close()


async def test_wrong_lsn_is_remembered(tmp_path: Path) -> None:
    log = await made(tmp_path)
    await log.condemn(DataLossError("the publisher sent a wrong LSN"))
    await log.close()
    log = RelayLog(str(tmp_path / "relay"), 2**20, KEY)
    with pytest.raises(DataLossError, match="the publisher sent a wrong LSN"):
        await log.open()
    await log.close()


async def test_what_was_not_synced_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sync leaves pages that are not on disk, but can be read. So can a killed process."""
    log = await made(tmp_path)
    await log.append(group(1100), 0, Lsn(1108))
    (path,) = segments(tmp_path)
    before = path.stat().st_size
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing)
        with pytest.raises(SpoolError, match="could not write the relay log"):
            await log.append(group(1200), 0, Lsn(1208))
        assert path.stat().st_size == before
    # killed between the write and its sync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", lambda _: None)
        await log.append(group(1200), 0, Lsn(1208))
    await log.close()
    whole = path.read_bytes()
    log = await made(tmp_path)
    assert log.end == 1208
    written, synced = list[tuple[bytes, int]](), list[int]()
    pwrite = os.pwrite

    def write_noted(descriptor: int, data: bytes, offset: int) -> int:
        written.append((bytes(data), offset))
        return pwrite(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_noted)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    # before receiving, which acknowledges the end
    await log.rewind()
    assert (written, len(synced)) == ([(whole[before:], before)], 1)
    await log.rewind()
    assert len(synced) == 1
    assert path.read_bytes() == whole
    await log.close()


async def test_segment_that_failed_after_it_got_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is removed; if that fails too, the next start finds that the one before it continued."""
    for broken in ("sync_directory", "unlink"):
        directory = tmp_path / broken
        directory.mkdir()
        log = await made(directory)
        await log.append(group(1100), 0, Lsn(1108))
        log.limit = 0
        with monkeypatch.context() as patch:
            patch.setattr(relay_segment, "sync_directory", failing)
            if broken == "unlink":
                patch.setattr(Path, "unlink", failing)
            with pytest.raises(SpoolError):
                await log.acknowledge(Lsn(1108))
        assert len(segments(directory)) == (2 if broken == "unlink" else 1)
        await log.rewind()
        await log.append(group(1200), 0, Lsn(1208))
        await log.close()
        log = await made(directory)
        assert (log.end, len(log.segments), len(segments(directory))) == (1208, 1, 1)
        assert len(await read(log, START)) == 2
        await log.close()
