"""What happens during one round of the applier: no row is lost, and no row is kept that the publisher does not have."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from subscriber.interfaces import CopyFormat, Position, PublishedTable, TableEntry, TableName, TableState
from subscriber.protocol.lsn import Lsn
from subscriber.protocol.messages import Column, Delete, Insert, Message, Relation, Truncate, TruncateOption, Update
from subscriber.sinks.spark.catalog.snapshots import Snapshot, read_snapshot
from subscriber.sinks.spark.merge import parquet as parquet_module
from subscriber.sinks.spark.merge.row_matching import MissingRows
from subscriber.sinks.spark.opened_spark_sink import OpenedSparkSink
from subscriber.sinks.spark.pipeline import applier as applier_module
from subscriber.sinks.spark.pipeline.applier import Applier, ApplierSettings
from subscriber.sinks.spark.pipeline.publisher import SnapshotPublisher
from subscriber.sinks.spark.pipeline.round_input import taken_manifests
from subscriber.sinks.spark.schema.table_schema import META_NAMES, lake_names
from subscriber.sinks.spark.tables.delta import LakeDelta
from tests.support.delta_tables import delta_rows
from tests.unit.sinks.spark.pipeline.test_applier import all_rounds, applier, stop_of, storage
from tests.unit.sinks.spark.stream import TABLE, batch, begun, make, row, transaction

Identity = Literal["d", "n", "f", "i"]


def relation(identity: Identity, *columns: tuple[str, int, bool], number: int = 5, name: str = "t") -> Relation:
    return Relation(number, "public", name, identity, tuple(Column(column, oid, -1, key) for column, oid, key in columns))


KEYED = relation("d", ("id", 23, True), ("note", 25, False))


def rows(path: Path, columns: Sequence[str] = ("id", "note"), name: str = "t") -> list[tuple[Any, ...]]:
    table = delta_rows(DeltaTable(str(path / "tables/public" / name)))
    return sorted((tuple(item[column] for column in columns) for item in table), key=repr)


async def land(sink: OpenedSparkSink, end: int, *messages: Message) -> None:
    await sink.apply(batch(transaction(end, *messages)))
    await sink.advance(Lsn(end))


async def copy(sink: OpenedSparkSink, table: TableName, lines: bytes, lsn: int) -> None:
    """Synchronize a table of two columns, and hand it over at an LSN."""
    published = PublishedTable(
        name=table,
        relation_id=5,
        kind="r",
        columns=("id", "note"),
        key_columns=("id",),
        replica_identity="d",
        column_types=(23, 25),
        column_modifiers=(-1, -1),
    )
    copying = sink.open_table(table)
    await copying.begin()
    await copying.start_copy()

    async def copied() -> AsyncIterator[bytes]:
        yield lines

    await copying.describe(published)
    await copying.copy(["id", "note"], CopyFormat.TEXT, copied())
    await copying.finish_copy(Position("sync", "7", 1, Lsn(lsn)))
    await copying.finish_sync(Lsn(lsn))
    await copying.close()


async def start(path: Path, *messages: Message) -> tuple[OpenedSparkSink, Applier]:
    """A lake whose first transaction ends at 200, and is applied."""
    sink, work = await begun(make(path)), applier(path)
    await land(sink, 200, *messages)
    all_rounds(work)
    return sink, work


async def test_a_table_that_comes_amid_a_round_keeps_its_first_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    other = relation("d", ("id", 23, True), ("note", 25, False), number=6, name="u")
    loop, real = asyncio.get_running_loop(), SnapshotPublisher.read

    async def come() -> None:
        await sink.add_tables([TableName("public", "u")], TableEntry(TableState.READY))
        await land(sink, 300, other, Insert(6, row("1", "x")))

    def between(publisher: SnapshotPublisher) -> Snapshot | None:
        monkeypatch.setattr(SnapshotPublisher, "read", real)
        asyncio.run_coroutine_threadsafe(come(), loop).result()
        return real(publisher)

    monkeypatch.setattr(SnapshotPublisher, "read", between)
    await asyncio.to_thread(work.run_round)
    await land(sink, 400, Insert(6, row("2", "y")))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    assert rows(tmp_path, name="u") == [(1, "x"), (2, "y")]
    log = DeltaTable(str(tmp_path / "log/public/u")).to_pyarrow_table(columns=["id"])
    assert sorted(log["id"].to_pylist()) == [1, 2]


def record(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that are fsynced from now on."""
    real, synced = os.fsync, list[str]()

    def recorded(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    return synced


async def test_a_snapshot_is_published_after_its_commits_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = record(monkeypatch)
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    published = next(number for number, path in enumerate(synced) if "/snapshots/" in path and path.endswith(".parquet"))
    log = str(tmp_path / "tables/public/t/_delta_log")
    commits = [f"{log}/{number:020d}.json" for number in (0, 1)]
    assert sorted(str(file) for file in Path(log).glob("*.json")) == commits
    assert {*commits, log} <= set(synced[:published])
    # its name in the directory, after the file
    assert synced[:published].index(commits[1]) < published - synced[:published][::-1].index(log)
    work.tidy(now=True)
    await sink.close()
    log = str(tmp_path / "log/public/t/_delta_log")
    assert {*map(str, Path(log).glob("*.json")), log} <= set(synced)


async def test_what_a_killed_applier_committed_is_on_disk_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Insert(5, row("2", "b")))
    await sink.close()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(LakeDelta, "_sync_log", killed)
        with pytest.raises(KeyboardInterrupt):
            work.run_round()
    synced = record(monkeypatch)
    all_rounds(applier(tmp_path))
    newest = max(str(file) for file in (tmp_path / "tables/public/t/_delta_log").glob("*.json"))
    assert newest.endswith("2.json")
    assert newest in synced


