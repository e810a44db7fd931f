"""The files of a relay log: when they are removed, when there is no room, and who may use them."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from subscriber.errors import ConfigurationError, DataLossError, PublisherUnavailable, SpoolError
from subscriber.protocol.frames import StandbyStatusUpdate, encode_frame
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Begin,
    Commit,
)
from subscriber.recording import relay_log
from subscriber.recording.relay_directory import discard_relay_log, probe_relay_log
from subscriber.recording.relay_log import RelayLog
from subscriber.recording.relay_stream import RelayStream
from tests.unit.relay_log.written import (
    KEY,
    START,
    ScriptedStream,
    failing,
    frame,
    made,
    relation,
    row,
    segments,
    several,
    write,
)


async def test_removed_while_in_use(tmp_path: Path) -> None:
    """What would be written into a file without a name is not acknowledged."""
    log = await made(tmp_path)
    end = log.end
    shutil.rmtree(log.directory)
    with pytest.raises(DataLossError, match="was removed or replaced while it was in use"):
        await log.append((), 0, Lsn(end + 100))
    assert log.end == end
    await log.close()


async def test_pauses_when_full_and_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A segment is removed once the target has all of it; a transaction that is larger than all is written whole."""
    caplog.set_level("INFO")
    log = await made(tmp_path, 1024**2)
    end, frames = int(START), []
    for number in range(60):
        end += 100
        rows = [row(1, b"x" * 50_000) for _ in range(40 if number == 30 else 1)]
        frames += frame(Begin(Lsn(end), 1, number + 10), relation(1, "t"), *rows, Commit(0, Lsn(end), Lsn(end + 8), 1))
    writing = asyncio.create_task(write(log, frames, Lsn(end + 8)))
    for _ in range(20):
        async with asyncio.timeout(20):
            while not (log.full and "receiving pauses" in caplog.text) and not writing.done():
                await asyncio.sleep(0.001)
        if writing.done():
            break
        assert log.size < 1024**2 + 200_000 or log.end > START + 3000
        await log.acknowledge(log.end)
        assert not log.full
    await writing
    text = [record.message for record in caplog.records]
    assert any("the relay log is full (relay_log_size): receiving pauses" in each for each in text)
    assert any("receiving continues" in each for each in text)


async def test_disk_is_full_while_removing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not needed is removed first, which may be what gives a new segment its room. The apply side does not end."""
    log = await several(tmp_path)
    log.limit = 0
    stream = RelayStream(log, START, lambda _: None)
    status = encode_frame(StandbyStatusUpdate(log.end, log.end, log.end, 0, False))
    with monkeypatch.context() as patch:
        patch.setattr(relay_log, "create_file", failing)
        await stream.send(status)
        assert len(segments(tmp_path)) == len(log.segments) == 1
    await stream.send(status)
    assert log.segments[0].base == log.end
    await log.close()


async def test_belongs_to_one_subscription_and_one_process(tmp_path: Path) -> None:
    log = await several(tmp_path)
    directory = log.directory
    with pytest.raises(ConfigurationError, match="another process uses the relay log"):
        await RelayLog(str(tmp_path / "relay"), 2**20, KEY).open()
    await log.close()
    other = RelayLog(str(tmp_path / "relay"), 2**20, "target 1 subscription 3")
    shutil.copytree(directory, other.directory)
    with pytest.raises(ConfigurationError, match="is of another subscription: target 1 subscription 2"):
        await other.open()
    await other.close()
    other.directory.chmod(0o777)
    with pytest.raises(SpoolError, match="is not private") as met:
        await other.open()
    assert "set relay_log to a directory" in (met.value.hint or "")
    await probe_relay_log(str(tmp_path / "relay"))
    assert set((tmp_path / "relay").iterdir()) == {directory, other.directory}
    with pytest.raises(SpoolError, match="could not create relay log"):
        await probe_relay_log("/proc/relay")
    discard_relay_log(str(tmp_path / "relay"), KEY)
    assert not directory.exists()
    discard_relay_log(str(tmp_path / "relay"), KEY)


async def test_lost_connection_is_told_while_receiving_pauses(tmp_path: Path) -> None:
    """The bug was that it was noticed only when there was room again."""
    log = await made(tmp_path)
    log.limit = 0
    stream = ScriptedStream([*frame(Begin(Lsn(2000), 1, 9), relation(1, "t"), row(1, b"v"), Commit(0, Lsn(2000), Lsn(2008), 1))])
    stream.failure = PublisherUnavailable("the connection was lost")
    with pytest.raises(PublisherUnavailable):
        await write(log, stream, Lsn(2008))
    await log.close()
