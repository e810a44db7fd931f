"""Change logs: they get all changes, are compacted, and a log that cannot be continued stops alone."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Insert, Relation
from subscriber.sinks.spark.catalog.observe import observe
from subscriber.sinks.spark.maintenance import append_planner as planner_module
from subscriber.sinks.spark.maintenance.append_planner import AppendPlanner
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import some_and_others
from tests.unit.sinks.spark.damage import rot
from tests.unit.sinks.spark.maintenance.test_retention import OTHER, OTHER_TABLE, sweeping
from tests.unit.sinks.spark.model import NAMES, Publisher
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds
from tests.unit.sinks.spark.pipeline.test_rounds import copy
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

pytestmark = pytest.mark.slow


async def test_small_files_of_a_change_log_are_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "_SMALL_FILES", 6)
    sink: OpenedSparkSink = await begun(make(tmp_path))
    work = sweeping(tmp_path, 24, target_rows=1000)
    for number in range(20):
        end = 200 + 10 * number
        await sink.apply(batch(transaction(end, *([RELATION] if not number else []), Insert(5, row(str(number), "x", None)))))
        await sink.advance(Lsn(end))
        all_rounds(work)
        work.tidy(now=True)
    await sink.close()
    log = DeltaTable(str(tmp_path / "log/public/t"))
    assert len(log.file_uris()) <= 6
    rows = log.to_pyarrow_table(columns=["_lsn", "id"]).to_pylist()
    assert sorted((item["_lsn"], item["id"]) for item in rows) == [(200 + 10 * number, number) for number in range(20)]
    actions = [json.loads(line) for file in (tmp_path / "log/public/t/_delta_log").glob("*.json") for line in file.read_text().splitlines()]
    removed = [action["remove"] for action in actions if "remove" in action]
    assert removed
    assert not any(action["dataChange"] for action in removed)


@pytest.mark.parametrize("whole", [False, True])
async def test_change_log_changed_by_another_writer_gets_nothing_and_the_others_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_TABLE))
    work = sweeping(tmp_path, 24)
    uri = str(tmp_path / "log/public/t")

    async def land(end: int, relation: Relation = RELATION, *more: str) -> None:
        changes: list[Any] = [relation, Insert(5, row(str(end), "x", None, *more)), OTHER, Insert(6, row(str(end), "x", None))]
        await sink.apply(batch(transaction(end, *changes)))
        await sink.advance(Lsn(end))
        all_rounds(work)

    def lsns(name: str = "t") -> list[int]:
        return sorted(DeltaTable(str(tmp_path / "log/public" / name)).to_pyarrow_table()["_lsn"].to_pylist())

    async def stops() -> Mapping[str, str]:
        (found,) = await observe(f"spark://{tmp_path}")
        assert found.applier is not None
        return found.applier.stopped

    def landed() -> set[str]:
        return {file.name for file in (tmp_path / "landing").iterdir()}

    await land(200)
    work.tidy(now=True)
    version = DeltaTable(uri).version()
    assert not await stops()
    await land(300)
    await land(400)
    if whole:
        DeltaTable(uri).delete()
    else:
        rows = DeltaTable(uri).to_pyarrow_table()
        write_deltalake(uri, rows.set_column(rows.schema.get_field_index("_lsn"), "_lsn", [[201]]), mode="append")
    changed = DeltaTable(uri).version()
    left = {file.name for file in (tmp_path / "landing").glob("*-1-*.parquet")}
    for attempt in range(3):
        # a new process knows only the lake's files
        work = sweeping(tmp_path, 24) if attempt == 1 else work
        work.open()
        work.tidy(now=True)
        work.close()
        error = (await stops())["change log of public.t"]
        assert f"log/public/t was changed by another writer, in version {version + 1}" in error
        assert "(hint: remove its directory and copy the table again" in error
        assert DeltaTable(uri).version() == changed
        # only what its log lacks is kept, and the last batch
        assert lsns("other") == [200, 300, 400]
        assert {name for name in landed() if "-2-" in name} == {f"{400:020d}-2-1.parquet"}
        assert left - {f"{200:020d}-1-0.parquet"} <= landed()
    shutil.rmtree(uri)
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    work.tidy()
    assert lsns() == [200, 300, 400], "what was landed is kept for it"
    assert not await stops()
    assert len(landed()) == 3
    wider = Relation(5, "public", "t", "d", (*RELATION.columns, Column("more", 25, -1, False)))
    await land(500, wider, "y")
    work.tidy(now=True)
    assert lsns()[-3:] == [300, 400, 500]
    await sink.close()


async def test_a_change_log_changed_between_two_commits_of_ours_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_module, "_SMALL_FILES", 4)
    sink = await begun(make(tmp_path))
    work = sweeping(tmp_path, 24, target_rows=1000)
    small, versions = AppendPlanner.small_files, []

    def meddled(self: AppendPlanner, log: LakeDelta) -> Any:
        found = small(self, log)
        if len(log.table_files()) == 3:
            versions.append(log.version)
            DeltaTable(log.uri).delete("id = 210")
            log.load()
        return found

    monkeypatch.setattr(AppendPlanner, "small_files", meddled)
    for end in (200, 210, 220, 230):
        await sink.apply(batch(transaction(end, *([RELATION] if end == 200 else []), Insert(5, row(str(end), "x", None)))))
        await sink.advance(Lsn(end))
        all_rounds(work)
        if not versions:
            work.tidy(now=True)
    work.tidy(now=True)
    assert f"another writer, in version {versions[0] + 1}" in work.progress.stopped_logs[TABLE]
    await sink.close()


async def test_logs_of_many_tables_are_written_and_compacted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Spark, each call of the engine is a job, which takes as long as it does for one table."""
    monkeypatch.setattr(planner_module, "_SMALL_FILES", 4)
    sink = await begun(make(tmp_path), tables=NAMES)
    publisher = Publisher(5)
    work = sweeping(tmp_path, 24, target_rows=10_000)
    calls: list[tuple[str, int]] = []
    real = LocalEngine.each

    def counted(self: LocalEngine, function: Any, items: Any, weights: Any, what: str) -> Any:
        if items:
            calls.append((function.__name__, len(items)))
        return real(self, function, items, weights, what)

    written = 0
    for _ in range(4):
        await sink.apply(batch(publisher.transaction(60)))
        await sink.advance(Lsn(publisher.end))
        all_rounds(work)
        with monkeypatch.context() as patch:
            patch.setattr(LocalEngine, "each", counted)
            written += work.tidy(now=True)
    await sink.close()
    assert [name for name, _ in calls] == ["write_log_part"] * 4 + ["rewrite_files"]
    assert min(count for _, count in calls) == len(NAMES)
    logs = [tmp_path / f"log/{name.namespace}/{name.name}" for name in NAMES]
    # created, four times appended, compacted
    assert {DeltaTable(str(log)).version() for log in logs} == {5}
    assert written == sum(file.stat().st_size for log in logs for file in log.glob("*.parquet"))


