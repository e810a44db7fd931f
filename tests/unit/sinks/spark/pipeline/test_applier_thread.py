"""The applier as a thread of the subscriber: its end, and its beginning again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from subscriber.errors import TargetUnavailable
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.files.location import Location
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.program import applier_thread as beside_module
from subscriber.sinks.spark.pipeline.program import start
from subscriber.sinks.spark.pipeline.program.applier_thread import ApplierThread
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from tests.unit.sinks.spark.pipeline.test_applier import current, storage
from tests.unit.sinks.spark.stream import RELATION, batch, begun, make, row, transaction


class LongRound:
    """In place of the applier's loop: one round that ends when it is let."""

    def __init__(self) -> None:
        self.begun = 0
        self.under_way = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, _location: Location, stop: threading.Event, _rest_seconds: float) -> None:
        self.begun += 1
        self.under_way.set()
        assert self.may_end.wait(60)
        assert stop.wait(60)


@pytest.fixture
def long_round(monkeypatch: pytest.MonkeyPatch) -> Iterator[LongRound]:
    made = LongRound()
    monkeypatch.setattr(start, "apply_in_process", made)
    monkeypatch.setattr(beside_module, "_PATIENCE_SECONDS", 0.01)
    yield made
    made.may_end.set()


@pytest.mark.timeout(60)
def test_an_end_does_not_wait_for_ever_and_no_second_applier_begins_beside_the_round(tmp_path: Path, long_round: LongRound) -> None:
    applier = ApplierThread(Location(path=str(tmp_path), apply="local"))
    applier.start()
    assert long_round.under_way.wait(30)
    thread = applier._thread
    assert thread is not None
    for _ in range(2):
        applier.stop()
        with pytest.raises(TargetUnavailable, match="has not yet ended its round"):
            applier.start()
    assert thread.daemon
    long_round.may_end.set()
    thread.join(30)
    long_round.under_way.clear()
    applier.start()
    assert long_round.under_way.wait(30)
    assert long_round.begun == 2
    thread = applier._thread
    assert thread is not None
    applier.stop()
    thread.join(30)
    applier.stop()
    assert applier._thread is None


@pytest.mark.slow
@pytest.mark.parametrize("failing", [False, True])
async def test_what_is_landed_amid_the_last_look_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    """The bug was that a round which found nothing, or failed, was the last one, though it had looked before the stop."""
    sink = await begun(make(tmp_path, "?batch_delay=0"))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", "a", None)))))
    work, stop = Applier(storage(tmp_path), LocalEngine(storage(tmp_path))), threading.Event()
    loop, real, round_ = asyncio.get_running_loop(), work.run_round, 0

    def run_round() -> Snapshot | None:
        nonlocal round_
        found = real()
        round_ += 1
        if found is None and not stop.is_set():
            asyncio.run_coroutine_threadsafe(sink.apply(batch(transaction(300, Insert(5, row("2", "b", None))))), loop).result(30)
            stop.set()
            if failing:
                raise TargetUnavailable("away for a moment")
        return found

    monkeypatch.setattr(work, "run_round", run_round)
    await asyncio.to_thread(apply_forever, work, stop, rest_seconds=60)
    await sink.close()
    assert current(tmp_path) == [(1, "a"), (2, "b")]
    assert round_ == 4, "and it ended as soon as nothing waited"


async def test_an_error_after_the_stop_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, stop, rounds = await begun(make(tmp_path, "?batch_delay=0")), threading.Event(), 0
    work = Applier(storage(tmp_path), LocalEngine(storage(tmp_path)))

    def run_round() -> Snapshot | None:
        nonlocal rounds
        rounds += 1
        stop.set()
        raise TargetUnavailable("away for good")

    monkeypatch.setattr(work, "run_round", run_round)
    with pytest.raises(TargetUnavailable, match="away for good"):
        await asyncio.to_thread(apply_forever, work, stop, rest_seconds=60)
    await sink.close()
    assert rounds == 2
