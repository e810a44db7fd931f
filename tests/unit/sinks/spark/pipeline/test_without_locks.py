"""Appliers where no lock keeps a second one away, as in an object store; here they are in a directory, without its lock."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from subscriber.catalog import ApplierObservation
from subscriber.errors import SubscriptionInUse, TargetUnavailable
from subscriber.interfaces import TableName
from subscriber.protocol.messages import Insert
from subscriber.sinks.spark.catalog.observe import observe
from subscriber.sinks.spark.catalog.snapshots import Snapshot, read_snapshot
from subscriber.sinks.spark.files.file_lock import FileLock
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline import applier_status
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.pipeline.program.apply_loop import apply_forever
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.pipeline.test_applier import storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, relation, rows
from tests.unit.sinks.spark.stream import batch, begun, make, row, transaction

pytestmark = pytest.mark.slow

OTHER = "has another applier, which published in the meantime"


def _applier(path: Path) -> Applier:
    work = Applier(storage(path), LocalEngine(storage(path)))
    work._lock = FileLock(None, "", "")
    return work


async def _land(sink: OpenedSparkSink, end: int) -> None:
    await sink.apply(batch(transaction(end, KEYED, Insert(5, row(str(end), "a")))))


def _is_published(path: Path, lsn: int) -> bool:
    snapshot = read_snapshot(storage(path))
    return snapshot is not None and snapshot.lsn == lsn


def _until(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not (found := what()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("taken", [True, False])
async def test_publication_without_an_answer_is_its_own_whether_the_store_took_it_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    sink = await begun(make(tmp_path, "?batch_delay=0"))
    await _land(sink, 200)
    stop, real, lost = threading.Event(), LakeDelta.commit, threading.Event()

    def commit(self: LakeDelta, *arguments: Any, **named: Any) -> None:
        if self.directory == "snapshots" and not lost.is_set():
            if taken:
                real(self, *arguments, **named)
            lost.set()
            self._table = None  # as after every error of delta-rs
            raise TargetUnavailable("the answer was lost")
        real(self, *arguments, **named)

    work = threading.Thread(target=apply_forever, args=[_applier(tmp_path), stop], daemon=True)
    work.start()
    try:
        assert _until(lambda: _is_published(tmp_path, 200))
        monkeypatch.setattr(LakeDelta, "commit", commit)
        await _land(sink, 300)
        assert lost.wait(30)
        await _land(sink, 400)
        assert _until(lambda: _is_published(tmp_path, 400))
    finally:
        stop.set()
        work.join()
    await sink.close()


async def test_applier_that_was_believed_dead_cannot_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused before it publishes. The other one publishes, and removes landed files."""
    sink, dead, work = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path), _applier(tmp_path)
    await _land(sink, 200)
    dead.open()
    dead.run_round()
    await _land(sink, 300)
    real, loop = SnapshotPublisher.publish, asyncio.get_running_loop()

    def paused(self: SnapshotPublisher, snapshot: Snapshot) -> Snapshot:
        monkeypatch.setattr(SnapshotPublisher, "publish", real)
        work.open()
        work.run_round()
        asyncio.run_coroutine_threadsafe(_land(sink, 400), loop).result(30)
        work.run_round()
        work.tidy(now=True)
        return real(self, snapshot)

    monkeypatch.setattr(SnapshotPublisher, "publish", paused)
    with pytest.raises(SubscriptionInUse, match=OTHER):
        await asyncio.to_thread(dead.run_round)
    assert _is_published(tmp_path, 400)
    # started again, it continues from there
    await _land(sink, 500)
    await sink.close()
    dead.open()
    dead.run_round()
    assert _is_published(tmp_path, 500)
    assert sorted(rows(tmp_path)) == [(end, "a") for end in (200, 300, 400, 500)]
    with pytest.raises(SubscriptionInUse, match=OTHER):
        work.run_round()


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

    with pytest.raises(SubscriptionInUse, match=OTHER):
        await asyncio.to_thread(apply_forever, first, threading.Event(), check=between)
    assert _is_published(tmp_path, 300)
    # the other one continues
    await _land(sink, 400)
    await sink.close()
    second.run_round()
    assert _is_published(tmp_path, 400)