def _ids(path: Path, name: str) -> list[int]:
    return sorted(DeltaTable(str(path / "log/public" / name)).to_pyarrow_table()["id"].drop_null().to_pylist())


async def test_log_that_is_damaged_while_files_are_written_stops_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_TABLE))
    work = sweeping(tmp_path, 24)
    real = LocalEngine.each

    async def land(end: int) -> None:
        changes: list[Any] = [RELATION, Insert(5, row(str(end), "x", None)), OTHER, Insert(6, row(str(end), "x", None))]
        await sink.apply(batch(transaction(end, *changes)))
        await sink.advance(Lsn(end))
        all_rounds(work)

    def damaging(self: LocalEngine, function: Any, items: Any, weights: Any, what: str) -> Any:
        # the log was created when the append was planned
        (tmp_path / f"log/public/t/_delta_log/{0:020d}.json").write_bytes(b"")
        return real(self, function, items, weights, what)

    await land(200)
    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "each", damaging)
        work.tidy(now=True)
    assert work.progress.stopped_logs.keys() == {TABLE}
    await land(300)
    work.tidy(now=True)
    assert "log/public/t is damaged" in work.progress.stopped_logs[TABLE]
    assert _ids(tmp_path, "other") == [200, 300]
    shutil.rmtree(tmp_path / "log/public/t")
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    work.tidy(now=True)
    await sink.close()
    assert not work.progress.stopped_logs
    assert _ids(tmp_path, "t") == _ids(tmp_path, "other") == [200, 300]


