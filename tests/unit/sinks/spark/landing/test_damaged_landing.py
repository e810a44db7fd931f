"""Damaged lakes, directories that are none, and disks that fail: what is refused, and that nothing is acknowledged."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from subscriber.config import Settings, SubscriptionOptions
from subscriber.errors import (
    ConfigurationError,
    DataLossError,
    SubscriptionInUse,
    TargetError,
    TargetUnavailable,
)
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import (
    Insert,
)
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.landing.manifest import Manifest, check_chain
from subscriber.sinks.spark.landing.zone import ParquetFile
from subscriber.sinks.spark.sink import SparkSink
from tests.unit.sinks.spark.stream import RELATION, START, batch, begun, landed, make, row, transaction


async def _two_batches(path: Path) -> None:
    sink = await begun(make(path))
    for end in (200, 300, 400):
        await sink.apply(batch(transaction(end, RELATION, Insert(5, row(str(end), None, None)))))
        await sink.advance(Lsn(end))
    await sink.close()


def _cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "error", "words"),
    [
        (lambda path: (path / "landing/00000000000000000300.json").unlink(), DataLossError, "has a gap: no manifest from 0/C8 to 0/12C"),
        (lambda path: _cut_off(path / "landing/00000000000000000300.json"), TargetError, r"00000000000000000300\.json is damaged"),
        (lambda path: _cut_off(next(path.glob("landing/*400-*.parquet"))), TargetError, r"landed file .* has \d+ bytes, not \d+"),
        (lambda path: next(path.glob("landing/*400-*.parquet")).unlink(), TargetError, "landed file .* is missing"),
        (lambda path: (path / "catalog.json").write_text("{}"), TargetError, r"catalog\.json is damaged"),
        (lambda path: (path / "subscriber.json").unlink(), TargetError, "is not empty and is not a lake"),
        (lambda path: (path / "position.json").write_text('{"format": 2, "crc": 0, "document": {}}'), TargetError, "has format 2, not 1"),
    ],
)
async def test_a_damaged_lake_is_refused_by_name(
    tmp_path: Path, harm: Callable[[Path], object], error: type[TargetError], words: str
) -> None:
    await _two_batches(tmp_path)
    harm(tmp_path)
    with pytest.raises(error, match=words) as caught:
        await make(tmp_path).open("replica", lambda _: None)
    assert "\n" not in str(caught.value)
    assert caught.value.hint


async def test_a_lake_of_another_subscription_is_refused(tmp_path: Path) -> None:
    await _two_batches(tmp_path)
    sink = make(tmp_path)
    for call in (sink.exists("other"), sink.open("other", lambda _: None)):
        with pytest.raises(TargetError, match='belongs to subscription "replica", not "other"'):
            await call


async def test_a_directory_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    sink = make(tmp_path)
    with pytest.raises(TargetError, match='is not empty and is not a lake: it contains "photos"'):
        await sink.open("replica", lambda _: None)
    assert [finding.severity for finding in await sink.check([], two_phase=False)] == ["error"]
    assert os.listdir(tmp_path) == ["photos"]


async def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    with pytest.raises(SubscriptionInUse, match="in use by another process"):
        await make(tmp_path).open("replica", lambda _: None)
    await sink.close()
    second = await begun(make(tmp_path))
    await second.close()


async def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TargetError, match="lake/"):
        await make(tmp_path / "file" / "lake").open("replica", lambda _: None)


async def test_a_full_disk_acknowledges_nothing(tmp_path: Path) -> None:
    durable: list[int] = []
    sink = await begun(make(tmp_path), durable)
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    reported = list(durable)
    with pytest.MonkeyPatch.context() as monkeypatch:

        def full(_: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TargetError, match="no space left") as caught:
            await sink.advance(Lsn(200))
    assert not isinstance(caught.value, TargetUnavailable)
    assert caught.value.hint is not None
    assert durable == reported
    await sink.close()
    sink = await make(tmp_path).open("replica", durable.append)
    state = sink.state
    assert state.position == START
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    await sink.close()
    assert [found["id"] for found in landed(tmp_path)] == [1]


def test_a_parquet_file_that_finds_no_room_for_its_first_bytes_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ: writing fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(TargetError, match=r"x\.parquet.*no space left"):
            ParquetFile(Storage.open(Location(path=str(tmp_path))), "x.parquet", pa.schema([("a", pa.int32())]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


async def test_an_opening_that_fails_late_gives_the_lock_back(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.close()
    definition = tmp_path / "definition.json"
    definition.write_text("damaged")
    with pytest.raises(TargetError, match=r"definition\.json is damaged"):
        await make(tmp_path).open("replica", lambda _: None)
    definition.unlink()
    second = await begun(make(tmp_path))
    await second.close()


def test_a_chain_that_overlaps_is_refused() -> None:
    with pytest.raises(TargetError, match="overlaps"):
        check_chain([Manifest(previous=Lsn(1), begin=Lsn(1), end=Lsn(5)), Manifest(previous=Lsn(3), begin=Lsn(3), end=Lsn(8))], "landing")


def test_binary_format_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="text format"):
        SparkSink("spark:///lake", options=SubscriptionOptions(binary=True), settings=Settings())