async def test_table_that_another_applier_creates_at_the_same_time_has_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store takes both creations, the second one as a later version."""
    sink, first, second = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path), _applier(tmp_path)
    await _land(sink, 200)
    await sink.close()
    first.open()
    second.open()
    real = LakeDelta.create

    def late(self: LakeDelta, *arguments: Any) -> None:
        monkeypatch.setattr(LakeDelta, "create", real)
        first.run_round()
        monkeypatch.setattr(DeltaTable, "create", lambda uri, *_, **__: DeltaTable(uri))
        real(self, *arguments)

    monkeypatch.setattr(LakeDelta, "create", late)
    second.run_round()
    assert rows(tmp_path) == [(200, "a")]


async def test_loss_that_another_applier_explains_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It publishes and removes landed files between two looks."""
    sink, first, second = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path), _applier(tmp_path)
    await _land(sink, 200)
    first.open()
    first.run_round()
    for end in (300, 400, 500):
        await _land(sink, end)
    await sink.close()
    real = Applier._manifests

    def between(self: Applier, snapshot: Snapshot) -> Any:
        monkeypatch.setattr(Applier, "_manifests", real)
        second.open()
        second.run_round()
        second.tidy(now=True)
        return real(self, snapshot)

    monkeypatch.setattr(Applier, "_manifests", between)
    with pytest.raises(SubscriptionInUse, match=OTHER):
        first.run_round()
    assert _is_published(tmp_path, 500)


async def test_commits_of_other_programs_to_the_snapshots_do_not_matter(tmp_path: Path) -> None:
    sink, work = await begun(make(tmp_path, "?batch_delay=0")), _applier(tmp_path)
    await _land(sink, 200)
    work.open()
    work.run_round()
    before = read_snapshot(storage(tmp_path))
    table = DeltaTable(str(tmp_path / "snapshots"))
    table.alter.set_table_description("mine")
    table.delete()
    assert read_snapshot(storage(tmp_path)) == before
    await _land(sink, 300)
    await sink.close()
    work.run_round()
    assert _is_published(tmp_path, 300)
    assert DeltaTable(str(tmp_path / "snapshots")).to_pyarrow_table(columns=["lsn_number"])["lsn_number"].to_pylist() == [300]


async def test_tables_that_are_ahead_after_a_crash_are_levelled_before_new_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="u")
    sink, work = (
        await begun(make(tmp_path, "?batch_delay=0"), tables=[TableName("public", name) for name in ("t", "u")]),
        _applier(tmp_path),
    )
    await land(sink, 200, KEYED, other, Insert(5, row("1", "a")), Insert(6, row("1", "a")))
    work.open()
    work.run_round()
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    real = LakeDelta.commit

    def one_of_two(self: LakeDelta, *arguments: Any, **named: Any) -> None:
        if self.directory.endswith("/u"):
            raise KeyboardInterrupt
        real(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(LakeDelta, "commit", one_of_two)
        with pytest.raises(KeyboardInterrupt):
            work.run_round()
    for end in (400, 500):
        await land(sink, end, Insert(5, row(str(end), "c")), Insert(6, row(str(end), "c")))
    await sink.close()
    work = _applier(tmp_path)
    work.open()
    levelled = work.run_round()
    assert levelled is not None
    assert levelled.lsn == 300
    assert {table.applied for table in levelled.tables.values()} == {300}
    assert rows(tmp_path, name="t") == rows(tmp_path, name="u") == [(1, "a"), (2, "b")]
    rest = work.run_round()
    assert rest is not None
    assert rest.lsn == 500


async def test_status_finds_an_applier_on_another_host_by_its_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_status, "REPORT_SECONDS", 0.02)
    sink = await begun(make(tmp_path, "?batch_delay=0"))
    await _land(sink, 200)
    await sink.close()

    async def seen() -> ApplierObservation:
        (found,) = await observe(f"spark://{tmp_path}")
        assert found.applier is not None
        return found.applier

    work = _applier(tmp_path)
    work.open()
    # on this host its lock would be seen
    assert ((await seen()).pid, (await seen()).last_report) == (None, None)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
        first = (await seen()).last_report
        assert first is not None
        async with asyncio.timeout(30):
            while (now := await seen()).last_report == first:
                await asyncio.sleep(0.01)
        assert (now.pid, now.host) == (os.getpid(), os.uname().nodename)
        # its machine has lost power
        reports = work._status._reports
        assert reports is not None
        work._status._stop.set()
        await asyncio.to_thread(reports.join)
        elsewhere.setattr(time, "time", lambda: first.timestamp() + 3600)
        late = await seen()
        assert (late.pid, late.host) == (None, os.uname().nodename)
        assert late.last_report is not None
    work.close()
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("socket.gethostname", lambda: "elsewhere")
        ended = await seen()
        assert (ended.pid, ended.host, ended.last_report) == (None, None, None)