LACKS = [
    ("new type", "missing", "restored"),
    ("new type", "rotten", "removed"),
    ("compaction", "damaged", "removed"),
    ("compaction", "rotten", "restored"),
]
"""Each reader, damage and remedy."""


@some_and_others(
    ["read_by", "damage", "remedy"],
    LACKS,
    sorted({*itertools.product(("new type", "compaction"), ("missing", "damaged", "rotten"), ("restored", "removed"))} - {*LACKS}),
)
async def test_log_that_lacks_a_file_stops_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_by: str, damage: str, remedy: str
) -> None:
    """The bug was that no log got anything then, and no landed file was removed."""
    monkeypatch.setattr(planner_module, "_SMALL_FILES", 4)
    sink, work = await begun(make(tmp_path), tables=(TABLE, OTHER_TABLE)), sweeping(tmp_path, 24, target_rows=1000)
    wider = replace(RELATION, columns=(replace(RELATION.columns[0], type_oid=20), *RELATION.columns[1:]))

    async def land(end: int, relation: Relation = RELATION) -> None:
        changes: list[Any] = [relation, Insert(5, row(str(end), "x", None)), OTHER, Insert(6, row(str(end), "x", None))]
        await sink.apply(batch(transaction(end, *changes)))
        await sink.advance(Lsn(end))
        all_rounds(work)
        work.tidy(now=True)

    for end in (200, 300, 400):
        await land(end)
    lost = next((tmp_path / "log/public/t").glob("*.parquet"))
    lost.rename(tmp_path / lost.name)
    if damage != "missing":
        lost.write_bytes(b"garbage" * 100)
    if damage == "rotten":
        shutil.copy(tmp_path / lost.name, lost)
        rot(lost.parent, lost.name)
    for end in (500, 600):
        await land(end, wider if read_by == "new type" else RELATION)
        error = work.progress.stopped_logs.pop(TABLE)
        told = "missing" if damage == "missing" else "damaged"
        assert f"{lost} is {told} (hint: remove its directory and copy the table again" in error
        assert not work.progress.stopped_logs
        work.tidy(now=True)
        assert TABLE in work.progress.stopped_logs
        assert _ids(tmp_path, "other") == list(range(200, end + 1, 100))
    assert [file.name for file in (tmp_path / "landing").glob("*-2-*.parquet")] == [f"{600:020d}-2-1.parquet"]
    if remedy == "restored":
        (tmp_path / lost.name).rename(lost)
    else:
        shutil.rmtree(tmp_path / "log/public/t")
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 61)
    work.tidy(now=True)
    await land(700, wider if read_by == "new type" else RELATION)
    await sink.close()
    assert not work.progress.stopped_logs
    assert _ids(tmp_path, "t")[-2:] == [600, 700]
    assert remedy == "removed" or _ids(tmp_path, "t") == list(range(200, 701, 100))


