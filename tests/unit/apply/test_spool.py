"""Real files throughout."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from subscriber.apply.receiving import spool_file
from subscriber.apply.receiving.spool import SpoolDirectory
from subscriber.apply.receiving.spool_file import BLOCK_SIZE, SpoolFile, blocks
from subscriber.errors import SpoolError
from subscriber.transaction.model import PreparedTransaction, SpooledRecords, Transaction
from subscriber.transaction.reassembly import SpoolDiscard, SpoolTruncate
from tests.unit.transaction.publisher_model import Publisher
from tests.unit.transaction.test_reassembly_histories import Subscriber

KEY = "target subscription table"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_file, "BLOCK_SIZE", 64)


async def read(part: SpooledRecords) -> list[bytes]:
    return [record async for chunk in part.chunks() for record in chunk]


def files(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


RECORDS = [b"I%d" % number + b"." * (number % 40) for number in range(200)]


# --- writing and reading


async def test_reads_back_what_was_appended(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS[:50])
        await spool.append(2, [b"other", b"\0" * 10])
        await spool.append(1, RECORDS[50:])
        part = spool.reader(1)
        assert await read(part) == RECORDS
        assert await read(part) == RECORDS, "it may be read again"
        assert await read(spool.reader(2)) == [b"other", b"\0" * 10]


async def test_pieces_are_bounded(tmp_path: Path) -> None:
    records = [bytes(1000)] * 2000 + [bytes(3 * BLOCK_SIZE)] + [b"x"] * 10
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, records)
        chunks = [chunk async for chunk in spool.reader(1).chunks()]
    assert [record for chunk in chunks for record in chunk] == records
    assert len(chunks) > 8
    assert all(sum(map(len, chunk)) < BLOCK_SIZE + 3 * BLOCK_SIZE for chunk in chunks)
    assert all(sum(map(len, chunk)) < 2 * BLOCK_SIZE for chunk in chunks if max(map(len, chunk)) < BLOCK_SIZE)


def test_blocks_lose_nothing() -> None:
    records = [bytes([number]) * (BLOCK_SIZE // 3) for number in range(10)]
    cut = list(blocks(records))
    assert [record for block in cut for record in block] == records
    assert [len(block) for block in cut] == [4, 4, 2]
    assert list(blocks([])) == []


async def test_chunks_may_be_left_early(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, [bytes(1000)] * 1000)
        chunks = spool.reader(1).chunks()
        assert await anext(aiter(chunks))


async def test_appending_nothing(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, [])
        assert files(spool.directory) == []
        assert await read(spool.reader(1)) == []


async def test_discard(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS)
        await spool.append(2, RECORDS)
        await spool.discard(1)
        await spool.discard(1)
        await spool.discard(99)
        assert len(files(spool.directory)) == 1
        part = spool.reader(2)
        await part.discard()
        await part.discard()
        assert files(spool.directory) == []
        with pytest.raises(SpoolError, match="No such file"):
            await read(part)


async def test_number_used_again_does_not_mix(tmp_path: Path) -> None:
    """After a reconnect numbers start again while an earlier transaction may still be read."""
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, [b"old"])
        old = spool.reader(1)
        await spool.append(1, [b"new"])
        await spool.discard(1)
        await spool.append(1, [b"newer"])
        assert await read(old) == [b"old"]
        assert await read(spool.reader(1)) == [b"newer"]
        await old.discard()


@pytest.mark.parametrize("call", ["truncate", "reader"])
async def test_unknown_number(tmp_path: Path, call: str) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        if call == "truncate":
            with pytest.raises(SpoolError, match="nothing was spilled under number 7"):
                await spool.truncate(7, 1)
        else:
            with pytest.raises(SpoolError, match="nothing was spilled under number 7"):
                spool.reader(7)


# --- truncation


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kept", range(31))
async def test_truncate_anywhere(tmp_path: Path, kept: int) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS[:12])
        await spool.append(1, RECORDS[12:30])
        assert len([block async for block in _reader_of_copy(spool, RECORDS[:30])]) > 5
        await spool.truncate(1, kept)
        await spool.append(1, RECORDS[100:120])
        await spool.truncate(1, kept + 5)
        assert await read(spool.reader(1)) == RECORDS[: min(kept, 30)] + RECORDS[100:105]


async def _reader_of_copy(spool: SpoolDirectory, records: Sequence[bytes]) -> AsyncIterator[Sequence[bytes]]:
    await spool.append(2, records)
    async for chunk in spool.reader(2).chunks():
        yield chunk


async def test_truncate_beyond_the_end_and_to_nothing(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS)
        await spool.truncate(1, 10_000)
        await spool.truncate(1, len(RECORDS))
        await spool.truncate(1, 0)
        assert files(spool.directory)[0].stat().st_size == 0
        await spool.append(1, [b"again"])
        assert await read(spool.reader(1)) == [b"again"]


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_blocks")
@given(st.lists(st.one_of(st.lists(st.binary(max_size=90), max_size=12), st.integers(0, 40)), max_size=25))
def test_as_a_list(tmp_path: Path, steps: list[list[bytes] | int]) -> None:
    """Appends and truncations in any order, against a list."""
    model: list[bytes] = []

    async def play() -> list[bytes]:
        async with SpoolDirectory(str(tmp_path), KEY) as spool:
            await spool.append(1, [])
            for step in steps:
                if isinstance(step, int):
                    await spool.truncate(1, step)
                    del model[step:]
                else:
                    await spool.append(1, step)
                    model.extend(step)
            return await read(spool.reader(1))

    assert asyncio.run(play()) == model


class SpoolingSubscriber(Subscriber):
    """Reassembly's orders on real files: the lists of :class:`Subscriber` must say the same."""

    def __init__(self, spool: SpoolDirectory) -> None:
        super().__init__()
        self.files = spool

    async def play(self, publisher: Publisher) -> None:
        for payload in publisher.sent:
            if payload is None:
                spill = self.reassembly.spill()
                if spill is not None:
                    await self.files.append(*spill)
                continue
            for output in self.reassembly.feed(payload):
                if isinstance(output, SpoolTruncate):
                    await self.files.truncate(output.spool_id, output.count)
                elif isinstance(output, SpoolDiscard):
                    await self.files.discard(output.spool_id)
                else:
                    transaction = output.transaction if isinstance(output, PreparedTransaction) else output
                    if isinstance(transaction, Transaction) and transaction.spilled:
                        transaction.spool = self.files.reader(transaction.spool_id)
                        self.spool[transaction.spool_id] = await read(transaction.spool)
                        await transaction.discard()
                    self.take(output)
        for order in self.reassembly.reset():
            await self.files.discard(order.spool_id)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("small_blocks")
