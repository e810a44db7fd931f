"""Other writers maintain the tables while the applier runs: OPTIMIZE, ZORDER, VACUUM, properties, comments and columns."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from subscriber.interfaces import TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Insert, Relation, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline import applier as applier_module
from subscriber.sinks.spark.pipeline.applier import Applier
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.table_errors import CommitConflict
from tests.support.examples import some_and_others
from tests.unit.sinks.spark.model import NAMES, RELATIONS, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import SMALL, Killed, all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, rows, start
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import OTHER, OTHER_NAME, Maintained, commit

pytestmark = pytest.mark.slow


def maintain(path: Path, dice: random.Random) -> None:
    """Do what other writers may do, to some table."""
    relation = dice.choice(RELATIONS)
    uri = str(path / "tables/public" / relation.name)
    if not DeltaTable.is_deltatable(uri):
        return
    table = DeltaTable(uri)
    match dice.randrange(6):
        case 0 | 1:
            table.optimize.compact()
        case 2:
            table.optimize.z_order([dice.choice(relation.columns).name])
        case 3:
            table.vacuum(retention_hours=48, dry_run=False, enforce_retention_duration=False)
        case 4:
            table.alter.set_table_properties({"delta.dataSkippingNumIndexedCols": str(dice.randrange(1, 5))})
        case 5:
            table.alter.set_column_metadata(dice.choice(relation.columns).name, {"comment": "of another writer"})


def published_txns(path: Path, name: str) -> list[int]:
    """All LSNs that commits of a table state, in order."""
    log = path / "tables/public" / name / "_delta_log"
    lines = [json.loads(line) for file in sorted(log.glob("0*.json")) for line in file.read_text().splitlines()]
    return [line["txn"]["version"] for line in lines if "txn" in line]


@some_and_others(["seed", "attempts"], [(0, 50), (3, 1)], [(1, 50), (4, 1)])
async def test_maintenance_by_others_between_and_during_rounds(
    tmp_path: Path, seed: int, attempts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier_module, "_ATTEMPTS", attempts)
    dice, publisher = random.Random(seed), Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    during = left_out = 0

    def between() -> None:
        nonlocal during
        if dice.random() < 0.5:
            during += 1
            maintain(tmp_path, dice)
        if dice.random() < 0.1:
            raise Killed

    for _ in range(8):
        await sink.apply(batch(publisher.transaction(dice.randrange(5, 40))))
        await sink.advance(Lsn(publisher.end))
        maintain(tmp_path, dice)
        while True:
            work = Applier(storage(tmp_path), Maintained(tmp_path, between), SMALL)
            try:
                snapshot = all_rounds(work)
                break
            except Killed:
                continue
        assert snapshot.lsn == publisher.end
        stopped = {name.name for name in snapshot.stopped}
        left_out += len(stopped)
        assert read(tmp_path, snapshot) == {name: rows for name, rows in publisher.rows().items() if name not in stopped}
        work.tidy()
    await sink.close()
    assert during
    assert bool(left_out) == (attempts == 1)
    assert read(tmp_path, all_rounds(applier(tmp_path))) == publisher.rows()
    for name in NAMES:
        found = published_txns(tmp_path, name.name)
        assert found == sorted(set(found))


async def test_commit_follows_maintenance_that_left_its_files(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Update(5, None, None, row("1", "b")))
    await sink.close()
    planned = 0

    def between() -> None:
        nonlocal planned
        planned += 1
        table = DeltaTable(str(tmp_path / "tables/public/t"))
        table.optimize.compact()
        table.vacuum(retention_hours=48, dry_run=False, enforce_retention_duration=False)

    work = Applier(storage(tmp_path), Maintained(tmp_path, between), SMALL)
    all_rounds(work)
    assert planned == 1
    assert rows(tmp_path) == [(1, "b")]


async def test_table_that_others_change_every_time_is_left_out_of_the_round(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(tmp_path))
    numbers, uri = iter(range(100)), str(tmp_path / "tables/public/t")

    def between() -> None:
        if (number := next(numbers)) < 5:
            DeltaTable(uri).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": str(number)})

    def ids(snapshot: Snapshot, name: TableName) -> list[int]:
        table = snapshot.tables[name]
        return sorted(DeltaTable(str(tmp_path / table.path), version=table.version).to_pyarrow_table()["id"].to_pylist())

    work = Applier(storage(tmp_path), Maintained(tmp_path, between), SMALL)
    await land(sink, 300, Insert(5, row("2", "b")), Update(5, None, None, row("1", "c")), Insert(6, row("2", "b")))
    snapshot = work.run_round()
    assert snapshot is not None
    assert snapshot.lsn == 300
    assert ids(snapshot, OTHER_NAME) == [1, 2]
    assert snapshot.stopped.keys() == {TABLE}
    assert "was changed by another writer at the same time (5 times) (hint: let other" in snapshot.stopped[TABLE].error
    work.tidy(now=True)
    await land(sink, 400, Insert(6, row("3", "c")))
    await sink.close()
    snapshot = work.run_round()
    assert snapshot is not None
    assert not snapshot.stopped
    assert (snapshot.lsn, ids(snapshot, TABLE), ids(snapshot, OTHER_NAME)) == (400, [1, 2], [1, 2, 3])
    assert rows(tmp_path) == [(1, "c"), (2, "b")]
    assert DeltaTable(uri).metadata().configuration["delta.dataSkippingNumIndexedCols"] == "4"


async def test_round_fails_if_others_change_the_table_of_snapshots_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    numbers, real = iter(range(100)), SnapshotPublisher.publish

    def publish(self: SnapshotPublisher, snapshot: Snapshot) -> Snapshot:
        DeltaTable(self.delta.uri).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": str(next(numbers))})
        return real(self, snapshot)

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotPublisher, "publish", publish)
        with pytest.raises(CommitConflict, match="snapshots was changed by another writer at the same time"):
            work.run_round()
    all_rounds(work)
    assert rows(tmp_path) == [(1, "a"), (2, "b")]


async def test_commit_of_another_writer_right_after_ours_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Update(5, None, None, row("1", "b")))
    await sink.close()
    real = LakeDelta.load

    def load(self: LakeDelta) -> bool:
        log = tmp_path / "tables/public/t/_delta_log"
        if self.is_there and len(list(log.glob("0*.json"))) == self.version + 2:
            DeltaTable(self.uri).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": "3"})
        return real(self)

    with monkeypatch.context() as patched:
        patched.setattr(LakeDelta, "load", load)
        all_rounds(work)
    assert rows(tmp_path) == [(1, "b")]
    assert published_txns(tmp_path, "t") == [200, 300]


async def test_column_added_by_another_writer_stays_empty(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    table.alter.add_columns([Field("theirs", PrimitiveType("string"))])
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(1, "a"), (2, "b")]
    found = DeltaTable(str(tmp_path / "tables/public/t")).to_pyarrow_table().to_pylist()
    assert {item["theirs"] for item in found} == {None}


async def test_comments_stay_when_all_rows_are_replaced(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    DeltaTable(str(tmp_path / "tables/public/t")).alter.set_column_metadata("id", {"comment": "of another writer"})

    def comments() -> list[object]:
        return [field.metadata.get("comment") for field in DeltaTable(str(tmp_path / "tables/public/t")).schema().fields]

    wider = Relation(5, "public", "t", "d", (Column("id", 20, -1, True), Column("note", 25, -1, False)))
    await land(sink, 300, wider, Insert(5, row("5000000000", "b")))
    all_rounds(work)
    assert rows(tmp_path) == [(1, "a"), (5000000000, "b")]
    assert comments() == ["of another writer", None, None]
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"7\tseven\n", 400)
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(7, "seven")]
    assert comments() == ["of another writer", None, None]


async def test_column_dropped_by_another_writer_is_reported(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    metadata = table.metadata()
    fields = json.loads(table.schema().to_json())
    before = {"id": metadata.id, "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "configuration": {}}
    fields["fields"] = [field for field in fields["fields"] if field["name"] != "note"]
    commit(tmp_path, {"metaData": {**before, "schemaString": json.dumps(fields)}})
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    stop_of(work, r"another writer, in version 2 \(column \"note\"\)")


async def test_history_says_what_was_done_up_to_which_lsn(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Update(5, None, None, row("1", "b")))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    found = {
        where: [
            json.loads(entry["userMetadata"])
            for entry in DeltaTable(str(tmp_path / where / "public/t")).history()
            if "userMetadata" in entry
        ]
        for where in ("tables", "log")
    }
    assert found == {
        "tables": [{"subscriber": "apply", "lsn": "0/12C", "after": "0/C8"}, {"subscriber": "apply", "lsn": "0/C8"}],
        "log": [{"subscriber": "append", "lsn": "0/12C"}],
    }


async def test_change_data_feed_of_a_table_gives_its_changes(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")), Insert(5, row("2", "b")))
    uri = str(tmp_path / "tables/public/t")
    DeltaTable(uri).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    since = DeltaTable(uri).version() + 1
    await land(sink, 300, Update(5, None, None, row("1", "c")), Insert(5, row("3", "d")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(1, "c"), (2, "b"), (3, "d")]
    found = Counter[tuple[int, str]]()
    for item in pa.table(DeltaTable(uri).load_cdf(starting_version=since).read_all()).to_pylist():
        found[item["id"], item["note"]] += 1 if item["_change_type"] in {"insert", "update_postimage"} else -1
    # unchanged rows of a rewritten file are deleted and inserted
    assert {key: count for key, count in found.items() if count} == {(1, "a"): -1, (1, "c"): 1, (3, "d"): 1}


@pytest.mark.parametrize("how", ["swapped", "dropped and added"])
async def test_column_of_the_same_name_that_is_another_one_in_the_files_is_reported(tmp_path: Path, how: str) -> None:
    columns = (Column("id", 23, -1, True), Column("a", 25, -1, False), Column("b", 25, -1, False))
    sink, _ = await start(tmp_path, Relation(5, "public", "t", "d", columns), Insert(5, row("1", "aa", "bb")))
    await sink.close()
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    schema = json.loads(table.schema().to_json())
    stored = {"a": "b", "b": "a"} if how == "swapped" else {"a": "col-1234"}
    for number, field in enumerate(schema["fields"]):
        name = field["name"]
        field["metadata"] |= {"delta.columnMapping.id": number + 4, "delta.columnMapping.physicalName": stored.get(name, name)}
    metadata = {
        "id": table.metadata().id,
        "format": {"provider": "parquet", "options": {}},
        "partitionColumns": [],
        "schemaString": json.dumps(schema),
        "configuration": {"delta.columnMapping.mode": "name", "delta.columnMapping.maxColumnId": "9"},
    }
    commit(tmp_path, {"protocol": {"minReaderVersion": 2, "minWriterVersion": 5}}, {"metaData": metadata})
    stop_of(applier(tmp_path), r"another writer, in version 2 \(column \"a\"\)")