@pytest.mark.parametrize("survivor", ["t", "other"])
async def test_applier_is_killed_between_the_commits_of_two_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, survivor: str) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_TABLE))
    real, committed = LakeDelta.commit, threading.Event()

    def killed(self: LakeDelta, *arguments: Any, **more: Any) -> None:
        if self.directory != f"log/public/{survivor}":
            assert committed.wait(30)
            raise Killed
        real(self, *arguments, **more)
        committed.set()

    for end in (200, 300):
        changes: list[Any] = [RELATION, Insert(5, row(str(end), "x", None)), OTHER, Insert(6, row(str(end), "x", None))]
        await sink.apply(batch(transaction(end, *changes)))
        await sink.advance(Lsn(end))
        work = sweeping(tmp_path, 24)
        all_rounds(work)
        committed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(LakeDelta, "commit", killed)
            with pytest.raises(Killed):
                work.tidy(now=True)
        assert _ids(tmp_path, survivor) == list(range(200, end + 1, 100))
        work = sweeping(tmp_path, 24)
        all_rounds(work)
        work.tidy(now=True)
        assert _ids(tmp_path, "t") == _ids(tmp_path, "other") == list(range(200, end + 1, 100))
        assert not work.progress.stopped_logs
    await sink.close()


async def test_logs_of_copied_tables_wait_while_more_tables_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [TableName("public", f"t{number}") for number in range(5)]
    sink, work = await begun(make(tmp_path), tables=()), sweeping(tmp_path, 24, log_files=200)
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    await sink.add_tables(names, TableEntry(TableState.INIT))

    def logged() -> list[str]:
        return [name.name for name in names if (tmp_path / f"log/public/{name.name}").exists()]

    for number in range(4):
        await copy(sink, names[number], b"1\ta\n", 200)
        await sink.advance(Lsn(200 + number))
        all_rounds(work)
        work.tidy()
        assert not logged()
    passed[0] += 61
    work.tidy()
    assert logged() == ["t0", "t1", "t2", "t3"]
    # a table that is copied again does not wait: the next copy would replace the one that the log lacks
    await sink.remove_table(names[0])
    await sink.add_tables([names[0]], TableEntry(TableState.INIT))
    await copy(sink, names[4], b"1\ta\n", 300)
    await sink.advance(Lsn(300))
    all_rounds(work)
    work.tidy()
    assert "t4" not in logged()
    await copy(sink, names[0], b"2\tb\n", 400)
    await sink.advance(Lsn(400))
    all_rounds(work)
    work.tidy()
    await sink.close()
    assert logged() == ["t0", "t1", "t2", "t3", "t4"]
    rows = DeltaTable(str(tmp_path / "log/public/t0")).to_pyarrow_table()
    assert sorted(rows["_op"].to_pylist()) == ["c", "c", "t", "t"]
    assert not list((tmp_path / "copy").iterdir())


async def test_log_of_the_last_copied_table_does_not_wait(tmp_path: Path) -> None:
    """The bug was that a reader of the changes found nothing for a minute after the copy."""
    sink, work = await begun(make(tmp_path), tables=()), sweeping(tmp_path, 24, log_files=200)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 200)
    await sink.advance(Lsn(200))
    all_rounds(work)
    work.tidy()
    await sink.close()
    assert _ids(tmp_path, "t") == [1]


async def test_change_log_follows_after_a_minute_even_if_little_was_landed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug was that the log of a quiet table came when 200 landed files waited, that is never."""
    sink, work = await begun(make(tmp_path)), sweeping(tmp_path, 24, log_files=200)
    real, passed = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + passed[0])
    for end in (200, 300):
        await sink.apply(batch(transaction(end, RELATION, Insert(5, row(str(end), "x", None)))))
        await sink.advance(Lsn(end))
        all_rounds(work)
        work.tidy()
        assert not (tmp_path / "log").exists() if end == 200 else _ids(tmp_path, "t") == [200]
        passed[0] += 61
        work.tidy()
        assert _ids(tmp_path, "t") == ([200] if end == 200 else [200, 300])
    await sink.close()
