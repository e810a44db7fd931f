"""Other writers give a table features or constraints that the applier cannot write or read. Only that table stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from subscriber.protocol.messages import Insert, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot
from subscriber.sinks.spark.pipeline.applier import Applier
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, stop_of
from tests.unit.sinks.spark.pipeline.test_rounds import KEYED, land, rows, start
from tests.unit.sinks.spark.stream import TABLE, begun, make, row
from tests.unit.sinks.spark.tables.foreign_writer import OTHER, OTHER_NAME, commit, protocol, reader_protocol

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("actions", "reason"),
    [
        ([protocol("clustering", "domainMetadata")], 'table feature "clustering"'),
        ([protocol("domainMetadata", "rowTracking")], r'table feature "rowTracking" \(property delta.enableRowTracking\)'),
        ([protocol("domainMetadata", "other")], 'table feature "other"'),
        ([protocol("domainMetadata")], 'table feature "domainMetadata"'),
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
    told = stop_of(work, f"public/t has what engine local cannot write: {reason}")
    # no engine can change rows of a table that forbids it
    assert ("(hint: let Spark with Delta's jar apply (`spark-apply --engine spark`), " in told) == ("appendOnly" not in reason)
    assert "remove that from the table" in told
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

    def counted(self: Applier, *arguments: Any) -> Snapshot | None:
        nonlocal rounds
        rounds += 1
        assert rounds < 10
        return real(self, *arguments)

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
    assert "copy it again" in stop_of(applier(lake), "Json error")