@pytest.mark.parametrize(("lost", "again"), [("commit", True), ("content", True), ("table", True), ("table", False)])
async def test_a_published_commit_that_is_gone_is_told(tmp_path: Path, lost: str, again: bool) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Insert(5, row("2", "b")))
    snapshot = all_rounds(work)
    work.tidy(now=True)
    table = tmp_path / "tables/public/t"
    if lost == "table":
        shutil.rmtree(table)
    elif lost == "commit":
        max((table / "_delta_log").glob("*.json")).unlink()
    else:
        max((table / "_delta_log").glob("*.json")).write_bytes(b"")
    await land(sink, 400, Insert(5, row("3", "c")))
    await sink.close()
    work = applier(tmp_path) if again else work
    # the applier that saw it commit sees it when it commits again
    stop_of(work, r"Delta table .*public/t has lost version 2, which was published")
    now = read_snapshot(storage(tmp_path))
    assert now is not None
    assert now.stopped[TABLE].last == snapshot.tables[TABLE]


async def test_an_update_before_the_identity_becomes_full_replaces_its_row(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    full = relation("f", ("id", 23, True), ("note", 25, True))
    await sink.apply(batch(transaction(300, Update(5, None, None, row("1", "b")), full, Update(5, None, row("1", "b"), row("1", "c")))))
    await land(sink, 400, full, Insert(5, row("3", "c")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(1, "c"), (3, "c")]
    assert work.missing == MissingRows()


async def test_a_delete_before_the_key_changes_deletes_its_row(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")), Insert(5, row("2", "b")), Insert(5, row("4", "d")))
    indexed = relation("i", ("id", 23, False), ("note", 25, True))
    await land(sink, 300, Delete(5, row("1", None), None))
    await land(sink, 400, indexed, Insert(5, row("3", "c")), Update(5, None, None, row("20", "b")), Delete(5, row(None, "d"), None))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(20, "b"), (3, "c")]
    assert work.missing == MissingRows()


async def test_changes_before_the_identity_becomes_nothing_are_no_rows(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")), Insert(5, row("2", "b")))
    none = relation("n", ("id", 23, False), ("note", 25, False))
    await land(sink, 300, Update(5, None, None, row("1", "a2")), Delete(5, row("2", None), None))
    await land(sink, 400, none, Insert(5, row("3", "c")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(1, "a2"), (3, "c")]


async def test_a_truncate_behind_a_new_identity_clears_the_table(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Insert(5, row("2", "b")), Update(5, None, None, row("9", "of no row")))
    full = relation("f", ("id", 23, True), ("note", 25, True))
    await land(sink, 400, full, Insert(5, row("3", "c")), Truncate(TruncateOption(0), (5,)), Insert(5, row("4", "d")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(4, "d")]
    assert work.missing == MissingRows()


async def test_a_column_that_goes_and_comes_back_in_one_round_is_null_in_rows_from_before(tmp_path: Path) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")), Insert(5, row("2", "b")))
    await land(sink, 300, relation("d", ("id", 23, True)), Insert(5, row("3")))
    await land(sink, 400, KEYED, Update(5, None, None, row("2", "again")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path) == [(1, None), (2, "again"), (3, None)]


def _foreign(path: Path) -> None:
    write_deltalake(
        str(path / "tables/public/t"),
        pa.table({"id": pa.array([99], pa.int32()), "note": ["of nobody"], "_special": pa.array([None], pa.string())}),
        mode="append",
    )


async def test_the_remedy_keeps_what_the_applier_committed_behind_a_foreign_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Insert(5, row("2", "b")))

    def between(manifests: Any, reached: Any, *arguments: Any) -> Any:
        _foreign(tmp_path)
        # as MERGE INTO does, which loads the table itself
        assert all(work._tables.of(name, table).load() for name, table, _ in reached)
        return taken_manifests(manifests, reached, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(applier_module, "taken_manifests", between)
        reason = stop_of(work, "another writer, in version 2 ")
    assert "copy it again" in reason
    # restored in spite of that: later commits would be missing
    DeltaTable(str(tmp_path / "tables/public/t")).restore(1)
    stop_of(applier(tmp_path), "in version 2")
    # as the hint says: copied again
    name = TableName("public", "t")
    await sink.remove_table(name)
    await sink.add_tables([name], TableEntry(TableState.INIT))
    await copy(sink, name, b"1\ta\n2\tb\n", 300)
    await land(sink, 400, Insert(5, row("3", "c")))
    await sink.close()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SnapshotPublisher, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            applier(tmp_path).run_round()
    assert all_rounds(applier(tmp_path)).lsn == 400
    assert rows(tmp_path) == [(1, "a"), (2, "b"), (3, "c")]


NARROW = relation("f", ("id", 23, True))


async def test_whole_rows_from_before_a_column_went_are_found(tmp_path: Path) -> None:
    wide = relation("f", ("id", 23, True), ("tags", 1009, True))
    sink, work = await start(tmp_path, wide, *(Insert(5, row(str(number), "{a,b}")) for number in range(20)))
    await land(sink, 300, NARROW, Delete(5, None, row("1")))
    all_rounds(work)
    await land(sink, 400, Delete(5, None, row("2")), Delete(5, None, row("19")))
    # it comes back
    await land(sink, 500, wide, Delete(5, None, row("3", None)), Update(5, None, row("4", None), row("4", "{d}")))
    await sink.close()
    all_rounds(work)
    assert {one[0] for one in rows(tmp_path, ("id",))} == {0, *range(4, 19)}
    assert (4, ["d"]) in rows(tmp_path, ("id", "tags"))
    assert work.missing == MissingRows()


@pytest.mark.parametrize(
    ("oid", "text", "written"),
    [(1009, '{a,"b c"}', '{a,"b c"}'), (17, "\\x6100", "\\x6100"), (1016, "{1,NULL}", "{1,NULL}"), (701, "1e+20", "1e+20")],
)
async def test_any_type_becomes_text(tmp_path: Path, oid: int, text: str, written: str) -> None:
    sink, work = await start(tmp_path, relation("d", ("id", 23, True), ("note", oid, False)), Insert(5, row("1", text)))
    await land(sink, 300, KEYED, Insert(5, row("2", "x")))
    await sink.close()
    all_rounds(work)
    work.tidy(now=True)
    assert rows(tmp_path) == [(1, written), (2, "x")]
    assert len(DeltaTable(str(tmp_path / "log/public/t")).to_pyarrow_table()) == 2


async def test_error_of_arrow_is_reported_without_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink, work = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    await land(sink, 300, Insert(5, row("2", "secret")))
    await sink.close()

    def refused(column: pa.ChunkedArray, _: pa.DataType) -> pa.ChunkedArray:
        raise pa.ArrowInvalid(f"cannot cast {column.to_pylist()}")

    monkeypatch.setattr(parquet_module, "converted", refused)
    assert "secret" not in stop_of(work, r"public/t: Arrow cannot compute with its columns \(ArrowInvalid\)")


async def test_a_dropped_column_that_delta_keeps_no_statistics_of_becomes_null(tmp_path: Path) -> None:
    columns = [("id", 23, True), *((f"c{number}", 25, False) for number in range(38)), ("tags", 1009, False)]
    first = [Insert(5, row(str(number), *["x"] * 38, "{a}")) for number in range(30)]
    sink, work = await start(tmp_path, relation("d", *columns), *first)
    await land(sink, 300, relation("d", *columns[:-2]), Insert(5, row("100", *["y"] * 37)))
    all_rounds(work)
    assert set(rows(tmp_path, ("c37", "tags"))) == {(None, None)}
    # and that is done once
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    before = set(table.file_uris())
    await land(sink, 400, Update(5, None, None, row("100", *["z"] * 37)))
    await sink.close()
    all_rounds(work)
    table = DeltaTable(str(tmp_path / "tables/public/t"))
    assert before & set(table.file_uris())
    assert set(rows(tmp_path, ("c37", "tags"))) == {(None, None)}


@pytest.mark.parametrize(
    ("before", "after", "old", "new"),
    [
        (1082, 1114, "2024-01-02", "2024-01-02 00:00:00"),
        (23, 701, "7", "7"),
        (1114, 25, "2024-01-02 03:04:05.5", "2024-01-02 03:04:05.5"),
        (701, 25, "1e+20", "1e+20"),
    ],
)
@pytest.mark.parametrize("identity", ["d", "f"])
async def test_rows_from_before_a_key_had_another_type_are_found(
    tmp_path: Path, identity: Identity, before: int, after: int, old: str, new: str
) -> None:
    first = relation(identity, ("id", before, True), ("note", 25, identity == "f"))
    then = relation(identity, ("id", after, True), ("note", 25, identity == "f"))
    sink, work = await start(tmp_path, first, Insert(5, row(old, "a")))
    change = Update(5, None, row(new, "a"), row(new, "b")) if identity == "f" else Update(5, None, None, row(new, "b"))
    await land(sink, 300, then, change)
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path, ("note",)) == [("b",)]
    assert work.missing == MissingRows()


async def test_an_altered_name_is_no_other_columns_when_one_goes(tmp_path: Path) -> None:
    sink, work = await start(
        tmp_path, relation("d", ("id", 23, True), ("a b", 25, False), ("a_b", 25, False)), Insert(5, row("1", "blank", "plain"))
    )
    await land(sink, 300, relation("d", ("id", 23, True), ("a_b", 25, False)), Insert(5, row("2", "plain")))
    all_rounds(work)
    blank = lake_names(["a b"])[0]
    assert rows(tmp_path, ("id", blank, "a_b")) == [(1, None, "plain"), (2, None, "plain")]
    await land(sink, 400, relation("d", ("id", 23, True), ("a_b", 25, False), ("a b", 25, False)), Insert(5, row("3", "plain", "blank")))
    await sink.close()
    all_rounds(work)
    assert rows(tmp_path, ("id", blank, "a_b")) == [(1, None, "plain"), (2, None, "plain"), (3, "blank", "plain")]


def test_no_two_columns_are_one_field() -> None:
    names = ["a b", "a_b", "a,b", "A", "a", "_op", "_OP", "Ab", "aB", "createdAt", "id"]
    fields = lake_names(names)
    assert len({field.lower() for field in fields}) == len(names)
    assert not {field.lower() for field in fields} & {name.lower() for name in META_NAMES}
    assert fields[1] == "a_b"
    assert fields[4] == "a"
    assert fields[-2:] == ("createdAt", "id")
    # with anything else in the directory
    assert lake_names(["a b"])[0] == fields[0]


async def test_a_table_that_is_handed_over_far_ahead_makes_no_round_longer(tmp_path: Path) -> None:
    sink, _ = await start(tmp_path, KEYED, Insert(5, row("1", "a")))
    other = TableName("public", "u")
    await sink.add_tables([other], TableEntry(TableState.INIT))
    for number in range(10):
        await land(sink, 300 + 10 * number, Insert(5, row(str(300 + 10 * number), "x")))
    await copy(sink, other, b"1\tcopied\n", 355)
    work = applier(tmp_path, ApplierSettings(round_bytes=1))
    ends, with_other = [], []
    while (snapshot := work.run_round()) is not None:
        ends.append(int(snapshot.lsn))
        with_other.append(other in snapshot.tables)
    assert ends == [300 + 10 * number for number in range(10)]
    assert with_other == [end >= 355 for end in ends]
    await sink.close()
    assert rows(tmp_path, name="u") == [(1, "copied")]
    assert len(rows(tmp_path)) == 11
