"""Other writers maintain the tables while the applier runs: OPTIMIZE, ZORDER, VACUUM, properties, comments and columns."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

from subscriber.abc import TableEntry, TableName, TableState
from subscriber.errors import TargetError
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Insert, Relation, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot, SnapshotTable
from subscriber.sinks.spark.merge.work_unit import Unit, UnitResult
from subscriber.sinks.spark.opened import OpenedSparkSink
from subscriber.sinks.spark.pipeline import applier as applier_module
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.engines import LocalEngine
from subscriber.sinks.spark.reading.snapshot import snapshot as spark_snapshot
from subscriber.sinks.spark.tables.delta import LakeDelta
from subscriber.sinks.spark.tables.table_errors import CommitConflict
from tests.unit.sinks.spark.model import NAMES, RELATIONS, Publisher, read
from tests.unit.sinks.spark.pipeline.test_applier import SMALL, Killed, all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, copy, land, rows, start
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row


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


class Maintained(LocalEngine):
    """Another writer commits between the plan of a round and its commits."""

    def __init__(self, path: Path, between: Callable[[], None]) -> None:
        super().__init__(storage(path))
        self.between = between

    def run(self, units: Sequence[Unit]) -> list[UnitResult]:
        found = super().run(units)
        self.between()
        return found


def published_txns(path: Path, name: str) -> list[int]:
    """All LSNs that commits of a table state, in order."""
    log = path / "tables/public" / name / "_delta_log"
    lines = [json.loads(line) for file in sorted(log.glob("0*.json")) for line in file.read_text().splitlines()]
    return [line["txn"]["version"] for line in lines if "txn" in line]


@pytest.mark.parametrize("seed", range(2))
async def test_maintenance_by_others_between_and_during_rounds(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applier_module, "_ATTEMPTS", 50)
    dice, publisher = random.Random(seed), Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    during = 0

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
        assert read(tmp_path, snapshot) == publisher.rows()
        work.tidy()
    await sink.close()
    assert during
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


async def test_round_fails_if_others_rewrite_its_files_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Update(5, None, None, row("1", "b")))
    await sink.close()
    numbers = iter(range(100))

    def between() -> None:
        DeltaTable(str(tmp_path / "tables/public/t")).alter.set_table_properties({"delta.dataSkippingNumIndexedCols": str(next(numbers))})

    work = Applier(storage(tmp_path), Maintained(tmp_path, between), SMALL)
    with pytest.raises(CommitConflict, match="changed by another writer at the same time"):
        work.run_round()
    assert next(numbers) == 5
    all_rounds(applier(tmp_path))
    assert rows(tmp_path) == [(1, "b")]
    assert DeltaTable(str(tmp_path / "tables/public/t")).metadata().configuration["delta.dataSkippingNumIndexedCols"] == "4"


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


def commit(path: Path, *actions: dict[str, Any]) -> int:
    """Commit as a writer that delta-rs is not."""
    version = DeltaTable(str(path / "tables/public/t")).version() + 1
    log = path / "tables/public/t/_delta_log"
    (log / f"{version:020d}.json").write_text("".join(json.dumps(action) + "\n" for action in actions))
    return version


async def test_column_dropped_by_another_writer_is_reported(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    metadata = table.metadata()
    fields = json.loads(table.schema().to_json())
    before = {"id": metadata.id, "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "configuration": {}}
    there = json.dumps(fields)
    fields["fields"] = [field for field in fields["fields"] if field["name"] != "note"]
    commit(tmp_path, {"metaData": {**before, "schemaString": json.dumps(fields)}})
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()
    stop_of(work, r"another writer, in version 2 \(column \"note\"\)")
    commit(tmp_path, {"metaData": {**before, "schemaString": there}})
    all_rounds(applier(tmp_path))
    assert rows(tmp_path) == [(1, "a"), (2, "b")]


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


OTHER = Relation(6, "public", "other", "d", (Column("id", 23, -1, True), Column("note", 25, -1, False)))
OTHER_NAME = TableName("public", "other")


async def two_tables(path: Path) -> OpenedSparkSink:
    """Two tables, with a row each at 200. Another writer deletes that of one of them, and both get a row at 300."""
    sink = await begun(make(path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(path))
    DeltaTable(str(path / "tables/public/t")).delete()
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    return sink


async def test_table_whose_rows_others_changed_leaves_the_snapshot_alone(tmp_path: Path) -> None:
    sink = await two_tables(tmp_path)
    work = applier(tmp_path)
    assert "RESTORE TABLE … TO VERSION AS OF 1" in stop_of(work, "was changed by another writer, in version 2 ")
    await land(sink, 400, Insert(5, row("3", "c")), Insert(6, row("3", "c")))
    await sink.close()
    snapshot = all_rounds(work)
    work.tidy(now=True)
    assert (snapshot.lsn, snapshot.stopped[TABLE].lsn, snapshot.stopped[TABLE].last) == (
        400,
        200,
        SnapshotTable("tables/public/t", 1, Lsn(200)),
    )
    assert sorted(DeltaTable(str(tmp_path / snapshot.tables[OTHER_NAME].path)).to_pyarrow_table()["id"].to_pylist()) == [1, 2, 3]
    assert DeltaTable(str(tmp_path / "tables/public/t")).version() == 2
    # the log has all changes; the landed ones are kept for the table
    assert sorted(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()["_lsn"].to_pylist()) == [200, 300, 400]
    assert {file.name for file in (tmp_path / "landing").glob("*.json")} == {f"{300:020d}.json", f"{400:020d}.json"}
    no_session: Any = None
    with pytest.raises(TargetError, match=r"not in the snapshot at 0/190: .* was changed by another writer"):
        spark_snapshot(no_session, str(tmp_path)).table("public.t")
    # it continues once its rows are there again
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    work = applier(tmp_path)
    snapshot = all_rounds(work)
    assert not snapshot.stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (3, "c")]
    work.tidy(now=True)
    assert {file.name for file in (tmp_path / "landing").glob("*.json")} == {f"{400:020d}.json"}
    assert sorted(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()["_lsn"].to_pylist()) == [200, 300, 400]


async def test_changes_of_a_stopped_table_are_not_kept_without_end(tmp_path: Path) -> None:
    sink = await two_tables(tmp_path)
    hasty = ApplierSettings(retain_hours=0)
    work = applier(tmp_path, hasty)
    for end in (400, 500):
        all_rounds(work)
        work.tidy(now=True)
        await land(sink, end, Insert(5, row(str(end), "c")), Insert(6, row(str(end), "c")))
    assert "changes of more than 0 hours are not kept: copy it again" in stop_of(applier(tmp_path, hasty), "another writer")
    work.tidy(now=True)
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    stop_of(applier(tmp_path), "are not kept: copy it again")
    # a new copy ends the stop
    await sink.remove_table(TABLE)
    await sink.add_tables([TABLE], TableEntry(TableState.INIT))
    await copy(sink, TABLE, b"7\tseven\n", 600)
    await land(sink, 700, Insert(5, row("8", "eight")))
    await sink.close()
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(7, "seven"), (8, "eight")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
async def test_tables_stop_and_continue_under_kills(tmp_path: Path, seed: int) -> None:
    dice, publisher = random.Random(seed), Publisher(seed)
    sink = await begun(make(tmp_path), tables=NAMES)
    broken: dict[str, int] = {}
    snapshot: Snapshot | None = None
    history: dict[int, dict[str, Any]] = {}

    def between() -> None:
        if dice.random() < 0.15:
            raise Killed

    for _ in range(12):
        await sink.apply(batch(publisher.transaction(dice.randrange(5, 40))))
        await sink.advance(Lsn(publisher.end))
        history[publisher.end] = publisher.rows()
        name = dice.choice(NAMES).name
        uri = str(tmp_path / "tables/public" / name)
        if name in broken and dice.random() < 0.7:
            DeltaTable(uri).restore(broken.pop(name))
        elif name not in broken and DeltaTable.is_deltatable(uri) and DeltaTable(uri).count() and dice.random() < 0.7:
            broken[name] = DeltaTable(uri).version()
            DeltaTable(uri).delete()
        while True:
            work = Applier(storage(tmp_path), Maintained(tmp_path, between), SMALL)
            try:
                snapshot = all_rounds(work)
                work.tidy(now=dice.random() < 0.5)
                break
            except Killed:
                continue
        assert snapshot is not None
        assert {name.name for name in snapshot.stopped} == set(broken)
        expected = history[int(snapshot.lsn)]
        assert read(tmp_path, snapshot) == {name: rows for name, rows in expected.items() if name not in broken}
    for name, version in broken.items():
        DeltaTable(str(tmp_path / "tables/public" / name)).restore(version)
    await sink.close()
    work = applier(tmp_path)
    snapshot = all_rounds(work)
    assert read(tmp_path, snapshot) == publisher.rows()
    work.tidy(now=True)
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


def protocol(*features: str) -> dict[str, Any]:
    return {"protocol": {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["appendOnly", "invariants", *features]}}


def reader_protocol(*features: str) -> dict[str, Any]:
    return {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, "writerFeatures": [*features], "readerFeatures": [*features]}}


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([protocol("clustering", "domainMetadata")], 'table feature "clustering"'),
        ([protocol("domainMetadata", "rowTracking")], 'table feature "domainMetadata"'),
        ([{"configuration": {"delta.appendOnly": "true"}}], "property delta.appendOnly"),
        ([reader_protocol("vacuumProtocolCheck")], 'table feature "vacuumProtocolCheck"'),
    ],
)
async def test_feature_that_cannot_be_written_stops_its_table_alone(tmp_path: Path, actions: list[dict[str, Any]], reason: str) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(tmp_path))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    metadata: dict[str, Any] = {
        "id": table.metadata().id,
        "format": {"provider": "parquet", "options": {}},
        "partitionColumns": [],
        "schemaString": table.schema().to_json(),
    }
    commit(tmp_path, *(action if "protocol" in action else {"metaData": {**metadata, **action}} for action in actions))
    await land(sink, 300, Update(5, None, None, row("1", "b")), Insert(6, row("2", "b")))
    await sink.close()
    work = applier(tmp_path)
    assert "DROP FEATURE" in stop_of(work, f"public/t has what engine local cannot write: {reason}")
    snapshot = all_rounds(work)
    assert snapshot.lsn == 300
    assert set(snapshot.tables) == {OTHER_NAME}
    commit(tmp_path, protocol(), {"metaData": {**metadata, "configuration": {}}})
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "b")]


async def test_constraints_of_other_writers_are_checked(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(tmp_path))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    table.alter.add_constraint({"small": "id < 10"})
    await land(sink, 300, Insert(5, row("2", "b")))
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b")]
    await land(sink, 400, Insert(5, row("11", "c")), Insert(6, row("2", "b")))
    work = applier(tmp_path)
    reason = stop_of(work, r'public/t: 1 rows violate CHECK constraint "small"')
    assert "drop the constraint" in reason
    assert set(all_rounds(work).tables) == {OTHER_NAME}
    await land(sink, 500, Insert(5, row("3", "d")), Insert(6, row("3", "c")))
    await sink.close()
    assert all_rounds(work).lsn == 500
    table.update_incremental()
    table.alter.drop_constraint("small")
    assert not all_rounds(applier(tmp_path)).stopped
    assert sorted(rows(tmp_path)) == [(1, "a"), (2, "b"), (3, "d"), (11, "c")]


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


async def test_table_that_cannot_be_read_stops_alone(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    commit(tmp_path, {"protocol": {"minReaderVersion": 99, "minWriterVersion": 99}})
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    await sink.close()
    stop_of(work, r"Delta table .*/tables/public/t: .*Unsupported minimum reader version 99")
    work._next_sweep = 0.0
    work.tidy(now=True)
    assert set(all_rounds(applier(tmp_path)).tables) == {OTHER_NAME}
    max((tmp_path / "tables/public/t/_delta_log").glob("0*.json")).unlink()
    assert not all_rounds(applier(tmp_path)).stopped
    assert sorted(rows(tmp_path)) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("seen", [False, True], ids=["removed first", "stopped first"])
@pytest.mark.parametrize("hours", [24, 0])
async def test_landed_changes_of_a_stopped_table_that_was_removed_are_kept(tmp_path: Path, seen: bool, hours: int) -> None:
    settings = ApplierSettings(retain_hours=hours)
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    all_rounds(applier(tmp_path))
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    table.alter.set_table_properties({"delta.appendOnly": "true"})
    await land(sink, 300, Insert(5, row("2", "b")), Insert(6, row("2", "b")))
    if seen:
        stop_of(applier(tmp_path), "appendOnly")
    await sink.remove_table(TABLE)
    work = applier(tmp_path, settings)
    for end in (350, 360, 370):
        snapshot = all_rounds(work)
        work.tidy(now=True)
        assert set(snapshot.tables) == {OTHER_NAME}
        await land(sink, end, Insert(6, row(str(end), "c")))
    table.update_incremental()
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    await sink.add_tables([TABLE], TableEntry(TableState.READY))
    await land(sink, 400, KEYED, Insert(5, row("4", "d")))
    await sink.close()
    if not hours:
        stop_of(applier(tmp_path), "not kept: copy it again")
        return
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (4, "d")]


async def test_removed_table_takes_its_changes_once_the_reason_of_its_stop_is_gone(tmp_path: Path) -> None:
    sink = await two_tables(tmp_path)
    stop_of(applier(tmp_path), "was changed by another writer")
    await sink.remove_table(TABLE)
    assert TABLE in all_rounds(applier(tmp_path)).stopped
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    await land(sink, 400, Insert(6, row("3", "c")))
    await sink.close()
    work = applier(tmp_path)
    assert not all_rounds(work).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b")]
    # its rows are not checked from then on
    DeltaTable(str(tmp_path / "tables/public/t")).delete()
    work.tidy(now=True)
    assert not all_rounds(applier(tmp_path)).stopped
    assert len(list((tmp_path / "landing").glob("*.json"))) == 1


async def test_round_ends_if_a_removed_table_violates_a_constraint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    table.alter.add_constraint({"small": "id < 10"})
    await land(sink, 300, Insert(5, row("11", "b")), Insert(6, row("2", "b")))
    await sink.remove_table(TABLE)
    await sink.close()
    real, rounds = Applier._round, 0

    def counted(self: Applier) -> Snapshot | None:
        nonlocal rounds
        rounds += 1
        assert rounds < 10
        return real(self)

    monkeypatch.setattr(Applier, "_round", counted)
    snapshot = all_rounds(work)
    assert (snapshot.lsn, set(snapshot.tables), set(snapshot.stopped)) == (300, {OTHER_NAME}, {TABLE})
    table.update_incremental()
    table.alter.drop_constraint("small")
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "a"), (11, "b")]


@pytest.mark.parametrize("waits", [True, False])
async def test_removed_table_that_cannot_be_read_stops_no_other_table(tmp_path: Path, waits: bool) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER, Insert(6, row("1", "a")))
    work = applier(tmp_path)
    all_rounds(work)
    commit(tmp_path, {"protocol": {"minReaderVersion": 99, "minWriterVersion": 99}})
    await land(sink, 300, *([Insert(5, row("2", "b"))] if waits else []), Insert(6, row("2", "b")))
    await sink.remove_table(TABLE)
    await land(sink, 400, Insert(6, row("3", "c")))
    await sink.close()
    for _ in range(2):
        snapshot = all_rounds(work)
        assert (snapshot.lsn, set(snapshot.tables), set(snapshot.stopped)) == (400, {OTHER_NAME}, {TABLE} if waits else set())
        work._next_sweep = 0.0
        work.tidy(now=True)
        work = applier(tmp_path)
    max((tmp_path / "tables/public/t/_delta_log").glob("0*.json")).unlink()
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == ([(1, "a"), (2, "b")] if waits else [(1, "a")])


async def test_damaged_log_is_no_unreadable_feature_if_the_lake_has_such_a_name(tmp_path: Path) -> None:
    lake = tmp_path / "features"
    lake.mkdir()
    sink, _ = await start(lake, KEYED, Insert(5, row("1", "a")))
    await sink.close()
    (lake / f"tables/public/t/_delta_log/{1:020d}.json").write_bytes(b"\xff{")
    assert "restore it from a backup" in stop_of(applier(lake), "Json error")


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


async def test_table_without_recent_changes_continues_after_restore(tmp_path: Path) -> None:
    sink = await begun(make(tmp_path), tables=(TABLE, OTHER_NAME))
    await land(sink, 200, KEYED, Insert(5, row("1", "a")), OTHER)
    work = applier(tmp_path)
    all_rounds(work)
    for end in (300, 310, 320):
        await land(sink, end, Insert(6, row(str(end), "x")))
        all_rounds(work)
        work.tidy(now=True)
    DeltaTable(str(tmp_path / "tables/public/t")).delete()
    stop_of(applier(tmp_path), "another writer")
    await land(sink, 330, Insert(5, row("2", "b")))
    await sink.close()
    assert all_rounds(applier(tmp_path)).stopped[TABLE].lsn == 320
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    assert not all_rounds(applier(tmp_path)).stopped
    assert rows(tmp_path) == [(1, "a"), (2, "b")]