@given(st.binary(min_size=100, max_size=400))
def test_histories_through_files(tmp_path: Path, history: bytes) -> None:
    """Reassembly and this spool together: the surviving rows of random histories, and no file left."""
    publisher = Publisher(history)

    async def play() -> None:
        async with SpoolDirectory(str(tmp_path), KEY) as spool:
            subscriber = SpoolingSubscriber(spool)
            await subscriber.play(publisher)
            assert subscriber.events == publisher.expected
            assert files(spool.directory) == []

    asyncio.run(play())


# --- damage


def written(path: Path) -> SpoolFile:
    file = SpoolFile(path)
    file.append([b"secret one", b"", b"secret two"])
    file.append([b"secret three"])
    return file


def read_all(file: SpoolFile) -> list[bytes]:
    return [record for block in range(file.blocks) for record in file.read(block)]


def test_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path / "1.spool")
    good = file.path.read_bytes()
    for position in range(len(good)):
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(good)
            damaged[position] ^= change
            file.path.write_bytes(damaged)
            with pytest.raises(SpoolError) as caught:
                read_all(file)
            assert str(file.path) in str(caught.value)
            assert "secret" not in caught.value.one_line()
    file.path.write_bytes(good)
    assert read_all(file) == [b"secret one", b"", b"secret two", b"secret three"]


