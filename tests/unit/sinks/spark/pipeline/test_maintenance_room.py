"""Rounds wait while another program rewrites files of a table, so that its OPTIMIZE wins after a few tries."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable, WriterProperties
from deltalake.exceptions import CommitFailedError

from subscriber.interfaces import TableName
from subscriber.protocol.messages import Insert, Update
from subscriber.sinks.spark.pipeline.applier import ApplierSettings
from subscriber.sinks.spark.pipeline.maintenance_room import MaintenanceRoom
from subscriber.sinks.spark.pipeline.pace import Pace
from subscriber.sinks.spark.pipeline.program.apply_loop import _seconds_until_round
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, rows, start
from tests.unit.sinks.spark.stream import begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import OTHER

TRIES = 6


async def test_rounds_wait_for_a_commit_or_for_twice_as_long_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, *(Insert(5, row(str(number), "a")) for number in range(30)))
    directory, now = tmp_path / "tables/public/t", 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    (directory / "part-00000-old-c000.parquet").write_bytes(b"")
    assert work.room() == 0.0
    for number, seconds in enumerate((10, 20, 40, 80, 120, 120)):
        (directory / f"part-00000-{number}-c000.parquet").write_bytes(b"")
        assert work.room() == seconds
        now += 4
        assert work.room() == seconds - 4, "the same file is not another maintenance"
        now += seconds
        assert work.room() == 0.0
    (directory / "part-00000-new-c000.parquet").write_bytes(b"")
    assert work.room() == 120
    assert len(list(directory.glob("*.parquet"))) > 10
    DeltaTable(str(directory)).optimize.compact()
    assert work.room() == 0.0, "it has won"
    # rounds of this program are no maintenance
    await land(sink, 300, Update(5, None, None, row("1", "b")))
    await sink.close()
    all_rounds(work)
    assert work.room() == 0.0
    (directory / "part-00000-next-c000.parquet").write_bytes(b"")
    assert work.room() == 10


async def test_rounds_begin_soon_after_the_commit_that_they_waited_for(tmp_path: Path) -> None:
    """The bug was that the next look was after half of the limit, up to a minute after the commit."""
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    assert work.room() == 0.0
    await land(sink, 300, Insert(5, row("2", "a")))
    await sink.close()
    (tmp_path / "tables/public/t/part-00000-new-c000.parquet").write_bytes(b"")
    assert _seconds_until_round(work, Pace(0.0), 0.1) == 0.1


async def test_nothing_waits_for_maintenance_that_has_ended(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, *(Insert(5, row(str(number), "a")) for number in range(30)))
    await sink.close()
    directory = tmp_path / "tables/public/t"
    assert work.room() == 0.0
    assert DeltaTable(str(directory)).optimize.compact()["numFilesAdded"]
    assert work.room() == 0.0


async def test_maintenance_of_one_table_after_another_does_not_hold_rounds_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug was that a program that rewrites many tables held the rounds of all until it ended."""
    relations = [replace(OTHER, relation_id=number, name=f"t{number}") for number in range(3)]
    sink, work = await begun(make(tmp_path), tables=[TableName("public", one.name) for one in relations]), applier(tmp_path)
    await land(sink, 200, *relations, *(Insert(number, row("1", "a")) for number in range(3)))
    await sink.close()
    all_rounds(work)
    now, held = 0.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert work.room() == 0.0
    for number in range(100):
        (tmp_path / f"tables/public/t{number % 3}/part-00000-{number}-c000.parquet").write_bytes(b"")
        if work.room() <= 0:
            break
        now = held = now + 6
    assert 100 < held <= 130
    assert work.room() <= 0, "it does not wait for the same files again"


@pytest.mark.slow
async def test_optimize_of_another_program_wins_within_some_tries(tmp_path: Path) -> None:
    """The bug was that it lost each time if the applier committed faster than it."""
    sink, dice = await begun(make(tmp_path)), random.Random(1)
    notes = {str(number): f"{dice.getrandbits(240):060x}" for number in range(15_000)}
    await land(sink, 200, KEYED, *(Insert(5, row(key, note)) for key, note in notes.items()))
    work = applier(tmp_path, ApplierSettings(target_rows=5_000, vectors=False))
    all_rounds(work)
    table, end, lost, rounds = str(tmp_path / "tables/public/t"), 200, 0, 0

    def optimize() -> bool:
        # this slows it down: it takes longer than a round
        slow = WriterProperties(compression="ZSTD", compression_level=15)
        try:
            return bool(DeltaTable(table).optimize.compact(writer_properties=slow)["numFilesRemoved"])
        except CommitFailedError:
            return False

    while True:
        optimizing = asyncio.create_task(asyncio.to_thread(optimize))
        while not optimizing.done():
            end += 10
            changed = {str(number): str(end) for number in range(end % 100, 15_000, 2_500)}
            notes |= changed
            await land(sink, end, *(Update(5, None, None, row(key, note)) for key, note in changed.items()))
            if not await asyncio.to_thread(work.room):
                await asyncio.to_thread(work.run_round)
                rounds += 1
        if optimizing.result():
            break
        lost += 1
        assert lost < TRIES
    assert rounds
    await sink.close()
    all_rounds(work)
    assert sorted(rows(tmp_path)) == sorted((int(key), note) for key, note in notes.items())


async def test_table_whose_directory_is_gone_keeps_no_round_waiting(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await sink.close()
    assert work.room() == 0.0
    shutil.rmtree(tmp_path / "tables/public/t")
    assert work.room() == 0.0


def test_nothing_waits_without_a_table(tmp_path: Path) -> None:
    table = LakeDelta(storage(tmp_path), "tables/public/t")
    assert MaintenanceRoom(storage(tmp_path)).seconds([table]) == 0.0
