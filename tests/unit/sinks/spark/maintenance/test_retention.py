"""A lake over a long time: its logs, its files and its snapshots stay few, and nothing goes that a published snapshot needs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Insert, Relation, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot, read_snapshot
from subscriber.sinks.spark.files.storage import Storage
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines.local_engine import LocalEngine
from subscriber.sinks.spark.reading.snapshot import find_snapshot
from subscriber.sinks.spark.tables import delta as delta_module
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.examples import some_and_others
from tests.unit.sinks.spark.model import NAMES, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import Killed, all_rounds, storage
from tests.unit.sinks.spark.stream import RELATION, TABLE, batch, begun, make, row, transaction

pytestmark = pytest.mark.slow

OTHER_TABLE = TableName("public", "other")
OTHER = Relation(6, "public", "other", "d", RELATION.columns)


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


@pytest.mark.timeout(300)
@some_and_others(["rounds", "interval"], [(80, 20)], [(220, 100)])
async def test_over_a_long_log_everything_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int, interval: int) -> None:
    monkeypatch.setattr(delta_module, "_PROPERTIES", {**delta_module._PROPERTIES, "delta.checkpointInterval": str(interval)})
    monkeypatch.setattr(delta_module, "_CHECKPOINT_VERSIONS", interval)
    sink = await begun(make(tmp_path))
    work = sweeping(tmp_path, 0)
    rows: dict[int, str] = {}
    for number in range(rounds):
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
    assert snapshot.tables[TABLE].version >= rounds
    # a checkpoint at each interval, and what is before the last one is removed
    assert any(file.name.endswith(".checkpoint.parquet") for file in log.iterdir())
    assert len(versions) <= interval + 1
    # nothing but the files of the snapshot, all near the target
    assert on_disk(tmp_path, snapshot, TABLE) == of_snapshot(tmp_path, snapshot, TABLE)
    assert 5 <= len(on_disk(tmp_path, snapshot, TABLE)) <= 15
    assert len(list((tmp_path / "landing").iterdir())) <= 2
    published = DeltaTable(str(tmp_path / "snapshots"))
    assert published.version() >= rounds
    assert len(list((tmp_path / "snapshots").glob("*.parquet"))) == len(published.file_uris()) == 1
    assert len(list((tmp_path / "snapshots/_delta_log").glob("*.json"))) <= interval + 1
    table = DeltaTable(str(tmp_path / "tables/public/t"), version=snapshot.tables[TABLE].version).to_pyarrow_table()
    assert dict(zip(table["id"].to_pylist(), table["note"].to_pylist(), strict=True)) == rows
    assert len(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()) == rounds


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
        found = find_snapshot(storage(tmp_path), Lsn(end))
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
    for generation in (1, 2, 3):
        (tmp_path / f"copy/{number}-{generation}").mkdir(exist_ok=True)
        (tmp_path / f"copy/{number}-{generation}/of-the-copy").write_bytes(b"")
    work.tidy()
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
    random = "0" * 32
    hours_ago = time.time() - 3 * 3600
    left: list[Path] = []
    removed: list[Path] = []
    for directory in ("tables/public/t", "log/public/t", ".", "snapshots"):
        for name, age, stays in [
            (f".tmp-{random}-part-{random}.parquet", hours_ago, False),
            (f".tmp-{random}-part-young.parquet", time.time(), True),
            (".tmp-of-another-program", hours_ago, True),
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
