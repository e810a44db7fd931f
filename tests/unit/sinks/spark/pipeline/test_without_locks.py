"""Appliers where no lock keeps a second one away, as in an object store; here they are in a directory, without its lock."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from subscriber.errors import SubscriptionInUse, TargetUnavailable
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.catalog.snapshots import Cut, read_cut, write_cut
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.opened import OpenedSparkSink
from subscriber.sinks.spark.pipeline import publisher
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.engines import LocalEngine
from tests.unit.sinks.spark.pipeline.test_applier import storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED
from tests.unit.sinks.spark.stream import batch, begun, make, row, transaction


def _applier(path: Path) -> Applier:
    work = Applier(storage(path), LocalEngine(storage(path)))
    work._publisher._is_locked, work._lock = False, FileLock(None, "", "")
    return work


async def _land(sink: OpenedSparkSink, end: int) -> None:
    await sink.apply(batch(transaction(end, KEYED, Insert(5, row(str(end), "a")))))


def _is_published(path: Path, lsn: int) -> bool:
    cut = read_cut(storage(path))
    return cut is not None and cut.lsn == lsn


def _until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("taken", [True, False])
async def test_a_cut_whose_writing_failed_is_its_own_whether_the_store_took_it_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    sink = await begun(make(tmp_path, "?batch_delay=0"))
    await _land(sink, 200)
    stop, real, lost = threading.Event(), Storage.write, threading.Event()

    def write(self: Storage, name: str, *arguments: Any, **options: Any) -> None:
        if name == "applied.json" and not lost.is_set():
            if taken:
                real(self, name, *arguments, **options)
            lost.set()
            raise TargetUnavailable("the answer was lost")
        real(self, name, *arguments, **options)

    work = threading.Thread(target=apply_forever, args=[_applier(tmp_path), stop], daemon=True)
    work.start()
    try:
        assert _until(lambda: _is_published(tmp_path, 200))
        monkeypatch.setattr(Storage, "write", write)
        await _land(sink, 300)
        assert lost.wait(30)
        await _land(sink, 400)
        assert _until(lambda: _is_published(tmp_path, 400))
    finally:
        stop.set()
        work.join()
    await sink.close()


@pytest.mark.parametrize("between", [Applier._manifests, Applier._cut])
async def test_cut_that_was_stored_although_the_store_reported_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, between: Callable[..., Any]
) -> None:
    """Between two looks of a later round: the first one found the former cut."""
    sink, work = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path)
    await _land(sink, 200)
    work.open()
    work.run_round()
    await _land(sink, 300)
    late: list[Cut] = []

    def write(_: Storage, cut: Cut) -> None:
        late.append(cut)
        raise TargetUnavailable("the answer was lost")

    def taken(*arguments: Any) -> Any:
        if late:
            write_cut(storage(tmp_path), late.pop())
            late.clear()
        return between(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(publisher, "write_cut", write)
        for _ in range(2):
            with pytest.raises(TargetUnavailable):
                work.run_round()
    assert _is_published(tmp_path, 200)
    monkeypatch.setattr(Applier, between.__name__, taken)
    await _land(sink, 400)
    work.run_round()
    assert _is_published(tmp_path, 400)
    await _land(sink, 500)
    work.run_round()
    assert _is_published(tmp_path, 500)
    await sink.close()


async def test_however_many_cuts_the_store_refuses_the_published_one_stays_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path)
    await _land(sink, 200)
    work.open()
    work.run_round()
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "write_cut", _refused)
        for number in range(20):
            await _land(sink, 300 + 10 * number)
            with pytest.raises(TargetUnavailable):
                work.run_round()
    work.run_round()
    assert _is_published(tmp_path, 490)
    await sink.close()


def _refused(_: Storage, __: Cut) -> None:
    raise TargetUnavailable("the answer was lost")


@pytest.mark.parametrize("tidied", [True, False])
async def test_a_former_cut_that_another_one_publishes_late_is_not_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tidied: bool
) -> None:
    sink, dead, work = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path), _applier(tmp_path)
    await _land(sink, 200)
    dead.open()
    dead.run_round()
    await _land(sink, 300)
    late: list[Cut] = []
    with monkeypatch.context() as patch:
        patch.setattr(publisher, "write_cut", lambda _, cut: late.append(cut))
        dead.run_round()
    work.open()
    work.run_round()
    assert read_cut(storage(tmp_path)) == late[0], "both publish the same one"
    await _land(sink, 400)
    await _land(sink, 500)
    work.run_round()
    if tidied:
        work.tidy(now=True)
    write_cut(storage(tmp_path), late[0])
    with pytest.raises(SubscriptionInUse):
        work.run_round()
    # a start finds the newest one
    work.open()
    assert _is_published(tmp_path, 500)
    await _land(sink, 600)
    await sink.close()
    work.run_round()
    assert _is_published(tmp_path, 600)


async def test_one_of_two_ends(tmp_path: Path) -> None:
    sink, loop = await begun(make(tmp_path, "?batch_delay=0")), asyncio.get_running_loop()
    await _land(sink, 200)
    first, second, looked = _applier(tmp_path), _applier(tmp_path), 0

    def between() -> None:
        nonlocal looked
        looked += 1
        if looked == 2:
            # the first has published
            asyncio.run_coroutine_threadsafe(_land(sink, 300), loop).result(30)
            second.open()
            second.run_round()

    with pytest.raises(SubscriptionInUse, match="has another applier, which published in the meantime"):
        await asyncio.to_thread(apply_forever, first, threading.Event(), check=between)
    assert _is_published(tmp_path, 300)
    # the other one continues
    await _land(sink, 400)
    await sink.close()
    second.run_round()
    assert _is_published(tmp_path, 400)
