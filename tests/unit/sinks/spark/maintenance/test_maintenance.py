"""A lake over a long time: its logs, its files and its snapshots stay few, and nothing goes that a published snapshot needs."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from subscriber.abc import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Insert, Relation, Update
from subscriber.sinks.spark.catalog.observe import observe
from subscriber.sinks.spark.catalog.snapshots import Snapshot, Snapshots, read_snapshot
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.maintenance import change_log as changelog_module
from subscriber.sinks.spark.maintenance.change_log import ChangeLog
from subscriber.sinks.spark.opened import OpenedSparkSink
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines import LocalEngine
from subscriber.sinks.spark.tables import delta as delta_module
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.unit.sinks.spark.damage import rot
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, storage
from tests.unit.sinks.spark.pipeline.test_rounds import copy
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction


def sweeping(path: Path, retain_hours: int, **settings: Any) -> Applier:
    """An applier that sweeps after each round."""
    made = replace(ApplierSettings(target_rows=8, log_files=10, sweep_seconds=0.0, retain_hours=retain_hours), **settings)
    work = Applier(storage(path), LocalEngine(storage(path)), made)
    work._next_sweep = 0.0
    return work


def on_disk(path: Path, snapshot: Snapshot, name: TableName) -> set[str]:
    return {file.name for file in (path / snapshot.tables[name].path).glob("*.parquet")}


def of_snapshot(path: Path, snapshot: Snapshot, name: TableName) -> set[str]:
    table = snapshot.tables[name]
    return {Path(uri).name for uri in DeltaTable(str(path / table.path), version=table.version).file_uris()}


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_over_a_long_log_everything_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path))
    work = sweeping(tmp_path, 0)
    rows: dict[int, str] = {}
    for number in range(220):
        changes = (
            [Insert(5, row(str(number), "new", None))] if number < 60 else [Update(5, None, None, row(str(number % 60), str(number), None))]
        )
        rows[number % 60] = "new" if number < 60 else str(number)
        end = 200 + 10 * number
        await sink.apply(batch(transaction(end, *([RELATION] if not number else []), *changes)))
        await sink.advance(Lsn(end))
        work.run_round()
        if number % 5 == 0:
            work.tidy()
            snapshot = read_snapshot(storage(tmp_path))
            assert snapshot is not None
            assert snapshot.lsn == end
            assert of_snapshot(tmp_path, snapshot, TABLE) <= on_disk(tmp_path, snapshot, TABLE)
    await sink.close()
    work.tidy(now=True)
    snapshot = all_rounds(work)
    log = tmp_path / "tables/public/t/_delta_log"
    versions = [int(file.name.split(".")[0]) for file in log.glob("*.json")]
    assert snapshot.tables[TABLE].version >= 220
    # a checkpoint every hundred versions, and what is before the last one is removed
    assert any(file.name.endswith(".checkpoint.parquet") for file in log.iterdir())
    assert len(versions) <= 101
    # nothing but the files of the snapshot, all near the target
    assert on_disk(tmp_path, snapshot, TABLE) == of_snapshot(tmp_path, snapshot, TABLE)
    assert 5 <= len(on_disk(tmp_path, snapshot, TABLE)) <= 15
    assert len(list((tmp_path / "landing").iterdir())) <= 2
    published = DeltaTable(str(tmp_path / "snapshots"))
    assert published.version() >= 220
    assert len(list((tmp_path / "snapshots").glob("*.parquet"))) == len(published.file_uris()) == 1
    assert len(list((tmp_path / "snapshots/_delta_log").glob("*.json"))) <= 101
    table = DeltaTable(str(tmp_path / "tables/public/t"), version=snapshot.tables[TABLE].version).to_pyarrow_table()
    assert dict(zip(table["id"].to_pylist(), table["note"].to_pylist(), strict=True)) == rows
    assert len(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()) == 220


@pytest.mark.parametrize("ours", [True, False])
def test_a_log_is_removed_after_the_checkpoint_that_stands_for_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    properties = {**delta_module._PROPERTIES, "delta.checkpointInterval": "5"}
    monkeypatch.setattr(delta_module, "_PROPERTIES", properties)
    monkeypatch.setattr(delta_module, "_CHECKPOINT_VERSIONS", 5)
    real, there = os.fsync, list[bool]()
    log = tmp_path / "t/_delta_log"

    def recorded(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("checkpoint.parquet"):
            there.append((log / f"{0:020d}.json").exists())
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    delta = LakeDelta(storage(tmp_path), "t", retain_hours=0)
    delta.create(pa.schema([("id", pa.int32())]))
    for number in range(7):
        if ours:
            delta.commit([], [], "subscriber", Lsn(number), note="")
        else:
            delta.add_columns(pa.schema([("id", pa.int32()), (f"c{number}", pa.int32())]))
    assert there[0]
    assert not (log / f"{0:020d}.json").exists()
    assert LakeDelta(storage(tmp_path), "t").load()


def test_checkpoints_of_spark_are_made_durable_in_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = LakeDelta(storage(tmp_path), "t")
    delta.create(pa.schema([("id", pa.int32())]))
    DeltaTable(delta.uri).create_checkpoint()
    log = tmp_path / "t/_delta_log"
    (log / "_sidecars").mkdir()
    content = next(log.glob("*.checkpoint.parquet")).read_bytes()
    names = [f"{0:020d}.checkpoint.{form}" for form in ("0000000001.0000000001.parquet", "6b7f7e3a-0d2c-4c1e-9f51-3f6a1c9f2b11.json")]
    names += [f".{names[0]}.crc", "_sidecars/part.parquet"]
    synced: list[str] = []
    real = os.fsync

    def recorded(descriptor: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), log))
        real(descriptor)

    delta = LakeDelta(storage(tmp_path), "t")
    delta.load()
    for name in names:
        (log / name).write_bytes(content)
    monkeypatch.setattr(os, "fsync", recorded)
    delta.make_durable()
    assert {*names, f"{0:020d}.json", f"{0:020d}.checkpoint.parquet", "_sidecars"} <= set(synced)
    assert synced[-2:] == ["_last_checkpoint", "."], "it names one of them"


@pytest.mark.slow
async def test_within_the_retention_time_every_snapshot_is_read_and_files_of_dead_rounds_go_after_it(tmp_path: Path) -> None:
    publisher = Publisher(11)
    sink = await begun(make(tmp_path), tables=NAMES)
    work = sweeping(tmp_path, 2)
    history = {}
    snapshot: Snapshot | None = None
    for _ in range(8):
        await sink.apply(batch(publisher.transaction(25)))
        await sink.advance(Lsn(publisher.end))
        snapshot = all_rounds(work)
        work.tidy()
        history[publisher.end] = publisher.rows()
    for end, rows in history.items():
        found = Snapshots(storage(tmp_path)).as_of_lsn(Lsn(end))
        assert found is not None
        if len(found.tables) == len(NAMES):
            assert read(tmp_path, found) == rows
    directory = tmp_path / "tables/public/keyed"
    young, old = directory / "part-young.parquet", directory / "part-old.parquet"
    for orphan in (young, old):
        orphan.write_bytes(b"of a round that was killed")
    hours_ago = time.time() - 3 * 3600
    os.utime(old, (hours_ago, hours_ago))
    work.tidy()
    assert young.exists()
    assert not old.exists()
    # the files of the snapshot stay, however old they are
    for file in directory.glob("part-*.parquet"):
        os.utime(file, (hours_ago, hours_ago))
    work.tidy()
    assert not young.exists()
    assert snapshot is not None
    assert read(tmp_path, snapshot) == publisher.rows()
    await sink.close()


async def test_files_of_a_running_copy_stay_and_those_of_a_restarted_one_are_removed(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    await sink.advance(Lsn(200))
    work = sweeping(tmp_path, 0)
    all_rounds(work)
    name = TableName("public", "t")
    await sink.remove_table(name)
    await sink.add_tables([name], TableEntry(TableState.INIT))
    copying = sink.open_table(name)
    for _ in range(2):
        await copying.begin()
        await copying.start_copy()
    number = copying.relation_id
    directory = tmp_path / "tables/public/t"
    names = [f"copy-{number}-2-0.parquet", f"copy-{number}-1-0.parquet", f"copy-{number}-3-0.parquet"]
    for file in names:
        (directory / file).write_bytes(b"")
    for generation in (1, 2, 3):
        (tmp_path / f"copy/{number}-{generation}").mkdir(exist_ok=True)
        (tmp_path / f"copy/{number}-{generation}/of-the-copy").write_bytes(b"")
    work.tidy()
    assert [(directory / file).exists() for file in names] == [True, False, True]
    # of the future: a copy that was begun since the applier looked
    assert sorted(os.listdir(tmp_path / "copy")) == [f"{number}-2", f"{number}-3"]
    await copying.close()
    await sink.close()


async def test_what_was_being_written_when_a_process_was_killed_goes_after_the_retention_time(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", None, None)))))
    await sink.advance(Lsn(200))
    work = sweeping(tmp_path, 2)
    all_rounds(work)
    work.tidy(now=True)
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    copying = sink.open_table(TABLE)
    await copying.begin()
    await copying.start_copy()
    number, random = copying.relation_id, "0" * 32
    (tmp_path / f"copy/{number}-1/order.json").write_bytes(b"")
    hours_ago = time.time() - 3 * 3600
    left: list[Path] = []
    removed: list[Path] = []
    for directory in ("tables/public/t", "log/public/t", ".", "snapshots"):
        for name, age, stays in [
            (f".tmp-{random}-part-{random}.parquet", hours_ago, False),
            (f".tmp-{random}-part-young.parquet", time.time(), True),
            (f".tmp-{random}-copy-{number}-1-{random}.parquet", hours_ago, True),
            (f".tmp-{random}-copy-{number}-0-{random}.parquet", hours_ago, False),
            (".tmp-of-somebody-else", hours_ago, True),
        ]:
            file = tmp_path / directory / name
            file.write_bytes(b"half")
            os.utime(file, (age, age))
            (left if stays else removed).append(file)
    work.tidy()
    assert [file for file in left if not file.exists()] == []
    assert [file for file in removed if file.exists()] == []
    await copying.close()
    await sink.close()


@pytest.mark.parametrize("finder", ["applier", "subscriber"])
async def test_landed_files_whose_manifest_went_before_a_kill_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finder: str) -> None:
    sink = await begun(make(tmp_path))
    landing = tmp_path / "landing"

    async def land(end: int) -> None:
        await sink.apply(batch(transaction(end, RELATION, Insert(5, row(str(end), None, None)))))
        await sink.advance(Lsn(end))

    for end in (200, 300, 400):
        await land(end)
    work = sweeping(tmp_path, 24)
    all_rounds(work)
    delete, calls = Storage.delete, 0

    def killed(storage: Storage, names: Iterable[str]) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Killed
        delete(storage, names)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "delete", killed)
        with pytest.raises(Killed):
            work.tidy(now=True)
    assert not (landing / f"{200:020d}.json").exists()
    assert list(landing.glob(f"{200:020d}-*.parquet"))
    if finder == "applier":
        await land(500)
        work = sweeping(tmp_path, 24)
        all_rounds(work)
        work.tidy(now=True)
        assert sorted(file.name.split("-")[0] for file in landing.iterdir()) == [f"{500:020d}", f"{500:020d}.json"]
    else:
        await sink.close()
        sink = await make(tmp_path).open("replica", lambda _: None)
        assert not list(landing.glob(f"{200:020d}*"))
        assert len(list(landing.iterdir())) == 2
    await sink.close()


@pytest.mark.slow
async def test_small_files_of_a_change_log_are_merged_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog_module, "_SMALL_FILES", 6)
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


OTHER_TABLE = TableName("public", "other")
OTHER = Relation(6, "public", "other", "d", RELATION.columns)


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["restored", "removed"])
@pytest.mark.parametrize("whole", [False, True])
async def test_change_log_changed_by_another_writer_gets_nothing_and_the_others_continue(tmp_path: Path, whole: bool, remedy: str) -> None:
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
        assert f"RESTORE TABLE … TO VERSION AS OF {version}; or remove its directory" in error
        assert DeltaTable(uri).version() == changed
        # only what its log lacks is kept, and the last batch
        assert lsns("other") == [200, 300, 400]
        assert {name for name in landed() if "-2-" in name} == {f"{400:020d}-2-1.parquet"}
        assert left - {f"{200:020d}-1-0.parquet"} <= landed()
    if remedy == "restored":
        DeltaTable(uri).restore(version)
    else:
        shutil.rmtree(uri)
    work.tidy()
    assert lsns() == [200, 300, 400]
    assert not await stops()
    assert len(landed()) == 3
    wider = Relation(5, "public", "t", "d", (*RELATION.columns, Column("more", 25, -1, False)))
    await land(500, wider, "y")
    work.tidy(now=True)
    assert lsns()[-3:] == [300, 400, 500]
    await sink.close()


@pytest.mark.slow
async def test_a_change_log_changed_between_two_commits_of_ours_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changelog_module, "_SMALL_FILES", 4)
    sink = await begun(make(tmp_path))
    work = sweeping(tmp_path, 24, target_rows=1000)
    small, versions = ChangeLog._small_files, []

    def meddled(self: ChangeLog, log: LakeDelta) -> Any:
        found = small(self, log)
        if len(log.table_files()) == 3:
            versions.append(log.version)
            DeltaTable(log.uri).delete("id = 210")
            log.load()
        return found

    monkeypatch.setattr(ChangeLog, "_small_files", meddled)
    for end in (200, 210, 220, 230):
        await sink.apply(batch(transaction(end, *([RELATION] if end == 200 else []), Insert(5, row(str(end), "x", None)))))
        await sink.advance(Lsn(end))
        all_rounds(work)
        if not versions:
            work.tidy(now=True)
    work.tidy(now=True)
    assert f"another writer, in version {versions[0] + 1}" in work.progress.stopped_logs[TABLE]
    DeltaTable(str(tmp_path / "log/public/t")).restore(versions[0])
    work.tidy(now=True)
    await sink.close()
    assert sorted(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()["id"].to_pylist()) == [200, 210, 220, 230]


async def test_table_that_cannot_be_swept_does_not_keep_others_from_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_TABLE))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", "a", None)), OTHER, Insert(6, row("1", "a", None)))))
    await sink.advance(Lsn(200))
    await sink.close()
    all_rounds(sweeping(tmp_path, 24))
    work = sweeping(tmp_path, 2)
    all_rounds(work)
    tables = [tmp_path / "tables/public" / name for name in ("t", "other")]
    orphans = [table / "part-orphan.parquet" for table in tables]
    hours_ago = time.time() - 3 * 3600
    for orphan in orphans:
        orphan.write_bytes(b"of a round that was killed")
        os.utime(orphan, (hours_ago, hours_ago))
    loop = tables[0] / "loop"
    for _ in range(2):
        loop.symlink_to(loop.name)
        for _ in range(2):
            work.tidy()
        told = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert len(told) == 1
        assert f"Delta table {tables[0]}" in told[0]
        assert json.loads((tmp_path / "applier.json").read_text())["document"]["last_error"] in told[0]
        assert [orphan.exists() for orphan in orphans] == [True, False]
        assert DeltaTable(str(tables[1])).metadata().configuration["delta.logRetentionDuration"] == "interval 2 hours"
        loop.unlink()
        caplog.clear()
        work._next_sweep = time.monotonic() + 3600
        work.tidy()
        assert orphans[0].exists()
        work._next_sweep = 0.0
        work.tidy()
        assert not orphans[0].exists()
        assert not caplog.records
        work._next_look = 0.0
        all_rounds(work)
        orphans[0].write_bytes(b"of another round")
        os.utime(orphans[0], (hours_ago, hours_ago))


async def test_retention_time_is_stored_in_the_tables_and_follows_the_option(tmp_path: Path) -> None:
    def properties() -> dict[str, Mapping[str, str]]:
        tables = {name: DeltaTable(str(tmp_path / name)) for name in ("tables/public/t", "log/public/t", "snapshots")}
        return {name: table.metadata().configuration for name, table in tables.items()}

    names = ("delta.logRetentionDuration", "delta.deletedFileRetentionDuration")
    sink = await begun(make(tmp_path))
    await sink.apply(batch(transaction(200, RELATION, Insert(5, row("1", "a", None)))))
    await sink.advance(Lsn(200))
    work = sweeping(tmp_path, 24)
    all_rounds(work)
    work.tidy(now=True)
    assert {found[name] for found in properties().values() for name in names} == {"interval 24 hours"}
    # another value of the user's stays, in any other form
    DeltaTable(str(tmp_path / "log/public/t")).alter.set_table_properties({names[0]: "interval 30 days"})
    work = sweeping(tmp_path, 48)
    all_rounds(work)
    work.tidy(now=True)
    found = properties()
    assert {found["log/public/t"][name] for name in names} == {"interval 30 days", "interval 48 hours"}
    assert {found[table][name] for table in ("tables/public/t", "snapshots") for name in names} == {"interval 48 hours"}
    # the applier continues, and publishes behind its own commit
    await sink.apply(batch(transaction(210, Insert(5, row("2", "b", None)))))
    await sink.advance(Lsn(210))
    assert len(of_snapshot(tmp_path, all_rounds(work), TABLE)) >= 1
    await sink.close()


async def test_logs_of_many_tables_are_written_and_compacted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Spark, each call of the engine is a job, which takes as long as it does for one table."""
    monkeypatch.setattr(changelog_module, "_SMALL_FILES", 4)
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
    return sorted(DeltaTable(str(path / "log/public" / name)).to_pyarrow_table()["id"].to_pylist())


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
    work.tidy(now=True)
    await sink.close()
    assert not work.progress.stopped_logs
    assert _ids(tmp_path, "t") == _ids(tmp_path, "other") == [200, 300]


