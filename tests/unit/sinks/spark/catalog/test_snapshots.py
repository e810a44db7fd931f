"""The Delta table of the published snapshots: what finds the newest and earlier ones, and what other Delta readers see."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from subscriber.errors import TargetError
from subscriber.interfaces import TableName
from subscriber.protocol.lsn import Lsn
from subscriber.sinks.spark.catalog.snapshots import SNAPSHOTS, Snapshot, Snapshots, SnapshotTable, StoppedTable, read_snapshot
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.reading.table_files import PinnedTable
from subscriber.sinks.spark.tables import delta as delta_module
from tests.unit.sinks.spark.pipeline.test_applier import storage

NAMES = [TableName("public", name) for name in ("a", "b")]
STOP = StoppedTable(last=SnapshotTable("tables/public/c", 3, Lsn(7)), generation=2, lsn=Lsn(9), kept=True, since=1.5, error="why")


def snapshot_at(lsn: int) -> Snapshot:
    tables = {name: SnapshotTable(f"tables/public/{name.name}", lsn // 10, Lsn(lsn)) for name in NAMES}
    return Snapshot(Lsn(lsn), Lsn(lsn - 1), tables, {TableName("public", "c"): STOP})


def publish(path: Path, count: int, retain_hours: int = 24) -> list[Snapshot]:
    publisher = SnapshotPublisher(storage(path), retain_hours)
    return [publisher.publish(snapshot_at(10 * number)) for number in range(1, count + 1)]


def as_of_lsn(snapshots: Snapshots, lsn: int) -> Snapshot | None:
    return snapshots.last(lambda each: each.lsn <= lsn)


def as_of_time(snapshots: Snapshots, time: datetime) -> Snapshot | None:
    return snapshots.last(lambda each: each.published <= time)


def test_every_snapshot_is_found_by_lsn_and_time_whatever_the_reader_has_read_before(tmp_path: Path) -> None:
    published = publish(tmp_path, 13)
    kept = Snapshots(storage(tmp_path))
    for one in published:
        assert one.published is not None
        for snapshots in (Snapshots(storage(tmp_path)), kept):
            assert as_of_lsn(snapshots, one.lsn) == one
            assert as_of_lsn(snapshots, one.lsn + 9) == one
            assert as_of_time(snapshots, one.published) == one
            assert snapshots.newest() == published[-1]
    first = published[0]
    assert first.published is not None
    assert as_of_lsn(kept, 9) is None
    assert as_of_time(kept, first.published - timedelta(seconds=1)) is None
    times = [one.published for one in published if one.published is not None]
    assert times == sorted(times)


def test_reader_that_is_kept_follows_and_a_lake_without_snapshots_has_none(tmp_path: Path) -> None:
    kept, publisher = Snapshots(storage(tmp_path)), SnapshotPublisher(storage(tmp_path))
    assert kept.newest() is None
    for number in (1, 2, 3, 9):
        published = publisher.publish(snapshot_at(10 * number))
        assert kept.newest() == published == read_snapshot(storage(tmp_path))


def test_memory_that_lacks_is_not_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> NoReturn:
        raise pa.ArrowMemoryError("malloc of size 64 failed")

    publish(tmp_path, 1)
    pinned = PinnedTable(storage(tmp_path), SnapshotTable(SNAPSHOTS, DeltaTable(str(tmp_path / SNAPSHOTS)).version(), Lsn(0)))
    [file] = pinned.files()
    monkeypatch.setattr(pq.ParquetFile, "read", lacks)
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lacks)
    with pytest.raises(TargetError, match=r"parquet: there is not enough memory"):
        read_snapshot(storage(tmp_path))
    with pytest.raises(TargetError, match=r"parquet: there is not enough memory"):
        list(pinned.read(file.path, file.vector, pa.schema([])))


def test_log_is_cleaned_up_and_what_is_no_longer_stored_is_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {**delta_module._PROPERTIES, "delta.checkpointInterval": "5"}
    monkeypatch.setattr(delta_module, "_PROPERTIES", properties)
    monkeypatch.setattr(delta_module, "_CHECKPOINT_VERSIONS", 5)
    published = publish(tmp_path, 23, 0)
    log = tmp_path / "snapshots/_delta_log"
    assert len(list(log.glob("*.json"))) < 12
    assert read_snapshot(storage(tmp_path)) == published[-1]
    assert as_of_lsn(Snapshots(storage(tmp_path)), 225) == published[-2]
    assert as_of_lsn(Snapshots(storage(tmp_path)), 50) is None
    # without it, the newest one is found in the directory
    (log / "_last_checkpoint").unlink()
    assert read_snapshot(storage(tmp_path)) == published[-1]


def test_other_delta_readers_find_the_versions_in_its_rows(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    table = DeltaTable(str(tmp_path / "snapshots"))
    rows = table.to_pyarrow_table().sort_by("table_name").to_pylist()
    assert [(row["schema_name"], row["table_name"], row["path"], row["version"]) for row in rows] == [
        ("public", "a", "tables/public/a", 3),
        ("public", "b", "tables/public/b", 3),
        ("public", "c", None, None),
    ]
    assert [(row["lsn"], row["lsn_number"], row["error"]) for row in rows] == [("0/1E", 30, None), ("0/1E", 30, None), ("0/1E", 30, "why")]
    table.load_as_version(2)
    assert table.to_pyarrow_table(columns=["lsn_number"])["lsn_number"].to_pylist() == [20, 20, 20]


def test_damage_is_told(tmp_path: Path) -> None:
    publish(tmp_path, 2)
    (file,) = {*(tmp_path / "snapshots").glob("*.parquet")} - {*(tmp_path / "snapshots").glob("*010-*.parquet")}
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(TargetError, match=r"\.parquet is damaged"):
        read_snapshot(storage(tmp_path))
    (tmp_path / "snapshots/_delta_log" / f"{2:020d}.json").write_bytes(b"{")
    with pytest.raises(TargetError, match=r"2\.json is damaged"):
        read_snapshot(storage(tmp_path))