def test_every_other_length_is_noticed(tmp_path: Path) -> None:
    file = written(tmp_path / "1.spool")
    good = file.path.read_bytes()
    for length in range(len(good)):
        file.path.write_bytes(good[:length])
        with pytest.raises(SpoolError, match=f"it has {length} bytes where {len(good)} were written"):
            read_all(file)
    file.path.write_bytes(good + b"\0")
    with pytest.raises(SpoolError, match="is damaged"):
        read_all(file)


def test_exchanged_blocks_are_noticed(tmp_path: Path) -> None:
    file = SpoolFile(tmp_path / "1.spool")
    file.append([b"one"])
    file.append([b"two"])
    data = file.path.read_bytes()
    half = len(data) // 2
    file.path.write_bytes(data[half:] + data[:half])
    with pytest.raises(SpoolError, match="wrong checksum in the block at byte 0"):
        read_all(file)


def test_damage_is_noticed_by_truncate(tmp_path: Path) -> None:
    file = written(tmp_path / "1.spool")
    good = file.path.read_bytes()
    file.path.write_bytes(good[:20] + b"?" + good[21:])
    with pytest.raises(SpoolError, match="is damaged"):
        file.truncate(1)
    file = written(tmp_path / "2.spool")
    file.path.write_bytes(good[:20])
    with pytest.raises(SpoolError, match="it ends at byte 20"):
        file.truncate(1)


async def test_removed_file(tmp_path: Path) -> None:
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS)
        files(spool.directory)[0].unlink()
        with pytest.raises(SpoolError, match=r"could not write spool file .*: No such file"):
            await spool.append(1, RECORDS)
        with pytest.raises(SpoolError, match=r"could not read spool file .*: No such file"):
            await read(spool.reader(1))


# --- no room


async def test_no_room(tmp_path: Path) -> None:
    """A real limit of the system on the size of files; the part stays as it was."""
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(SpoolError, match=r"could not write spool file .*: File too large") as caught:
                await spool.append(1, [bytes(1000)] * 1000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.hint is not None
        assert caught.value.hint.startswith("make room in ")
        await spool.append(1, [b"more"])
        assert await read(spool.reader(1)) == [*RECORDS, b"more"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_full_disk_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        monkeypatch.setattr(os, "pwrite", pwrite)
        with pytest.raises(SpoolError, match=os.strerror(number)) as caught:
            await spool.append(1, RECORDS)
        monkeypatch.undo()
        assert caught.value.hint is not None
        assert str(spool.directory) in caught.value.hint
        await spool.append(1, RECORDS)
        assert await read(spool.reader(1)) == RECORDS, "the file that the failed attempt made is used"


# --- threads


async def test_file_work_is_done_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for name in ("open", "unlink", "mkdir"):
        original = getattr(os, name)

        def watched(*args: object, _original: object = original, **kwargs: object) -> object:
            seen.append(threading.current_thread() is threading.main_thread())
            return _original(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(os, name, watched)
    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        await spool.append(1, RECORDS)
        await spool.truncate(1, 10)
        part = spool.reader(1)
        await read(part)
        await part.discard()
    assert len(seen) > 5
    assert not any(seen)


async def test_cancelled_append_ends_with_its_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug would be a thread that still writes, or makes the file, after a discard."""
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()
    go_on = threading.Event()
    original = SpoolFile.append

    def slow(self: SpoolFile, records: Sequence[bytes]) -> None:
        loop.call_soon_threadsafe(entered.set)
        assert go_on.wait(10)
        original(self, records)

    async with SpoolDirectory(str(tmp_path), KEY) as spool:
        monkeypatch.setattr(SpoolFile, "append", slow)
        task = asyncio.create_task(spool.append(1, RECORDS))
        await entered.wait()
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await spool.discard(1)
        assert files(spool.directory) == []