@pytest.mark.parametrize("remedy", ["restored", "removed"])
@pytest.mark.parametrize("damage", ["missing", "damaged", "rotten"])
@pytest.mark.parametrize("read_by", ["new type", "compaction"])
async def test_log_that_lacks_a_file_stops_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_by: str, damage: str, remedy: str
) -> None:
    """The bug was that no log got anything then, and no landed file was removed."""
    monkeypatch.setattr(changelog_module, "_SMALL_FILES", 4)
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
        assert f"{lost} is {told} (hint: restore it from a backup, or remove its directory: it begins again" in error
        assert not work.progress.stopped_logs
        work.tidy(now=True)
        assert TABLE in work.progress.stopped_logs
        assert _ids(tmp_path, "other") == list(range(200, end + 1, 100))
    assert [file.name for file in (tmp_path / "landing").glob("*-2-*.parquet")] == [f"{600:020d}-2-1.parquet"]
    if remedy == "restored":
        (tmp_path / lost.name).rename(lost)
    else:
        shutil.rmtree(tmp_path / "log/public/t")
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


async def test_logs_of_copied_tables_wait_while_more_tables_are_copied(tmp_path: Path) -> None:
    names = [TableName("public", f"t{number}") for number in range(5)]
    sink, work = await begun(make(tmp_path), tables=()), sweeping(tmp_path, 24)
    await sink.add_tables(names, TableEntry(TableState.INIT))

    def logged() -> list[str]:
        return [name.name for name in names if (tmp_path / f"log/public/{name.name}").exists()]

    for number, expected in enumerate([[], [], ["t0", "t1", "t2"], ["t0", "t1", "t2", "t3"]]):
        await copy(sink, names[number], b"1\ta\n", 200)
        await sink.advance(Lsn(200 + number))
        all_rounds(work)
        work.tidy()
        assert logged() == expected
    # a table that is copied again does not wait: the next copy would replace the one that the log lacks
    await sink.remove_table(names[0])
    await sink.add_tables([names[0]], TableEntry(TableState.INIT))
    await sink.add_tables([TableName("public", f"more{number}") for number in range(9)], TableEntry(TableState.INIT))
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
    assert sorted(rows["_op"].to_pylist()) == ["c", "c", "t"]
    assert not list((tmp_path / "copy").iterdir())


@pytest.mark.parametrize("limit", ["_WAITING_BYTES", "_WAITING_SECONDS"])
async def test_large_and_old_copies_do_not_wait_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(changelog_module, limit, 0)
    sink, work = await begun(make(tmp_path), tables=()), sweeping(tmp_path, 24)
    await sink.add_tables([TABLE, OTHER_TABLE, TableName("public", "more")], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 200)
    await sink.advance(Lsn(200))
    all_rounds(work)
    work.tidy()
    await sink.close()
    assert _ids(tmp_path, "t") == [1]


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
async def test_copies_wait_as_long_if_the_clock_of_the_store_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: float
) -> None:
    sink, work = await begun(make(tmp_path), tables=()), sweeping(tmp_path, 24)
    await sink.add_tables([TABLE, OTHER_TABLE, TableName("public", "more")], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"1\ta\n", 200)
    await sink.advance(Lsn(200))
    await sink.close()
    all_rounds(work)
    moment = time.time() + ahead
    for file in (tmp_path / "copy").rglob("*.*"):
        os.utime(file, (moment, moment))
    real, later = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: real() + later)
    work.tidy()
    assert not (tmp_path / "log").exists()
    later = 31.0
    work.tidy()
    assert _ids(tmp_path, "t") == [1]
