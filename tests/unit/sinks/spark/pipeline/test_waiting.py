"""What waits for the next round, and the thread that registers snapshots."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from subscriber.errors import SubscriberError
from subscriber.interfaces import TableName
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.pace import Pace, Waiting
from subscriber.sinks.spark.pipeline.program import registration as registration_module
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.program.registration import CatalogRegistration
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land
from tests.unit.sinks.spark.stream import begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import Maintained


async def test_look_for_other_writers_does_not_bring_forward_a_round(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    assert work.waiting() is None
    work._next_look = 0.0
    assert work.waiting() == Waiting(-math.inf)
    looked = work._looked
    await land(sink, 300, Insert(5, row("2", "a")))
    found = work.waiting()
    assert found is not None
    # the publisher's clock is decades behind
    assert looked - 1 <= found.since <= looked
    assert found.size > 0
    assert work.waiting() == found
    await sink.close()


async def test_what_is_landed_during_a_round_waits_since_its_begin(tmp_path: Path) -> None:
    sink, loop, landing = await begun(make(tmp_path)), asyncio.get_running_loop(), list[float]()

    def between() -> None:
        landing.append(time.monotonic())
        asyncio.run_coroutine_threadsafe(land(sink, 300, Insert(5, row("2", "b"))), loop).result(30)

    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    work = Applier(storage(tmp_path), Maintained(tmp_path, between))
    began = time.monotonic()
    await asyncio.to_thread(work.run_round)
    found = work.waiting()
    await sink.close()
    assert found is not None
    assert began - 1 <= found.since <= landing[0]


def test_registration_ends_if_it_is_stopped_at_any_moment(tmp_path: Path) -> None:
    registration = CatalogRegistration(cast("Any", Mock()), storage(tmp_path), "catalog.lake", lambda _: None)

    class StoppedAfterLook(threading.Event):
        def is_set(self) -> bool:
            found = super().is_set()
            self.set()
            registration._wake.set()
            return found

    registration._stop = StoppedAfterLook()
    thread = threading.Thread(target=registration._run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()


class Registered(CatalogRegistration):
    """With a catalog that does something else."""

    def __init__(self, path: Path, register: Callable[[], object]) -> None:
        self.reported: list[SubscriberError | None] = []
        super().__init__(cast("Any", Mock()), storage(path), "catalog.lake", self.reported.append)
        self.called = threading.Event()
        self._do = register

    def _register(self, snapshot: Snapshot, names: Mapping[TableName, str]) -> None:
        self.called.set()
        self._do()


@pytest.mark.spark
async def test_unexpected_error_of_the_registration_ends_the_applier(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    await sink.close()

    def broken() -> None:
        raise ZeroDivisionError

    registration = Registered(tmp_path, broken)

    def apply() -> None:
        with registration.running():
            apply_forever(applier(tmp_path), threading.Event(), lambda _: registration.publish(), check=registration.check)

    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(apply)


async def test_catalog_that_does_not_answer_is_reported_and_the_applier_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration_module, "_PATIENCE_SECONDS", 0.1)
    sink = await begun(make(tmp_path))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    all_rounds(applier(tmp_path))
    await sink.close()
    answer = threading.Event()
    registration = Registered(tmp_path, answer.wait)
    with registration.running():
        assert await asyncio.to_thread(registration.called.wait, 30)
        async with asyncio.timeout(30):
            while not registration.reported:
                registration.check()
                await asyncio.sleep(0.01)
        assert [error and error.one_line() for error in registration.reported] == [
            "catalog.lake has not answered for 0 s (hint: check the catalog; replication continues)"
        ]
        assert not answer.is_set()
    answer.set()
    # it has recovered
    async with asyncio.timeout(30):
        while registration.reported[1:] != [None]:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
async def test_clock_that_is_set_neither_stalls_nor_frees_a_limited_write_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    sink = await begun(make(tmp_path, "?batch_delay=0"))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")))
    work, stop, real, ahead = applier(tmp_path), threading.Event(), time.time, 0.0
    pace, began = Pace(0.1, 1000.0), list[float]()
    monkeypatch.setattr(time, "time", lambda: real() + ahead)
    published = asyncio.Queue[int]()
    loop = asyncio.get_running_loop()

    def tell(snapshot: Snapshot) -> None:
        began.append(time.monotonic())
        loop.call_soon_threadsafe(published.put_nowait, int(snapshot.lsn))

    applying = asyncio.create_task(asyncio.to_thread(apply_forever, work, stop, tell, pace=pace))
    try:
        async with asyncio.timeout(60):
            assert await published.get() == 200
            ahead = jump
            await land(sink, 300, Insert(5, row("2", "b")))
            while await published.get() != 300:
                pass
    finally:
        stop.set()
        await applying
        await sink.close()
    written = work.progress.recent[0]["sink"]["metrics"]["bytes"]
    assert began[1] - began[0] >= int(written) / 1000.0 * 0.8
